"""NKI's own compiler where it is installed, in both of its forms. Neither was ever run here: it is written from public sources.

`kernelgen.languages.nki.native` has the interface, and a double of it is what tests run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.languages.nki.native import Config, Toolchain
from kernelgen.targets import TARGETS

GENERATIONS: Mapping[int, str] = {2: "gen2", 3: "gen3", 4: "gen4"}
"""What NKI calls the devices, by the version of their NeuronCore."""


def installed() -> Toolchain | None:
    """Returns the toolchain of this machine, the newest form first; None when there is none."""
    for module, made in (
        ("nki.framework.compiled", _Compiled),
        ("nki.compile", _Dumped),
        ("neuronxcc.nki.compile", _Dumped),
    ):
        try:
            return made(importlib.import_module(module))
        except ImportError:
            continue
    return None


def _named(module: Any) -> str:
    package = "nki" if module.__name__.startswith("nki") else "neuronx-cc"
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _bound(function: Callable[..., Any], arrays: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    arguments = inspect.signature(getattr(function, "func", function)).bind(*arrays, **keywords)
    arguments.apply_defaults()
    return dict(arguments.arguments)


class _Dumped:
    """NKI up to 0.3: a kernel's configuration is a text that holds all of it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def name(self) -> str:
        return _named(self._module)

    def config(
        self,
        function: Callable[..., Any],
        arrays: Sequence[Any],
        keywords: Mapping[str, Any],
        grid: tuple[int, ...],
        target: str,
        folder: Path,
    ) -> Config:
        kernel: Any = function[grid] if grid else function  # type: ignore[index]
        with kernel.bind_arguments(**_bound(function, arrays, keywords)) as bound:
            made = kernel.dump_config_with_boundargs(bound)
        return Config(
            made.dumped_config,
            tuple((tuple(shape), str(dtype)) for dtype, shape in made.return_types),
            dict(made.operand_output_aliases or {}),
            tuple(made.constant_values),
            bool(made.has_collectives),
        )


class _Compiled:
    """NKI from 0.4 on: a kernel's configuration names a file, which the compiler leaves in a folder."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def name(self) -> str:
        return _named(self._module)

    def config(
        self,
        function: Callable[..., Any],
        arrays: Sequence[Any],
        keywords: Mapping[str, Any],
        grid: tuple[int, ...],
        target: str,
        folder: Path,
    ) -> Config:
        driver = importlib.import_module("nki.compiler.ncc_driver")
        options = driver.CompileOptions(
            target=GENERATIONS[TARGETS[target].neuron_core],
            lnc=grid[0] if grid else 1,
            artifacts_dir=str(folder),
            output_path=str(folder / "kernel.neff"),
        )
        inputs = _bound(function, arrays, keywords)
        made = self._module.compile_kernel_to_nir(function, inputs=inputs, compile_opts=options, enable_cache=False)
        config = made.build_config()
        text = config.backend_config_b64
        return Config(
            text,
            tuple((tuple(spec.shape), str(spec.dtype)) for spec in config.output_specs),
            dict(config.operand_output_aliases or {}),
            (),
            bool(config.has_collectives),
            _file(text, folder),
        )


def _file(text: str, folder: Path) -> Path:
    """Returns the file of a folder that a configuration in base64 names."""
    import base64

    plain = base64.b64decode(text)
    found = [file for file in sorted(folder.rglob("*")) if file.is_file() and str(file).encode() in plain]
    if len(found) != 1:
        raise KernelgenError(
            f"the configuration of a native kernel names {len(found)} files, not one", exit_code=EXIT_FAILED
        )
    return found[0]
