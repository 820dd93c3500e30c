"""Runs a kernel of a file on the CPU: `python -m nki_interpreter FILE FUNCTION INPUT…`.

An input is an array of random numbers, such as `f32[128,512]`, or a `.npy` file. The command prints shape, dtype and range of
each result, and the kernel's cost by the documented formulas.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nki_interpreter.cost import cost
from nki_interpreter.devices import DEVICES
from nki_interpreter.dtypes import bfloat16
from nki_interpreter.errors import LoadError, NkiError
from nki_interpreter.kernel import record_kernel, simulate
from nki_interpreter.loading import interpreter, load_kernel

DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": bfloat16,
    **{
        f"{kind}{bits}": np.dtype(f"{name}{bits}")
        for kind, name in (("i", "int"), ("u", "uint"))
        for bits in (8, 16, 32)
    },
}
MOST_BYTES = 1 << 32
"""The largest size of one random input, in bytes."""


class _Mistake(Exception):
    """The command line requests something that the interpreter can't do."""


def array(text: str, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Returns an input: random numbers of a shape and dtype, or the array of a `.npy` file.

    Raises:
        _Mistake: the text describes neither.
    """
    if text.endswith(".npy"):
        try:
            return np.asarray(np.load(text, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise _Mistake(f"{text}: {error}") from None
    found = re.fullmatch(r"(\w+)\[(\d+(?:,\d+)*)\]", text)
    if not found or found[1] not in DTYPES:
        raise _Mistake(
            f"'{text}': expected a .npy file, or a dtype and a shape such as f32[128,512] ({', '.join(DTYPES)})"
        )
    shape, dtype = tuple(map(int, found[2].split(","))), DTYPES[found[1]]
    if np.prod(shape, dtype=object) * dtype.itemsize > MOST_BYTES:
        raise _Mistake(f"'{text}': more than {MOST_BYTES >> 30} GiB")
    if dtype.kind in "iu":
        return random.integers(0, 100, shape, dtype=np.int64).astype(dtype)
    return random.standard_normal(shape, dtype=np.float32).astype(dtype)


def static(text: str) -> tuple[str, Any]:
    """Returns name and value of `NAME=VALUE`; a value that is not a Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise _Mistake(f"'{text}': expected NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def summary(number: int, result: np.ndarray[Any, Any]) -> str:
    """Returns a line about a result."""
    values = result.astype(np.float64)
    low, high = (values.min(), values.max()) if values.size else (np.nan, np.nan)
    return f"result {number}: {result.dtype}{list(result.shape)}, from {low:.6g} to {high:.6g}"


def flat(results: Any) -> Iterable[np.ndarray[Any, Any]]:
    """Yields the arrays that a kernel returned."""
    if isinstance(results, np.ndarray):
        yield results
    elif isinstance(results, dict):
        for value in results.values():
            yield from flat(value)
    elif isinstance(results, list | tuple):
        for value in results:
            yield from flat(value)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m nki_interpreter", description=__doc__.partition("\n")[0])
    made.add_argument("file", type=Path, help="the Python file")
    made.add_argument("function", help="the kernel")
    made.add_argument("inputs", nargs="*", metavar="INPUT", help="f32[128,512], or a .npy file; in the kernel's order")
    made.add_argument(
        "--static", action="append", default=[], metavar="NAME=VALUE", help="an argument that is not an array"
    )
    made.add_argument("--grid", default="", metavar="N[,N]", help="the number of programs per axis")
    made.add_argument("--target", action="append", default=[], choices=list(DEVICES), help="whose limits are checked")
    made.add_argument("--seed", type=int, default=0, help="of the random inputs")
    made.add_argument("--output", type=Path, metavar="FOLDER", help="where the results are written, as result0.npy …")
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    random = np.random.default_rng(arguments.seed)
    try:
        inputs = [array(text, random) for text in arguments.inputs]
        keywords = dict(map(static, arguments.static))
        if not re.fullmatch(r"(\d+(,\d+)*)?", arguments.grid):
            raise _Mistake(f"--grid {arguments.grid}: expected numbers, such as 4 or 2,2")
        if not arguments.file.is_file():
            raise _Mistake(f"{arguments.file} is not a file")
        kernel = load_kernel(arguments.file, arguments.function)
        if arguments.grid:
            kernel = kernel[tuple(map(int, arguments.grid.split(",")))]
        with interpreter():
            recorded = record_kernel(kernel, inputs, keywords, targets=tuple(arguments.target))
            results = list(flat(simulate(kernel, *inputs, **keywords)))
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            for number, result in enumerate(results):
                np.save(arguments.output / f"result{number}.npy", result)
    except (_Mistake, LoadError, NkiError, IndexError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number, result in enumerate(results):
        print(summary(number, result))
    for note in recorded.notes:
        print(f"note: {note}")
    taken = cost(recorded.block, recorded.storages, kernel.older).to_json()
    print("modelled, not measured: " + ", ".join(f"{name} {value}" for name, value in taken.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
