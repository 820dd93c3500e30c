"""Emitters: how one is written, found in a folder's sources, chosen for an op, and imported.

An emitter is one decorated function of arrays and named parameters:

    from kernelgen.emitters import emitter

    @emitter("rms_norm", types="float")
    def rms_norm(x, *, eps):
        ...

The function's positional arguments are the op's inputs as JAX arrays, in the order of ggml's `src[0…]`, with the reversed shape
`(ne3, ne2, ne1, ne0)`; an optional input has the default None. Keyword-only arguments are the op's parameters by ggml's names. The
keyword `out`, when declared, receives the result's `TensorDesc`, and `inputs` those of the inputs.

`types` says which types the inputs may have: one entry per input, separated by commas, each one or several of ggml's type names
and of the groups in `kernelgen.ggml.types.GROUPS`; `same` is the first input's type. Where the type of one input depends on that
of another, several such rows are given as a tuple: `types=("f32, f32", "f16, f32 f16")`. An op without inputs has `types=""`.

`language` says what the kernel is written in, when that is not JAX. Of `numpy`, the function is in NumPy; of `nki`, it is in JAX
and calls an NKI kernel. `targets` names the targets that it is for, when these are not all. `where` has comparisons of sizes and
of parameters of integers ("x_ne0 <= 4096"; `kernelgen.emitters.conditions`): a kernel that breaks one is for another emitter.
`layouts` names the layouts in which the emitter takes the op's weights besides ggml's own: a weight in the layout `planes` arrives
as the bytes of its rows, `(ne3, ne2, ne1, bytes per row)`, and one in `transposed` as it is stored, `(ne3, ne2, ne0, ne1)`.
Several emitters may compute an op, each in a module of its own: a manifest's `languages` chooses (`kernelgen.emitters.catalog`).

`library` is a folder of emitters, `scan` reads its modules without importing them, `catalog` says which library computes an op.
`dependencies` and `loading` are what a build needs of one emitter. `kernelgen.lowering` makes HLO of its function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT = ("out", "inputs", "op")
"""Keyword arguments that are filled in by the framework and are not parameters of the op."""


def emitter(
    *ops: str,
    types: str | tuple[str, ...] = (),
    language: str = "jax",
    targets: str | tuple[str, ...] = (),
    where: str | tuple[str, ...] = (),
    layouts: str | tuple[str, ...] = (),
    forms: str | tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Marks a function as the emitter of one or more ggml ops (names as `ggml_op_desc`, lower case, string literals).

    `types` tells what the kernel can be asked for; without it any type is passed on.
    A function for several ops declares the keyword `op` to be told which one it is asked for. The function stays as it is: what is
    said here is read from the source (`kernelgen.emitters.scan`). `forms` is the earlier name of `layouts`.
    """
    if forms:
        warnings.warn("@emitter(forms=…) is layouts=… now", FutureWarning, stacklevel=2)
    return lambda function: function
