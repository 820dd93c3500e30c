"""Runs NKI's own compiler on one kernel, and writes what it made of it.

    python3 native_driver.py --identity=NAME --emitter=FILE.py --call=JSON --target=TARGET --output=FILE

In Bazel this file is an input of every native kernel, and is run by the Python that has NKI, not by kernelgen's own: it needs
Python 3.8, NumPy and NKI, and nothing of kernelgen. `kernelgen build` and CMake call `record` in their own process.

What is written is JSON (`record`): it holds the file that the compiler leaves by its content, and no path.

Neither form of the compiler was ever run here: they are called as public sources have it. `Toolchain` is the seam; tests stand a
double in.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

GENERATIONS: Mapping[str, str] = {"trn1": "gen2", "trn1n": "gen2", "inf2": "gen2", "trn2": "gen3", "trn3": "gen4"}
"""What NKI calls the devices, by neuronx-cc's name of the target."""

FORMS = (("nki.framework.compiled", "compiled"), ("nki.compile", "dumped"), ("neuronxcc.nki.compile", "dumped"))
"""The modules that NKI's compiler is in, the newest first, and which of its forms each has."""


class Failure(Exception):
    """The compiler is absent, refuses the kernel, or leaves what can't be used."""


@dataclass(frozen=True)
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


def installed() -> Toolchain | None:
    """Returns the toolchain of this Python, the newest form first; None when there is none."""
    for module, form in FORMS:
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        return _Compiled(found) if form == "compiled" else _Dumped(found)
    return None


def asked(arrays: Sequence[Any], keywords: Mapping[str, Any], grid: Sequence[int], target: str) -> dict[str, Any]:
    """Returns what a compiler is asked for, as JSON has it.

    Args:
        arrays: the kernel's tensor arguments, of which shape and dtype count.
        keywords: its other arguments.
        grid: the programs in each dimension.
        target: neuronx-cc's name of the device.
    """
    made: dict[str, Any] = json.loads(
        json.dumps(
            {
                "arrays": [[str(a.dtype), list(a.shape)] for a in arrays],
                "keywords": dict(keywords),
                "grid": list(grid),
                "target": target,
            }
        )
    )
    return made


def record(
    toolchain: Toolchain,
    function: Callable[..., Any],
    arrays: Sequence[Any],
    keywords: Mapping[str, Any],
    grid: tuple[int, ...],
    target: str,
) -> dict[str, Any]:
    """Returns what a toolchain makes of a kernel: values that JSON has, without a path in them.

    Args:
        toolchain: it.
        function: the kernel.
        arrays: NumPy arrays of the shapes and dtypes of its tensor arguments.
        keywords: its other arguments.
        grid: the programs in each dimension; empty for none.
        target: neuronx-cc's name of the device.

    Returns:
        `asked`, the `toolchain`'s name, and the fields of `Config`: `text` names its file as `sha256:<digest>`, and `file` is that
        file's bytes in base64, empty where there is none; an array of `constants` is its dtype, shape, and bytes in base64.

    Raises:
        Failure: the toolchain fails.
    """
    with tempfile.TemporaryDirectory(prefix="kernelgen-nki-") as folder:
        try:
            with _programs(Path(folder)):
                made = toolchain.config(function, arrays, keywords, grid, target, Path(folder))
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"{toolchain.name}: {type(error).__name__}: {error}") from error
        content = None if made.file is None else made.file.read_bytes()
        text = made.text if content is None else renamed(made.text, str(made.file), content_name(content))
    return {
        "asked": asked(arrays, keywords, grid, target),
        "toolchain": toolchain.name,
        "text": text,
        "results": [[list(shape), dtype] for shape, dtype in made.results],
        "aliases": {str(result): argument for result, argument in made.aliases.items()},
        "constants": [[str(a.dtype), list(a.shape), _coded(a.tobytes())] for a in made.constants],
        "collectives": made.collectives,
        "file": "" if content is None else _coded(content),
    }


