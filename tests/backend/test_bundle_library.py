"""The C++ library agrees with `kernelgen.bundle`: it makes the same keys, and finds the kernels of a bundle."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from lookups import lookups

from kernelgen.bundle import pack
from kernelgen.bundle.contents import BundleOrigin, Contents, StoredFile
from kernelgen.bundle.key import KernelIndex, key, key_hash
from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.spec.kernel import KernelSpec

ROOT = Path(__file__).parents[2]

T = TensorDesc.parse

Run = Callable[..., subprocess.CompletedProcess[str]]


def specs() -> list[KernelSpec]:
    """Returns kernels of every type, with strides, absent inputs, aliasing, parameters; ggml does not have one of the ops."""
    f32 = T("(64,4,1,1)/f32")
    out = [
        KernelSpec.make("add", [T("(4096,512,1,1)/f32")] * 2, T("(4096,512,1,1)/f32")),
        KernelSpec.make("add", [f32, f32], f32, alias=0),
        KernelSpec.make("soft_max", [f32, None, T("(4,1,1,1)/f32")], f32, {"scale": 0.125}),
        KernelSpec.make("set_rows", [f32, T("(4,1,1,1)/i64"), T("(64,32,1,1)/f16")], T("(64,32,1,1)/f16")),
        KernelSpec.make("cont", [T("(64,8,3,1)/f16/(2,384,128,3072)")], T("(64,8,3,1)/f16")),
        KernelSpec.make("clamp", [f32], f32, {"min": float("-inf"), "max": -0.0}),
        KernelSpec.make("rope", [T("(128,32,7,1)/f32"), T("(7,1,1,1)/i32")], T("(128,32,7,1)/f32"), {"n_dims": 128}),
        KernelSpec.make("my_op", [f32], f32, {"factor": 0.5, "wrap": True}),
        KernelSpec.make("my_op", [], f32),
    ]
    # In a row of one block, every stride follows from the type's size, so a wrong type in C++ is not found.
    for name, t in TYPES.items():
        one, more = TensorDesc.make((t.block, 1, 1, 1), name), TensorDesc.make((t.block * 2, 3, 1, 1), name)
        out += [KernelSpec.make("cont", [one], one), KernelSpec.make("cont", [more], more)]
    return out


@dataclass(frozen=True)
class Bundle:
    """A pack, and its content in the format of backend/bundle/tests/lookups.py."""

    pack: Path
    table: Path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle")
    index = KernelIndex.build(specs())
    by_id = {spec.id: spec for spec in specs()}
    neffs = []
    for number in range(7):  # fewer than kernels: some are shared
        data = bytes([number]) * (100 * number + 1)
        path = folder / f"{number}.neff"
        path.write_bytes(data)
        neffs.append(StoredFile(path, hashlib.sha256(data).hexdigest(), len(data)))
    flags = tuple(CompileConfig.make("trn1").flags())
    contents = Contents(
        origin=BundleOrigin("test", "trn1", 1, False, "neuronx-cc 2.0", flags, "0.1.0", "unknown"),
        index=index,
        specs=tuple(by_id[kernel] for kernel in index.ids),
        hlos=tuple(neffs[0] for _ in index.ids),
        neffs=tuple(neffs),
        kernel_neff=tuple(number % len(neffs) for number in range(len(index.ids))),
    )
    written = Bundle(folder / "test_trn1.kernels.gguf", folder / "lookups.txt")
    pack.write(written.pack, contents)
    written.table.write_text(lookups(by_id.values()))
    return written


def test_finds_every_kernel_of_a_bundle_and_no_other(run: Run, bundle: Bundle) -> None:
    result = run("bundle_test", bundle.pack, bundle.table)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"test for trn1: {len(specs())} kernels, 7 NEFFs\n"


def test_a_kernel_that_is_not_in_the_pack_is_noticed(run: Run, bundle: Bundle, tmp_path: Path) -> None:
    """The test program can fail."""
    other = KernelSpec.make("sub", [T("(4096,512,1,1)/f32")] * 2, T("(4096,512,1,1)/f32"))
    table = tmp_path / "lookups.txt"
    table.write_text(lookups([other, *specs()[1:]]))
    result = run("bundle_test", bundle.pack, table)
    assert result.returncode == 1
    assert other.id in result.stderr


def test_an_error_names_the_file(run: Run, bundle: Bundle, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(bundle.pack.read_bytes()[:1000])
    result = run("example", broken)
    assert result.returncode == 1
    assert result.stderr.startswith(f"{broken}: truncated or corrupt: metadata '")


def test_the_example_finds_its_kernel(run: Run, bundle: Bundle) -> None:
    result = run("example", bundle.pack)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "test for trn1, made by neuronx-cc 2.0"
    assert lines[1:-1] == sorted(spec.id for spec in specs())
    assert lines[-1].startswith(f"found {specs()[0].id}: ")


def test_keys_are_the_golden_ones(run: Run, tmp_path: Path) -> None:
    vectors = json.loads((ROOT / "tests" / "data" / "bundle-keys.json").read_text())
    lines = []
    for vector in vectors:
        line = lookups([KernelSpec.from_json(vector["spec"])]).rstrip("\n")
        lines.append(f"{line}\t{' '.join(vector['key'])}\t{vector['hash']}\n")
    table = tmp_path / "keys.txt"
    table.write_text("".join(lines))
    result = run("key_test", table)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{len(vectors)} keys\n"


def test_strides_are_made_canonical_as_in_python(run: Run, tmp_path: Path) -> None:
    """Random shapes with many ones, and arbitrary strides where they have no meaning."""
    rng = random.Random(7)
    lines = []
    for _ in range(300):
        name, t = rng.choice(list(TYPES.items()))
        ne = [t.block * rng.choice((1, 1, 2, 5)), *(rng.choice((1, 1, 3, 8)) for _ in range(3))]
        nb = [
            t.size if t.quantized else t.size * rng.choice((1, 7)),
            *(t.size * 2 * rng.randrange(1, 99) for _ in range(3)),
        ]
        spec = KernelSpec.make("cont", [TensorDesc.make(ne, name, nb)], T("(1,1,1,1)/f32"))
        words = key(spec)
        fields = lookups([spec]).rstrip("\n").split("\t")
        fields[4] = " ".join(map(str, (t.number, *ne, *nb)))
        lines.append("\t".join([*fields, " ".join(f"{word:x}" for word in words), f"{key_hash(words):x}"]) + "\n")
    table = tmp_path / "keys.txt"
    table.write_text("".join(lines))
    result = run("key_test", table)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "300 keys\n"
