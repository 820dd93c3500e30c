"""Builds the wheel neuron-kernelgen-llama-cpp: the backend and export-graphs for llama-cpp-python, and the simulator's libnrt.

    ./bazelw run //backend/python:wheel -- FOLDER

The same sources give the same bytes, if the C++ compiler's output is also the same.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import build_meta

import kernelgen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = "neuron_kernelgen"
PLUGIN = ROOT / "backend/ggml-neuron/plugin/libggml-neuron.so"
EXPORTER = ROOT / "backend/exporter/server_exporter/export-graphs"
SIMULATOR = ROOT / "backend/simulator/libnrt.so.1"
VERSION = "0.3.36"
"""The version of llama-cpp-python; Bazel fetches its llama.cpp (rules/private/repositories/pypi_sdist.bzl)."""


def build(folder: Path, plugin: Path, exporter: Path, simulator: Path, version: str) -> Path:
    """Writes the wheel into a folder and returns it.

    Args:
        folder: the destination; created if it does not exist.
        plugin: libggml-neuron.so.
        exporter: export-graphs.
        simulator: libnrt.so.1, which `kernelgen simulate` finds in the environment that the wheel is installed in.
        version: the version of llama-cpp-python for which the plugin and the exporter are built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch)
        package = project / PACKAGE
        shutil.copytree(HERE / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        text = (HERE / "pyproject.toml").read_text(encoding="utf-8")
        known = f'version = "{kernelgen.__version__}"\ndependencies = ["llama-cpp-python=={version}"]'
        (project / "pyproject.toml").write_text(
            text.replace('dynamic = ["version", "dependencies"]', known), encoding="utf-8"
        )
        (package / "llama-cpp-python.txt").write_text(f"{version}\n", encoding="utf-8")
        (package / "py.typed").touch()
        for binary in (plugin, exporter):
            shutil.copy(binary, package / binary.name)
        shutil.copy(simulator, project / simulator.name)
        with contextlib.chdir(project), contextlib.redirect_stdout(sys.stderr):
            tag = f"--plat-name=linux_{platform.machine()}"
            name = build_meta.build_wheel(str(folder), {"--build-option": tag})
    runpy.run_path(str(ROOT / "tools/packaging/reproducible.py"))["fix_wheel"](
        folder / name, [f"{PACKAGE}/{exporter.name}"]
    )
    return folder / name


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plugin", type=Path, default=PLUGIN)
    parser.add_argument("--exporter", type=Path, default=EXPORTER)
    parser.add_argument("--simulator", type=Path, default=SIMULATOR)
    parser.add_argument("--llama-cpp-python", default=VERSION, metavar="VERSION")
    args = parser.parse_args()
    print(build(args.folder, args.plugin, args.exporter, args.simulator, args.llama_cpp_python))


if __name__ == "__main__":
    main()
