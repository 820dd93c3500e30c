"""`kernelgen check`: runs kernels on the CPU, from the compiler's HLO, and compares them with the manifests' references."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelgen import manifest
from kernelgen.cli import options
from kernelgen.cli.emit import select
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError, described
from kernelgen.manifest.sources import ReferenceCheck
from kernelgen.plan import Kernel, Plan
from kernelgen.spec.kernel import SourceSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


_NUMBERS = "biufV"
"""Kinds of comparable NumPy dtypes; ml_dtypes' types, such as bfloat16, have the kind V."""


@click.command(short_help="Compare kernels with their references.")
@options.manifests_argument
@options.kernels_option
@click.option("--only", metavar="GLOB", help="Only kernels whose id or name matches.")
def command(manifests: tuple[Path, ...], catalog: Catalog, only: str | None) -> int:
    """Run kernels on the CPU, from the HLO that a compiler receives, and compare them with the references that manifests name.

    A backward kernel is compared with the gradients that JAX derives from its forward kernel. The exit status is 1 if a kernel
    differs.
    """
    requests = manifest.load(manifests, catalog)
    kernels = {k.spec.id: k for k in Plan.merge(requests).kernels}
    checks = {check.kernel: check for request in requests for check in request.checks}
    if not checks:
        raise KernelgenError(
            "no kernel of these manifests has a reference: see `check` in docs/reference/source-kernels.md"
        )
    ids = sorted(checks)
    failed = 0
    chosen = select(ids, [kernels[id].spec.op for id in ids], only)
    for id in chosen:
        with contextlib.redirect_stdout(sys.stderr):  # a kernel's output is not a result
            wrong = _compare(kernels[id], checks[id], kernels, catalog)
        failed += bool(wrong)
        click.echo(f"{id}: {'differs' if wrong else 'ok'}")
        for line in wrong:
            click.echo(f"    {line}")
    without = len(kernels) - len(ids)
    more = f", {without} without a reference" if without and only is None else ""
    click.echo(f"{len(chosen) - failed} ok, {failed} different{more}")
    return EXIT_FAILED if failed else EXIT_OK


def _compare(kernel: Kernel, check: ReferenceCheck, kernels: dict[str, Kernel], catalog: Catalog) -> list[str]:
    """Returns the differences between a kernel and its reference, a line for each result that differs."""
    from kernelgen.hlo import execute, judge
    from kernelgen.lowering import emission
    from kernelgen.neff.container import tensors_of

    spec = kernel.spec
    assert isinstance(spec, SourceSpec)
    arrays = [judge.random(*a.numpy, check.seed + i) for i, a in enumerate(spec.inputs)]
    try:
        hlo = emission.emit(catalog.emitters(kernel.interpreted), spec.interpreted, targets=kernel.targets).hlo
        results = execute.run(hlo, arrays)
        wanted = _wanted(check, spec, arrays, kernels, catalog)
    except (KernelgenError, ValueError) as error:
        return str(error).splitlines()
    names = [tensor.name for tensor in tensors_of(hlo) if tensor.usage == "out"]
    if len(wanted) != len(spec.outputs):
        return [f"the reference returns {len(wanted)} results, and the kernel {len(spec.outputs)}"]
    found = [
        (name, judge.difference(have, want, check.rtol, check.atol))
        for name, have, want in zip(names, results, wanted, strict=False)
    ]
    return [f"{name}: {text}" for name, text in found if text is not None]


def _wanted(
    check: ReferenceCheck, spec: SourceSpec, arrays: Sequence[Array], kernels: dict[str, Kernel], catalog: Catalog
) -> list[Array]:
    if check.file is None:
        return _gradients(kernels[check.forward], arrays, catalog)
    from kernelgen.emitters.loading import load_file

    _, function = load_file(check.file, check.function)
    return _called(function, f"{check.file}:{check.function}", arrays, dict(spec.params))


def _called(function: Callable[..., Any], name: str, arrays: Sequence[Array], keywords: dict[str, Any]) -> list[Array]:
    import numpy as np

    try:
        returned = function(*(a.copy() for a in arrays), **keywords)
        results = [np.asarray(r) for r in (returned if isinstance(returned, tuple | list) else (returned,))]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: a missing answer is not a success
        raise KernelgenError(f"{name}: {described(error)}", exit_code=EXIT_FAILED) from error
    for number, result in enumerate(results):
        if result.dtype.kind not in _NUMBERS:
            message = f"{name}: result {number} is an array of {result.dtype}, not of numbers"
            raise KernelgenError(message, exit_code=EXIT_FAILED)
    return results


def _gradients(forward: Kernel, arrays: Sequence[Array], catalog: Catalog) -> list[Array]:
    """Returns the gradients of a kernel's inputs, as JAX derives them from the kernel's operations."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kernelgen.manifest.differentiable import as_jax

    spec = forward.spec
    assert isinstance(spec, SourceSpec)
    function = as_jax(forward, catalog)
    n = len(spec.inputs)
    given = [jnp.asarray(a) for a in arrays]
    floats = [i for i, a in enumerate(spec.inputs) if a.is_float]

    def of_floats(*values: Any) -> Any:
        changed = dict(zip(floats, values, strict=True))
        return function(*(changed.get(i, given[i]) for i in range(n)))

    _, backward = jax.vjp(of_floats, *(given[i] for i in floats))
    return [np.asarray(g) for g in backward(tuple(given[n:]))]
