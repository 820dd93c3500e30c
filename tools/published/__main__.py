"""Writes the manifests of `MANIFESTS`: `python -m published`, or `./bazelw run //tools:published`.

It needs export-graphs and llama.cpp's libraries: those that Bazel built, or those of the options, as for `kernelgen
model`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernelgen import cli
from published import MANIFESTS, MODELS, Manifest, model_header
from published.header import write


def derive(manifest: Manifest, output: Path, arguments: list[str]) -> str:
    """Writes a manifest to `output`; returns the command's output."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = write(manifest.header(), Path(folder) / f"{manifest.model}.gguf")
        command = ["model", str(file), "-o", str(output), "--name", manifest.name, "--ftype", manifest.ftype]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = cli.run([*command, *manifest.options, *arguments])
    if status:
        raise SystemExit(f"{manifest.path}: {said.getvalue()}")
    return said.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="published", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a manifest is stale")
    parser.add_argument(
        "--header",
        nargs=2,
        metavar=("MODEL", "FILE"),
        help=f"write a published model's GGUF file without its weights instead: {', '.join(MODELS)}. It is enough for"
        " `kernelgen model`, `forecast` and `report`",
    )
    parser.add_argument("--exporter", help="the same option of `kernelgen model`")
    parser.add_argument("--llama-cpp", help="the same option of `kernelgen model`")
    args = parser.parse_args(arguments)
    if args.header:
        model, file = args.header
        if model not in MODELS:
            parser.error(f"--header {model}: the published models are {', '.join(MODELS)}")
        named = Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")) / file
        try:
            write(model_header(model), named)
        except OSError as error:
            parser.error(f"--header: {error.filename}: {error.strerror}")
        print(f"{named} written")
        return 0
    passed = [
        f"--{name}={value}" for name, value in (("exporter", args.exporter), ("llama-cpp", args.llama_cpp)) if value
    ]
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).resolve().parents[2]))
    built = Path(__file__).absolute().parents[2]
    program = built / "backend" / "exporter" / "exporter" / "export-graphs"
    if program.is_file():
        passed = [f"--exporter={program}", f"--llama-cpp={built / 'tests' / 'llama' / 'llama_cpp'}", *passed]
    stale = False
    with tempfile.TemporaryDirectory() as folder:
        for manifest in MANIFESTS:
            fresh, there = Path(folder) / manifest.path.name, root / manifest.path
            derive(manifest, fresh, passed)
            if there.is_file() and there.read_bytes() == fresh.read_bytes():
                continue
            stale = True
            if args.check:
                print(f"{manifest.path} is stale: ./bazelw run //tools:published")
            else:
                there.write_bytes(fresh.read_bytes())
                print(f"{manifest.path} written")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
