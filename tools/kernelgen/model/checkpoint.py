"""Converts a Hugging Face checkpoint to the header of a GGUF file with llama.cpp's own converter.

The checkpoint's weights may be missing: if a safetensors file ends after its header, a hole replaces the rest. The converter gets
a separate folder with the texts of the checkpoint and none of its code. It runs in a child process with limits of memory and time,
and cannot download anything.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.errors import Diagnostic, KernelgenError, printable, signal_name
from kernelgen.model.sources import Source, read_json

PROGRAM = "convert_hf_to_gguf.py"

TIMEOUT = 900
"""The time limit in seconds. Most of the time passes while PyTorch and a tokenizer start."""

MAX_MEMORY = 8 << 30
"""The most bytes of private memory of the converter."""

MAX_HEADER = 1 << 24
"""The most bytes of a safetensors file's header; the header of 60,000 tensors has half of that."""

_MAX_FILES = 4096
"""The most safetensors files of one checkpoint."""

_MAX_SIZE = 1 << 44
"""The most bytes of one safetensors file."""

_DTYPES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""The bits of safetensors' types."""

_TEXTS = (".json", ".txt", ".model", ".tiktoken", ".jinja")
"""The suffixes of a checkpoint's texts, without code and pickles."""

_MODULES = "torch transformers safetensors sentencepiece numpy pyyaml"
"""The packages that the converter imports, if the source tree has no list of them."""

_MAX_SAID = 2000
"""The most characters of the converter's output in a message."""

_REQUIREMENTS = Path("requirements") / "requirements-convert_hf_to_gguf.txt"


@dataclass(frozen=True, slots=True)
class Converted:
    """The header of a checkpoint.

    Attributes:
        file: the GGUF file.
        notes: messages about the conversion.
    """

    file: Path
    notes: tuple[str, ...]


@contextmanager
def converted(source: Source, llama_cpp: Path | None, python: str | None) -> Iterator[Converted]:
    """Yields a checkpoint's header as a GGUF file, which exists until the block ends.

    Args:
        source: the checkpoint.
        llama_cpp: llama.cpp's source tree, or a build in it.
        python: a Python with the packages that the converter imports; `python3` by default.

    Raises:
        KernelgenError: the checkpoint is damaged, a program or module is missing, or the converter refuses the model.
    """
    tree = _tree(llama_cpp)
    with tempfile.TemporaryDirectory(prefix="kernelgen-") as scratch:
        name = _name(source)
        folder = Path(scratch) / "checkpoint" / name
        folder.mkdir(parents=True)
        _stage(source, folder)
        output = Path(scratch) / f"{name}.gguf"
        notes = _run(source.path, tree, folder, output, Path(scratch), python or "python3")
        yield Converted(output, notes)


def _tree(llama_cpp: Path | None) -> Path:
    how = f"name llama.cpp's source tree, with {PROGRAM}: --llama-cpp <folder>"
    if llama_cpp is None:
        raise KernelgenError(Diagnostic("a Hugging Face model is converted by llama.cpp's own program", hint=how))
    folder = llama_cpp.absolute()
    for place in (folder, *list(folder.parents)[:2]):
        if (place / PROGRAM).is_file():
            return place
    raise KernelgenError(Diagnostic(f"--llama-cpp {llama_cpp}: there is no {PROGRAM} in it or above it", hint=how))


def _name(source: Source) -> str:
    named = source.folder or (source.path.parent if source.path.name == "config.json" else source.path.with_suffix(""))
    return named.absolute().name or "model"


# --- the converter's folder ---------------------------------------------------------------------------------------------------


def _stage(source: Source, folder: Path) -> None:
    try:
        if source.folder is None:
            (folder / "config.json").symlink_to(source.path.absolute())
            return
        weights = []
        for path in sorted(source.folder.iterdir()):
            if path.name.endswith(".safetensors"):
                weights.append(path)
            elif path.name.endswith(_TEXTS) and path.is_file():
                (folder / path.name).symlink_to(path.absolute())
        _check_parts(source.folder, [path.name for path in weights])
        for path in weights:
            _stage_weights(path, folder / path.name)
    except OSError as error:
        raise KernelgenError(f"{source.path}: {error.strerror or error}") from None


