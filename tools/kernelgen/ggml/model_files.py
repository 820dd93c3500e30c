"""Recognizes model files, which most commands do not accept: GGUF, safetensors, and Hugging Face folders.

Kernel packs and repacked weights are GGUF too. Their keys identify them: `general.architecture` is `neuron-kernels` for packs and
`neuron-repacked` for repacked weights.
"""

from __future__ import annotations

import json
import stat
import struct
from pathlib import Path
from typing import BinaryIO

from kernelgen.errors import Diagnostic
from kernelgen.ggml.gguf_reader import MAGIC, STRING, DamagedGguf, GgufReader

_PACK = "neuron-kernels"
_REPACKED = "neuron-repacked"
_PART = "part"
"""The type that `gguf_kind` returns for a later file of a split model, which has no architecture."""
_MAX_TEXT = 1 << 10
"""Maximum bytes of a key or value that is read."""
_MAX_STEPS = 1 << 20
"""Values and elements to skip before the search ends; the largest vocabularies have half a million."""
_MAX_CONFIG = 1 << 20
"""Maximum bytes of a config.json."""

_DERIVE = "kernelgen model {} -o model.yaml writes the manifest of a model's kernels"


def recognize(path: str | Path, expected: str, *, packs: bool = False) -> Diagnostic | None:
    """Returns the error for a model file that a command does not accept, or None if the path is not a known model file.

    Args:
        path: a file or folder, which may not exist.
        expected: the input that the command accepts: `manifest`.
        packs: whether it accepts kernel packs and repacked weights; if not, they are recognized too.
    """
    try:
        status = Path(path).stat()
        if stat.S_ISDIR(status.st_mode):
            return _folder(Path(path), expected)
        if not stat.S_ISREG(status.st_mode):
            return None
        with Path(path).open("rb") as file:
            return _file(file, Path(path), status.st_size, expected, packs)
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return None  # the next reader reports the reason


def _file(file: BinaryIO, path: Path, size: int, expected: str, packs: bool) -> Diagnostic | None:
    head = file.read(16)
    if head[:4] == MAGIC:
        file.seek(4)
        found = gguf_kind(file)
        if found is None:
            return None
        architecture, kind = found
        if architecture == _PACK:
            message = f"{path} is a bundle of kernels, a GGUF pack, not a {expected}"
            return None if packs else Diagnostic(message, hint=f"kernelgen inspect {path} prints what is in it")
        if architecture == _REPACKED:
            message = f"{path} has repacked weights, not a {expected}"
            hint = f"kernelgen inspect {path} prints what is in it, and the variable GGML_NEURON_REPACKED makes programs read it"
            return None if packs else Diagnostic(message, hint=hint)
        if kind == _PART:
            message = f"{path} is a later file of a model that was split into several GGUF files, not a {expected}"
            return Diagnostic(message, hint="kernelgen model takes the first of them")
        if kind != "model":
            return Diagnostic(f"{path} is a GGUF file of the type '{kind}' ({architecture}), not a {expected}")
        return Diagnostic(
            f"{path} is a model in a GGUF file ({architecture}), not a {expected}", hint=_DERIVE.format(path)
        )
    if is_safetensors(head, size):
        return Diagnostic(
            f"{path} is a model's weights in a safetensors file, not a {expected}", hint=_DERIVE.format(path)
        )
    if path.suffix == ".json" and size <= _MAX_CONFIG:
        file.seek(0)
        if _is_configuration(file.read(_MAX_CONFIG)):
            return Diagnostic(
                f"{path} is the configuration of a Hugging Face model, not a {expected}", hint=_DERIVE.format(path)
            )
    return None


def is_repacked(path: Path) -> bool:
    """Returns whether a GGUF file has repacked weights.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        return (gguf_kind(file) or ("",))[0] == _REPACKED


def _folder(path: Path, expected: str) -> Diagnostic | None:
    config = path / "config.json"
    if config.is_file() and config.stat().st_size <= _MAX_CONFIG and _is_configuration(config.read_bytes()):
        return Diagnostic(f"{path} is the folder of a Hugging Face model, not a {expected}", hint=_DERIVE.format(path))
    return None


def _is_configuration(data: bytes) -> bool:
    try:
        value = json.loads(data)
    except ValueError:
        return False
    return isinstance(value, dict) and isinstance(value.get("model_type"), str)


def is_safetensors(head: bytes, size: int) -> bool:
    """Returns whether a file starts with the length of a JSON object that fits into it, and with that object."""
    if len(head) < 10 or head[8:9] != b"{" or head[9:10] not in b'" }':
        return False
    (length,) = struct.unpack("<Q", head[:8])
    return bool(2 <= length <= size - 8)


def lacks_chat_template(path: Path) -> bool:
    """Returns whether the metadata of a GGUF file has no chat template; False if it can't be read.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        try:
            reader = GgufReader(file, len(MAGIC))
            *_, count = (reader.number(code, "the header") for code in "IQQ")
            for _ in range(count):
                key = reader.text("a key", limit=_MAX_TEXT, errors="replace")
                if key == "tokenizer.chat_template":
                    return False
                reader.skip_value(reader.number("I", key), key, _MAX_STEPS)
        except DamagedGguf:
            return False
    return True


def gguf_kind(file: BinaryIO) -> tuple[str, str] | None:
    """Returns a GGUF file's `general.architecture` and `general.type`.

    The type is `model` by default. A later file of a split model has an empty architecture here, and the type `part`.

    Args:
        file: positioned after the magic number.

    Returns:
        None if there is no architecture, or the metadata can't be read up to it.
    """
    architecture: str | None = None
    kind = "model"
    is_part = False
    steps = 0
    try:
        reader = GgufReader(file, file.tell())
        version, _, count = (reader.number(code, "the header") for code in "IQQ")
        if version not in (2, 3):
            return None
        for _ in range(count):
            key = reader.text("a key", limit=_MAX_TEXT, errors="replace")
            value_type = reader.number("I", key)
            if value_type == STRING and key in ("general.architecture", "general.type"):
                value = reader.text(key, limit=_MAX_TEXT, errors="replace")
                if key == "general.type":
                    kind = value
                else:
                    architecture = value
            else:
                steps += reader.skip_value(value_type, key, _MAX_STEPS - steps)
            steps += 1
            is_part |= key == "split.no"
            # gguf-py and llama.cpp write both first in every file; the later values are long.
            if steps > _MAX_STEPS or (architecture is not None and not key.startswith("general.")):
                break
    except DamagedGguf:
        pass  # the rest is missing or damaged; the values read so far decide
    if architecture is None:
        return ("", _PART) if is_part else None
    return architecture, kind
