"""`kernelgen doctor`: reports the installed requirements of kernelgen, and how to install missing ones. It changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import click

from kernelgen.cache import own_folder
from kernelgen.device.libnrt import NEURON_RUNTIME
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError
from kernelgen.hlo import cpu

MINIMUM_PYTHON = (3, 11)

DEPENDENCIES = MappingProxyType(
    {
        "aiohttp": "3.11",
        "click": "8.1",
        "fsspec": "2026.1",
        "gguf": "0.17",
        "jax": "0.10",
        "jaxlib": "0.10",
        "jinja2": "3.1",
        "msgspec": "0.19",
        "ninja": "1.11",
        "numpy": "2.2",
        "protobuf": "5",
        "pyyaml": "6",
        "rich": "13",
    }
)
"""Each Python dependency and its oldest supported version, as in requirements.in, which an installed kernelgen lacks."""

NEURON_DRIVER = Path("/sys/module/neuron/version")


@dataclass(frozen=True, slots=True)
class DoctorLine:
    """One line of the report.

    Attributes:
        name: the requirement.
        found: its version or path, or None if it is missing or unusable.
        needed: whether `kernelgen build` fails without it.
        remedy: how to install it.
    """

    name: str
    found: str | None
    needed: bool
    remedy: str

    @property
    def status(self) -> str:
        return "ok" if self.found is not None else "MISSING" if self.needed else "absent"


@click.command(short_help="Show what is installed, what is missing and how to get it.")
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--device", is_flag=True, help="Check the first NeuronCore, or the simulated one, instead.")
@click.option(
    "--libnrt",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"With --device: the runtime; GGML_NEURON_LIBNRT, {NEURON_RUNTIME} or the simulator's by default.",
)
@click.option(
    "--bundle",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="With --device: the kernels, as --device built them before or elsewhere; by default they are built now.",
)
def command(output_format: str, device: bool, libnrt: Path | None, bundle: Path | None) -> int:
    """Show what is installed, what is missing and how to get it.

    Exits with 1 if something is MISSING: kernels can't be built without it. Only some uses need things that are absent.

    With --device it builds a small kernel of each family, runs them on the first core that this process gets, and reports what
    works (docs/reference/device-checks.md); it exits with 1 when a check FAILED.
    """
    if device:
        from kernelgen.cli import doctor_device

        return doctor_device.run(output_format, libnrt, bundle)
    if libnrt or bundle:
        raise click.UsageError("--libnrt and --bundle are for --device")
    checks = [check for section in (_python, _compilers, _build_tools, _machine, _devices) for check in section()]
    missing = [c for c in checks if c.needed and c.found is None]
    if output_format == "json":
        click.echo(json.dumps([{**asdict(c), "status": c.status} for c in checks], indent=1))
        return EXIT_FAILED if missing else EXIT_OK
    width = max(len(c.name) for c in checks)
    for c in checks:
        click.echo(f"{c.status:7}  {c.name:{width}}  {c.found or c.remedy}".rstrip())
    click.echo(f"\nmissing: {', '.join(c.name for c in missing)}" if missing else "\nkernelgen can build kernels here")
    return EXIT_FAILED if missing else EXIT_OK


def _python() -> Iterator[DoctorLine]:
    wanted = ".".join(map(str, MINIMUM_PYTHON))
    version = platform.python_version() if sys.version_info >= MINIMUM_PYTHON else None
    yield DoctorLine("python", version, True, f"Python {wanted} or later; this is {platform.python_version()}")
    for name, minimum in DEPENDENCIES.items():
        remedy = f"pip install '{name}>={minimum}', or everything with pip install -r requirements.txt"
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield DoctorLine(name, None, True, remedy)
            continue
        if _version(installed) < _version(minimum):
            yield DoctorLine(name, None, True, f"{installed} is too old: {remedy}")
        else:
            yield DoctorLine(name, installed, True, remedy)
    has_venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    remedy = "Bazel builds make a virtual environment; on Debian: apt-get install python3-venv"
    yield DoctorLine("python venv", "yes" if has_venv else None, False, remedy)
    yield DoctorLine(
        "XLA for the CPU",
        _xla(),
        True,
        "pip install jaxlib; 'python -c \"import jax; jax.devices()\"' shows why it fails",
    )


def _xla() -> str | None:
    # In a separate process: a broken jaxlib may abort, and the doctor must survive that.
    code = "import jax; d = jax.devices('cpu'); print(len(d), d[0].device_kind)"
    text = _output([sys.executable, "-c", code], {"JAX_PLATFORMS": "cpu"})
    return f"{text.split(maxsplit=1)[0]} device ({text.split(maxsplit=1)[1]})" if text and " " in text else None


def _neuronx_cc() -> DoctorLine:
    where = "not on PATH and NEURON_SDK is not set"
    version = None
    try:
        # Needs packages that may be missing.
        from kernelgen.compilers import choice
        from kernelgen.compilers.neuronx_cc import NeuronxCC

        if path := choice.find_sdk():
            version = NeuronxCC.open(path).identity
    except ImportError:
        where = "looked for once the packages above are installed"
    except KernelgenError as error:
        where = error.diagnostics[0].message
    remedy = f"{where}; builds use the simulator. AWS's documentation explains how to install it; see docs/reference/compilers.md"
    return DoctorLine("neuronx-cc", version, False, remedy)


def _compilers() -> Iterator[DoctorLine]:
    yield _neuronx_cc()
    name = next((n for n in (os.environ.get("CXX"), "c++", "g++", "clang++") if n and shutil.which(n)), None)
    remedy = "needed to link bundles into programs; on Debian: apt-get install g++"
    yield DoctorLine("C++ compiler", _first_line([name, "--version"]) if name else None, False, remedy)


def _build_tools() -> Iterator[DoctorLine]:
    yield DoctorLine("bazel", _tool("bazel", "bazelisk"), False, "needed for Bazel builds only; ./bazelw gets it")
    yield DoctorLine(
        "cmake", _tool("cmake"), False, "needed for CMake builds only: pip install cmake, or apt-get install cmake"
    )
    yield DoctorLine(
        "ninja",
        _tool("ninja"),
        False,
        "needed for CMake builds only: pip install ninja, or apt-get install ninja-build",
    )


def _machine() -> Iterator[DoctorLine]:
    folder = own_folder(os.environ)
    parent = next((p for p in (folder, *folder.parents) if p.exists()), folder) if folder else None
    is_writable = parent is not None and os.access(parent, os.W_OK | os.X_OK) and parent.is_dir()
    yield DoctorLine(
        "cache folder",
        str(folder) if is_writable else None,
        False,
        f"{f'{folder} can not be written' if folder else 'the user has no home folder'}, so builds share neither NEFFs nor a "
        "Python environment; set NEURON_KERNELGEN_CACHE to a folder that can be written",
    )
    if cpu.ignored:
        yield DoctorLine("variables of JAX", f"ignored: {', '.join(sorted(cpu.ignored))}", False, "")


def _devices() -> Iterator[DoctorLine]:
    devices = sorted(Path("/dev").glob("neuron[0-9]*"))
    remedy = "only needed to run kernels on a NeuronCore, never to build them"
    yield DoctorLine("Neuron devices", f"{len(devices)} (/dev/neuron*)" if devices else None, False, remedy)
    driver = NEURON_DRIVER.read_text().strip() if NEURON_DRIVER.is_file() else None
    yield DoctorLine("Neuron driver", driver, False, f"{remedy}: AWS's package aws-neuronx-dkms")
    runtime = str(NEURON_RUNTIME) if NEURON_RUNTIME.is_file() else None
    yield DoctorLine("libnrt", runtime, False, f"{remedy}: AWS's package aws-neuronx-runtime-lib")
    yield _simulator()


def _simulator() -> DoctorLine:
    found, remedy = None, "needed to run kernels without a NeuronCore only"
    try:
        from kernelgen.cli import simulate

        found = str(simulate.find(None, os.environ))
    except ImportError:
        remedy = "looked for once the packages above are installed"
    except KernelgenError as error:
        remedy += f": {error.diagnostics[0].message}; docs/guides/use-the-simulator.md explains how to build it"
    return DoctorLine("simulator's libnrt", found, False, remedy)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _tool(*names: str) -> str | None:
    path = next((p for p in map(shutil.which, names) if p), None)
    return _first_line([path, "--version"]) if path else None


def _first_line(command: list[str]) -> str | None:
    text = _output(command)
    return text.splitlines()[0].strip() if text else None


def _output(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """Returns a command's output, or None if it fails or hangs."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
