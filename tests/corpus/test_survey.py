"""The survey of compiled artifacts, on a folder that the double of neuronx-cc fills, and on a public one if this
machine has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import history
import pytest
import survey

from kernelgen import cache, lowering
from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import proto
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

Make = Callable[..., bytes]
CORPUS = "KERNELGEN_CORPUS"
"""The environment variable that names a folder of public artifacts."""


@pytest.fixture(scope="session")
def modules() -> list[bytes]:
    made = []
    for n in range(1, 4):
        tensor = TensorDesc.parse(f"({8 * n},4,1,1)/f32")
        made.append(lowering.emit(KernelSpec.make("sqr", [tensor], tensor), lambda x: x * x))
    return made


def edited(data: bytes, change: Callable[[Any], None]) -> bytes:
    module = proto.parse(data)
    change(module)
    return proto.serialize(module)


def as_xla_writes_it(data: bytes) -> bytes:
    """Returns a module with names, metadata and ids like XLA's: from 0, and not dense."""

    def change(module: Any) -> None:
        module.name = "SyncTensorsGraph.42"
        for computation in module.computations:
            for i in computation.instructions:
                i.id = 3 * (i.id - 1)
                i.operand_ids[:] = [3 * (n - 1) for n in i.operand_ids]
                i.metadata = b"\x0a\x03add"
                i.frontend_attributes.Clear()
            computation.root_id = 3 * (computation.root_id - 1)

    return edited(data, change)


@pytest.fixture
def folder(tmp_path: Path, modules: list[bytes], real_neff: Make) -> Path:
    """AWS's compile cache, a cache of kernelgen's, HLO that carries a NEFF, and unrelated files."""
    root = tmp_path / "corpus"

    def put(path: str, data: bytes) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)

    for number, module in enumerate(modules):
        put(f"aws/neuronxcc-2.24/MODULE_{number}/model.hlo_module.pb", as_xla_writes_it(module))
        put(f"aws/neuronxcc-2.24/MODULE_{number}/compile_flags.txt", b"--target=trn1")
    put("aws/neuronxcc-2.24/MODULE_0/model.neff", real_neff(as_xla_writes_it(modules[0]), "trn1", 1))
    old = real_neff(as_xla_writes_it(modules[1]), "trn2", 2, version="2.14.227.0+2d4f85be", drop=["input0"])
    put("aws/neuronxcc-2.24/MODULE_1/model.neff", old)
    put("aws/neuronxcc-2.24/MODULE_2/model.neff", b"ERROR")
    put("aws/neuronxcc-2.24/MODULE_2/model.log", b"Failed compilation with ['neuronx-cc', 'compile']")
    put("copies/again.neff", old)
    key = cache.NeffKey.make(modules[2], "neuronx-cc 2.24.5133.0+58f8de22", CompileConfig.make("trn3").flags())
    neff = real_neff(modules[2], "trn3", 2)
    put(f"cache/{key.name}.neff", neff)
    put(f"cache/{key.name}.json", cache.EntryHead.make(key, "k", neff).encode())
    put("hlo/k.hlo.pb", modules[2])
    put("hlo/broken.hlo", b"no module")
    put("README.md", b"text")

    def carry(module: Any) -> None:
        (computation,) = module.computations
        call = next(i for i in computation.instructions if i.opcode == "multiply")
        call.opcode, call.custom_call_target, call.backend_config = (
            "custom-call",
            survey.CARRIER,
            real_neff(modules[1], "trn2", 2),
        )

    put("wrapped/wrapped_neff.hlo", edited(modules[1], carry))
    put(
        "simulated/k.trn1.neff",
        container.write_simulated(modules[0], CompileConfig.make("trn1").flags(), "simulator 3"),
    )
    return root


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, survey.__file__, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def rows(text: str) -> dict[str, str]:
    """Returns the table: the name, and the rest of the line."""
    return {
        line.strip().partition("  ")[0]: " ".join(line.strip().partition("  ")[2].split()) for line in text.splitlines()
    }


