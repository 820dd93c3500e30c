"""Which keys attention may leave out where rows are computed in their order: those behind a token, which its mask hides.

A kernel for FLASH_ATTN_EXT with the parameter `causal` computes tokens by 128, and of the keys those up to the last of these tokens
alone, as if the call's tokens were the last keys: of n tokens and n_kv keys the tokens up to number t need n_kv - n + t keys. A
backend launches it where each mask that it is launched with hides the rest (`neuron_hidden_condition` of
`backend/ggml-neuron/select/causality.h`), and takes another kernel elsewhere. ggml has no such parameter.
"""

from __future__ import annotations

TOKENS = 128
"""Tokens that have the keys of the last one of them."""


def seen(n: int, n_kv: int, first: int, tokens: int) -> int:
    """Returns how many keys some tokens from `first` on need of n_kv, at most `TOKENS` of n from a multiple of it on."""
    return n_kv - n + first + tokens
