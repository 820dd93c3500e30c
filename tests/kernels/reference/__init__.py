"""ggml's ops in NumPy: the reference for the emitters, written independently of them.

A function takes the kernel and its inputs as logical arrays `[ne3, ne2, ne1, ne0]` in their own types (None for an
absent input; quantized tensors as bytes per row). It returns the result in the type of the kernel's output; for an op
that changes further inputs, a tuple of the result and their new content. Functions follow ggml's CPU backend row by
row, keep its order of operations where that changes the result, and sum in float64 as it does. The modules have the
names of those in `kernels/`.
"""

import importlib
import pkgutil

from .core import DTYPES, EXAMPLES, REFERENCES, Example, compute

__all__ = ["DTYPES", "EXAMPLES", "REFERENCES", "Example", "compute"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
