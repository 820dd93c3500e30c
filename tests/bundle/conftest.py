"""Fixtures of the bundle tests: kernels with HLO and NEFFs, made without JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.neff import container
from kernelgen.plan import BundleEntries, Entry
from kernelgen.spec.kernel import KernelSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from tiny_bundles import make_hlo

__all__ = ["COMPILER", "Kernels", "make_hlo", "make_kernels", "unary"]

COMPILER = "simulator 1 (jaxlib 1.2.3)"


@dataclass
class Kernels:
    """The input of a bundle; tests change it before they build."""

    folder: Path
    name: str
    specs: dict[str, KernelSpec] = field(default_factory=dict)
    hlos: dict[str, Path] = field(default_factory=dict)
    neffs: dict[str, Path] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    config: CompileConfig = field(default_factory=lambda: CompileConfig.make("trn1"))

    @property
    def arguments(self) -> tuple[BundleEntries, dict[str, Path], dict[str, Path]]:
        for id, text in self.notes.items():
            (self.folder / f"{id}.notes.json").write_text(text)
        entries = tuple(Entry(id, spec, self.config, id in self.notes) for id, spec in self.specs.items())
        return BundleEntries(self.name, self.config, entries), self.hlos, self.neffs


def make_kernels(folder: Path, specs: Sequence[KernelSpec], name: str = "tiny") -> Kernels:
    config = CompileConfig.make("trn1")
    folder.mkdir(parents=True, exist_ok=True)
    made = Kernels(folder, name)
    for spec in specs:
        hlo = make_hlo(spec.output.elements)
        made.specs[spec.id] = spec
        made.hlos[spec.id] = folder / f"{spec.id}.hlo.pb"
        made.neffs[spec.id] = folder / f"{spec.id}.neff"
        made.hlos[spec.id].write_bytes(hlo)
        made.neffs[spec.id].write_bytes(container.write_simulated(hlo, config.flags(), COMPILER))
    return made


def unary(op: str, length: int) -> KernelSpec:
    tensor = TensorDesc.make((length, 1, 1, 1), "f32")
    return KernelSpec.make(op, [tensor], tensor)


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    """Twelve kernels with six distinct NEFFs: relu and silu of one length have the same HLO."""
    return make_kernels(tmp_path / "in", [unary(op, n) for op in ("relu", "silu") for n in range(1, 7)])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Kernels]:
    return lambda specs, **options: make_kernels(tmp_path / "in", specs, **options)
