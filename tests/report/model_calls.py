"""Calls of a model, in the form of a report's numbers, for tests that do not derive any."""

from __future__ import annotations

from typing import Any

from kernelgen.report.numbers import PARTS


def call(n_kv: int, cores: int, ms: float, *, without_kernel: int = 0) -> dict[str, Any]:
    """Returns a call of one token that takes `ms`, in equal parts; if nodes have no kernel, it does not fit the device."""
    return {
        "n_tokens": 1,
        "n_kv": n_kv,
        "cores": cores,
        "ms": ms,
        "tokens_per_s": 1e3 / ms,
        "launches": 3,
        "nodes_without_kernel": without_kernel,
        "fits": not without_kernel,
        "memory": {"weights": 3 << 29, "cache": 1 << 29, "device": 16 << 30},
        "parts_ms": dict.fromkeys(PARTS, ms / len(PARTS)),
    }
