"""The one table of Neuron targets. Every copy of it elsewhere (.bzl, .cmake, .h) is generated from here and checked by a test.

Figures are from AWS's published device documentation; `trn3` is not documented as a `--target` of neuronx-cc.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Target:
    """One value of neuronx-cc's `--target`.

    Attributes:
        name: the value itself.
        neuron_core: version of the NeuronCore (2, 3, 4).
        cores_per_chip: physical NeuronCores per chip.
        lnc: default logical NeuronCore configuration (physical cores per logical one).
        lnc_choices: the values of `--lnc` that the target takes.
        sbuf_bytes_per_partition: usable SBUF per partition, of 128 partitions.
        fp8: FP8 element types the target's compiler takes, as XLA names them.
        int32_dot: whether the compiler takes a dot of 32-bit integers.
        sort: whether the compiler takes a sort.
        memory_per_compile_mb: what one compile may need on the build machine, in MiB, unless the manifest says otherwise.
        cpus_per_compile: build-machine CPUs one compile is counted for.
        experimental: not documented by AWS as a target.
    """

    name: str
    neuron_core: int
    cores_per_chip: int
    lnc: int
    lnc_choices: tuple[int, ...]
    sbuf_bytes_per_partition: int
    fp8: tuple[str, ...]
    int32_dot: bool
    sort: bool
    memory_per_compile_mb: int = 4096
    cpus_per_compile: int = 1
    experimental: bool = False


TARGETS = MappingProxyType(
    {
        t.name: t
        for t in (
            Target("trn1", 2, 2, 1, (1,), 180224, (), True, True),
            Target("trn1n", 2, 2, 1, (1,), 180224, (), True, True),
            Target("inf2", 2, 2, 1, (1,), 180224, (), True, True),
            Target("trn2", 3, 8, 2, (1, 2), 212984, (), False, False),
            Target("trn3", 4, 8, 2, (1, 2), 245752, ("F8E4M3FN",), False, False, experimental=True),
        )
    }
)
"""Every target by name, in the order in which documentation lists them."""

SIMULATOR_MEMORY_MB = 1024
"""What one simulated compile is counted for at most, in MiB: XLA:CPU needs a fraction of what neuronx-cc does."""
