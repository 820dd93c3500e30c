"""Emitters: how to write one, find it in a folder's sources, choose it for an op, and import it.

An emitter is one decorated function of arrays and named parameters:

    from kernelgen.emitters import emitter

    @emitter("rms_norm", types="float")
    def rms_norm(x, *, eps):
        ...

The function's positional arguments are the op's inputs as JAX arrays, in the order of ggml's `src[0…]`, with the reversed shape
`(ne3, ne2, ne1, ne0)`; an optional input has the default None. Keyword-only arguments are the op's parameters by ggml's names. If
declared, the keyword `out` receives the result's `TensorDesc`, and `inputs` the inputs' `TensorDesc`s.

`types` declares the inputs' types: one entry per input, separated by commas. An entry lists ggml's type names and groups of
`kernelgen.ggml.types.GROUPS`; `same` is the first input's type. If the type of one input depends on another's, `types` is a
tuple of such rows: `types=("f32, f32", "f16, f32 f16")`. An op without inputs has `types=""`.

`language` is the kernel's language, if not JAX. With `numpy`, the function is in NumPy; with `nki`, it is in JAX and calls an NKI
kernel. `targets` lists its targets, if not all. `where` has comparisons of sizes and integer parameters ("x_ne0 <= 4096";
`kernelgen.emitters.scan`): a kernel that violates one needs another emitter. `layouts` lists the layouts besides ggml's that
the emitter accepts for the op's weights: a weight in the layout `planes` arrives as the bytes of its rows,
`(ne3, ne2, ne1, bytes per row)`, and one in `transposed` as it is stored, `(ne3, ne2, ne0, ne1)`. Several emitters may compute an
op, each in its own module: a manifest's `languages` chooses (`kernelgen.emitters.catalog`).

`library` is a folder of emitters, `scan` reads its modules without importing them, `catalog` finds the library for an op.
`dependencies` and `loading` are for builds of one emitter. `kernelgen.lowering` makes HLO from its function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT = ("out", "inputs", "op")
"""Keyword arguments that the framework fills in; they are not parameters of the op."""


def emitter(
    *ops: str,
    types: str | tuple[str, ...] = (),
    language: str = "jax",
    targets: str | tuple[str, ...] = (),
    where: str | tuple[str, ...] = (),
    layouts: str | tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Marks a function as the emitter of one or more ggml ops (names as `ggml_op_desc`, lower case, string literals).

    `types` declares the supported types of the inputs; without it every type is passed on. A function for several ops declares
    the keyword `op` to receive the requested op's name. The decorator returns the function unchanged: `kernelgen.emitters.scan`
    reads its arguments from the source.
    """
    return lambda function: function