def test_the_table_of_a_folder(folder: Path) -> None:
    done = run(folder, "--execute", 2)
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["NEFFs"] == "5"
    assert table["neuronx-cc 2.24.5133.0+58f8de22"].startswith(("1 cayman", "1 mariana", "1 sunda"))
    assert table["neuronx-cc 2.14.227.0+2d4f85be"] == "1 cayman (trn2), hash: MD5, cores 2"
    assert table["simulator 3"] == "1 sunda (trn1, trn1n, inf2), hash: SHA-256, cores 1"
    assert table["remnants of failed compiles"] == "1 bytes 5"
    assert table["HLO modules"] == "6 3 compiled, 1 failed, 2 of unknown fate"
    assert table["agree with their NEFF"] == "3 1 have inputs that the compiler dropped, 0 other types of equal size"
    assert table["lint, compiled"] == "0 with errors 0 with warnings"
    assert table["lint, of unknown fate"] == "1 with errors 0 with warnings; error NCC_EVRF015: 1"
    assert table["canonicalised"] == "6 4 distinct", "what XLA wrote and what kernelgen wrote of it are one"
    assert table["run on the CPU before and after"] == "2 2 with equal bits; 0 more that XLA does not run"
    assert table["wrong"] == "0"
    assert "broken.hlo: not a serialized HloModuleProto" in done.stdout


def test_violations_are_reported_and_are_the_exit_status(folder: Path, modules: list[bytes], real_neff: Make) -> None:
    aws = folder / "aws" / "neuronxcc-2.24"
    (aws / "MODULE_0" / "model.neff").write_bytes(real_neff(modules[1], "trn1", 1))  # belongs to another module
    damaged = bytearray(real_neff(modules[0], "trn1", 1))
    damaged[1500] ^= 4
    (folder / "copies" / "again.neff").write_bytes(damaged)
    (folder / "copies" / "zeros.neff").write_bytes(bytes(5000))

    def to_f64(module: Any) -> None:
        for i in module.computations[0].instructions:
            i.shape.element_type = 12

    (aws / "MODULE_3").mkdir()
    (aws / "MODULE_3" / "model.hlo_module.pb").write_bytes(edited(modules[0], to_f64))
    (aws / "MODULE_3" / "model.neff").write_bytes(real_neff(modules[0], "trn1", 1))
    done = run(folder)
    assert done.returncode == 1
    assert "MODULE_0/model.neff: its input input0 has 256 bytes; its HLO's input0: f32[1,1,4,8], 128" in done.stderr
    assert "again.neff: damaged NEFF" in done.stderr
    assert "zeros.neff: not a NEFF" in done.stderr
    assert "MODULE_3/model.hlo_module.pb: it was compiled, and the lint says: [NCC_ESPP004]" in done.stderr


def test_a_folder_that_is_not_there() -> None:
    done = run("nowhere")
    assert done.returncode == 2 and "nowhere is not a folder" in done.stderr


def test_files_of_all_commits_are_found(tmp_path: Path, modules: list[bytes], real_neff: Make) -> None:
    repository, out = tmp_path / "repository", tmp_path / "out"

    def git(*words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=repository, check=True, capture_output=True)

    repository.mkdir()
    git("init", "-q")
    for number, name in enumerate(("cache/MODULE_0/model", "often changed")):
        for version in range(number + 1):
            path = repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f"{path.name}.hlo_module.pb").write_bytes(modules[version])
            path.with_name(f"{path.name}.neff").write_bytes(real_neff(modules[version], "trn1", 1))
            (repository / "notes.txt").write_text(f"{number} {version}")
            git("add", "-A")
            git("commit", "-qm", "more")
    git("rm", "-rq", "cache")
    git("commit", "-qm", "less")
    assert history.unpack(repository, out) == (6, 0)
    assert sorted(p.name for p in (out / "cache/MODULE_0").iterdir()) == ["model.hlo_module.pb", "model.neff"]
    assert len(list((out / "versions").rglob("often changed.*"))) == 4
    corpus = survey.gather(out)
    assert (len(corpus.neffs), len(corpus.modules)) == (3, 2)
    assert [m.fate for m in corpus.modules.values()].count(survey.COMPILED) == 1
    assert history.main([str(tmp_path / "none"), str(out)]) == 2


def test_public_artifacts() -> None:
    """docs/results/real-artifacts.md has the figures of these files; they have no licence that allows copies here."""
    folder = os.environ.get(CORPUS)
    if not folder:
        pytest.skip(
            f"{CORPUS} does not name a folder of public artifacts (docs/results/real-artifacts.md says how to get them)"
        )
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
