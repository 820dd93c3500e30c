"""The one table of Neuron targets. `./bazelw run //tools:regenerate` generates every copy elsewhere (Starlark, C++, the manifest's
schema, standalone Python), and a test checks the copies. To add a target, add a row here and run that command.

The figures are from AWS's published documentation of the devices and of NKI. It does not list `trn3` as a `--target` of neuronx-cc.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Target:
    """One value of neuronx-cc's `--target`.

    Attributes:
        name: the value itself.
        neuron_core: version of the NeuronCore (2, 3, 4); NKI names it gen2 and so on.
        device: the device's name in a NEFF. No NEFF of trn1n or inf2 was available: their cores are trn1's.
        cores_per_chip: physical NeuronCores per chip.
        lnc: default logical NeuronCore configuration (physical cores per logical one).
        lnc_choices: the values of `--lnc` that the target accepts.
        fp8: FP8 element types that the target's compiler accepts, under XLA's names.
        int32_dot: whether the compiler accepts a dot of 32-bit integers.
        sort: whether the compiler accepts a sort.
        memory_per_compile_mb: MiB of the build machine that the scheduler reserves per compile; a manifest can override it.
        cpus_per_compile: CPUs of the build machine that the scheduler reserves per compile.
        experimental: whether AWS does not document it as a target.
        runs: other targets whose NEFFs its machines run. trn1n is trn1 with more network bandwidth. inf2 has the same cores, but
            neuronx-cc treats it as another target. A NEFF for trn1 runs on inf2: AWS's PyTorch plugin compiles for trn1 there.
        sbuf_bytes: bytes of SBUF that a kernel may use in each partition.
        state_buffer_mib: SBUF of a physical core, in MiB.
        memory_gib: HBM of a physical core, in GiB: its share of the chip's HBM.
        moving_free: maximum number of elements per partition of a product's moving operand.
        product_banks: maximum number of PSUM banks that one product may write.
        ranks: numbers of cores over which AWS's runtime has collectives. A program of N ranks begins at a core that is a multiple
            of N.
        families: machine families that `nrt_get_instance_info` returns: values of NRT_INSTANCE_… in libnrt's header nrt.h.
    """

    name: str
    neuron_core: int
    device: str
    cores_per_chip: int
    lnc: int
    lnc_choices: tuple[int, ...]
    fp8: tuple[str, ...]
    int32_dot: bool
    sort: bool
    memory_per_compile_mb: int = 4096
    cpus_per_compile: int = 1
    experimental: bool = False
    runs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    families: tuple[int, ...] = ()
    sbuf_bytes: int = 180_224
    state_buffer_mib: int = 24
    memory_gib: int = 16
    moving_free: int = 512
    product_banks: int = 1

    def rank_error(self, ranks: int, first: int = 0) -> str:
        """Returns why cores from number `first` of the machine on can't compute one program; empty if they can."""
        if ranks not in self.ranks:
            *counts, last = map(str, self.ranks)
            return f"{self.name} has collectives over {', '.join(counts)} or {last} cores, not {ranks}"
        if first % ranks:
            return f"a program of {ranks} cores begins at a core that is a multiple of {ranks}, not at core {first}"
        return ""


@dataclass(frozen=True, slots=True)
class Instance:
    """A kind of EC2 instance that the simulator simulates, from AWS's pages on Inf2, Trn1 and Trn2.

    Attributes:
        name: AWS's name for it.
        target: the target of its NeuronCores.
        size: the size that `nrt_get_instance_info` returns: a value of NRT_INSTANCE_SIZE_….
        cores: number of its logical NeuronCores with the target's default LNC.
    """

    name: str
    target: str
    size: int
    cores: int


PARTITIONS = 128
"""Number of partitions of SBUF and of PSUM, on all targets."""
INSTRUCTION_BYTES = 64
"""Bytes of one instruction in an engine's instruction stream, in a NEFF and in memory."""
MAX_INSTRUCTIONS = 5_000_000
"""Instructions per physical core that neuronx-cc accepts without `--internal-max-instruction-limit` (error NCC_EBVF030)."""
COMPILE_MB = 1024
COMPILE_KB = MappingProxyType({"generic": 20, "transformer": 12})
"""Host memory of a compile: a base in MiB, and KiB per instruction by `--model-type`. Measured with neuronx-cc 2.27 on layers of
0.5 to 2.5 million instructions, which took 4 to 43 GB."""
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
"""Bytes of a PSUM bank in one partition."""

_TRN1_RANKS = (1, 2, 8, 16, 32)

TARGETS = MappingProxyType(
    {
        t.name: t
        for t in (
            Target("trn1", 2, "sunda", 2, 1, (1,), (), True, True, runs=("trn1n",), ranks=_TRN1_RANKS, families=(2,)),
            Target("trn1n", 2, "sunda", 2, 1, (1,), (), True, True, runs=("trn1",), ranks=_TRN1_RANKS, families=(3,)),
            Target(
                "inf2",
                2,
                "sunda",
                2,
                1,
                (1,),
                (),
                True,
                True,
                runs=("trn1", "trn1n"),
                ranks=(1, 2, 4, 8, 24),
                families=(4, 7),
            ),
            Target(
                "trn2",
                3,
                "cayman",
                8,
                2,
                (1, 2),
                (),
                False,
                False,
                families=(5, 6, 8, 9, 10, 11, 12, 13),
                sbuf_bytes=212_984,
                state_buffer_mib=28,
                memory_gib=12,
            ),
            Target(
                "trn3",
                4,
                "mariana",
                8,
                2,
                (1, 2),
                ("F8E4M3FN",),
                False,
                False,
                experimental=True,
                families=(14, 15),
                sbuf_bytes=245_752,
                state_buffer_mib=32,
                memory_gib=18,
                moving_free=4096,
                product_banks=8,
            ),
        )
    }
)
"""Every target by name, in the order of the documentation."""

INSTANCES = (
    Instance("trn1.2xlarge", "trn1", 1, 2),
    Instance("trn1.32xlarge", "trn1", 6, 32),
    Instance("inf2.48xlarge", "inf2", 7, 24),
    Instance("trn2.48xlarge", "trn2", 7, 64),
)

SIMULATOR_MEMORY_MB = 1024
"""Maximum memory that the scheduler reserves per simulated compile, in MiB: XLA:CPU needs a fraction of neuronx-cc's memory."""
