"""`kernelgen run`: executes one kernel on the CPU, from the compiler's HLO."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelgen import fileio
from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.languages import LANGUAGES
from kernelgen.plan import Kernel
from kernelgen.spec.arrays import ArrayDesc
from kernelgen.spec.kernel import KernelSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@click.command(short_help="Run a kernel on the CPU and print what it computes.")
@click.argument("kernel", metavar="KERNEL|FILE:FUNCTION")
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The manifest that has KERNEL.",
)
@click.option("--language", type=click.Choice(LANGUAGES), help="The language of KERNEL's emitter.")
@click.option(
    "--inputs",
    multiple=True,
    metavar="WHAT",
    help="An input, in order: a .npy file, or a shape and dtype such as f32[128,512] that is filled with random values.",
)
@click.option("--random", "seed", type=int, default=0, show_default=True, metavar="SEED", help="Seed of random values.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="A static argument of FUNCTION, as JSON.")
@click.option(
    "--save", metavar="DIR", type=click.Path(file_okay=False, path_type=Path), help="Write results as .npy files."
)
@click.option(
    "--compare", metavar="WHAT", help="Compare with KERNEL in another language, or with FILE:FUNCTION in NumPy."
)
@click.option("--rtol", type=float, default=1e-5, show_default=True, help="Relative tolerance.")
@click.option("--atol", type=float, default=1e-5, show_default=True, help="Absolute tolerance.")
@options.kernels_option
@options.target_option
def command(
    kernel: str,
    manifests: tuple[Path, ...],
    language: str | None,
    inputs: tuple[str, ...],
    seed: int,
    params: tuple[str, ...],
    save: Path | None,
    compare: str | None,
    rtol: float,
    atol: float,
    catalog: Catalog,
    targets: tuple[str, ...],
) -> None:
    """Run one kernel on the CPU; print its results, or write them with --save.

    KERNEL is the id or op of a kernel that a --manifest names; its inputs are the parameters of its HLO. FILE:FUNCTION is a
    function in JAX, NumPy or NKI. Without --inputs all inputs are random: floats normal, integers 0 or 1.
    """
    with contextlib.redirect_stdout(sys.stderr):  # a kernel's output is not a result
        made = (
            _of_file(kernel, inputs, params, targets, seed)
            if _is_file(kernel)
            else _of_manifest(kernel, manifests, catalog, language, targets)
        )
        arrays = _arrays(inputs, made.parameters, seed)
        results = _execute(made, arrays)
        wanted = None if compare is None else _wanted(compare, made, arrays, catalog, targets, params)
    for name, array in zip(made.results, results, strict=True):
        click.echo(f"{name}: {_shown(array)}")
    if save is not None:
        _save(save, made.results, results)
    if wanted is not None:
        _compare(made.results, results, wanted, rtol, atol)


@dataclass(frozen=True, slots=True)
class _Made:
    """A kernel to execute.

    Attributes:
        hlo: its canonical HLO.
        kernel: the plan's kernel, or None for a function in a file.
    """

    hlo: bytes
    kernel: Kernel | None = None

    @property
    def parameters(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and NumPy dtype name of each parameter."""
        from kernelgen.hlo import execute

        return [(shape, dtype) for _, dtype, shape in execute.parameters(self.hlo)]

    @property
    def results(self) -> list[str]:
        """The results' names."""
        from kernelgen.neff.container import tensors_of

        return [tensor.name for tensor in tensors_of(self.hlo) if tensor.usage == "out"]


def _is_file(kernel: str) -> bool:
    file, colon, function = kernel.rpartition(":")
    return bool(colon) and file.endswith(".py") and function.isidentifier()


