"""Interprets kernels in NKI, AWS's kernel language, on the CPU and without an SDK: `import nki` and `import neuronxcc.nki`.

`kernel` runs a kernel as Python code and records its instructions; meanwhile `checks` checks the limits of the hardware and the
rules of NKI. `lower` lowers the recording to JAX, `steps` runs it instruction by instruction, and `cost` counts its cost by the
documented formulas. `loading` finds kernels in files; `program`, `tensors` and `written` define the recording; `isa` holds the
instructions by engine, `language` the other names that kernels import. `roll` turns repeated instructions into loops, and
`access` plans how views become slices. Only lowering imports JAX. README.md has an example.
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
    # Imported on first use: a caller that only replaces modules (`standing_in`) needs no NumPy.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _WHERE[name] == "kernel":
        importlib.import_module(f"{__name__}.loading")  # so that imports in a running kernel resolve
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
