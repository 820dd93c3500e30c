"""Kernels by NKI's compiler: the HLO calls the compiler's output for a kernel instead of containing the kernel's operations.

The call's target is `AwsNeuronCustomNativeKernel`, and the toolchain writes its configuration. Up to NKI 0.3 the configuration is
complete; from 0.4 on it names a file, which neuronx-cc reads. The call identifies that file by its content
(`kernelgen.compilers.nki_calls`).

The compiler runs in this process (`kernelgen.compilers.nki_driver`), or has run in another Python that wrote a record of its
output, as in Bazel.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelgen.compilers import nki_driver
from kernelgen.compilers.nki_driver import Toolchain
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.hlo import custom_calls
from kernelgen.languages import Call, CallResults

_CHOSEN: list[Toolchain] = []
_RECORDS: list[tuple[Path, Mapping[str, Any]]] = []
_KEEPING: list[list[Mapping[str, Any]]] = []


@contextlib.contextmanager
def using(toolchain: Toolchain) -> Iterator[None]:
    """Makes a toolchain the current one until the block ends."""
    _CHOSEN.append(toolchain)
    try:
        yield
    finally:
        _CHOSEN.remove(toolchain)


@contextlib.contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Uses a record of `nki_driver` for the kernel that the block emits."""
    with known(file, json.loads(file.read_bytes())):  # read here: the record is not data of the kernel's file
        yield


@contextlib.contextmanager
def known(file: Path, record: Mapping[str, Any]) -> Iterator[None]:
    """Uses a record for the kernel that the block emits; the file is for messages."""
    _RECORDS.append((file, record))
    try:
        yield
    finally:
        _RECORDS.pop()


@contextlib.contextmanager
def keeping() -> Iterator[list[Mapping[str, Any]]]:
    """Yields the records of the block's compiles."""
    records: list[Mapping[str, Any]] = []
    _KEEPING.append(records)
    try:
        yield records
    finally:
        _KEEPING.pop()


def toolchain() -> Toolchain:
    """Returns the toolchain of this machine.

    Raises:
        KernelgenError: none is installed.
    """
    found = _CHOSEN[-1] if _CHOSEN else nki_driver.installed()
    if found is None:
        raise KernelgenError(
            "the lowering 'native' needs NKI's own compiler, which is not installed; use 'lowering: interpreted'",
            exit_code=EXIT_FAILED,
        )
    return found


def called(function: Callable[..., Any], call: Call) -> CallResults:
    """Returns the results of a call to the toolchain's output for a kernel, under a JAX trace.

    Raises:
        KernelgenError: there is no toolchain, it refuses the kernel, the kernel has several targets, or a record belongs to
            another kernel.
    """
    import numpy as np
    from jax.experimental import xla_metadata

    from kernelgen.hlo.cpu import import_jax

    jax: Any = import_jax()
    metadata: Any = xla_metadata
    tools = None if _RECORDS else toolchain()
    if len(call.targets) != 1:
        raise KernelgenError(f"the lowering 'native' is for one target, not for {len(call.targets)}")
    given = [a for a in call.arguments if a is not None]
    made = _recorded(call, given) if tools is None else _compiled(tools, function, call, given)
    shapes = [jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype)) for shape, dtype in made["results"]]
    aliases = {int(result): argument for result, argument in made["aliases"].items()}
    constants = [
        np.frombuffer(base64.b64decode(content), np.dtype(dtype)).reshape(shape)
        for dtype, shape, content in made["constants"]
    ]
    function_of_arrays = jax.ffi.ffi_call(
        custom_calls.TARGET,
        shapes,
        custom_call_api_version=2,
        legacy_backend_config=made["text"],
        input_output_aliases=aliases,
    )
    attributes = {custom_calls.ARTIFACT: made["file"]} if made["file"] else {}
    attributes |= {custom_calls.COLLECTIVES: "1"} if made["collectives"] else {}
    with metadata.set_xla_metadata(**attributes):
        results = function_of_arrays(*given, *constants)
    updated = {i: results[k] for i, k in aliases.items()}
    kept = tuple(r for k, r in enumerate(results) if k not in aliases.values())
    return CallResults(kept, updated, {"native": {"toolchain": made["toolchain"], "target": call.targets[0]}})


def _compiled(tools: Toolchain, function: Callable[..., Any], call: Call, given: list[Any]) -> Mapping[str, Any]:
    import numpy as np

    arrays = [np.zeros(a.shape, a.dtype) for a in given]
    try:
        made = nki_driver.record(tools, function, arrays, call.keywords, call.grid, call.targets[0])
    except nki_driver.NkiFailure as error:
        raise KernelgenError(str(error), exit_code=EXIT_FAILED) from error
    for records in _KEEPING:
        records.append(made)
    return made


def _recorded(call: Call, given: list[Any]) -> Mapping[str, Any]:
    """Returns the record, after checking that it matches the request."""
    file, made = _RECORDS[-1]
    wanted = nki_driver.asked(given, call.keywords, call.grid, call.targets[0])
    if made["asked"] != wanted:
        differing = sorted(key for key in wanted if made["asked"].get(key) != wanted[key])
        what = "; ".join(f"{key} is {made['asked'].get(key)}, not {wanted[key]}" for key in differing)
        raise KernelgenError(Diagnostic(f"{file} was made by NKI's compiler from another kernel: {what}"))
    return made
