"""Writes weights in the layouts of kernels to a file, which the backend reads instead of repacking weights at each load.

docs/reference/repacked-weights.md describes the file. It is GGUF, with a tensor of bytes for each weight. The `gguf` package
writes the header, and threads write the data to its place. The package also dequantizes quantized weights, to the same floats as
ggml.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kernelgen import fileio
from kernelgen.errors import KernelgenError
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import (
    BF16,
    F8_TILES,
    LAYOUTS,
    PLANES,
    TILE,
    TRANSPOSED,
    WEIGHTS,
    pack,
    pack_bf16,
    pack_f8_tiles,
    stored_bytes,
    tiles,
)
from kernelgen.model.gguf_weights import StoredTensor
from kernelgen.spec.kernel import Spec

if TYPE_CHECKING:
    import numpy as np

ARCHITECTURE = "neuron-repacked"
TYPE = "repacked weights"
FORMAT = 1
FORMAT_KEY = "kernelgen.format"
WORDS_KEY = "kernelgen.weights.words"
N_WORDS = 8
"""Words in the file's metadata for each weight."""
ALIGNMENT = 64
LAYOUT_SHIFT = 16
"""The lowest bit of the layout in the word of a type, as in keys."""

Layouts = MappingProxyType[tuple[str, tuple[int, ...]], str]
"""The layout that kernels require of a weight, by type and shape."""

_CHUNK = 1 << 20
"""Bytes that a thread packs or digests at once, unless a row has more."""
_ROWS = 8
"""Rows are packed in multiples of this, so that each part begins at a word."""
_COLUMNS = 256
"""Columns of a matrix that are packed at once: whole blocks of each type, and whole tiles."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_WORDS = 1 << 14
"""Words that are digested at once: they fit into a processor's cache."""


# --- which weights ---------------------------------------------------------------------------------------------------------------


def wanted(specs: Iterable[Spec]) -> Layouts:
    """Returns the layout that the backend gives a weight, by type and shape; the first in `LAYOUTS` if there are several."""
    found: dict[tuple[str, tuple[int, ...]], str] = {}
    for node in (node for spec in specs for node in spec.nodes):
        number = WEIGHTS.get(node.op)
        operand = node.inputs[number] if number is not None and number < len(node.inputs) else None
        if operand is None or not operand.tensor.layout or not operand.tensor.contiguous:
            continue
        weight = operand.tensor
        key = weight.dtype, tuple(weight.ne)
        found[key] = min(weight.layout, found.get(key, weight.layout), key=LAYOUTS.__getitem__)
    return MappingProxyType(found)


@dataclass(frozen=True, slots=True)
class RepackedWeight:
    """A weight and its layout in the file."""

    weight: StoredTensor
    layout: str

    @property
    def size(self) -> int:
        """Bytes in the layout."""
        return stored_bytes(self.layout, self.weight.dtype, self.weight.ne)


def choose(weights: Sequence[StoredTensor], layouts: Layouts) -> list[RepackedWeight]:
    """Returns the weights of a model for which kernels require a layout.

    The embedding is a weight of a product only if the model has no `output.weight`; otherwise llama.cpp keeps it on the CPU.
    """
    has_output = any(weight.name == "output.weight" for weight in weights)
    return [
        RepackedWeight(weight, layouts[weight.dtype, weight.ne])
        for weight in weights
        if (weight.dtype, weight.ne) in layouts and not (has_output and weight.name == "token_embd.weight")
    ]


def can_pack(one: RepackedWeight) -> bool:
    """Returns whether this module can pack a weight: the `gguf` package does not dequantize all types."""
    import numpy as np

    if one.layout in (PLANES, TRANSPOSED):
        return True
    try:
        _dequantize(np.zeros((1, TYPES[one.weight.dtype].size), np.uint8), one.weight.dtype)
    except NotImplementedError:
        return False
    return True


# --- digests ---------------------------------------------------------------------------------------------------------------------


