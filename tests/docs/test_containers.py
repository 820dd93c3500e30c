"""Dockerfile and compose.yaml, which no container engine reads here: the files that they name exist, and
docs/guides/containers.md describes them correctly.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernelgen import cli

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Returns the instructions of each stage of the Dockerfile as (name, arguments), without those before the first stage."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    found: dict[str, list[tuple[str, str]]] = {}
    for line in filter(None, joined.splitlines()):
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            base, _, stage = arguments.partition(" AS ")
            assert base in ("${BASE}", *found), f"{stage} is made from {base}, which is not a stage above it"
            found[stage] = list(found.get(base, []))
        elif found:
            found[stage].append((name, arguments))
    return found


STAGES = stages()


def ignored(path: str) -> bool:
    """Whether .dockerignore excludes a file of the checkout from the build."""
    kept = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line.startswith("#") and (fnmatch.fnmatch(path, pattern) or path.startswith(f"{pattern}/")):
            kept = line.startswith("!")
    return not kept


def test_what_is_copied_is_there_and_no_more_is_sent() -> None:
    sources = [
        word
        for instructions in STAGES.values()
        for name, arguments in instructions
        if name == "COPY" and not arguments.startswith("--from=")
        for word in arguments.split()[:-1]
    ]
    assert "tools" in sources
    for source in sources:
        files = list((ROOT / source).rglob("*.*")) if (ROOT / source).is_dir() else [ROOT / source]
        assert any(file.is_file() and not ignored(str(file.relative_to(ROOT))) for file in files), source
    assert not ignored("tools/kernelgen/plan.py") and not ignored("tools/packaging/reproducible.py")
    assert ignored("tools/lint/lint.py") and ignored(".git/config") and ignored("output/x.neff")


@pytest.mark.parametrize("stage", ["simulator", "sdk"])
def test_what_runs_is_kernelgen_and_not_root(stage: str) -> None:
    *_, user, folder, entry, command = STAGES[stage]
    assert user == ("USER", "kernelgen") and folder == ("WORKDIR", "/output")
    assert entry == ("ENTRYPOINT", '["kernelgen"]') and cli.run(json.loads(command[1])) == 0


def test_packages_are_pinned_and_no_host_is_named() -> None:
    scripts = [arguments for instructions in STAGES.values() for name, arguments in instructions if name == "RUN"]
    installs = [part for script in scripts for part in script.split("&&") if re.search(r"\bpip install\b", part)]
    assert len(set(installs)) == 4
    for install in installs:
        assert "--require-hashes" in install or '=="' in install or "==$" in install or "/src/dist/" in install, install
    assert re.search(r"^ARG BASE=debian:12\.\d+-slim$", DOCKERFILE, re.MULTILINE)
    assert ("ARG", "NEURON_INDEX") in STAGES["sdk"]
    assert "://" not in DOCKERFILE + (ROOT / "compose.yaml").read_text()


def test_the_scripts_pass_shellcheck(tmp_path: Path) -> None:
    scripts = {arguments for instructions in STAGES.values() for name, arguments in instructions if name == "RUN"}
    for number, script in enumerate(sorted(scripts)):
        (tmp_path / f"{number}.sh").write_text(f"#!/bin/sh\nexport NEURON_INDEX='' NEURONX_CC=''\n{script}\n")
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, *tmp_path.iterdir()], capture_output=True, text=True, check=False)
    assert len(scripts) == 6 and done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_runs_a_command_that_exists(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = SERVICES[name]
    assert name in (ROOT / "docs/guides/containers.md").read_text()
    assert service["build"]["target"] in STAGES and service["image"].endswith(":" + service["build"]["target"])
    assert service["user"] == "${UID:-10001}:${GID:-10001}" and service["read_only"] and service["cap_drop"] == ["ALL"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    assert mounts == {"/manifests": "./manifests", "/output": "./output", "/cache": "cache"}
    words = [re.sub(r"\$\{MANIFEST:-(.*?)\}", r"\1", word) for word in service["command"]]
    assert (ROOT / words[1].lstrip("/")).is_file()
    # The default manifest has many kernels; planning another one is faster.
    words[1] = str(ROOT / "manifests/basic.yaml")
    words[words.index("--output") + 1] = str(tmp_path / Path(words[words.index("--output") + 1]).relative_to("/output"))
    sdk = tmp_path / "sdk" / "bin"
    sdk.mkdir(parents=True)
    (sdk / "neuronx-cc").symlink_to(ROOT / "tests/compilers/fake_neuronx_cc")
    monkeypatch.setenv("NEURON_SDK", str(sdk.parent))
    assert cli.run([*words, "--dry-run"]) == 0, shlex.join(words)
    assert capsys.readouterr().out.count("emit ") == 10
