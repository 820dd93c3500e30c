"""Which library computes an op."""

from __future__ import annotations

from collections.abc import Sequence

from kernelgen.emitters.library import Library
from kernelgen.emitters.registration import Registration
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.ggml import ops as ggml_ops


def find(op: str, libraries: Sequence[Library]) -> tuple[Library, Registration]:
    """Returns the first library that computes `op`, and where; users' libraries come before the built-in one.

    Raises:
        KernelgenError: none does.
    """
    for library in libraries:
        registration = library.scan().get(op)
        if registration:
            return library, registration
    known = [name for library in libraries for name in library.scan()]
    near = did_you_mean(op, known, dict(ggml_ops.ALIASES))
    roots = ", ".join(str(library.root) for library in libraries)
    raise KernelgenError(
        Diagnostic(f"no emitter computes op '{op}'{near}", hint=f"looked in {roots}; docs/adding-a-kernel.md adds one")
    )
