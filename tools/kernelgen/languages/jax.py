"""Kernels in JAX: calls the function of JAX arrays directly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernelgen.languages.protocol import Call, CallResults, Language


class _Jax:
    name = "jax"

    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def call(self, function: Callable[..., Any], call: Call) -> CallResults:
        ordered, named = call.bound(call.arguments)
        returned = function(*ordered, **named)
        return CallResults(tuple(returned) if isinstance(returned, tuple) else (returned,))


LANGUAGE: Language = _Jax()
