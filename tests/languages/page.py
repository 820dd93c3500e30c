"""Runs pages of docs/: writes the files that they show, runs their commands, and compares the output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def write(page: str, folder: Path) -> list[str]:
    """Writes the files that a page shows and the program `kernelgen` to a folder; returns the files' names, sorted."""
    text = (DOCS / page).read_text(encoding="utf-8")
    files = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    program(folder)
    return sorted(files)


def program(folder: Path) -> None:
    """Writes the program `kernelgen` to a folder, where `run` finds it."""
    program = folder / "bin" / "kernelgen"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m kernelgen "$@"\n')
    program.chmod(0o755)


def run(command: str, folder: Path, status: int = 0) -> str:
    """Runs a command in a folder of `write`; returns its stdout, followed by its stderr if `status` is not 0."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "COLUMNS": "120",
        "NEURON_KERNELGEN_NEFF_CACHE": "off",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == status, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr if status else done.stdout


def pattern(output: str) -> str:
    """Returns the regular expression of a page's output: `…` stands for any text, and alone on a line for any lines."""
    return "".join(
        r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in output.splitlines()
    )


def sessions(page: str) -> list[tuple[str, str]]:
    """Returns the commands that a page shows, each with its output."""
    blocks = re.findall(r"^```console\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    parts = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(command, expected) for command, _, expected in parts]


def check(page: str, folder: Path, *, failing: tuple[str, ...] = ()) -> int:
    """Runs a page's commands in order and compares the output; returns their number. The commands in `failing` exit with 1."""
    shown = sessions(page)
    for command, expected in shown:
        printed = run(command, folder, 1 if command in failing else 0)
        assert re.fullmatch(pattern(expected), printed), f"$ {command}\n{printed}"
    return len(shown)
