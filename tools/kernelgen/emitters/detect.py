"""Detects the language of a file's kernels from its imports, without running it."""

from __future__ import annotations

import ast

from kernelgen.emitters.scan import parse

_NKI = ("nki", "neuronxcc", "torch_neuronx", "nki_cpu_simulator")
_NUMPY = ("kernelgen.languages.numpy", "nkipy", "nkigen")


def language_of(source: bytes, file: str) -> str:
    """Returns a file's language: `nki`, `numpy` or `jax`.

    A file that imports NKI is in NKI. One that imports `kernelgen.languages.numpy`, or NumPy and not JAX, is in NumPy.

    Args:
        source: the file's bytes.
        file: its name in messages.

    Raises:
        KernelgenError: it is not valid Python.
    """
    names: set[str] = set()
    for node in ast.walk(parse(source, file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    roots = {name.partition(".")[0] for name in names}
    if roots & {*_NKI}:
        return "nki"
    if roots & {*_NUMPY} or names & {*_NUMPY} or ("numpy" in roots and "jax" not in roots):
        return "numpy"
    return "jax"
