"""Languages of kernels: each turns a kernel's function into JAX operations under a JAX trace.

`protocol` is the interface of a language. Everything else (parameters, their names, aliases, the canonical form, time limits,
tracking of reads) is common to all and lies in `kernelgen.lowering` and `kernelgen.emitters`. Importing this package imports
neither JAX nor NumPy.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernelgen.languages.protocol import Call, CallResults, Language

DEFAULT = "jax"
"""The default language of an emitter, and of a kernel whose manifest selects none."""

LANGUAGES = ("jax", "numpy", "nki")
"""The languages' names in `@emitter(language=…)` and in a manifest's `languages`."""

EMITTERS_IN_JAX = ("jax", "nki")
"""Languages whose `@emitter` functions take JAX arrays (around a kernel); in others the function is the kernel itself."""


def built_id(kernel: str, language: str, target: str = "") -> str:
    """Returns the name of a kernel's HLO and NEFF: the kernel's id, with the language unless it is `DEFAULT`.

    Args:
        kernel: the kernel's id.
        language: the kernel's language.
        target: the one target of the HLO, if it depends on the target.
    """
    name = f"{kernel}.{target}" if target else kernel
    return name if language == DEFAULT else f"{name}.{language}"


def get(name: str) -> Language:
    """Returns a language; `name` is one of `LANGUAGES`."""
    if name == DEFAULT:
        return _Jax()
    module = importlib.import_module(f"kernelgen.languages.{name}")
    language: Language = module.LANGUAGE
    return language


class _Jax:
    """Calls the function of JAX arrays directly."""

    name = "jax"

    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def call(self, function: Callable[..., Any], call: Call) -> CallResults:
        ordered, named = call.bound(call.arguments)
        returned = function(*ordered, **named)
        return CallResults(tuple(returned) if isinstance(returned, tuple) else (returned,))