def _of_file(kernel: str, inputs: Sequence[str], params: Sequence[str], targets: tuple[str, ...], seed: int) -> _Made:
    from kernelgen.emitters.loading import load_file
    from kernelgen.hlo.canonicalize import canonicalize
    from kernelgen.languages import Call
    from kernelgen.lowering.function import lower_function

    file, _, name = kernel.rpartition(":")
    language, function = load_file(Path(file), name)
    described = [_described(text) for text in inputs]
    if not described:
        specs = getattr(function, "input_specs", None) or ()
        described = [_described(f"{dtype}[{','.join(map(str, shape))}]") for shape, dtype in specs]
    if not described:
        raise KernelgenError(f"{kernel}: give its inputs: --inputs f32[128,512] for each, or a .npy file")
    call = Call(tuple(described), keywords=_keywords(params), targets=targets)
    lowered = lower_function(language, function, call, name)
    return _Made(canonicalize(lowered.hlo, lowered.inputs, lowered.outputs, aliases=lowered.aliases))


def _of_manifest(
    kernel: str, manifests: Sequence[Path], catalog: Catalog, language: str | None, targets: tuple[str, ...]
) -> _Made:
    from kernelgen import manifest
    from kernelgen.plan import Plan

    if not manifests:
        raise click.UsageError(f"give the --manifest that names '{kernel}', or a FILE:FUNCTION")
    plan = Plan.merge(options.only_targets(manifest.load(manifests, catalog), targets))
    found = {k.spec.id: k for k in plan.kernels if kernel in (k.id, k.spec.id, k.spec.op)}
    if len(found) != 1:
        names = f"names {len(found)} kernels: {', '.join(sorted(found)[:8])}"
        none = "is not a kernel of the manifest; `kernelgen plan` prints their ids"
        raise KernelgenError(f"'{kernel}' {names if found else none}")
    (chosen,) = found.values()
    return _emitted(chosen, catalog, language, targets)


def _emitted(kernel: Kernel, catalog: Catalog, language: str | None, targets: tuple[str, ...]) -> _Made:
    """Returns a kernel's HLO, in another language than the plan's if one is given."""
    from kernelgen.lowering.emission import emit

    if language is not None and isinstance(kernel.spec, KernelSpec):
        kernel, *_ = catalog.kernels(kernel.spec, (language,), targets or ("trn1",))
    # A native call runs on no CPU: the interpreter's lowering of the kernel replaces it.
    kernel = kernel.interpreted
    return _Made(emit(catalog.emitters(kernel), kernel.spec, targets=kernel.targets).hlo, kernel)


def _keywords(params: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in params:
        name, equals, value = text.partition("=")
        try:
            if not equals or not name.isidentifier():
                raise ValueError
            found[name] = json.loads(value)
        except ValueError:
            expected = 'NAME=VALUE with a number, true, false, null or "text"'
            raise KernelgenError(f"--param {text[:80]}: expected {expected}") from None
    return found


def _described(text: str) -> tuple[tuple[int, ...], str]:
    """Returns shape and dtype of an input, given as a file or a description."""
    if text.endswith(".npy"):
        array, dtype = _load(text)
        return array.shape, dtype
    try:
        return ArrayDesc.parse(text).numpy
    except ValueError as error:
        message = str(error).replace("expected a dtype", "expected a .npy file, or a dtype")
        raise KernelgenError(f"--inputs {text}: {message}") from None


def _load(path: str) -> tuple[Array, str]:
    """Returns the array in a .npy file, and the name of the dtype that a kernel gets."""
    import numpy as np

    try:
        array: Array = np.load(path)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"it has elements of type {array.dtype}")
    except (OSError, ValueError) as error:
        raise KernelgenError(f"--inputs {path}: not a .npy file of numbers: {error}") from None
    name = array.dtype.name
    return array, {"float64": "float32", "int64": "int32", "uint64": "uint32"}.get(name, name)


