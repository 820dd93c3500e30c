"""Manifests' kernels as JAX functions, which JAX differentiates with the backward kernels that the manifests name.

Such a function computes the same as the kernel's HLO (`kernelgen.lowering.function`); it needs no device and no SDK.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import environment, load_functions
from kernelgen.errors import KernelgenError, did_you_mean
from kernelgen.hlo.cpu import import_jax
from kernelgen.lowering.function import call_of, jax_function
from kernelgen.plan import Kernel, Plan
from kernelgen.spec.kernel import SourceSpec


def operator(manifest: str | Path, name: str) -> Callable[..., tuple[Any, ...]]:
    """Returns a kernel that a manifest names by its source, as a function from JAX arrays to a tuple of JAX arrays.

    JAX differentiates the function by the backward kernel (`vjp`) if the manifest names one, else by the function's own operations.

    Args:
        manifest: the manifest's file.
        name: the kernel's name in it.

    Raises:
        KernelgenError: the manifest is wrong, or has no such kernel.
    """
    from kernelgen import manifest as manifests

    catalog = Catalog([builtin_library()])
    made = Plan.merge(manifests.load([manifest], catalog))
    kernels = {k.spec.name: k for k in made.kernels if isinstance(k.spec, SourceSpec)}
    if name not in kernels:
        raise KernelgenError(f"{manifest} has no kernel that is named '{name}'{did_you_mean(name, kernels)}")
    forward = as_jax(kernels[name], catalog)
    backward = kernels.get(f"{name}.vjp")
    return forward if backward is None else tied(forward, as_jax(backward, catalog))


def as_jax(kernel: Kernel, catalog: Catalog) -> Callable[..., tuple[Any, ...]]:
    """Returns a kernel that is named by its source, as a function of JAX arrays.

    Raises:
        KernelgenError: its file raises during its import.
    """
    spec = kernel.spec
    assert isinstance(spec, SourceSpec)
    import_jax()
    emitters = catalog.emitters(kernel.interpreted)
    (function,) = load_functions(emitters)
    called = jax_function(kernel.language, function, call_of(spec.interpreted, kernel.targets), spec.id)

    def in_its_environment(*arrays: Any) -> tuple[Any, ...]:
        with environment(emitters[0][1]):
            return called(*arrays)

    return in_its_environment


def tied(
    forward: Callable[..., tuple[Any, ...]], backward: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """Returns `forward` with `backward` as its derivative.

    Args:
        forward: a function of arrays that returns a tuple of them.
        backward: a function of the same arguments and of the results' gradients, that returns the gradients of the floating-point
            arguments, in order.
    """
    import_jax()
    import jax
    import jax.numpy as jnp
    import numpy as np

    def first(*arrays: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return forward(*arrays), arrays

    def second(arrays: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        found = iter(backward(*arrays, *gradients))
        return tuple(
            next(found) if jnp.issubdtype(a.dtype, jnp.floating) else np.zeros(a.shape, jax.dtypes.float0)
            for a in arrays
        )

    made = jax.custom_vjp(forward)
    made.defvjp(first, second)
    function: Callable[..., tuple[Any, ...]] = made
    return function
