"""All implementations of NumPy's functions: importing this module fills `FUNCTIONS`."""

from __future__ import annotations

from kernelgen.languages.numpy import creation, elementwise, gathering, indexing, layout, linalg, reductions  # noqa: F401
from kernelgen.languages.numpy.tensor import FUNCTIONS

__all__ = ["FUNCTIONS"]