def _arrays(inputs: Sequence[str], parameters: Sequence[tuple[tuple[int, ...], str]], seed: int) -> list[Array]:
    if inputs and len(inputs) != len(parameters):
        raise KernelgenError(f"{len(inputs)} inputs are given, and the kernel has {len(parameters)}")
    from kernelgen.hlo import judge

    found = []
    for i, (shape, dtype) in enumerate(parameters):
        if not inputs or not inputs[i].endswith(".npy"):
            if inputs and _described(inputs[i]) != (shape, dtype):
                raise KernelgenError(f"--inputs {inputs[i]}: input {i} is {dtype}{list(shape)}")
            found.append(judge.random(shape, dtype, seed + i))
            continue
        array, kind = _load(inputs[i])
        if kind != dtype or array.size != _size(shape):
            raise KernelgenError(
                f"--inputs {inputs[i]}: {kind}{list(array.shape)}, and input {i} is {dtype}{list(shape)}"
            )
        found.append(array.astype(dtype).reshape(shape))
    return found


def _size(shape: Sequence[int]) -> int:
    import math

    return math.prod(shape)


def _execute(made: _Made, arrays: Sequence[Array]) -> list[Array]:
    from kernelgen.hlo import execute

    try:
        return execute.run(made.hlo, list(arrays))
    except ValueError as error:
        raise KernelgenError(str(error), exit_code=EXIT_FAILED) from None


def _wanted(
    compare: str,
    made: _Made,
    arrays: Sequence[Array],
    catalog: Catalog,
    targets: tuple[str, ...],
    params: Sequence[str],
) -> list[Array]:
    import numpy as np

    if compare in LANGUAGES:
        if made.kernel is None or not isinstance(made.kernel.spec, KernelSpec):
            raise KernelgenError(f"--compare {compare}: only the kernel of an op has emitters in several languages")
        return _execute(_emitted(made.kernel, catalog, compare, targets), arrays)
    if not _is_file(compare):
        raise KernelgenError(f"--compare {compare}: expected one of {', '.join(LANGUAGES)}, or FILE:FUNCTION")
    from kernelgen.emitters.loading import load_file

    file, _, name = compare.rpartition(":")
    _, function = load_file(Path(file), name)
    try:
        returned = function(*(a.copy() for a in arrays), **_keywords(params))
    except Exception as error:
        raise KernelgenError(f"{compare}: {type(error).__name__}: {error}", exit_code=EXIT_FAILED) from error
    return [np.asarray(r) for r in (returned if isinstance(returned, tuple | list) else (returned,))]


def _compare(names: Sequence[str], results: Sequence[Array], wanted: Sequence[Array], rtol: float, atol: float) -> None:
    from kernelgen.hlo import judge

    if len(results) < len(wanted):
        raise KernelgenError(f"{len(results)} results, and {len(wanted)} to compare with", exit_code=EXIT_FAILED)
    wrong = []
    for name, have, want in zip(names, results, wanted, strict=False):
        found = judge.difference(have, want, rtol, atol)
        if found is None:
            click.echo(f"{name}: equal within rtol {rtol:g}, atol {atol:g}")
        else:
            wrong.append(f"{name}: {found}")
    if wrong:
        raise KernelgenError("\n".join(wrong), exit_code=EXIT_FAILED)


def _shown(array: Array) -> str:
    import numpy as np

    head = f"{array.dtype.name}{list(array.shape)}"
    if not array.size:
        return head
    wide = array.astype(np.float64)
    values = " ".join(f"{v:g}" for v in wide.reshape(-1)[:6])
    more = " …" if array.size > 6 else ""
    return f"{head}, {wide.min():g} to {wide.max():g}, mean {wide.mean():g}: {values}{more}"


def _save(folder: Path, names: Sequence[str], results: Sequence[Array]) -> None:
    import io

    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(names, results, strict=True):
        # NumPy's file format does not support bfloat16 and FP8.
        plain = array if array.dtype.kind in "fiub" else array.astype(np.float32)
        data = io.BytesIO()
        np.save(data, plain)
        path = folder / f"{name}.npy"
        fileio.write_bytes(path.absolute(), data.getvalue())
        click.echo(str(path))
