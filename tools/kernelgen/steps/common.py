"""Common parts of several steps: the depfile, the version of JAX and warnings."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from kernelgen import fileio
from kernelgen.errors import KernelgenError
from kernelgen.steps.protocol import Arguments, maybe

_TOOLS = Path(__file__).parents[2]


def check_jax(arguments: Arguments) -> None:
    """Raises if the version of JAX is not the plan's (`--jax`).

    Raises:
        KernelgenError: the version differs.
    """
    planned = maybe(arguments, "jax")
    if planned and version("jax") != planned:
        raise KernelgenError(
            f"the build is for jax {planned}, and {sys.prefix} has jax {version('jax')}: configure the build again"
        )


def write_depfile(
    arguments: Arguments, target: str, sources: Sequence[Path] = (), needed: Callable[[Path], bool] = lambda _: True
) -> None:
    """Writes the `--depfile`, if given: `target` depends on kernelgen's imported modules, and on `sources`.

    This process may have imported modules for other steps: `needed` decides for each module, by its path relative to the folder of
    kernelgen's package.
    """
    path = maybe(arguments, "depfile")
    if path is None:
        return
    # Emitters of other kernels may have been imported too; `sources` lists the relevant ones.
    names = [name for name in sys.modules if name.partition(".")[0] in ("kernelgen", "nki_interpreter")]
    own = [sys.modules[name] for name in names if not name.startswith("kernelgen.kernels")]
    modules = [m.__file__ for m in own if m.__file__ and needed(_in_tools(m.__file__))]
    files = {_resolved(file) for file in (str(Path(__file__).with_name("worker.py")), *modules, *map(str, sources))}
    rule = " \\\n  ".join([f"{_makefile(target)}:", *map(_makefile, sorted(files))])
    fileio.write_bytes(path, f"{rule}\n".encode())


def imported_elsewhere() -> Iterator[Path]:
    """Yields the imported files of the user that are not in a kernel library: neither kernelgen's nor Python's nor installed."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and _is_elsewhere(name, file):
            yield Path(file)


# Cached: a process has a thousand modules, and runs hundreds of steps.
@functools.cache
def _is_elsewhere(name: str, file: str) -> bool:
    path, stdlib = Path(file), sysconfig.get_path("stdlib")
    is_installed = path.is_relative_to(stdlib) or bool({"site-packages", "dist-packages"} & {*path.parts})
    is_own = name.startswith(("kernelgen.", "_kernelgen_library_")) or path.is_relative_to(_TOOLS)
    return not (is_installed or is_own)


@functools.cache
def _in_tools(file: str) -> Path:
    return Path(file).relative_to(_TOOLS)


@functools.cache
def _resolved(file: str) -> str:
    return str(Path(file).resolve())


def _makefile(path: str) -> str:
    return path.replace("$", "$$").replace("#", "\\#").replace(" ", "\\ ")


def warn(texts: Iterable[str]) -> None:
    for text in dict.fromkeys(texts):
        print(f"warning: {text}")
