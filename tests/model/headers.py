"""Headers of small models of several architectures."""

from __future__ import annotations

from published.header import GgufHeader, Tensor, Value, decoder, write

__all__ = ["SMALL", "GgufHeader", "Tensor", "Value", "decoder", "gemma2", "mixtral", "qwen3", "write"]

SMALL = {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 512, "n_vocab": 128}


def qwen3(**changes: object) -> GgufHeader:
    """A small Qwen3: its head size is not `n_embd / n_head`, and queries and keys have norms."""
    return decoder("qwen3", **(SMALL | {"head": 128, "qk_norm": True} | changes))  # type: ignore[arg-type]


def gemma2(**changes: object) -> GgufHeader:
    """A small Gemma 2: a sliding window in every other layer, soft caps, norms after each part."""
    fields = {
        "attention.sliding_window": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    return decoder("gemma2", **(SMALL | {"post_norms": True, "tied": True, "fields": fields} | changes))  # type: ignore[arg-type]


def mixtral(**changes: object) -> GgufHeader:
    """A small Mixtral, with experts."""
    return decoder("llama", **(SMALL | {"n_expert": 4} | changes))  # type: ignore[arg-type]
