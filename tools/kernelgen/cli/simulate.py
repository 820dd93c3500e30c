"""`kernelgen simulate`: runs a program with simulated NeuronCores, or prints the environment for a shell."""

from __future__ import annotations

import mmap
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

import kernelgen
from kernelgen import cache
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.hlo import cpu

LIBRARY = "libnrt.so.1"

_LIBNRT = "GGML_NEURON_LIBNRT"
_MARK = b"NEURON_SIMULATOR_PYTHON"
"""A text that the simulator's libnrt contains and AWS's does not."""

_HOW_TO_GET_IT = (
    "build it in a checkout of neuron-kernelgen, and install it beside kernelgen:\n"
    "      cmake -S backend/simulator -B build/simulator\n"
    "      cmake --build build/simulator --target neuron_simulator\n"
    f"      cmake --install build/simulator --prefix {{prefix}}\n"
    f"    or name it with --libnrt <folder>/{LIBRARY}"
)


@click.command(
    short_help="Run a program with simulated NeuronCores.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--env", "env", is_flag=True, help='Print the variables for a shell: eval "$(kernelgen simulate --env)".')
@click.option(
    "--libnrt",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"The simulator's {LIBRARY}; {_LIBNRT}, or the one beside kernelgen, by default.",
)
@click.argument("program", nargs=-1, metavar="[-- PROGRAM ARGUMENT...]", type=click.UNPROCESSED)
def command(env: bool, libnrt: Path | None, program: tuple[str, ...]) -> None:
    """Run a program with simulated NeuronCores: it loads the simulator's libnrt, which computes on the CPU.

    The exit status is the program's. Variables of the simulator that are already set keep their values
    (docs/guides/use-the-simulator.md).
    """
    if env is bool(program):
        raise click.UsageError("name a program after --, or give --env" if not env else "--env takes no program")
    library = find(libnrt, os.environ)
    changed = variables(library, os.environ)
    if env:
        click.echo("\n".join(f"export {name}={shlex.quote(value)}" for name, value in changed.items()))
        return
    found = shutil.which(program[0])
    if found is None:
        raise KernelgenError(f"there is no program {program[0]}: expected a path, or a name that is on PATH")
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores the signal, and a program would inherit that
    try:
        os.execve(found, program, {**os.environ, **cpu.ignored, **changed})
    except OSError as error:
        raise KernelgenError(f"can't run {found}: {error.strerror or error}") from None


def variables(libnrt: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that make programs load a simulator's libnrt, and libnrt find its helper.

    Args:
        libnrt: the library's absolute path.
        environment: the current variables. Existing variables of the simulator stay.
    """
    found = {_LIBNRT: str(libnrt), "LD_LIBRARY_PATH": _in_front(str(libnrt.parent), environment.get("LD_LIBRARY_PATH"))}
    if not environment.get("NEURON_SIMULATOR_PYTHON"):
        found["NEURON_SIMULATOR_PYTHON"] = sys.executable
        # Another Python must not get the packages of this one.
        if not environment.get("NEURON_SIMULATOR_PATH"):
            found["NEURON_SIMULATOR_PATH"] = str(_package().parent)
    own = cache.own_folder(environment)
    if not environment.get("NEURON_SIMULATOR_CACHE") and own:
        found["NEURON_SIMULATOR_CACHE"] = str(own / "simulator")
    return found


def find(named: Path | None, environment: Mapping[str, str]) -> Path:
    """Returns the absolute path of the simulator's libnrt.

    Args:
        named: its path from the user.
        environment: may name it, if the user does not; otherwise kernelgen's own places are searched.

    Raises:
        KernelgenError: it is missing, or is another libnrt; the message has the remedy.
    """
    variable = environment.get(_LIBNRT)
    if named is not None or variable:
        by, path = ("--libnrt", named) if named is not None else (_LIBNRT, Path(str(variable)))
        if not path.is_file():
            raise _missing(f"{by}: there is no file {path}")
        if not _is_simulator(path):
            raise _missing(f"{by}: {path} is not the simulator's libnrt")
        return path.absolute()
    for path in places():
        if path.is_file() and _is_simulator(path):
            return path
    raise _missing(f"there is no {LIBRARY} of the simulator beside kernelgen")


def places() -> Iterator[Path]:
    """Yields the places to search for the simulator's libnrt: beside an installed kernelgen, and in a checkout's builds."""
    package = _package()
    # CMake installs kernelgen and libnrt under one prefix: <prefix>/share/neuron-kernelgen/tools/kernelgen.
    prefixes = [Path(sys.prefix)]
    if package.parent.parent.name == "neuron-kernelgen" and package.parents[2].name == "share":
        prefixes.insert(0, package.parents[3])
    for prefix in prefixes:
        for folder in (prefix / "lib", prefix / "lib64", *sorted((prefix / "lib").glob("*-linux-gnu*"))):
            yield folder / "neuron-simulator" / LIBRARY
    # For Bazel's tests it is in the second; under Bazel the package is a link into the checkout.
    for root in dict.fromkeys((package.parents[1], package.resolve().parents[1])):
        for build in ("build/simulator", "backend/simulator", "bazel-bin/backend/simulator"):
            yield root / build / LIBRARY


def _package() -> Path:
    return Path(kernelgen.__file__).absolute().parent


def _is_simulator(path: Path) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(_MARK) >= 0
    except (OSError, ValueError):  # ValueError: it is empty
        return False


def _missing(message: str) -> KernelgenError:
    return KernelgenError(Diagnostic(message, hint=_HOW_TO_GET_IT.format(prefix=shlex.quote(sys.prefix))))


def _in_front(folder: str, path: str | None) -> str:
    """Returns a search path with a folder in front, without duplicates of it."""
    return ":".join([folder, *(part for part in (path or "").split(":") if part and part != folder)])
