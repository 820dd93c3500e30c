"""What ggml's ops compute, in NumPy: the measure of the emitters, and written without a look at them.

A function takes the kernel and its inputs as logical arrays `[ne3, ne2, ne1, ne0]` in their own types (None where absent; quantized
tensors as bytes per row) and returns the result in the type of the kernel's output; of an op that changes further inputs, a tuple
of the result and their new content. They follow ggml's CPU backend row by row and in
its order of operations where that shows in the result, and sum in float64 as it does. Modules are named as those in `kernels/`.
"""

import importlib
import pkgutil

from .core import DTYPES, EXAMPLES, REFERENCES, Example, compute

__all__ = ["DTYPES", "EXAMPLES", "REFERENCES", "Example", "compute"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
