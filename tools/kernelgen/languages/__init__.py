"""Languages that kernels are written in: each turns a kernel's function into JAX operations while JAX traces.

`protocol` is what a language has to offer. What is around it (parameters, their names, aliases, the canonical form, time limits,
what is read) is the same for all and lies in `kernelgen.lowering` and `kernelgen.emitters`. Importing this package imports
neither JAX nor NumPy.
"""

from __future__ import annotations

import importlib

from kernelgen.languages.protocol import Language

DEFAULT = "jax"
"""The language of an emitter that names none, and of a kernel when its manifest chooses none."""

LANGUAGES = ("jax", "numpy", "nki")
"""The languages' names, as `@emitter(language=…)` and a manifest's `languages` have them."""

EMITTERS_IN_JAX = ("jax", "nki")
"""Languages whose `@emitter` functions are functions of JAX arrays (around a kernel); those of others are kernels themselves."""


def built_id(kernel: str, language: str, target: str = "") -> str:
    """Returns the name of a kernel's HLO and NEFF: the kernel's id, and the language where that is not `DEFAULT`.

    Args:
        kernel: the id.
        language: what computes it is written in.
        target: the one target that the HLO is for, if it is.
    """
    name = f"{kernel}.{target}" if target else kernel
    return name if language == DEFAULT else f"{name}.{language}"


def get(name: str) -> Language:
    """Returns a language; `name` is one of `LANGUAGES`."""
    module = importlib.import_module(f"kernelgen.languages.{name}")
    language: Language = module.LANGUAGE
    return language