def content_name(content: bytes) -> str:
    """Returns how a file is named by its content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def renamed(text: str, old: str, new: str) -> str:
    """Returns a configuration, which is in base64 or plain, with another name of a file.

    Raises:
        Failure: it does not have the old name.
    """
    try:
        plain, coded = base64.b64decode(text, validate=True), True
    except ValueError:
        plain, coded = text.encode(), False
    if old.encode() not in plain:
        raise Failure(f"the configuration of a native kernel does not name {old}")
    plain = plain.replace(old.encode(), new.encode())
    return _coded(plain) if coded else plain.decode()


def _coded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@contextlib.contextmanager
def _programs(folder: Path) -> Iterator[None]:
    """Lets a compiler find programs and a home, which a kernel's file does not see while it is imported."""
    before = dict(os.environ)
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    os.environ.update({"PATH": path, "HOME": str(folder), "TMPDIR": str(folder)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- NKI's compiler in both of its forms ------------------------------------------------------------------------------------


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
        kernel: Any = function
        kernel = kernel[grid] if grid else kernel
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
            target=GENERATIONS[target],
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
    plain = base64.b64decode(text)
    found = [file for file in sorted(folder.rglob("*")) if file.is_file() and str(file).encode() in plain]
    if len(found) != 1:
        raise Failure(f"the configuration of a native kernel names {len(found)} files, not one")
    return found[0]


# --- as a program -----------------------------------------------------------------------------------------------------------


def _array(text: str) -> Any:
    """Returns an array of zeros as a kernel's spec has it: `float32[128,8]`."""
    import numpy as np

    dtype, _, shape = text.rstrip("]").partition("[")
    with contextlib.suppress(ImportError):  # bfloat16 and floats of 8 bits
        importlib.import_module("ml_dtypes")
    return np.zeros([int(n) for n in shape.split(",") if n], np.dtype(dtype))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _function(file: Path, name: str) -> Callable[..., Any]:
    """Imports a file as a module of a package, so that it may import files beside it, and returns one of its functions."""
    sys.dont_write_bytecode = True
    package = types.ModuleType("kernelgen_native_kernels")
    package.__path__ = [str(file.parent)]
    sys.modules[package.__name__] = package
    try:
        module = importlib.import_module(f"{package.__name__}.{file.stem}")
    except BaseException as error:  # SystemExit, too: the code is anybody's
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Failure(f"{file}: can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Failure(f"{file} has no function '{name}'")
    made: Callable[..., Any] = function
    return made


def _compile(args: argparse.Namespace) -> None:
    toolchain = installed()
    found = toolchain.name if toolchain else "no NKI"
    if toolchain is None or found != args.identity:
        # The kernel would be stored under the name of a compiler that did not make it.
        raise Failure(f"the build is for {args.identity}, and this machine has {found} ({sys.executable})")
    call = json.loads(args.call)
    os.environ.clear()
    os.environ.update(call["env"])
    function = _function(args.emitter.absolute(), call["function"])
    arrays = [_array(text) for text in call["arrays"]]
    keywords = {name: _tuples(value) for name, value in call["keywords"].items()}
    made = record(toolchain, function, arrays, keywords, tuple(call["grid"]), args.target)
    temporary = args.output.with_name(f".{args.output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(made, sort_keys=True, separators=(",", ":")))
        temporary.replace(args.output)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def main(argv: Sequence[str]) -> int:
    """Compiles one kernel, or with `--which` prints the toolchain's name, nothing where there is none; returns the exit status."""
    parser = argparse.ArgumentParser(description="Has NKI's own compiler compile one kernel.", allow_abbrev=False)
    parser.add_argument("--which", action="store_true", help="print which NKI this Python has")
    parser.add_argument("--identity", help="what the compiler must be: its name and version")
    parser.add_argument("--emitter", type=Path, help="the kernel's file")
    parser.add_argument("--call", help="JSON: function, arrays, keywords, grid and env")
    parser.add_argument("--target", choices=sorted(GENERATIONS), help="neuronx-cc's name of the device")
    parser.add_argument("--output", type=Path, help="the JSON to write")
    args = parser.parse_args(argv)
    if args.which:
        toolchain = installed()
        print(toolchain.name if toolchain else "")
        return 0
    absent = [name for name in ("identity", "emitter", "call", "target", "output") if getattr(args, name) is None]
    if absent:
        parser.error("the following arguments are required: " + ", ".join(f"--{name}" for name in absent))
    try:
        _compile(args)
    except (Failure, OSError) as error:
        print(f"error: {args.emitter}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
