"""Counts the files and functions of this project that one kernel passes on its way from YAML to a pack.

    python tools/lint/kernel_path.py          prints the two counts
    python tools/lint/kernel_path.py --list   prints the functions too, by file

The kernel is an rms_norm, for trn1, in JAX, compiled by the simulator. All steps run in this process, under Python's
profiler. A function counts if it runs once; comprehensions and bodies of modules and classes do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

FOLDERS = (str(ROOT / "tools" / "kernelgen"), str(ROOT / "kernels"))
MANIFEST = """\
format: 1
name: one
targets: [trn1]
kernels:
  - {op: rms_norm, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32", params: {eps: 1.0e-5}}
"""


def build(folder: Path) -> None:
    """Builds the kernel's pack in `folder`, all steps in this process."""
    from kernelgen import fileio, manifest
    from kernelgen.build.steps import Build, argument_files, steps_of
    from kernelgen.cache import OFF
    from kernelgen.compilers import choice
    from kernelgen.emitters.catalog import Catalog
    from kernelgen.emitters.library import builtin_library
    from kernelgen.plan import Plan
    from kernelgen.steps import worker

    (folder / "one.yaml").write_text(MANIFEST)
    catalog = Catalog([builtin_library()])
    plan = Plan.merge(manifest.load([folder / "one.yaml"], catalog))
    compiler = choice.resolve("simulator")
    settings = Build(compiler.name, compiler.identity, None, version("jax"), OFF, 1, 1024)
    for name, text in argument_files(plan, catalog.folders, settings).items():
        fileio.write_bytes(folder / name, text.encode())
    with contextlib.chdir(folder):
        for step in steps_of(plan, settings):
            status, output = worker.run([step.kind, *step.arguments])
            if status:
                raise SystemExit(output)
    if not (folder / "one_trn1.kernels.gguf").exists():
        raise SystemExit("no pack was written")


def functions_passed() -> dict[str, set[str]]:
    """Returns the names of the functions that run during `build`, by file."""
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(profile)
        try:
            build(Path(folder))
        finally:
            sys.setprofile(None)
    by_file = defaultdict(set)
    for code in codes:
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if is_function and code.co_filename.startswith(FOLDERS):
            by_file[str(Path(code.co_filename).relative_to(ROOT))].add(code.co_qualname)
    return dict(by_file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the functions, by file")
    args = parser.parse_args()
    by_file = functions_passed()
    if args.list:
        for file, names in sorted(by_file.items()):
            print(f"{file}: {', '.join(sorted(names))}")
    print(f"{len(by_file)} files, {sum(map(len, by_file.values()))} functions")


if __name__ == "__main__":
    main()
