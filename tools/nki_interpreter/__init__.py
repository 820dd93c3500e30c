"""Kernels in NKI, AWS's kernel language, on the CPU and without an SDK: `import nki` and `import neuronxcc.nki` are interpreted.

A kernel is run as Python code and recorded (`kernel`); the limits of the hardware and the rules of NKI are checked meanwhile
(`checks`). What was recorded is lowered to JAX (`lower`), or run instruction by instruction (`steps`), and its cost is counted by
the documented formulas (`cost`). `loading` finds kernels in files, `program`, `tensors`, `written` are what is recorded, `isa` the
instructions by engine, `language` the rest of what kernels import, `roll` makes loops of what was recorded, `access` plans how
views become slices. Only lowering imports JAX. README.md has an example.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "LoadError": "errors",
    "NkiError": "errors",
    "interpreter": "loading",
    "load_kernel": "loading",
    "record_kernel": "kernel",
    "simulate": "kernel",
}
__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    # Imported when it is used: who stands in for modules alone (`standing_in`) needs no NumPy.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _WHERE[name] == "kernel":
        importlib.import_module(f"{__name__}.loading")  # what a kernel imports while it runs is found
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
