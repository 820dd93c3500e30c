"""docs/kernels-in-numpy.md: its files are written where it says, its commands print what it shows, for both targets of its manifest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kernels-in-numpy.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page")
    files = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    assert sorted(files) == ["my_kernels/rows.py", "rows.yaml", "softplus.py"]
    for name, text in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    program = made / "bin" / "kernelgen"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m kernelgen "$@"\n')
    program.chmod(0o755)
    return made


def run(command: str, folder: Path) -> str:
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
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout


def pattern(output: str) -> str:
    return "".join(
        r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in output.splitlines()
    )


def test_the_page_shows_what_happens(folder: Path) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    sessions = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(sessions) == 6
    for command, _, expected in sessions:
        printed = run(command, folder)
        assert re.fullmatch(pattern(expected), printed), f"$ {command}\n{printed}"
    text = next((folder / "text").iterdir()).read_text()
    assert text.startswith("HloModule kernel") and " maximum(input0, " in text
    # An edit that means the same compiles nothing; one that does not compiles that kernel alone, for each target.
    source = folder / "my_kernels" / "rows.py"
    source.write_text(source.read_text().replace("    return np.max", "    # a comment\n    return np.max"))
    build = "kernelgen build rows.yaml --kernels my_kernels -o build --compiler simulator"
    assert "6 built (0 compiled, 6 up to date)" in run(build, folder)
    source.write_text(source.read_text().replace("np.maximum(x, 0)", "np.maximum(x, 0) + 1"))
    assert "6 built (2 compiled, 4 up to date)" in run(build, folder)
