"""NumPy as a language of kernels: how its files are imported, and how one of its functions is called (`languages.protocol`)."""

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
        from nki_interpreter.standing_in import standing_in

        with environment(env), standing_in(PACKAGES, modules()):
            yield

    def call(self, function: Callable[..., Any], call: Call) -> Returned:
        from kernelgen.languages.numpy.tracing import traced

        return traced(function, call)


LANGUAGE: Language = _NumPy()
