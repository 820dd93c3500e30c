"""The input of a bundle, and what is refused."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.bundle import build as bundle
from kernelgen.bundle import pack, tree
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

from .conftest import COMPILER, Kernels, make_hlo, unary

REAL = container._HEADER.pack(
    2, 1024, 9, 2, 0, b"", 1, b"", b"", b"kernel", 1, b"", 0, 1, b""
) + b"nonsense!"  # fmt: skip


def test_equal_neffs_are_stored_once(kernels: Kernels, tmp_path: Path) -> None:
    contents = bundle.build(*kernels.arguments, tree_path=tmp_path / "tree", pack_path=tmp_path / "p.gguf")
    assert len(contents.index.ids) == 12 and len(contents.neffs) == 6
    made = pack.read(tmp_path / "p.gguf")
    assert len(made.neffs) == 6
    for number, kernel in enumerate(made.index.ids):
        expected = kernels.neffs[kernel].read_bytes()
        assert made.read_neff(made.kernel_neff[number]) == expected
        file = tmp_path / "tree" / tree.neff_path(kernel, "trn1")
        assert file.read_bytes() == expected
        assert file.stat().st_nlink == 2
        hlo = tmp_path / "tree" / tree.hlo_path(kernel)
        assert hashlib.sha256(hlo.read_bytes()).hexdigest() == made.hlo_sha256[number]


def test_origin_is_recorded_in_every_form(kernels: Kernels, tmp_path: Path) -> None:
    bundle.build(
        *kernels.arguments,
        jax_version="9.8.7",
        tree_path=tmp_path / "tree",
        pack_path=tmp_path / "p.gguf",
        embed_folder=tmp_path,
    )
    origin = pack.read(tmp_path / "p.gguf").origin
    assert (origin.name, origin.target, origin.lnc, origin.simulated) == ("tiny", "trn1", 1, True)
    assert (origin.compiler, origin.jax_version) == (COMPILER, "9.8.7")
    assert list(origin.flags) == kernels.config.flags()
    index = tree.read_index(tmp_path / "tree")
    source = (tmp_path / "tiny_trn1.c").read_text()
    for name in ("name", "target", "compiler", "version", "jax_version"):
        assert index[name] == getattr(origin, name)
        assert f'.{name} = "{getattr(origin, name)}"' in source
    assert index["flags"] == list(origin.flags)


def test_a_given_compiler_wins_over_what_neffs_say(kernels: Kernels, real_neff: Callable[..., bytes]) -> None:
    for id, path in kernels.neffs.items():
        path.write_bytes(real_neff(kernels.hlos[id].read_bytes(), "trn1", 1))
    contents = bundle.build(*kernels.arguments)
    assert (contents.origin.simulated, contents.origin.compiler) == (False, "neuronx-cc 2.24.5133.0+58f8de22")
    assert bundle.build(*kernels.arguments, compiler="neuronx-cc 2.10").origin.compiler == "neuronx-cc 2.10"


def refused(kernels: Kernels) -> str:
    with pytest.raises(KernelgenError) as caught:
        bundle.build(*kernels.arguments)
    return str(caught.value)


def test_all_mistakes_at_once(kernels: Kernels) -> None:
    first, second, third, fourth, *_ = sorted(kernels.specs)
    del kernels.neffs[first]
    kernels.neffs[second].unlink()
    kernels.neffs[third].write_bytes(b"short")
    kernels.hlos[fourth].write_bytes(make_hlo(99))
    text = refused(kernels)
    assert f"kernel {first}: there is no NEFF" in text
    assert f"kernel {second}: {kernels.neffs[second]}: No such file" in text
    assert f"kernel {third}: {kernels.neffs[third]}: not a NEFF" in text
    assert f"kernel {fourth}: {kernels.neffs[fourth]}: compiled from another HLO" in text


def test_an_equal_neff_of_another_hlo_is_noticed(kernels: Kernels) -> None:
    # The second kernel has a NEFF that was read before, so only its HLO is read.
    last = max(kernels.specs)
    kernels.hlos[last].write_bytes(make_hlo(99))
    assert f"kernel {last}: {kernels.neffs[last]}: compiled from another HLO" in refused(kernels)


def test_simulated_and_real_are_not_mixed(kernels: Kernels, real_neff: Callable[..., bytes]) -> None:
    first = min(kernels.specs)
    kernels.neffs[first].write_bytes(real_neff(kernels.hlos[first].read_bytes(), "trn1", 1))
    assert "made by more than one compiler" in refused(kernels)


def test_real_neffs_are_compared_with_their_hlo_and_the_target(
    kernels: Kernels, real_neff: Callable[..., bytes]
) -> None:
    for id, path in kernels.neffs.items():
        path.write_bytes(real_neff(kernels.hlos[id].read_bytes(), "trn1", 1))
    assert bundle.build(*kernels.arguments).origin.compiler == "neuronx-cc 2.24.5133.0+58f8de22"
    first, second, third, fourth, fifth, *_, last = sorted(kernels.specs)
    kernels.neffs[first].write_bytes(real_neff(kernels.hlos[first].read_bytes(), "trn2", 2))
    kernels.neffs[second].write_bytes(real_neff(make_hlo(99), "trn1", 1))
    kernels.neffs[third].write_bytes(b"ERROR")
    # Equal bytes are read once and compared with the HLO of each kernel.
    kernels.neffs[last].write_bytes(kernels.neffs[fourth].read_bytes())
    kernels.neffs[fifth].write_bytes(real_neff(kernels.hlos[fifth].read_bytes(), "trn1", 1, drop=["input0"]))
    text = refused(kernels)
    assert f"kernel {first}: {kernels.neffs[first]}: compiled for cayman (trn2), not for trn1 (sunda)" in text
    assert f"kernel {second}: {kernels.neffs[second]}: its input input0 has 396 bytes" in text
    assert f"kernel {third}: {kernels.neffs[third]}: not a NEFF: 5 bytes" in text
    assert f"kernel {last}: {kernels.neffs[last]}: its input input0 has" in text
    assert f"kernel {fifth}" not in text, "the compiler drops inputs that do not matter"


def test_settings_must_be_the_bundle_s(kernels: Kernels) -> None:
    kernels.config = CompileConfig.make("trn1", optlevel=1)
    assert "compiled with --framework XLA --target trn1 --optlevel 2" in refused(kernels)


def test_damaged_neff(kernels: Kernels) -> None:
    path = kernels.neffs[min(kernels.specs)]
    data = bytearray(path.read_bytes())
    data[-600] ^= 1
    path.write_bytes(data)
    assert "damaged NEFF: the payload does not have the digest" in refused(kernels)


def test_empty_bundle(make: Callable[..., Kernels]) -> None:
    assert "at least one kernel" in refused(make([]))


def test_embedding_needs_a_pack(kernels: Kernels, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pack_path is needed"):
        bundle.build(*kernels.arguments, embed_folder=tmp_path / "out")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


BUILD = """
import sys
from pathlib import Path
from kernelgen.bundle import build as bundle
from kernelgen.neff import container
from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import KernelSpec
from kernelgen.plan import BundleEntries, Entry
source, out = map(Path, sys.argv[1:3])
config = CompileConfig.make("trn1")
specs = {s.id: s for s in (KernelSpec.make("relu", [t], t) for t in (TensorDesc.make((n, 1, 1, 1), "f32") for n in range(1, 7)))}
order = sorted(specs, reverse=len(sys.argv) > 3)
neffs = {}
for id in order:
    neffs[id] = out / f"{id}.neff"
    neffs[id].parent.mkdir(parents=True, exist_ok=True)
    neffs[id].write_bytes(container.write_simulated((source / f"{id}.hlo.pb").read_bytes(), config.flags(), "simulator x"))
