"""Runs a suite of llama.cpp's programs on a simulated NeuronCore: `./bazelw run //tools/llama_cpp:SUITE -- OPTIONS`.

docs/reference/llama-cpp-tests.md describes the suites. The exit status is 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import architectures
import backend_ops
import calls
import harness
import llama_programs
import server_chats

OPTIONS: dict[str, dict[str, Any]] = {
    "only": {"metavar": "NAMES", "help": "only these models, architectures, programs, ops or cases"},
    "work": {"type": Path, "help": "a folder that keeps finished results; a run with the same folder continues"},
    "jobs": {"type": int, "help": "how many run at once; one per CPU by default"},
    "write-page": {
        "action": "store_true",
        "help": "write what follows from a run of all: a page of docs/results, a list",
    },
    "params": {"metavar": "REGEX", "help": "only cases whose parameters match"},
    "languages": {"default": "", "help": "languages of the kernels, the first choice first, such as nki,jax"},
    "computed-by": {"metavar": "LANGUAGE", "help": "only cases with a kernel in this language"},
    "sample": {"action": "store_true", "help": "the cases that the tests run"},
    "cores": {"type": int, "help": "the number of cores"},
    "fuse": {"help": "--fuse of `kernelgen model`"},
    "step": {
        "type": int,
        "default": 1,
        "help": "every STEP-th number of tokens, and those next to the kernels' numbers",
    },
    "file": {"type": Path, "help": "a GGUF file in place of random models"},
    "f32": {"action": "store_true", "help": "write this file's weights in F32"},
    "layers": {"type": int, "default": 8, "help": "the number of layers of this file's draft"},
    "text": {"type": Path, "help": "a text file"},
    "windows": {"type": int, "default": 4, "help": f"the number of windows of {calls.WINDOW} tokens of the text"},
}

Suite = Callable[[harness.Programs, argparse.Namespace], bool]
_SURVEY = "only work jobs write-page"
SUITES: dict[str, tuple[Suite, str]] = {
    "backend_ops": (backend_ops.main, f"{_SURVEY} params languages computed-by sample"),
    **{
        name: (partial(architectures.main, survey), _SURVEY + " cores fuse" * (survey.cores > 1))
        for name, survey in architectures.SURVEYS.items()
    },
    "derived_kernels": (architectures.derived_main, _SURVEY),
    "any_tokens": (calls.any_tokens, "only step fuse"),
    "several_cores": (calls.several_cores, "only cores fuse file f32"),
    "accuracy": (calls.accuracy, "file text windows"),
    "programs": (llama_programs.main, "only file"),
    "server_chats": (server_chats.main, "only file f32 layers"),
}
"""The suites, and the options that each has."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, (_, options) in SUITES.items():
        suite = suites.add_parser(name)
        for option in options.split():
            suite.add_argument(f"--{option}", **OPTIONS[option])
    args = parser.parse_args(arguments)
    function, _ = SUITES[args.suite]
    for option in ("file", "text"):
        if (path := getattr(args, option, None)) and not path.is_file():
            parser.error(f"--{option}: {path} is not a file")
    if getattr(args, "write_page", False) and (args.only or getattr(args, "sample", False)):
        parser.error("--write-page: a page is of a run of all")
    with tempfile.TemporaryDirectory() as compiled:
        try:
            return 0 if function(replace(harness.Programs.find(), compiled=Path(compiled)), args) else 1
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
