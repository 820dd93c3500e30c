"""A forecast as text and as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kernelgen.dispatch.chips import Chip
from kernelgen.forecast.call import CallForecast

SHOWN = 8
"""Kernels that have a line of their own."""

_PARTS = {
    "launch": "launches",
    "memory": "weights, cache and results, streamed",
    "spills": "what SBUF has no room for",
    "tensor": "products",
    "vector": "vector engine",
    "scalar": "scalar engine",
    "descriptors": "what is found by an index",
    "calls": "beginnings of NKI kernels",
    "reductions": "sums over cores",
}


def plain(call: CallForecast, chip: Chip) -> dict[str, Any]:
    """Returns a call as JSON has it; times are milliseconds but those of a launch, which are microseconds."""
    return {
        "modelled": True,
        "target": chip.target,
        "lnc": chip.lnc,
        "n_tokens": call.n_tokens,
        "n_kv": call.n_kv,
        "ms": call.ms,
        "tokens_per_s": call.n_tokens / call.ms * 1e3,
        "launches": call.count,
        "nodes_without_kernel": call.missing,
        "host_ms": call.transfers_us / 1e3,
        "parts_ms": {part: call.part_ms(part) for part in _PARTS},
        "bound_ms": {part: call.bound_ms(part) for part in ("memory", "tensor", "vector", "scalar", "descriptors")},
        "kernels": [
            {"id": one.spec.id, "count": one.count, "bound": one.time.bound, "us": one.time.total, **asdict(one.time)}
            for one in call.launches
        ],
    }


def text(call: CallForecast, chip: Chip) -> list[str]:
    """Returns a call as lines for people."""
    tokens = "token" if call.n_tokens == 1 else "tokens"
    per_second = call.n_tokens / call.ms * 1e3
    lines = [
        f"{call.n_tokens} {tokens}, {call.n_kv} cells, {chip.target} with LNC {chip.lnc}: {call.ms:.2f} ms, "
        f"{per_second:,.0f} tokens/s; modelled, not measured"
    ]
    if call.missing:
        lines.append(f"  {call.missing} nodes have no kernel; the time that the CPU takes for them is not in it")
    lines.append(f"  {call.count} launches, and {call.transfers_us / 1e3:.2f} ms of transfers over the host")
    lines.append("  parts, which overlap within a launch: its time is that of the longest")
    for part, words in _PARTS.items():
        if ms := call.part_ms(part):
            bound = call.bound_ms(part) if part in ("memory", "tensor", "vector", "scalar", "descriptors") else 0
            longest = f"; the longest of launches of {bound:.2f} ms" if bound else ""
            lines.append(f"    {words:38} {ms:10.2f} ms{longest}")
    for one in call.launches[:SHOWN]:
        total = one.count * one.time.total / 1e3
        lines.append(f"  {total:9.2f} ms  {one.count:4} x {one.time.total:10.1f} µs  {one.time.bound:11} {one.spec.id}")
    if len(call.launches) > SHOWN:
        rest = sum(one.count * one.time.total for one in call.launches[SHOWN:]) / 1e3
        lines.append(f"  {rest:9.2f} ms  of {len(call.launches) - SHOWN} other kernels")
    return lines