def part_of_digest(data: np.ndarray[Any, Any], first: int) -> int:
    """Returns the sum that bytes contribute to a digest: one term for each word.

    The term of word w, little-endian, with number i is x + lo(x) * hi(x), where x is w xor (i + 1) * 0x9E3779B97F4A7C15, and lo and
    hi are its halves; all modulo 2^64. A change of one half of one word always changes the sum.

    Args:
        data: u8; missing bytes of the last word count as 0.
        first: number of the first word.
    """
    import numpy as np

    rest = np.zeros(-len(data) % 8, np.uint8)
    whole = len(data) // 8 * 8
    tail = np.concatenate([data[whole:], rest]).view("<u8")
    steps = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(_STEP)
    x, high = np.empty((2, _WORDS), np.uint64)
    total = 0
    for words, start in ((data[:whole].view("<u8"), 0), (tail, whole // 8)):
        for at in range(0, len(words), _WORDS):
            some = words[at : at + _WORDS]
            n = len(some)
            key = np.uint64((first + start + at) * _STEP & _MASK)
            np.bitwise_xor(np.add(steps[:n], key, out=x[:n]), some, out=x[:n])
            np.right_shift(x[:n], np.uint64(32), out=high[:n])
            total += int(x[:n].sum())
            np.bitwise_and(x[:n], np.uint64(0xFFFFFFFF), out=x[:n])
            total += int(np.multiply(x[:n], high[:n], out=x[:n]).sum())
    return total & _MASK


def finish_digest(parts: int, size: int) -> int:
    """Returns the digest of `size` bytes from the sum of its parts; the number of bytes is a last word."""
    words = -(-size // 8)
    x = size ^ ((words + 1) * _STEP & _MASK)
    return (parts + x + (x & 0xFFFFFFFF) * (x >> 32)) & _MASK


def digest(data: bytes) -> int:
    """Returns the digest of bytes, 64 bits."""
    import numpy as np

    return finish_digest(part_of_digest(np.frombuffer(data, np.uint8), 0), len(data))


def digest_of_file(path: Path, offset: int, size: int) -> int:
    """Returns the digest of `size` bytes of a file from `offset` on. It reads them in parts. The file has to contain them.

    Raises:
        OSError: the file can't be read.
    """
    import numpy as np

    parts = 0
    with path.open("rb") as file:
        file.seek(offset)
        for at in range(0, size, _CHUNK):
            parts += part_of_digest(np.frombuffer(file.read(min(_CHUNK, size - at)), np.uint8), at // 8)
    return finish_digest(parts & _MASK, size)


# --- packing ---------------------------------------------------------------------------------------------------------------------


def _dequantize(data: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Converts rows of bytes to rows of elements, f32."""
    import gguf
    import numpy as np

    with np.errstate(all="ignore"):  # scales may be NaN
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(TYPES[dtype].number))


Part = Callable[[], list[tuple[int, "np.ndarray[Any, Any]"]]]
"""Packs a part of a weight: returns byte arrays, each with its offset in the packed weight."""


def parts(one: RepackedWeight, data: np.ndarray[Any, Any]) -> Iterator[Part]:
    """Yields the parts of a weight.

    Args:
        one: the weight.
        data: its bytes in ggml's layout.
    """
    pack_part = _columns if one.layout in (TRANSPOSED, F8_TILES) else _rows
    return pack_part(one, data)


def _rows(one: RepackedWeight, data: np.ndarray[Any, Any]) -> Iterator[Part]:
    dtype, columns = one.weight.dtype, one.weight.ne[0]
    rows = data.reshape(-1, columns // TYPES[dtype].block * TYPES[dtype].size)
    step = max(_CHUNK // rows.shape[1] // _ROWS, 1) * _ROWS
    stored = one.size // len(rows)

    def packed(first: int) -> list[tuple[int, np.ndarray[Any, Any]]]:
        some = rows[first : first + step]
        if one.layout == PLANES:
            return [(first * stored, pack(some, PLANES, dtype, (columns, len(some), 1, 1)))]
        assert one.layout == BF16
        return [(first * stored, pack_bf16(_dequantize(some, dtype)))]

    return (partial(packed, first) for first in range(0, len(rows), step))


def _columns(one: RepackedWeight, data: np.ndarray[Any, Any]) -> Iterator[Part]:
    import numpy as np

    dtype, (columns, n_rows, *outer) = one.weight.dtype, one.weight.ne
    kind = TYPES[dtype]
    matrices = data.reshape(math.prod(outer), n_rows, columns // kind.block * kind.size)
    stored = one.size // len(matrices)
    across, down = tiles(one.weight.ne)

    def packed(matrix: int, first: int) -> list[tuple[int, np.ndarray[Any, Any]]]:
        n = min(_COLUMNS, columns - first)
        begin, end = (column // kind.block * kind.size for column in (first, first + n))
        some = np.ascontiguousarray(matrices[matrix, :, begin:end])
        at = matrix * stored
        if one.layout == TRANSPOSED:
            return [(at + first * n_rows * kind.size, pack(some, TRANSPOSED, dtype, (n, n_rows)))]
        codes, scales = np.split(pack_f8_tiles(_dequantize(some, dtype)), [-(-n // TILE) * TILE * n_rows])
        return [
            (at + first * n_rows, codes),
            (at + across * TILE * n_rows + first // TILE * down * 4, scales),
        ]

    places = ((matrix, first) for matrix in range(len(matrices)) for first in range(0, columns, _COLUMNS))
    return (partial(packed, matrix, first) for matrix, first in places)


# --- the file --------------------------------------------------------------------------------------------------------------------


def words(one: RepackedWeight, original: int, stored: int) -> tuple[int, ...]:
    """Returns the file's words for a weight: type and layout, shape, digests of its bytes in ggml's layout and in its own, seal."""
    numbers = (
        TYPES[one.weight.dtype].number | LAYOUTS[one.layout] << LAYOUT_SHIFT,
        *one.weight.ne,
        original,
        stored,
    )
    return (*numbers, seal(numbers, one.size, one.weight.name))


def seal(numbers: Sequence[int], size: int, name: str) -> int:
    """Returns the last word of a weight: a digest of the other words, its size in bytes in the layout, and its name."""
    return digest(struct.pack(f"<{N_WORDS}Q", *numbers, size) + name.encode())


def _header(chosen: Sequence[RepackedWeight], name: str, said: Sequence[int]) -> bytes:
    """Returns the file's bytes before the data, padded."""
    import gguf
    import numpy as np

    value = gguf.GGUFValueType
    with tempfile.TemporaryDirectory(prefix="kernelgen-") as folder:
        path = Path(folder) / "header.gguf"
        writer = gguf.GGUFWriter(None, ARCHITECTURE)
        writer.add_type(TYPE)
        writer.add_custom_alignment(ALIGNMENT)
        writer.add_key_value("general.name", name, value.STRING)
        writer.add_key_value(FORMAT_KEY, FORMAT, value.UINT32)
        writer.add_key_value(WORDS_KEY, list(said), value.ARRAY, value.UINT64)
        for one in chosen:
            writer.add_tensor_info(one.weight.name, (one.size,), np.dtype(np.int8), one.size)
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        data = path.read_bytes()
    return data + bytes(-len(data) % ALIGNMENT)


def write(
    output: Path,
    chosen: Sequence[RepackedWeight],
    name: str,
    threads: int,
    progress: Callable[[int], None] = lambda n: None,
) -> int:
    """Writes the file to a temporary name and renames it. Each thread has one part of a weight in memory.

    Args:
        output: the file.
        chosen: weights of one model for which `can_pack` is true.
        name: the model's name.
        threads: the number of threads that pack.
        progress: any thread calls it with a number of packed bytes of the model.

    Returns:
        the size of the file in bytes.

    Raises:
        KernelgenError: there is no room for it.
        OSError: a file can't be read or written.
    """
    begin = len(_header(chosen, name, [0] * N_WORDS * len(chosen)))
    places, end = [], begin
    for one in chosen:
        places.append(end)
        end += -(-one.size // ALIGNMENT) * ALIGNMENT
    said: list[int] = []
    with (
        fileio.replacing(output) as temporary,
        temporary.open("r+b", buffering=0) as stream,
        ThreadPoolExecutor(threads) as pool,
    ):
        file = stream.fileno()
        try:
            os.posix_fallocate(file, 0, end)
        except OSError as error:
            raise KernelgenError(f"{output}: no room for {end} bytes: {error.strerror}") from None
        try:
            for one, place in zip(chosen, places, strict=True):
                said += _write_weight(pool, file, place, one, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        _write_at(file, memoryview(_header(chosen, name, said)), 0)
    return end


def _write_weight(
    pool: ThreadPoolExecutor, file: int, place: int, one: RepackedWeight, progress: Callable[[int], None]
) -> tuple[int, ...]:
    """Packs a weight, writes it to its place in the file, and returns its words."""
    import numpy as np

    size = one.weight.size
    data = np.memmap(one.weight.file, np.uint8, "r", one.weight.offset, (size,)).view(np.ndarray)

    def write_part(part: Part) -> None:
        for at, packed in part():
            _write_at(file, packed.data, place + at)

    original = _begin_digest(pool, size, lambda at, n: data[at : at + n])
    packing = [pool.submit(write_part, part) for part in parts(one, data)]
    for number, future in enumerate(packing):
        future.result()
        progress(size * (number + 1) // len(packing) - size * number // len(packing))
    stored = _begin_digest(pool, one.size, lambda at, n: _read_at(file, place + at, n))
    return words(one, original(), stored())


def _begin_digest(
    pool: ThreadPoolExecutor, size: int, read: Callable[[int, int], np.ndarray[Any, Any]]
) -> Callable[[], int]:
    """Starts to digest bytes in threads. Returns a function that waits for the digest and returns it."""

    def digested(at: int) -> int:
        return part_of_digest(read(at, min(_CHUNK, size - at)), at // 8)

    futures = [pool.submit(digested, at) for at in range(0, size, _CHUNK)]
    return lambda: finish_digest(sum(future.result() for future in futures) & _MASK, size)


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data:
        n = os.pwrite(file, data, at)
        data, at = data[n:], at + n


def _read_at(file: int, at: int, size: int) -> np.ndarray[Any, Any]:
    import numpy as np

    data = np.empty(size, np.uint8)
    left = data.data
    while left:
        n = os.preadv(file, [left], at)
        if n == 0:
            raise OSError("the file that is written became shorter")
        left, at = left[n:], at + n
    return data
