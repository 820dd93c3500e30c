"""The page of one kernel: its computation, its origin, and its HLO."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.bundle.reader import StoredBundle, StoredKernel
from kernelgen.hlo.describe import describe


@dataclass(frozen=True, slots=True)
class KernelOrigin:
    """The origin of a kernel.

    Attributes:
        hlo: the serialized HLO.
        emitters: the functions that make it, as `FILE:LINE FUNCTION`; empty if the HLO is from a bundle.
        stored: the bundle and the kernel in it; None for a manifest's kernel.
        log: log of its compile, if a build kept one.
    """

    hlo: bytes
    emitters: Sequence[str]
    stored: tuple[StoredBundle, StoredKernel] | None
    log: str | None = None


def facts(row: Mapping[str, Any], made: KernelOrigin) -> dict[str, str]:
    """Returns the facts about a kernel, by heading.

    Args:
        row: its numbers (`kernelgen.report.numbers.collect`).
        made: its origin.
    """
    found = {"computes": "; ".join(row["computes"])}
    if made.emitters:
        found["emitters"] = "; ".join(made.emitters)
    found["HLO"] = f"{len(made.hlo):,} bytes, SHA-256 {hashlib.sha256(made.hlo).hexdigest()}"
    if made.stored is None:
        return found
    bundle, kernel = made.stored
    flags = bundle.origin.flags if kernel.flags is None else kernel.flags
    found["bundle"] = bundle.origin.id
    found["compiler"] = bundle.origin.compiler + (", simulated" if bundle.origin.simulated else "")
    found["command"] = f"neuronx-cc compile {kernel.id}.hlo.pb {' '.join(flags)} --output {kernel.id}.neff"
    found["NEFF"] = f"{kernel.neff_size:,} bytes, SHA-256 {kernel.neff_sha256}"
    if kernel.memory is not None:
        parts = kernel.memory.to_json().items()
        found["memory of the program"] = ", ".join(f"{name} {size:,} bytes" for name, size in parts)
    if row["compile_s"] is not None:
        found["compile time"] = f"{row['compile_s']} s"
    return found


def tensors(hlo: bytes, names: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Returns a kernel's inputs and outputs: role, name for readers, name in the NEFF, and shape in HLO text form.

    Args:
        hlo: the kernel's HLO.
        names: names of the inputs `input0`, `input1`, …; further inputs have none.
    """
    described = describe(hlo)
    shared = dict(described.aliases)

    def tensor(name: str) -> str:
        number = name.partition(".")[0].removeprefix("input")  # of input7.must_alias_input
        return names[int(number)] if number.isdecimal() and int(number) < len(names) else ""

    return [("input", tensor(name), name, shape) for name, shape in described.parameters] + [
        (
            f"output, in the memory of {shared[name]}" if name in shared else "output",
            tensor(shared.get(name, "")),
            name,
            shape,
        )
        for name, shape in described.results
    ]


def hlo_text(hlo: bytes) -> str:
    """Returns a kernel's HLO as text."""
    from jaxlib import xla_client

    made: str = xla_client.XlaComputation(hlo).as_hlo_text()
    return made
