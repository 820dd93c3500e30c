"""`kernelgen simulate`: runs a program with simulated NeuronCores, or prints the environment for a shell."""

from __future__ import annotations

import mmap
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

import kernelgen
from kernelgen import cache
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.hlo import cpu
from kernelgen.neff import container
from kernelgen.simulator import protocol

LIBRARY = "libnrt.so.1"

_LIBNRT = "GGML_NEURON_LIBNRT"
_MARK = b"NEURON_SIMULATOR_PYTHON"
"""A text that the simulator's libnrt contains and AWS's does not."""

_VERSIONS = re.compile(rb"neuron-kernelgen simulator of NEFF (\d{1,9}), protocol (\d{1,9})")
_KERNELS = "GGML_NEURON_KERNEL_DIR"

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

    If this simulator can run none of the kernels in GGML_NEURON_KERNEL_DIR, that is an error before the program starts. The exit
    status is the program's. Variables of the simulator that are already set keep their values (docs/guides/use-the-simulator.md).
    """
    if env is bool(program):
        raise click.UsageError("name a program after --, or give --env" if not env else "--env takes no program")
    library = find(libnrt, os.environ)
    check_versions(library, os.environ)
    changed = variables(library, os.environ)
    if env:
        click.echo("\n".join(f"export {name}={shlex.quote(value)}" for name, value in changed.items()))
        return
    check_kernels(library, os.environ)
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


@dataclass(frozen=True, slots=True)
class Versions:
    """The formats that a simulator's libnrt supports.

    Attributes:
        neff: the format of simulated NEFFs.
        protocol: version of the protocol between it and its helper, which is kernelgen.
    """

    neff: int
    protocol: int


OURS = Versions(container.SIMULATED_FORMAT, protocol.VERSION)


def versions(libnrt: Path) -> Versions | None:
    """Returns the versions that a simulator's libnrt reports; None if it reports none."""
    with libnrt.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        match = _VERSIONS.search(data)
        return Versions(int(match[1]), int(match[2])) if match else None


def check_versions(libnrt: Path, environment: Mapping[str, str]) -> None:
    """Raises if a libnrt of the simulator belongs to another version of kernelgen.

    Args:
        libnrt: the library.
        environment: may name another kernelgen, whose version is not available here.

    Raises:
        KernelgenError: it belongs to another version.
    """
    if environment.get("NEURON_SIMULATOR_PYTHON"):
        return
    theirs = versions(libnrt)
    if theirs != OURS:
        raise _missing(f"{libnrt} is of another version of kernelgen: {difference(theirs)}")


def difference(theirs: Versions | None) -> str:
    """Returns the differences between a libnrt and this kernelgen as text."""
    if theirs is None:
        return "it does not say which NEFFs it reads, as this kernelgen's does"
    return (
        f"it reads simulated NEFFs of version {theirs.neff} and speaks version {theirs.protocol} of its protocol, this kernelgen "
        f"{OURS.neff} and {OURS.protocol}"
    )


def check_kernels(libnrt: Path, environment: Mapping[str, str]) -> None:
    """Raises if the simulator can run none of the packs that a program would open.

    A program would continue without them: each kernel would be refused, and the CPU would compute. The check does not cover
    kernels embedded in a program, and leaves errors of unreadable files to the program.

    Args:
        libnrt: the simulator's libnrt.
        environment: GGML_NEURON_KERNEL_DIR names the kernels.

    Raises:
        KernelgenError: lists one mistake for each pack.
    """
    theirs = versions(libnrt)
    mistakes = []
    for path in _packs(environment.get(_KERNELS) or ""):
        try:
            head = _first_neff(path)
        except (OSError, KernelgenError, LookupError):
            return
        if not head.simulated:
            mistakes.append(
                Diagnostic(
                    f"{_KERNELS}: the kernels of {path} are for a Neuron device, and the simulator runs none of them",
                    hint="build them with --compiler simulator",
                )
            )
        elif theirs is not None and head.neff_version[1] != theirs.neff:
            mistakes.append(
                Diagnostic(
                    f"{_KERNELS}: the kernels of {path} are simulated NEFFs of version {head.neff_version[1]}, and the simulator "
                    f"({libnrt}) reads {theirs.neff}",
                    hint="build the kernels again with this kernelgen, or the simulator with the kernelgen that built them",
                )
            )
        else:
            return
    if mistakes:
        raise KernelgenError(mistakes)


def _packs(paths: str) -> list[Path]:
    """Returns the packs that the backend finds."""
    found: list[Path] = []
    for path in (Path(part) for part in paths.split(":") if part):
        if path.is_file():
            found.append(path)
        else:
            found += sorted(path.glob("*.kernels.gguf"))
    return found


def _first_neff(path: Path) -> container.Header:
    """Returns the header of a pack's first NEFF: one compiler made all of them.

    Raises:
        OSError, KernelgenError, LookupError: the pack can't be read.
    """
    from kernelgen.bundle import pack

    made = pack.read(path)
    return container.read_header(made.read_neff(0, container.HEADER_SIZE), total=made.neffs[0].size, source=str(path))


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
