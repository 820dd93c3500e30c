"""Counts what a build made and what it took from a cache, as Markdown for a CI job's summary.

    bazel run @neuron_kernelgen//tools/ci:summary -- actions.json >> "$GITHUB_STEP_SUMMARY"
    python3 tools/ci/summary.py build.log >> "$GITHUB_STEP_SUMMARY"

`actions.json` is Bazel's output with `--execution_log_json_file`; `build.log` is the output of `cmake --build` or
`kernelgen build`. The program needs only Python. Exit status 1 if a file does not mention kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = {"NeuronEmit": "emitted", "NeuronCompile": "compiled", "NeuronBundle": "bundled"}

_CMAKE = re.compile(r"(\S+): (\d+) kernels: (\d+) compiled, (\d+) from the cache, (\d+) up to date")
_KERNELGEN = re.compile(r"(\d+) built \((\d+) compiled, (?:(\d+) from the cache, )?.*?(\d+) up to date\), (\d+) failed")


def spawns(text: str) -> Iterator[dict[str, Any]]:
    """Yields the actions of an execution log, which consists of JSON objects one after another."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        spawn, at = decoder.raw_decode(text, at)
        yield spawn


def of_bazel(text: str) -> list[str]:
    """Returns a table of the actions that ran and the hits in a disk or remote cache."""
    ran: Counter[str] = Counter()
    cached: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for spawn in spawns(text):
        count = failed if spawn.get("exitCode") else cached if spawn.get("cacheHit") else ran
        count[spawn.get("mnemonic", "")] += 1
    rows = [
        f"| {what} | {ran[mnemonic]} | {cached[mnemonic]} | {failed[mnemonic]} |" for mnemonic, what in STEPS.items()
    ]
    return ["| kernels | now | from the cache | failed |", "|---|---|---|---|", *rows]


def of_log(text: str) -> list[str]:
    """Returns a table from the lines of CMake's packing, or from kernelgen's last line."""
    rows = [f"| {m[1]} | {m[3]} | {m[4]} | {m[5]} | |" for m in _CMAKE.finditer(text)]
    rows += [f"| all | {m[2]} | {m[3] or 0} | {m[4]} | {m[5]} |" for m in _KERNELGEN.finditer(text)]
    if not rows:
        return []
    return ["| kernels | compiled | from the cache | up to date | failed |", "|---|---|---|---|---|", *rows]


def table(file: Path) -> list[str]:
    """Returns the lines for one file; none if it does not mention kernels."""
    text = file.read_text(errors="replace")
    return of_bazel(text) if text.lstrip().startswith("{") else of_log(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    status = 0
    for file in parser.parse_args().files:
        try:
            lines = table(file)
        except (OSError, ValueError) as error:
            print(f"error: {file}: {error}", file=sys.stderr)
            status = 1
            continue
        if not lines:
            # A build that had nothing to do writes an empty log.
            print(f"{file} says nothing about kernels: none was built", file=sys.stderr)
            status = 1
        print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