entries = tuple(Entry(i, specs[i], config) for i in order)
bundle.build(BundleEntries("b", config, entries), {i: source / f"{i}.hlo.pb" for i in order}, neffs,
             tree_path=out / "tree", pack_path=out / "b_trn1.kernels.gguf", embed_folder=out)
"""


def test_same_bytes_everywhere(kernels: Kernels, tmp_path: Path) -> None:
    """Two processes, hash seeds, folders, locales, time zones, orders of the kernels."""
    made = []
    for seed, locale, extra in (("0", "C", []), ("424242", "en_US.UTF-8", ["reversed"])):
        out = tmp_path / ("deep/er" if extra else "out")
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": f"UTC{seed[0]}"}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        out.mkdir(parents=True)
        subprocess.run([sys.executable, "-c", BUILD, kernels.folder, out, *extra], check=True, env=env, cwd=out)
        made.append(everything(out))
    assert made[0] == made[1]
    assert {Path(name).suffix for name in made[0]} == {".S", ".c", ".h", ".gguf", ".json", ".neff", ".pb"}
    assert not [name for name, data in made[0].items() if str(tmp_path).encode() in data], "no path is in an output"


def test_memory_does_not_grow_with_the_bundle(
    make: Callable[..., Kernels], tmp_path: Path, real_neff: Callable[..., bytes]
) -> None:
    kernels = make([unary("relu", n) for n in range(1, 41)])
    for n, (id, path) in enumerate(kernels.neffs.items()):
        code = random.Random(n).randbytes(1 << 18)
        path.write_bytes(real_neff(kernels.hlos[id].read_bytes(), "trn1", 1, code=code))
    tracemalloc.start()
    bundle.build(*kernels.arguments, tree_path=tmp_path / "tree", pack_path=tmp_path / "p.gguf", embed_folder=tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "p.gguf").stat().st_size > 40 << 20
    assert peak < 12 << 20


def test_a_failed_write_leaves_what_was_there(kernels: Kernels, tmp_path: Path) -> None:
    packed, laid = tmp_path / "out/p.gguf", tmp_path / "out/tree"
    contents = bundle.build(*kernels.arguments, pack_path=packed, tree_path=laid)
    before = everything(tmp_path / "out")
    path = contents.neffs[-1].path
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(KernelgenError, match="changed while it was being packed"):
        pack.write(packed, contents)
    for kernel in contents.hlos:
        kernel.path.unlink()
    with pytest.raises(FileNotFoundError):
        tree.write(laid, contents)
    assert everything(tmp_path / "out") == before, "no temporary file, nothing half-written"


def test_a_disk_that_takes_no_more_is_named_with_the_file(kernels: Kernels, tmp_path: Path) -> None:
    contents = bundle.build(*kernels.arguments, pack_path=tmp_path / "p.gguf")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "p.gguf").stat().st_size - 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            pack.write(tmp_path / "full.gguf", contents)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.filename == str(tmp_path / "full.gguf")


def test_a_new_tree_replaces_the_old_one_whole(kernels: Kernels, tmp_path: Path) -> None:
    laid = tmp_path / "tree"
    bundle.build(*kernels.arguments, tree_path=laid)
    (laid / "stray").write_text("")
    bundle.build(*kernels.arguments, tree_path=laid)
    assert not (laid / "stray").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_tree_stays_in_its_folder(make: Callable[..., Kernels], tmp_path: Path) -> None:
    tensor = TensorDesc.parse("(4,1,1,1)/f32")
    good = unary("relu", 4)
    for op in ("../../escape", "/absolute", "a/b", "..", "a\0b", "new\nline"):
        spec = KernelSpec.make(op, [tensor], tensor)
        kernels = make([good])
        kernels.specs = {spec.id: spec}
        kernels.hlos[spec.id], kernels.neffs[spec.id] = kernels.hlos[good.id], kernels.neffs[good.id]
        before = set(tmp_path.rglob("*"))
        with pytest.raises(KernelgenError, match="cannot be the name of a file"):
            bundle.build(*kernels.arguments, tree_path=tmp_path / "out" / "tree")
        assert set(tmp_path.rglob("*")) - before == {tmp_path / "out"} - before
