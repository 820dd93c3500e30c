"""A new target is one row of tools/kernelgen/targets.py and a run of `regenerate`: no other file lists targets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import regenerate
from kernelgen.targets import TARGETS

ROOT = Path(__file__).parents[2]
ROW = """
            Target("trn9", 9, "denali", 8, 2, (1, 2), (), False, False, families=(99,), sbuf_bytes=300_000),
"""
MANIFEST = """\
format: 1
name: tiny
targets: [trn9]
kernels:
  - {op: sqr, inputs: ["(8,4,1,1)/f32"], output: "(8,4,1,1)/f32"}
  - {op: rms_norm, inputs: ["(256,4,1,1)/f32"], output: "(256,4,1,1)/f32", params: {eps: 1.0e-5}, languages: [nki]}
"""

# Files that can't run here, each with its row for trn9.
SAID = {
    "docs/reference/targets.md": "| **trn9** | **trn1** |",
    "backend/nrt/targets.inc": '{ "trn9", { "trn9" }, { 99 }, { 1, 2, 4, 8, 16, 32, 64 }, 2, 16 },',
    "rules/private/targets.bzl": '    "trn9": struct(\n',
    "tools/kernelgen/compilers/nki_driver.py": '    "trn9": "gen9",\n',
    "tools/nki_interpreter/devices.py": '    "trn9": Device(nc_version.gen9, 300000, 512, 1),\n',
    "tools/kernelgen/manifest/manifest.schema.json": '        "trn9",\n',
    "tools/kernelgen/neff/container.py": '        "trn9": "denali",\n',
}


def copy_checkout(copy: Path) -> Path:
    """Copies the files that `regenerate` and builds read into a folder; returns it."""
    ignored = shutil.ignore_patterns("__pycache__", ".*cache")
    for folder in ("kernels", "tools/kernelgen", "tools/nki_interpreter", "tools/regenerate"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for name in regenerate.FILES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for path in copy.rglob("*"):
        path.chmod(0o755)
    return copy


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the target trn9, after `regenerate`."""
    copy = copy_checkout(tmp_path_factory.mktemp("checkout"))
    table = copy / "tools" / "kernelgen" / "targets.py"
    before, name, after = table.read_text().partition('            Target("trn1", ')
    table.write_text(before + ROW.lstrip("\n") + name + after)
    assert "written" in run(copy, "regenerate")
    (copy / "tiny.yaml").write_text(MANIFEST)
    return copy


def run(checkout: Path, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(checkout / "tools"), "BUILD_WORKSPACE_DIRECTORY": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=env,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_copy_of_the_table_has_a_new_target(checkout: Path) -> None:
    assert run(checkout, "regenerate", "--check") == ""
    for name, row in SAID.items():
        assert row in (checkout / name).read_text(), name


def test_kernels_for_a_new_target_are_built_and_described(checkout: Path) -> None:
    assert "trn9" in run(checkout, "kernelgen", "list", "--targets")
    run(checkout, "kernelgen", "build", "tiny.yaml", "--compiler=simulator", "-o", "out")
    said = run(checkout, "kernelgen", "inspect", "--check", "out/tiny_trn9.kernels.gguf")
    assert "trn9" in said


def test_a_new_target_is_known_to_what_describes_and_compiles_kernels(checkout: Path) -> None:
    said = """
import runpy
from kernelgen.neff import container
from kernelgen.cli.model_manifest import ALL_TARGETS
from kernelgen.device import checks as device
from kernelgen.compilers import nki_driver
from nki_interpreter import isa, kernel, program
from nki_interpreter.isa import constants
print(container.DEVICES["trn9"], nki_driver.GENERATIONS["trn9"], "trn9" in ALL_TARGETS, "trn9" in device.MANIFEST)
print("trn9" in program.Recorder().targets, constants.GENERATIONS["trn9"].name)
print(*(kernel.NkiKernel(len, older=False, platform_target=name).target for name in ("gen9", "trn9", "gen2")))
print(runpy.run_path("tests/compilers/fake_neuronx_cc")["CHOICES"]["--target"])
"""
    (checkout / "tools" / "said.py").write_text(said)
    assert run(checkout, "said").splitlines() == [
        "denali gen9 True True",
        "True gen9",
        "trn9 trn9 trn1",
        str(("inf2", "trn1", "trn1n", "trn2", "trn3", "trn9")),
    ]


_NAME = rf"\b({'|'.join(TARGETS)})\b"
_LIST = re.compile(
    rf"[\"']{_NAME}[\"'][^\n]{{0,40}}\n?[^\n]{{0,40}}[\"'](?!\1\b){_NAME}[\"']|\[{_NAME}, *(?!\3\b){_NAME}"
)
_CHOSEN = {
    "tools/kernelgen/targets.py",
    "tools/published/__init__.py",  # the targets of the ready manifests
}


def test_no_other_file_lists_targets() -> None:
    sources = [path for folder in ("backend", "rules", "tools") for path in sorted((ROOT / folder).rglob("*"))]
    kinds = {".bazel", ".bzl", ".cc", ".cmake", ".cpp", ".h", ".inc", ".py", ".txt"}
    found = {}
    for path in sources:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in kinds or not path.is_file() or name in _CHOSEN or name in regenerate.FILES:
            continue
        if (match := _LIST.search(path.read_text())) is not None:
            found[name] = match[0]
    assert {"backend", "rules", "tools"} == {path.relative_to(ROOT).parts[0] for path in sources}
    assert found == {}
