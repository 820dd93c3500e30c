"""Languages of kernels: each turns a kernel's function into JAX operations under a JAX trace.

`Language` is the interface of a language; values in it hold JAX arrays, and are typed `Any`. Everything else (parameters, their
names, aliases, the canonical form, time limits, tracking of reads) is common to all and lies in `kernelgen.lowering` and
`kernelgen.emitters`. Importing this package imports neither JAX nor NumPy.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

DEFAULT = "jax"
"""The default language of an emitter, and of a kernel whose manifest selects none."""

LANGUAGES = ("jax", "numpy", "nki")
"""The languages' names in `@emitter(language=…)` and in a manifest's `languages`."""

EMITTERS_IN_JAX = ("jax", "nki")
"""Languages whose `@emitter` functions take JAX arrays (around a kernel); in others the function is the kernel itself."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel's function under a JAX trace.

    Attributes:
        arguments: a JAX array per positional input, in order; None for an absent one. No array has 64-bit elements.
        keywords: static arguments.
        grid: number of programs in each dimension; empty for a launch without a grid.
        targets: the kernel's targets, whose limits must all hold; empty if they are not available.
        results: shape and NumPy dtype name of each declared result, or None if none are declared.
        lowering: `interpreted`, or `native` for a call to the output of the language's own compiler.
        names: names of the parameters that receive the arguments; empty if these are the function's first parameters.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    results: tuple[tuple[tuple[int, ...], str], ...] | None = None
    lowering: str = "interpreted"
    names: tuple[str, ...] = ()

    def bound(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and keyword arguments of a call with these values."""
        if not self.names:
            return tuple(arguments), dict(self.keywords)
        return (), {**self.keywords, **dict(zip(self.names, arguments, strict=True))}


@dataclass(frozen=True, slots=True)
class CallResults:
    """The results of a call.

    Attributes:
        results: the JAX arrays that the function returns, in order.
        updated: new content of the arguments that the function changes, of the same shape and dtype, by position in
            `Call.arguments`.
        notes: facts about the kernel as JSON values, for people and reports; the HLO does not depend on them.
    """

    results: tuple[Any, ...]
    updated: Mapping[int, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


class Language(Protocol):
    """A language of kernels."""

    @property
    def name(self) -> str:
        """One of `kernelgen.languages.LANGUAGES`."""

    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> contextlib.AbstractContextManager[None]:
        """Prepares Python for the import of a kernel's file, and undoes it.

        Args:
            file: the file.
            env: the environment variables of the file.
            lowering: see `Call`.
        """

    def call(self, function: Callable[..., Any], call: Call) -> CallResults:
        """Calls a kernel's function under a JAX trace.

        Raises:
            KernelgenError: the function breaks a rule of the language, at a file and line.
        """


def built_id(kernel: str, language: str, target: str = "") -> str:
    """Returns the name of a kernel's HLO and NEFF: the kernel's id, with the language unless it is `DEFAULT`.

    Args:
        kernel: the kernel's id.
        language: the kernel's language.
        target: the one target of the HLO, if it depends on the target.
    """
    name = f"{kernel}.{target}" if target else kernel
    return name if language == DEFAULT else f"{name}.{language}"


def get(name: str) -> Language:
    """Returns a language; `name` is one of `LANGUAGES`."""
    if name == DEFAULT:
        return _Jax()
    module = importlib.import_module(f"kernelgen.languages.{name}")
    language: Language = module.LANGUAGE
    return language


class _Jax:
    """Calls the function of JAX arrays directly."""

    name = "jax"

    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def call(self, function: Callable[..., Any], call: Call) -> CallResults:
        ordered, named = call.bound(call.arguments)
        returned = function(*ordered, **named)
        return CallResults(tuple(returned) if isinstance(returned, tuple) else (returned,))


# --- the state of an emission --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelEmission:
    """One kernel's emission.

    Attributes:
        targets: the kernel's targets; empty if they are not available.
        notes: facts about the kernel as JSON values; the HLO does not depend on them.
    """

    targets: tuple[str, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


_CURRENT: ContextVar[KernelEmission | None] = ContextVar("emitting", default=None)


@contextlib.contextmanager
def emitting(targets: tuple[str, ...]) -> Iterator[KernelEmission]:
    """Makes one kernel's emission the current one until the block ends."""
    made = KernelEmission(targets)
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def targets() -> tuple[str, ...]:
    """Returns the kernel's targets; empty if they are not available."""
    current = _CURRENT.get()
    return current.targets if current else ()


def add_notes(notes: Mapping[str, Any]) -> None:
    """Adds notes about the current kernel. Lists of the same name are joined; for other values the last one counts."""
    current = _CURRENT.get()
    if current is None:
        return
    for name, value in notes.items():
        known = current.notes.get(name)
        current.notes[name] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value


# --- environment variables of a kernel's file ----------------------------------------------------------------------


@contextlib.contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables until the block ends."""
    with _restored():
        os.environ.update(env)
        yield


@contextlib.contextmanager
def only(env: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables and hides all others until the block ends."""
    with _restored():
        os.environ.clear()
        os.environ.update(env)
        yield


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
