"""What a language has to offer: how its files are imported, and how one of its functions is called while JAX traces.

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
        arguments: a JAX array per positional input, in order; None for one that is absent. No array has elements of 64 bits.
        keywords: static arguments.
        grid: how many programs there are in each dimension; empty for a launch without a grid.
        targets: the targets that the kernel is built for, whose limits must all hold; none when they are not known.
        results: shape and NumPy dtype name of each declared result, or None when none are declared.
        lowering: `interpreted`, or `native` for a call of the language's own compiler's artifact.
        names: the names of the parameters that the arguments are for; empty where they are the function's first ones.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    results: tuple[tuple[tuple[int, ...], str], ...] | None = None
    lowering: str = "interpreted"
    names: tuple[str, ...] = ()

    def bound(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns how a function is called with what stands for the arguments: by their order, and by name."""
        if not self.names:
            return tuple(arguments), dict(self.keywords)
        return (), {**self.keywords, **dict(zip(self.names, arguments, strict=True))}


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call gives.

    Attributes:
        results: the JAX arrays that the function returns, in order.
        updated: the new content of arguments that the function changes, of the same shape and dtype, by position in
            `Call.arguments`.
        notes: facts about the kernel as JSON values, for people and reports; the HLO does not depend on them.
    """

    results: tuple[Any, ...]
    updated: Mapping[int, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


class Language(Protocol):
    """A language that kernels are written in."""

    @property
    def name(self) -> str:
        """One of `kernelgen.languages.LANGUAGES`."""

    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> AbstractContextManager[None]:
        """Prepares Python for the import of a kernel's file, and undoes it.

        Args:
            file: the file.
            env: the environment variables that the file sees.
            lowering: as of `Call`.
        """

    def call(self, function: Callable[..., Any], call: Call) -> Returned:
        """Calls a kernel's function under a JAX trace.

        Raises:
            KernelgenError: the function breaks a rule of the language, at a file and line.
        """
