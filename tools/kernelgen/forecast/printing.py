"""A forecast as text and as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kernelgen.dispatch.chips import Chip
from kernelgen.forecast.call import CallForecast
from kernelgen.forecast.memory import Memory
from kernelgen.forecast.time import Time

SHOWN = 8
"""Maximum number of kernels with their own line."""

PARTS = {
    "launch": "launches",
    "memory": "DMA of weights, cache and results",
    "tensor": "tensor engine, up to 128 rows",
    "products": "tensor engine, more than 128 rows",
    "descriptors": "gathers and scatters",
    "elements": "vector and scalar engines",
    "spills": "spills of scores from SBUF",
    "waited": "work in few partitions",
    "latency": "latency of instructions",
    "calls": "starts of NKI kernels",
    "reductions": "sums over cores",
}
"""Descriptions of the parts of a launch's time (`Time.parts`)."""
_OVERLAPPED = ("memory", "tensor", "vector", "scalar")


def plain(call: CallForecast, chip: Chip) -> dict[str, Any]:
    """Returns a call as JSON values; times are in milliseconds, except for a launch's, which are in microseconds."""
    return {
        "modelled": True,
        "target": chip.target,
        "lnc": chip.lnc,
        "n_tokens": call.n_tokens,
        "n_kv": call.n_kv,
        "ms": call.ms,
        "tokens_per_s": call.n_tokens / call.ms * 1e3,
        "cores": call.cores,
        "built": call.cores == 1 or call.split,
        "memory": {**asdict(call.memory), "fits": call.memory.fits},
        "launches": call.count,
        "nodes_without_kernel": call.missing,
        "parts_ms": {**call.parts_ms, "host": call.transfers_us / 1e3},
        "alone_ms": {part: call.part_ms(part) for part in _OVERLAPPED},
        "kernels": [{"count": one.count, **plain_kernel(one.spec.id, one.time)} for one in call.launches],
    }


def plain_kernel(name: str, time: Time) -> dict[str, Any]:
    """Returns the time of a kernel's launch as JSON values, in microseconds."""
    return {"id": name, "bound": time.bound, "us": time.total, **asdict(time)}


def kernels_text(kernels: list[tuple[str, Time]], chip: Chip) -> list[str]:
    """Returns a line for each kernel, for people."""
    lines = [
        f"µs of a launch, {chip.target} with LNC {chip.lnc}; modelled, not measured",
        f"{'in all':>12}  {'bound by':11} kernel: parts",
    ]
    for name, time in kernels:
        parts = ", ".join(f"{part} {us:.1f}" for part, us in time.parts.items() if us)
        lines.append(f"{time.total:12.1f}  {time.bound:11} {name}: {parts}")
    return lines


def _memory(memory: Memory) -> str:
    gib = [f"{n / (1 << 30):.2f} GiB" for n in (memory.weights, memory.cache)]
    fits = "fits" if memory.fits else "does not fit"
    return f"{gib[0]} of weights and {gib[1]} of cache, of {memory.device >> 30} GiB of a core: {fits}"


def text(call: CallForecast, chip: Chip) -> list[str]:
    """Returns a call as lines for people."""
    tokens = "token" if call.n_tokens == 1 else "tokens"
    per_second = call.n_tokens / call.ms * 1e3
    lines = [
        f"{call.n_tokens} {tokens}, {call.n_kv} cells, {chip.target} with LNC {chip.lnc}: {call.ms:.2f} ms, "
        f"{per_second:,.0f} tokens/s; modelled, not measured"
    ]
    if call.split:
        lines.append(f"  the slowest of {call.cores} cores over which llama.cpp splits the tensors")
    elif call.cores > 1:
        lines.append(
            f"  the work of each kernel divided by {call.cores} cores: --split-mode tensor has the kernels of slices"
        )
    lines.append(f"  {_memory(call.memory)}")
    if call.missing:
        lines.append(f"  {call.missing} nodes have no kernel; the time that the CPU takes for them is not in it")
    lines.append(f"  {call.count} launches, and {call.transfers_us / 1e3:.2f} ms of transfers over the host")
    parts = call.parts_ms
    lines += [f"  {parts[part]:9.2f} ms  {words}" for part, words in PARTS.items() if parts.get(part)]
    alone = ", ".join(f"{part} {call.part_ms(part):.2f}" for part in _OVERLAPPED)
    lines.append(f"  ms that each would take alone: {alone}")
    for one in call.launches[:SHOWN]:
        total = one.count * one.time.total / 1e3
        lines.append(f"  {total:9.2f} ms  {one.count:4} x {one.time.total:10.1f} µs  {one.time.bound:11} {one.spec.id}")
    if len(call.launches) > SHOWN:
        rest = sum(one.count * one.time.total for one in call.launches[SHOWN:]) / 1e3
        lines.append(f"  {rest:9.2f} ms  of {len(call.launches) - SHOWN} other kernels")
    return lines
