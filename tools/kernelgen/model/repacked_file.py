"""Reads the files of `kernelgen repack`, for `kernelgen inspect`.

docs/reference/repacked-weights.md describes the format. The backend has its own reader in C++.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.ggml.types import TYPES_BY_NUMBER
from kernelgen.ggml.weight_layouts import LAYOUTS, stored_bytes
from kernelgen.model.gguf_weights import StoredTensor, read_file
from kernelgen.model.repacked import (
    ARCHITECTURE,
    FORMAT,
    FORMAT_KEY,
    LAYOUT_SHIFT,
    N_WORDS,
    WORDS_KEY,
    digest_of_file,
    seal,
)

_NAME_KEY = "general.name"
_LAYOUTS = {number: layout for layout, number in LAYOUTS.items()}


def describe(path: Path, *, check: bool = False) -> dict[str, Any]:
    """Returns the model and the weights of a file.

    Args:
        path: the file.
        check: also read the weights, and compare their digests.

    Raises:
        KernelgenError: the file is of another kind or format, or damaged.
    """
    values, tensors = read_file(path, ("general.alignment", "general.architecture", _NAME_KEY, FORMAT_KEY, WORDS_KEY))
    if values.get("general.architecture") != ARCHITECTURE:
        raise KernelgenError(f"{path} is not a file of kernelgen repack")
    if values.get(FORMAT_KEY) != FORMAT:
        raise KernelgenError(f"{path} has format {values.get(FORMAT_KEY)}, and this kernelgen reads format {FORMAT}")
    words = values.get(WORDS_KEY)
    if not isinstance(words, list) or len(words) != len(tensors) * N_WORDS:
        raise KernelgenError(f"{path}: damaged: it has {len(tensors)} weights, and not {N_WORDS} words about each")
    weights = [_weight(tensor, words[i * N_WORDS : (i + 1) * N_WORDS]) for i, tensor in enumerate(tensors)]
    mistakes = [
        Diagnostic(f"{path}: damaged: the bytes of {tensor.name} are not those that were written")
        for i, tensor in enumerate(tensors)
        if check and digest_of_file(path, tensor.offset, tensor.size) != words[i * N_WORDS + N_WORDS - 2]
    ]
    if mistakes:
        raise KernelgenError(mistakes)
    return {
        "path": str(path),
        "kind": "repacked",
        "model": str(values.get(_NAME_KEY, "")),
        "size": path.stat().st_size,
        "layouts": dict(sorted(Counter(weight["layout"] for weight in weights).items())),
        "weights": weights,
    }


def _weight(tensor: StoredTensor, words: list[int]) -> dict[str, Any]:
    """Decodes the eight words of a weight.

    Raises:
        KernelgenError: the words are damaged.
    """
    kind, layout = TYPES_BY_NUMBER.get(words[0] & ((1 << LAYOUT_SHIFT) - 1)), _LAYOUTS.get(words[0] >> LAYOUT_SHIFT)
    ne = words[1], words[2], words[3], words[4]
    if (
        words[-1] != seal(words[:-1], tensor.size, tensor.name)
        or kind is None
        or layout is None
        or stored_bytes(layout, kind.name, ne) != tensor.size
    ):
        raise KernelgenError(f"{tensor.file}: damaged: what it says of {tensor.name} is not what was written")
    return {"name": tensor.name, "dtype": kind.name, "shape": list(ne), "layout": layout, "size": tensor.size}


def line(weight: dict[str, Any]) -> str:
    """Returns the description of a weight as one line of text."""
    shape = ",".join(map(str, weight["shape"]))
    return f"{weight['name']}: ({shape})/{weight['dtype']} in {weight['layout']}, {weight['size']} bytes"
