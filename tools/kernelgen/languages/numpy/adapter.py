"""Kernels in NumPy: a plain function of arrays, which NumPy's own protocols hand over while it is traced.

`kernelgen.languages.numpy` is what kernels import. A `Tensor` (`tensor`) stands for an array that is not known yet; NumPy's functions
dispatch on it (`functions`), and what they compute becomes JAX operations. Importing this package imports neither NumPy nor JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelgen.languages.protocol import Call, Language, Returned


class _NumPy:
    name = "numpy"

    @contextlib.contextmanager
    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> Iterator[None]:
        """Lets imports of nkipy and nkigen find what `kernelgen.languages.numpy` has, and sets `env`."""
        from kernelgen.languages.environment import environment
        from kernelgen.languages.numpy.modules import PACKAGES, modules
        from kernelgen.languages.standing_in import standing_in

        with environment(env), standing_in(PACKAGES, modules()):
            yield

    def call(self, function: Callable[..., Any], call: Call) -> Returned:
        from kernelgen.languages.numpy.tracing import traced

        return traced(function, call)


LANGUAGE: Language = _NumPy()
