"""Runs a recorded kernel piece by piece: XLA takes more than twice as long to compile twice as many instructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kernelgen.languages.nki.program import Block
from kernelgen.languages.nki.roll import all_tensors

if TYPE_CHECKING:
    from kernelgen.languages.nki.kernel import Recorded
    from kernelgen.languages.nki.tensors import Tensor

PIECE = 5000
"""Instructions, and rolled loops, of a piece."""


def run(recorded: Recorded, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], list[tuple[int, tuple[int, str]]]]:
    """Returns a kernel's results on the CPU, and what its checks of indices found.

    Args:
        recorded: the kernel.
        arrays: the values of its tensor arguments, in order.

    Returns:
        the results as JAX arrays; for each check the index (`lower.INSIDE` where none is outside), and the number of elements and
        the line where it was.
    """
    import jax

    from kernelgen.languages.nki.lower import Context

    held: dict[int, Any] = {}
    results: tuple[Any, ...] = ()
    found: list[tuple[int, tuple[int, str]]] = []
    for items, later in _pieces(recorded):
        places: list[tuple[int, str]] = []

        def step(
            parameters: Sequence[Any],
            held: dict[int, Any],
            items: list[Any] = items,
            later: set[int] | None = later,
            places: list[tuple[int, str]] = places,
        ) -> Any:
            context = Context(parameters, True)
            context.values.update(held)
            context.run(Block(items))
            places[:] = context.places
            if later is None:
                return tuple(context.read(tensor) for tensor in recorded.results), context.checks
            return {n: value for n, value in context.values.items() if n in later}, context.checks

        options: Any = {"xla_backend_optimization_level": 0}  # compiling takes longer than running
        made, checks = jax.jit(step).lower(arrays, held).compile(compiler_options=options)(arrays, held)
        found += [(int(worst), places[int(number)]) for worst, number in checks]
        if later is None:
            results = made
        else:
            held = made
    return results, found


def _pieces(recorded: Recorded) -> Iterator[tuple[list[Any], set[int] | None]]:
    """Yields the items of each piece and the numbers of the storages that later ones use; None with the last."""
    items = recorded.block.items
    pieces = [items[at : at + PIECE] for at in range(0, max(len(items), 1), PIECE)]
    used = _storages(recorded.results)
    later: list[set[int]] = []
    for piece in reversed(pieces):
        later.append(used)
        used = used | _storages(all_tensors(piece))
    for number, piece in enumerate(pieces, 1):
        yield piece, later[-number] if number < len(pieces) else None


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {t.storage.number for tensor in tensors for t in (tensor, *(d.index for d in tensor.dynamic))}
