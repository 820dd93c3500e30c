"""NumPy as a language of kernels: imports its files and calls its functions (`languages.protocol`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelgen.languages.protocol import Call, CallResults, Language


class _NumPy:
    name = "numpy"

    @contextlib.contextmanager
    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> Iterator[None]:
        """Makes imports of nkipy and nkigen resolve to `kernelgen.languages.numpy`, and sets `env`."""
        from kernelgen.languages.environment import environment
        from kernelgen.languages.numpy.modules import PACKAGES, modules
        from nki_interpreter.standing_in import standing_in

        with environment(env), standing_in(PACKAGES, modules()):
            yield

    def call(self, function: Callable[..., Any], call: Call) -> CallResults:
        from kernelgen.languages.numpy.tracing import traced

        return traced(function, call)


LANGUAGE: Language = _NumPy()
