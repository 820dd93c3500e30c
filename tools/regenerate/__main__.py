"""Runs the generator: `python -m regenerate`, or `./bazelw run //tools:regenerate`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import regenerate
from regenerate.command import COMMAND


def main() -> int:
    parser = argparse.ArgumentParser(prog="regenerate", description=(regenerate.__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 if a file is stale.")
    args = parser.parse_args()
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).resolve().parents[2]))
    found = regenerate.stale(root)
    for name, text in found.items():
        if args.check:
            print(f"{name} is stale: {COMMAND}")
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
            print(f"{name} written")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
