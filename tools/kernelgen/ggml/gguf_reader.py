"""Reads the header of a GGUF file from front to back: kernel packs, and the descriptive part of a model's header.

It does not use the `gguf` package: that needs NumPy, which planning and `inspect` avoid, reads the whole header, and does not
report the problem and its place in a damaged file.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

MAGIC = b"GGUF"

# GGUF's value types: number → struct code, and the two types that are not scalars.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
U32, BOOL, STRING, ARRAY, U64 = 4, 7, 8, 9, 10


class DamagedGguf(Exception):
    """A file that ends too early, or that states impossible values.

    Attributes:
        at: offset of the problem in bytes from the start of the file.
        what: the problem.
    """

    def __init__(self, at: int, what: str) -> None:
        super().__init__(f"byte {at}: {what}")
        self.at = at
        self.what = what


@dataclass(frozen=True, slots=True)
class Value:
    """One metadata value and its offset.

    Attributes:
        kind: GGUF's type number; for an array, its elements' type number.
        value: the number, text, or list.
        offset: bytes from the start of the file to the value; for an array, to its first element.
        is_array: whether it is an array.
    """

    kind: int
    value: Any
    offset: int
    is_array: bool


class GgufReader:
    """A position in a file, which every method advances. A value beyond the file's end raises `DamagedGguf` before any allocation.

    Args:
        file: a seekable file.
        at: the initial position, in bytes from the start.
    """

    def __init__(self, file: BinaryIO, at: int = 0) -> None:
        self.at = at
        self.size = file.seek(0, 2)
        self._file = file
        file.seek(at)

    def fail(self, what: str) -> NoReturn:
        """Raises `DamagedGguf` for this position."""
        raise DamagedGguf(self.at, what)

    def take(self, count: int, what: str) -> bytes:
        """Returns the next bytes."""
        self._check(count, what)
        data = self._file.read(count)
        if len(data) < count:
            self.fail(f"{what} needs {count} bytes, and the file became shorter")
        self.at += count
        return data

    def skip(self, count: int, what: str) -> None:
        """Skips bytes."""
        self._check(count, what)
        self.at += count
        self._file.seek(self.at)

    def number(self, code: str, what: str) -> Any:
        """Returns a number by its struct code."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, *, limit: int | None = None, errors: str = "strict") -> str:
        """Returns a string; raises `DamagedGguf` if it exceeds `limit` bytes, or is not UTF-8 and `errors` is not `replace`."""
        count = self.number("Q", what)
        if limit is not None and count > limit:
            self.fail(f"{what} has {count} bytes")
        raw = self.take(count, what)
        try:
            return raw.decode(errors=errors)
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def value(self, what: str) -> Value:
        """Returns a metadata value from its type and the bytes after it."""
        kind = self.number("I", what)
        if kind != ARRAY:
            at = self.at
            if kind == STRING:
                return Value(kind, self.text(what), at, False)
            return Value(kind, self._numbers(kind, self._scalar(kind, what), 1, what)[0], at, False)
        kind, count, at = self._array(what)
        if kind == STRING:
            return Value(kind, [self.text(what) for _ in range(count)], at, True)
        return Value(kind, self._numbers(kind, _SCALARS[kind], count, what), at, True)

    def skip_value(self, kind: int, what: str, most: int) -> int:
        """Skips a metadata value after its type.

        Args:
            kind: the type.
            what: its name in messages.
            most: maximum number of strings in an array.

        Returns:
            the number of values and strings that it skipped.
        """
        if kind == STRING:
            self.skip(self.number("Q", what), what)
            return 1
        if kind != ARRAY:
            self.skip(struct.calcsize("<" + self._scalar(kind, what)), what)
            return 1
        kind, count, _ = self._array(what)
        if kind != STRING:
            self.skip(count * struct.calcsize("<" + _SCALARS[kind]), what)
            return 1
        if count > most:
            self.fail(f"{what} has {count} strings")
        for _ in range(count):
            self.skip(self.number("Q", what), what)
        return int(count)

    def _numbers(self, kind: int, code: str, count: int, what: str) -> list[Any]:
        raw = self.take(count * struct.calcsize("<" + code), what)
        if kind in (U32, U64):
            numbers = array("I" if kind == U32 else "Q", raw)
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers.tolist()
        if kind == BOOL and not set(raw) <= {0, 1}:
            self.fail(f"{what} is a bool that is neither 0 nor 1")
        return [v[0] for v in struct.iter_unpack("<" + code, raw)]

    def _check(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            self.fail(f"{what} needs {count} bytes, the file has {self.size - self.at} more")

    def _scalar(self, kind: int, what: str) -> str:
        if kind not in _SCALARS:
            self.fail(f"{what} has the unknown type {kind}")
        return _SCALARS[kind]

    def _array(self, what: str) -> tuple[int, int, int]:
        """Returns the elements' type, their number, and the offset of the first."""
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == STRING:
            if count > (self.size - self.at) // 8:  # each has a length of 8 bytes: no loop over an absurd count
                self.fail(f"{what} has {count} strings, more than the file can hold")
        elif kind not in _SCALARS:
            self.fail(f"{what} is an array of the unknown type {kind}")
        return kind, count, self.at
