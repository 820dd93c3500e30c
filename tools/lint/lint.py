"""Runs the linters over the checkout: ruff (format and lint), mypy --strict, buildifier.

    ./bazelw run //tools/lint             one line per linter, and what it says when it fails; exit status 1 then
    ./bazelw run //tools/lint -- --fix    mends what ruff and buildifier can mend

Buildifier is an npm package that carries its binary; where there is no npm, a `buildifier` on PATH is taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

BUILDIFIER = "@bazel/buildifier@8.2.1"
STARLARK = (".bzl", ".bazel", "BUILD", "WORKSPACE")


def buildifier() -> list[str]:
    """Returns how buildifier is called.

    Raises:
        SystemExit: it can't be had.
    """
    if shutil.which("npx"):
        return ["npx", "--yes", BUILDIFIER]
    if found := shutil.which("buildifier"):
        return [found]
    raise SystemExit("buildifier needs npx (on Debian: apt-get install npm), or a buildifier on PATH")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fix", action="store_true", help="Mend what can be mended.")
    args = parser.parse_args()
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).resolve().parents[2]))
    tracked = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines()
    starlark = [file for file in tracked if file.endswith(STARLARK) and Path(file).exists()]
    python = [sys.executable, "-m"]
    linters = {
        "ruff format": [*python, "ruff", "format", *([] if args.fix else ["--check", "--diff"]), "."],
        "ruff check": [*python, "ruff", "check", *(["--fix"] if args.fix else []), "."],
        "mypy --strict": [*python, "mypy", "--strict", "tools/kernelgen"],
        "buildifier": [*buildifier(), f"--mode={'fix' if args.fix else 'check'}", "--lint=warn", *starlark],
    }
    failed = 0
    for name, command in linters.items():
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"{'failed' if done.returncode else 'passed'}: {name}", flush=True)
        if done.returncode:
            failed += 1
            print(done.stdout, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
