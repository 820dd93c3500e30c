"""Kernels by NKI's own compiler: the HLO calls what that compiler made of a kernel, in place of doing what the kernel does.

What is called is the target `AwsNeuronCustomNativeKernel`, whose configuration the toolchain writes. Up to NKI 0.3 the
configuration is all there is; from 0.4 on it names a file, which neuronx-cc reads. The call holds that file by its content
(`kernelgen.hlo.native_calls`).

Nothing here was run with a real toolchain. `Toolchain` is the seam; tests stand a double in.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kernelgen.errors import EXIT_FAILED, KernelgenError, described
from kernelgen.hlo import native_calls
from kernelgen.languages.protocol import Call, Returned


@dataclass(frozen=True, slots=True)
class Config:
    """What a toolchain makes of one kernel.

    Attributes:
        text: the call's configuration.
        results: shape and NumPy dtype name of each result.
        aliases: result number by the number of the tensor argument whose memory it is written to.
        constants: arrays that the call is given after the kernel's arguments.
        collectives: whether the kernel communicates with others.
        file: the file that the configuration names, if it does.
    """

    text: str
    results: tuple[tuple[tuple[int, ...], str], ...]
    aliases: Mapping[int, int] = field(default_factory=dict)
    constants: tuple[Any, ...] = ()
    collectives: bool = False
    file: Path | None = None


class Toolchain(Protocol):
    """NKI's own compiler."""

    @property
    def name(self) -> str:
        """What it is, with its version."""

    def config(
        self,
        function: Callable[..., Any],
        arrays: Sequence[Any],
        keywords: Mapping[str, Any],
        grid: tuple[int, ...],
        target: str,
        folder: Path,
    ) -> Config:
        """Compiles a kernel.

        Args:
            function: it.
            arrays: NumPy arrays of the shapes and dtypes of its tensor arguments; their content means nothing.
            keywords: its other arguments.
            grid: the programs in each dimension; empty for none.
            target: neuronx-cc's name of the device.
            folder: where files may be left until the call returns.
        """


_CHOSEN: list[Toolchain] = []


@contextlib.contextmanager
def using(toolchain: Toolchain) -> Iterator[None]:
    """Makes a toolchain the one that is used while the block lasts."""
    _CHOSEN.append(toolchain)
    try:
        yield
    finally:
        _CHOSEN.remove(toolchain)


def toolchain() -> Toolchain:
    """Returns the toolchain of this machine.

    Raises:
        KernelgenError: none is installed.
    """
    if _CHOSEN:
        return _CHOSEN[-1]
    from kernelgen.languages.nki import toolchains

    found = toolchains.installed()
    if found is None:
        raise KernelgenError(
            "the lowering 'native' needs NKI's own compiler, which is not installed; use 'lowering: interpreted'",
            exit_code=EXIT_FAILED,
        )
    return found


def called(function: Callable[..., Any], call: Call) -> Returned:
    """Returns the results of a call of what the toolchain makes of a kernel, under a JAX trace.

    Raises:
        KernelgenError: there is no toolchain, it refuses the kernel, or the kernel is not for one target.
    """
    import numpy as np
    from jax.experimental import xla_metadata

    from kernelgen.hlo.cpu import import_jax

    jax: Any = import_jax()
    metadata: Any = xla_metadata
    tools = toolchain()
    if len(call.targets) != 1:
        raise KernelgenError(f"the lowering 'native' is for one target, not for {len(call.targets)}")
    given = [a for a in call.arguments if a is not None]
    arrays = [np.zeros(a.shape, a.dtype) for a in given]
    with tempfile.TemporaryDirectory(prefix="kernelgen-nki-") as folder:
        try:
            made = tools.config(function, arrays, call.keywords, call.grid, call.targets[0], Path(folder))
        except KernelgenError:
            raise
        except Exception as error:
            raise KernelgenError(f"{tools.name}: {described(error)}", exit_code=EXIT_FAILED) from error
        text, artifact = (made.text, "") if made.file is None else native_calls.by_content(made.text, made.file)
    shapes = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in made.results]
    function_of_arrays = jax.ffi.ffi_call(
        native_calls.TARGET,
        shapes,
        custom_call_api_version=2,
        legacy_backend_config=text,
        input_output_aliases=dict(made.aliases),
    )
    attributes = {native_calls.ARTIFACT: artifact} if artifact else {}
    attributes |= {native_calls.COLLECTIVES: "1"} if made.collectives else {}
    with metadata.set_xla_metadata(**attributes):
        results = function_of_arrays(*given, *made.constants)
    updated = {i: results[k] for i, k in made.aliases.items()}
    kept = tuple(r for k, r in enumerate(results) if k not in made.aliases.values())
    notes = {"native": {"toolchain": tools.name, "target": call.targets[0]}}
    return Returned(kept, updated, notes)
