"""Recognizes the sources of `kernelgen model` by their content: a model, or a file that lists kernels."""

from __future__ import annotations

import enum
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.errors import Diagnostic, KernelgenError, Location, did_you_mean
from kernelgen.ggml import model_files
from kernelgen.model import graphs

MAX_LISTED = 1 << 28
"""The most bytes of any other file that lists kernels."""

_HEAD = 1 << 16
"""The number of bytes at the beginning of a file by which it is recognized."""

_OPS = re.compile(rb"\s*\d+(?: +-?\d+){5,}(?: |$)", re.MULTILINE)
_GRAPHS = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + graphs.FORMAT.encode())

_TAKES = (
    "it takes a GGUF file, a Hugging Face folder or its config.json, what test-export-graph-ops or export-graphs writes, "
    "what the backend records, and the JSON configuration of ggml-hsa-gen-kernels"
)


class SourceKind(enum.Enum):
    """The kinds of sources."""

    MODEL = "a model in a GGUF file"
    CHECKPOINT = "a Hugging Face model"
    GRAPHS = "an export of graphs"
    HSA = "a configuration of ggml-hsa-gen-kernels"


@dataclass(frozen=True, slots=True)
class Source:
    """A source of kernels.

    Attributes:
        path: the user's path.
        kind: its kind.
        folder: the folder of a checkpoint's files; None if only its configuration was given.
    """

    path: Path
    kind: SourceKind
    folder: Path | None = None


def recognize(path: Path) -> Source:
    """Recognizes a file or folder.

    Raises:
        KernelgenError: it can't be read, or is not a source of kernels.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return _folder(path)
        if not stat.S_ISREG(status.st_mode):
            raise KernelgenError(Diagnostic(f"{path} is not a file or a folder", hint=_TAKES))
        with path.open("rb") as file:
            return _file(path, file.read(_HEAD), status.st_size)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise KernelgenError(f"can't read '{path}': {getattr(error, 'strerror', None) or error}") from None


def _folder(path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(path, SourceKind.CHECKPOINT, path)
    raise KernelgenError(Diagnostic(f"{path} is a folder without a config.json", hint=_TAKES))


def _file(path: Path, head: bytes, size: int) -> Source:
    if head[:4] == b"GGUF":
        return Source(path, SourceKind.MODEL)
    if model_files.is_safetensors(head, size):
        return _beside(path, "the weights of a model")
    if _GRAPHS.match(head) or _OPS.match(head):
        if size > MAX_LISTED:
            raise KernelgenError(f"{path}: {SourceKind.GRAPHS.value} of {size} bytes, more than {MAX_LISTED}")
        return Source(path, SourceKind.GRAPHS)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return _json(path)
    raise KernelgenError(Diagnostic(f"{path} is nothing that kernelgen model takes", hint=_TAKES))


def _beside(path: Path, what: str) -> Source:
    """Returns the checkpoint that contains a file."""
    if (path.parent / "config.json").is_file():
        return Source(path, SourceKind.CHECKPOINT, path.parent)
    raise KernelgenError(Diagnostic(f"{path} is {what}, and there is no config.json beside it", hint=_TAKES))


def _json(path: Path) -> Source:
    value = read_json(path.read_bytes(), str(path))
    if isinstance(value.get("model_type"), str) or isinstance(value.get("architectures"), list):
        return Source(path, SourceKind.CHECKPOINT, path.parent if path.name == "config.json" else None)
    if isinstance(value.get("weight_map"), dict):
        return _beside(path, "the index of a model's weights")
    if "kernels" in value:
        return Source(path, SourceKind.HSA)
    near = next((text for key in list(value)[:100] if (text := did_you_mean(key, ("kernels", "model_type")))), "")
    keys = "it has neither 'kernels', as the configuration of ggml-hsa-gen-kernels, nor 'model_type', as a model's config.json"
    raise KernelgenError(Diagnostic(f"{keys}{near}", Location(str(path), 1, 1)))


def read_json(data: bytes, file: str) -> Mapping[str, Any]:
    """Parses a document that is a JSON object.

    Raises:
        KernelgenError: it is not JSON, with the place of the first mistake, or not an object.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise KernelgenError(
            Diagnostic(f"not JSON: {error.msg}", Location(file, error.lineno, max(error.colno, 1)))
        ) from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise KernelgenError(
            Diagnostic(f"not JSON: byte 0x{data[error.start]:02x} is not UTF-8", Location(file, line, 1))
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise KernelgenError(Diagnostic(f"not JSON that can be read: {error}", Location(file, 1, 1))) from None
    if not isinstance(value, dict):
        raise KernelgenError(Diagnostic("expected an object, not a list", Location(file, 1, 1)))
    return value
