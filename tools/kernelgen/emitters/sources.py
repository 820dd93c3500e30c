"""The function that a manifest names in a file, as a registration: read from the file without running it."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kernelgen import fileio
from kernelgen.emitters.detect import language_of
from kernelgen.emitters.registration import Registration
from kernelgen.emitters.scan import MAX_SOURCE, parse
from kernelgen.errors import Diagnostic, KernelgenError, Location, did_you_mean
from kernelgen.spec.kernel import SourceSpec


def of_source(spec: SourceSpec, file: Path) -> Registration:
    """Returns the registration of a kernel's function; see `of_function`."""
    return replace(of_function(file, spec.function), op=spec.op, env=spec.env, lowering=spec.lowering)


def of_function(file: Path, function: str) -> Registration:
    """Returns the registration of a function in a file: a definition, a value or an imported name.

    Raises:
        KernelgenError: the file can't be read, is not Python, or nothing in it has the function's name.
    """
    try:
        source = fileio.read_input(file, MAX_SOURCE)
    except OSError as error:
        raise KernelgenError(f"can't read '{file}': {error.strerror or error}") from None
    lines = _names(source, str(file))
    if function not in lines:
        near = did_you_mean(function, lines)
        raise KernelgenError(Diagnostic(f"there is no '{function}'{near}", Location(str(file), 1, 1)))
    return Registration(
        op=function,
        module=file.stem,
        file=file,
        function=function,
        inputs=(),
        required=0,
        params=(),
        context=(),
        line=lines[function],
        language=language_of(source, str(file)),
    )


@lru_cache(maxsize=256)
def _names(source: bytes, file: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in ast.walk(parse(source, file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.alias):
            found.setdefault(node.asname or node.name, node.lineno)
    return found
