"""Reads the files of `kernelgen report --measured`: text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelgen.errors import KernelgenError

MAX_TIME = 1e12
"""Maximum time, in any unit: above it, sums and factors of units could overflow."""


def read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        KernelgenError: it is not UTF-8.
        OSError: it can't be read.
    """
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise KernelgenError(f"{path}: expected text: {error.reason} at byte {error.start}") from None


def read_json(path: Path, text: str, expected: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        KernelgenError: it is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise KernelgenError(f"{path}: expected {expected}: {str(error)[:200]}") from None


def read_csv(path: Path, text: str) -> tuple[set[str], list[tuple[str, Mapping[str, str]]]]:
    """Returns the columns of a CSV text, and (place, values by column) of each row.

    Raises:
        KernelgenError: a field is too long, or a row has fewer or more values than there are columns.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    rows: list[tuple[str, Mapping[str, str]]] = []
    try:
        columns = set(reader.fieldnames or ())
        for row in reader:
            if None in row or None in row.values():
                raise KernelgenError(f"{path}:{reader.line_num}: expected {len(columns)} values")
            rows.append((f"{path}:{reader.line_num}", row))
    except csv.Error as error:
        raise KernelgenError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    return columns, rows


def number(location: str, value: Any) -> float:
    """Returns a time as a float.

    Args:
        location: the place of the time, for the message.
        value: a number, or its text.

    Raises:
        KernelgenError: it is not a number above 0 and up to `MAX_TIME`.
    """
    try:
        time = float(value)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not 0 < time <= MAX_TIME:
        raise KernelgenError(f"{location[:300]} is {repr(value)[:100]}; expected a number above 0, up to {MAX_TIME:g}")
    return time
