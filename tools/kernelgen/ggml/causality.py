"""Keys that attention may skip if it computes rows in order: the keys after a token, which its mask hides.

A kernel for FLASH_ATTN_EXT with the parameter `causal` computes tokens in chunks of 128, and for each chunk only the keys up to its
last token, as if the call's tokens were the last keys: of n tokens and n_kv keys, the tokens up to number t need n_kv - n + t keys.
A backend launches it if every mask of the launch hides the rest (`neuron_hidden_condition` of
`backend/ggml-neuron/select/causality.h`), and otherwise uses another kernel. ggml has no such parameter.
"""

from __future__ import annotations

TOKENS = 128
"""Tokens per chunk; all use the keys of the last one."""


def seen(n: int, n_kv: int, first: int, tokens: int) -> int:
    """Returns the number of keys, of n_kv, for a chunk of `tokens` (at most `TOKENS`) of n tokens, from a multiple of `TOKENS`."""
    return n_kv - n + first + tokens
