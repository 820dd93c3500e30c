"""Finds the tensors of a model in its GGUF files."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.ggml.gguf_reader import MAGIC, DamagedGguf, GgufReader
from kernelgen.ggml.types import TYPES_BY_NUMBER

ALIGNMENT = 32
"""The alignment of tensors in bytes, if a file has no `general.alignment`."""

_PART = re.compile(r"(.*-)00001(-of-(\d{5})\.gguf)", re.DOTALL)
_KEYS = ("general.alignment", "general.architecture", "general.type", "split.count", "split.no")
_MOST = 1 << 24
"""The most strings in an array of the metadata."""
_MAX_PARTS = 4096
_MAX_DIMS = 4
_MAX_NE = 1 << 40


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a model, contiguous.

    Attributes:
        name: its name in the file.
        dtype: ggml's name of the type.
        ne: elements per dimension.
        file: the file that has it.
        offset: bytes from the start of the file.
        size: bytes.
    """

    name: str
    dtype: str
    ne: tuple[int, int, int, int]
    file: Path
    offset: int
    size: int


def read(path: Path) -> list[StoredTensor]:
    """Returns the tensors of a model in the order of its files, without tensors of unknown types.

    Args:
        path: the file; the first file if the model is split.

    Raises:
        KernelgenError: the file is not a model, is damaged, or lacks a part.
    """
    values, found = read_file(path)
    if values.get("general.type", "model") != "model" or "general.architecture" not in values:
        kind = values.get("general.type", "") if "split.count" not in values else "a later part of a split model"
        raise KernelgenError(f"{path} is not a model: it is {kind or 'a GGUF file without an architecture'}")
    count = values.get("split.count", 1)
    if count == 1:
        return found
    match = _PART.fullmatch(path.name)
    if match is None or count > _MAX_PARTS or int(match[3]) != count or values.get("split.no", 0) != 0:
        raise KernelgenError(
            Diagnostic(
                f"{path} is one of {count} files of a model, and its name does not say where the others are",
                hint=f"give the first of them, under the name that llama.cpp gave it: NAME-00001-of-{count:05}.gguf",
            )
        )
    for number in range(2, count + 1):
        found += read_file(path.with_name(f"{match[1]}{number:05}{match[2]}"))[1]
    return found


def read_file(path: Path, keys: Collection[str] = _KEYS) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Returns the values of `keys` in the metadata of a GGUF file, and its tensors without tensors of unknown types.

    Raises:
        KernelgenError: the file is not GGUF, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path, keys)
    except DamagedGguf as error:
        raise KernelgenError(f"{path}: damaged at byte {error.at}: {error.what}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise KernelgenError(f"can't read '{path}': {getattr(error, 'strerror', None) or error}") from None


def _read(file: BinaryIO, path: Path, keys: Collection[str]) -> tuple[dict[str, Any], list[StoredTensor]]:
    reader = GgufReader(file)
    if file.read(len(MAGIC)) != MAGIC:
        raise KernelgenError(f"{path} is not a GGUF file")
    reader = GgufReader(file, len(MAGIC))
    version, n_tensors, n_values = (reader.number(code, "the header") for code in "IQQ")
    if version not in (2, 3):
        reader.fail(f"version {version}, not 2 or 3")
    values: dict[str, Any] = {}
    for _ in range(n_values):
        key = reader.text("a key", errors="replace")
        if key in keys:
            values[key] = reader.value(key).value
        else:
            reader.skip_value(reader.number("I", key), key, _MOST)
    found = list(_tensors(reader, n_tensors))
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        reader.fail(f"general.alignment is {alignment}")
    data = -(-reader.at // alignment) * alignment
    stored = []
    for name, number, ne, offset in found:
        kind = TYPES_BY_NUMBER.get(number)
        if kind is None:
            continue
        size = math.prod(ne) // kind.block * kind.size
        if data + offset + size > reader.size:
            raise KernelgenError(
                f"{path}: the file ends at byte {reader.size}, and tensor '{name}' ends at {data + offset + size}"
            )
        stored.append(StoredTensor(name, kind.name, ne, path, data + offset, size))
    return values, stored


def _tensors(reader: GgufReader, count: int) -> Iterator[tuple[str, int, tuple[int, int, int, int], int]]:
    """Yields name, type number, dimensions, and offset from the start of the data in bytes."""
    for _ in range(count):
        name = reader.text("a tensor's name", errors="replace")
        n_dims = reader.number("I", name)
        if not 0 <= n_dims <= _MAX_DIMS:
            reader.fail(f"tensor '{name}' has {n_dims} dimensions")
        ne = [reader.number("Q", name) for _ in range(n_dims)]
        if math.prod(ne) > _MAX_NE:
            reader.fail(f"tensor '{name}' has {math.prod(ne)} elements")
        number, offset = reader.number("I", name), reader.number("Q", name)
        filled = (*ne, 1, 1, 1, 1)
        yield name, number, (filled[0], filled[1], filled[2], filled[3]), offset