def _check_parts(folder: Path, names: list[str]) -> None:
    if len(names) > _MAX_FILES:
        raise KernelgenError(f"{folder}: {len(names)} safetensors files, more than {_MAX_FILES}")
    index = folder / "model.safetensors.index.json"
    if not names or not index.is_file():
        return
    if index.stat().st_size > MAX_HEADER:
        raise KernelgenError(f"{index}: {index.stat().st_size} bytes, more than {MAX_HEADER}")
    parts = read_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise KernelgenError(f"{index}: 'weight_map' is not a mapping from tensors to files")
    missing = sorted(set(parts.values()) - set(names))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "its header is enough: the first bytes of the file; or give config.json alone, without any of them"
        raise KernelgenError(Diagnostic(f"{folder / missing[0]} is missing{more}", hint=hint))


def _stage_weights(path: Path, staged: Path) -> None:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= MAX_HEADER:
            raise KernelgenError(f"{path}: a header of {length} bytes: expected 2 to {MAX_HEADER}")
        header = file.read(length)
    if len(header) < length:
        raise KernelgenError(f"{path}: the header is cut off after {len(header)} of {length} bytes")
    size = 8 + length + _data_size(read_json(header, str(path)), path)
    if status.st_size == size:
        staged.symlink_to(path.absolute())
        return
    staged.write_bytes(head + header)
    os.truncate(staged, size)


def _data_size(header: Mapping[str, Any], path: Path) -> int:
    """Checks each tensor of a safetensors file, and returns the size of the data in bytes."""
    end = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            bits, shape, (begin, after) = _DTYPES[tensor["dtype"]], tensor["shape"], tensor["data_offsets"]
            right = all(type(n) is int and 0 <= n < _MAX_SIZE for n in (*shape, begin, after)) and len(shape) <= 8
            right = right and (after - begin) * 8 == math.prod(shape) * bits
        except (KeyError, TypeError, ValueError):
            right = False
        if not right:
            raise KernelgenError(
                f"{path}: tensor {ascii(name)[:100]} has an invalid description: {ascii(tensor)[:200]}"
            )
        end = max(end, after)
    return end


# --- the converter ------------------------------------------------------------------------------------------------------------


def _run(path: Path, tree: Path, folder: Path, output: Path, scratch: Path, python: str) -> tuple[str, ...]:
    """Runs the converter, and returns messages about the conversion."""
    report = scratch / "report.json"
    program = Path(__file__).with_name("run_converter.py").absolute()
    command = [python, str(program), str(MAX_MEMORY), str(tree), str(folder), str(output), str(report)]
    environment = {**os.environ, "HF_HOME": str(scratch / "cache"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (scratch / "said").open("wb") as said:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=TIMEOUT,
                check=False,
                env=environment,
                cwd=scratch,
            )
        except OSError as error:
            raise KernelgenError(f"--python {python}: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            raise KernelgenError(f"{path}: {PROGRAM} takes more than {TIMEOUT} s") from None
    try:
        outcome = json.loads(report.read_bytes())
    except (OSError, ValueError):
        how = f"is killed by {signal_name(-done.returncode)}" if done.returncode < 0 else f"ends with {done.returncode}"
        raise KernelgenError(f"{path}: {PROGRAM} {how}; it prints:\n{_tail(scratch / 'said')}") from None
    if "error" in outcome:
        raise KernelgenError(_diagnostic(path, outcome, tree, python))
    return tuple(printable(str(note).replace(f"{folder}/", "")) for note in outcome["notes"])


def _diagnostic(path: Path, outcome: Mapping[str, Any], tree: Path, python: str) -> Diagnostic:
    missing = outcome.get("missing")
    if missing:
        listed = tree / _REQUIREMENTS
        what = f"-r {listed}" if listed.is_file() else _MODULES
        hint = f"install what {PROGRAM} needs: {python} -m pip install {what}\n    or name a Python that has it: --python <program>"
        return Diagnostic(f"{python} has no module '{missing}', which {PROGRAM} needs", hint=hint)
    lines = [line.strip() for line in str(outcome["error"]).splitlines() if line.strip()]
    return Diagnostic(f"{path}: {PROGRAM} refuses the model: {printable(' '.join(lines)[:_MAX_SAID])}")


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_SAID))
        text = file.read().decode("utf-8", "replace")
    return re.sub("(?m)^", "    ", printable(text.strip()) or "nothing")
