"""The driver runs NKI's own compiler in a Python without kernelgen, as Bazel's rules do; a double replaces NKI 0.4."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernelgen import manifest
from kernelgen.compilers import nki_driver
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.plan import Plan
from kernelgen.spec.kernel import SourceSpec
from kernelgen.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
NKI = ROOT / "tests" / "data" / "fake_nki"
FAKE_NEURONX_CC = ROOT / "tests" / "compilers" / "fake_neuronx_cc"
DRIVER = Path(nki_driver.__file__)
KERNELS = """\
import os

import nki

from .sizes import HALF

assert os.environ.get("MODE") == "fast" and "PATH" not in os.environ


@nki.jit
def add(x, y, scale, half=HALF):
    return x + y * scale


@nki.jit
def refused(x, y, scale):
    return x
"""
MANIFEST = """\
format: 1
name: m
targets: [trn1, trn2]
kernels:
  - source: add.py:add
    inputs: ["f32[128,8]", "bf16[128,8]"]
    outputs: ["f32[128,8]"]
    params: {scale: 2}
    env: {MODE: fast}
    lowering: native
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "add.py").write_text(KERNELS)
    (made / "sizes.py").write_text("HALF = 0.5\n")
    (made / "m.yaml").write_text(MANIFEST)
    return made


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """Returns the double of neuronx-cc in an SDK."""
    made = tmp_path / "sdk" / "bin" / "neuronx-cc"
    made.parent.mkdir(parents=True)
    made.write_text("\n".join([f"#!{sys.executable}", *FAKE_NEURONX_CC.read_text().splitlines()[1:], ""]))
    made.chmod(0o755)
    return made


def native_call(spec: SourceSpec) -> str:
    """Returns the driver's argument for the call of a kernel, as Bazel's rule writes it."""
    arrays = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in (a.numpy for a in spec.inputs)]
    call = {"function": spec.function, "arrays": arrays, "keywords": dict(spec.params)}
    return json.dumps(call | {"grid": spec.grid, "env": dict(spec.env)})


def specs(folder: Path) -> list[tuple[str, str, SourceSpec]]:
    """Returns the id, target and spec of each kernel."""
    plan = Plan.merge(manifest.load([folder / "m.yaml"], Catalog([builtin_library()])))
    return [(k.id, k.targets[0], k.spec) for k in plan.kernels if isinstance(k.spec, SourceSpec)]


def run(
    *command: str | Path, path: str = "", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program with this Python, which also finds packages in `path`; keyword arguments are environment variables."""
    environment = {
        name: os.environ[name] for name in ("HOME", "NEURON_KERNELGEN_NEFF_CACHE", "PATH") if name in os.environ
    }
    environment |= {"PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )


def record(folder: Path, target: str, spec: SourceSpec, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the driver, which writes a kernel's record to `<folder>/<target>.json`."""
    arguments = {"identity": "nki 0.4.0", "call": native_call(spec), "target": target} | more
    return run(
        DRIVER,
        *(f"--{name}={value}" for name, value in arguments.items()),
        f"--emitter={folder / 'add.py'}",
        f"--output={folder / target}.json",
        path=str(NKI),
    )


def emit(folder: Path, target: str, spec: SourceSpec, native: str) -> subprocess.CompletedProcess[str]:
    """Runs the step that emits a kernel from a record, without NKI."""
    return run(
        *("-m", "kernelgen.steps.worker", "emit", f"--spec={spec.json}", "--library=m", f"--target={target}"),
        *(f"--emitter={folder / 'add.py'}", f"--native={folder / native}.json", f"--output={folder / target}.pb"),
        path=str(TOOLS),
    )


def test_a_record_makes_the_hlo_that_nki_in_kernelgens_own_process_makes(folder: Path, compiler: Path) -> None:
    for _, target, spec in specs(folder):
        assert record(folder, target, spec).stderr == ""
        assert emit(folder, target, spec, target).stderr == ""
        assert str(folder) not in (folder / f"{target}.json").read_text()
    built = run(
        *("-m", "kernelgen", "build", folder / "m.yaml", "-o", folder / "build", "--compiler", "neuronx-cc"),
        path=f"{TOOLS}{os.pathsep}{NKI}",
        NEURON_SDK=str(compiler.parent.parent),
    )
    assert "2 built (2 compiled" in built.stdout, built.stderr
    files = [next((folder / "build").rglob(f"{id}.hlo.pb")).read_bytes() for id, _, _ in specs(folder)]
    assert files == [(folder / f"{target}.pb").read_bytes() for target in ("trn1", "trn2")]
    made = json.loads(base64.b64decode(json.loads((folder / "trn2.json").read_text())["file"]))
    assert (made["target"], made["lnc"], made["others"]) == ("gen3", 1, ["half", "scale"])
    assert made["arrays"] == [["x", "float32", [128, 8]], ["y", "bfloat16", [128, 8]]]
    # A comment in the file does not change the compiler's result.
    before = (folder / "trn1.json").read_bytes()
    (folder / "add.py").write_text("# A comment.\n" + KERNELS)
    record(folder, "trn1", specs(folder)[0][2])
    assert (folder / "trn1.json").read_bytes() == before


def test_the_driver_reports_a_refusal_in_one_line(folder: Path) -> None:
    (_, target, spec), _ = specs(folder)

    def said(**more: str) -> str:
        done = record(folder, target, spec, **more)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert not list(folder.glob("*.json")) and not list(folder.glob(".*.tmp"))
        return done.stderr.removeprefix(f"error: {folder / 'add.py'}: ").strip()

    assert "the following arguments are required: --identity, --emitter" in run(DRIVER).stderr
    assert said(identity="nki 0.5.0").startswith("the build is for nki 0.5.0, and this machine has nki 0.4.0 (")
    other = native_call(replace(spec, source="add.py:refused"))
    assert said(call=other) == "nki 0.4.0: ValueError: SBUF has no room for it"
    assert said(call=native_call(replace(spec, source="add.py:absent"))).endswith("has no function 'absent'")
    assert "AssertionError" in said(call=native_call(replace(spec, env=())))
    (folder / "sizes.py").unlink()
    assert "can't be imported: ModuleNotFoundError: No module named" in said()


def test_neuronx_cc_is_given_the_files_beside_hlo_that_stays_as_it_is(
    folder: Path, compiler: Path, tmp_path: Path
) -> None:
    (_, target, spec), _ = specs(folder)
    record(folder, target, spec)
    emit(folder, target, spec, target)
    hlo = (folder / f"{target}.pb").read_bytes()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "hlo.pb").write_bytes(hlo)
    flags = ["--framework", "XLA", "--target", target, "--output", "kernel.neff"]
    done = run(
        *("-m", "kernelgen.compilers.nki_program", compiler, "compile", "hlo.pb", *flags),
        path=str(TOOLS),
        cwd=scratch,
        KERNELGEN_HOME=str(scratch),
    )
    assert done.returncode == 0, done.stderr
    assert (scratch / "kernel.neff").exists()
    assert (scratch / "hlo.pb").read_bytes() == hlo
    refused = run(compiler, "compile", "hlo.pb", *flags, cwd=scratch, HOME=str(scratch))
    assert "native kernel: sha256:" in refused.stderr  # no compiler accepts the form in canonical HLO


def test_nki_knows_every_target() -> None:
    assert {name: f"gen{target.neuron_core}" for name, target in TARGETS.items()} == nki_driver.GENERATIONS
