"""The interface of a language: imports its files, and calls a function under a JAX trace.

Values here hold JAX arrays and are typed `Any`: planning reads this module, and must not import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


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

    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> AbstractContextManager[None]:
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
