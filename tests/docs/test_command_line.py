"""The commands of docs/reference/command-line.md print what the page shows.

A `console` block is a session: lines with `$ ` run in order, in a folder with the project's manifests, and the text
below a command must be its output. `…` stands for any text in a line, and alone on a line for any lines.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/reference/command-line.md"


def sessions() -> list[tuple[str, str]]:
    """Returns (command, output) of the page's blocks, in order."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def pattern(output: str) -> str:
    """Returns the regular expression that an output must match as a whole."""
    lines = output.splitlines()
    text = ""
    for line in lines:
        text += r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkout")
    for name in ("manifests", "tests/data/graph-ops"):
        shutil.copytree(ROOT / name, made / name)
    program = made / "bin" / "kernelgen"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m kernelgen "$@"\n')
    program.chmod(0o755)
    (made / "neff").mkdir()
    return made


def test_commands_do_what_the_page_shows(folder: Path) -> None:
    commands = sessions()
    assert commands
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "COLUMNS": "120",
        "NEURON_KERNELGEN_NEFF_CACHE": str(folder / "cache"),
    }
    environment.pop("NEURON_SDK", None)
    for command, expected in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        assert re.fullmatch(pattern(expected), done.stdout), f"$ {command}\n{done.stdout}"


def test_the_page_shows_every_command() -> None:
    from kernelgen.cli.frame import COMMANDS

    text = (ROOT / PAGE).read_text()
    shown = {match for command, _ in sessions() for match in re.findall(r"kernelgen (\w+)", command)}
    mentioned = set(re.findall(r"kernelgen (\w+)", text))
    # The output of these depends on the machine, on llama.cpp, on NKI's own compiler or on a model;
    # docs/guides/source-kernels.md shows check.
    elsewhere = {"check", "doctor", "model", "prebuild", "repack", "simulate"}
    assert set(COMMANDS) - elsewhere <= shown
    assert elsewhere <= mentioned
