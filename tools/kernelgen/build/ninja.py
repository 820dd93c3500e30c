"""Builds a plan with ninja: `kernelgen build` runs this.

Everything between the manifests and the bundles is in one folder, `<output>/.kernelgen`: `build.ninja`, and the folders of
`kernelgen.build.steps`. ninja keeps there what is up to date: a step runs again when its command, an argument or a file that it
read changes, and an HLO that stays the same compiles nothing. Steps run in the servers of `kernelgen.build.ondemand`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen import fileio
from kernelgen.build import ondemand
from kernelgen.build.steps import Build, argument_files, neff_of, server_files, steps_of
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.neff import provenance
from kernelgen.plan import Plan
from kernelgen.spec.filenames import STATE

SERVERS = Path("workers")
"""The folder of the servers, in the build's folder."""

_PASSED = re.compile(
    "HOME|PATH|LD_LIBRARY_PATH|PYTHONPATH|TERM|AWS_.*|AZURE_.*|FSSPEC_.*|GOOGLE_.*|(?i:[a-z]+_proxy)|SSL_CERT_.*|NETRC"
)
"""Environment variables of the steps: those that find programs, and those that a shared cache needs. Results depend on no other."""


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The outcome of a build.

    Attributes:
        is_complete: whether everything was built.
        failed: `Neff.id` of each NEFF that could not be made, or whose HLO could not.
        unwritten: the id of each bundle that could not be written.
        compiled: number of NEFFs that this build compiled.
        cached: number of NEFFs that it took from a cache.
        up_to_date: number of NEFFs that were there.
    """

    is_complete: bool
    failed: frozenset[str]
    unwritten: frozenset[str]
    compiled: int
    cached: int
    up_to_date: int


def build(
    plan: Plan,
    libraries: Sequence[Library],
    settings: Build,
    output: Path,
    say: Callable[[str], None] | None,
    only: frozenset[str] | None = None,
) -> BuildResult:
    """Builds a plan's kernels and bundles; a kernel that fails stops no other.

    Args:
        plan: the plan.
        libraries: every kernel library that it names.
        settings: the settings.
        output: the output folder.
        say: receives ninja's lines; None prints them to standard error, on a terminal with one line for the progress.
        only: `Kernel.id` of the kernels to build, without bundles; None for everything.

    Raises:
        KernelgenError: another build is at work in the folder.
        OSError: the folder can't be written.
    """
    folder = output / STATE
    neffs = [neff for neff in plan.neffs if only is None or neff.kernel in only]
    targets = _targets(plan, only)
    with _locked(folder) as lock:
        write(plan, libraries, settings, folder)
        is_complete = _run(_command(settings, targets), folder, say, lock)
        pending = set() if is_complete else _pending(folder, settings, targets)
        failed = frozenset(neff.id for neff in neffs if ("compile", neff.id) in pending)
        known = {n.id: provenance.read(folder / "neff" / f"{n.id}.origin") for n in neffs if n.id not in failed}
        counts = provenance.count(folder / "neff" / "counted", {id: origin for id, origin in known.items() if origin})
    unwritten = frozenset(name for kind, name in pending if kind not in ("emit", "compile"))
    return BuildResult(is_complete, failed, unwritten, *counts)


def preview(
    plan: Plan, libraries: Sequence[Library], settings: Build, output: Path, only: frozenset[str] | None = None
) -> list[str]:
    """Returns the steps that a build would run, as "<kind> <name>"; an HLO that stays the same spares the steps after it."""
    folder = output / STATE
    if not folder.is_dir():  # a preview makes no folder
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / STATE).mkdir()
            return preview(plan, libraries, settings, Path(scratch), only)
    with _locked(folder):
        write(plan, libraries, settings, folder)
        return sorted(" ".join(step) for step in _pending(folder, settings, _targets(plan, only)))


def _targets(plan: Plan, only: frozenset[str] | None) -> list[str]:
    """Returns the files to build; none for everything."""
    return [] if only is None else [neff_of(neff) for neff in plan.neffs if neff.kernel in only]


def write(plan: Plan, libraries: Sequence[Library], settings: Build, folder: Path) -> None:
    """Writes `build.ninja` and the files of arguments; a file that stays the same keeps its time.

    Raises:
        OSError: the folder can't be written.
    """
    files = {"build.ninja": _graph(plan, settings), **argument_files(plan, libraries, settings)}
    files |= server_files(str(SERVERS), plan, settings, _environment(folder))
    for name, text in files.items():
        try:
            fileio.write_if_changed(folder / name, text.encode())
        except UnicodeEncodeError as error:
            raise KernelgenError(f"a path that is not UTF-8 can't stand in a build file: {error.object!a}") from None


def _graph(plan: Plan, settings: Build) -> str:
    """Returns the text of `build.ninja`. Names of kernels, settings and bundles have no character that ninja escapes."""
    program = shlex.join([sys.executable, "-P", "-S", ondemand.__file__]).replace("$", "$$")
    lines = ["ninja_required_version = 1.11", f"pool compile\n  depth = {settings.slots(plan)}", "rule step"]
    lines += [
        f"  command = {program} {SERVERS}/$server $kind $arguments",
        "  description = $kind $name",
        "  restat = 1",
    ]
    for step in steps_of(plan, settings):
        lines.append(f"build {' '.join(step.outputs)}: step {' '.join(step.inputs)}")
        lines.append(f"  kind = {step.kind}\n  name = {step.name}\n  arguments = {' '.join(step.arguments)}")
        lines.append(f"  server = {'emit' if step.kind == 'emit' else 'compile'}")
        lines += [f"  depfile = {step.depfile}\n  deps = gcc"] if step.depfile else []
        lines += ["  pool = compile"] if step.kind == "compile" else []
    return "\n".join(lines) + "\n"


def _command(settings: Build, targets: Sequence[str]) -> list[str]:
    # The wheel's list of files: the package may be in another environment than this Python's, through a .pth file.
    files = importlib.metadata.files("ninja") or ()
    program = next(str(file.locate()) for file in files if file.match("bin/ninja"))
    return [program, "-k", "0", "-j", str(settings.cpus), *targets]


def _environment(folder: Path) -> dict[str, str]:
    """Returns the environment of all steps."""
    variables = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    # Not the file that a link leads to: bytecode is beside the link.
    paths = [str(Path(__file__).absolute().parents[2]), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str((folder / SERVERS / "tmp").absolute())}
    return variables | {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "NINJA_STATUS": "[%f/%t] "}


def _run(command: Sequence[str], folder: Path, say: Callable[[str], None] | None, lock: int) -> bool:
    """Runs ninja and returns whether everything was built. ninja ends when this process is stopped; it holds the lock, too, in case
    this process is killed.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if say else sys.stderr,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=[lock],
    )
    try:
        for line in process.stdout or ():
            say(line.rstrip("\n"))  # type: ignore[misc]  # with a pipe there is a function
        return process.wait() == 0
    except BaseException:
        process.terminate()
        process.communicate()
        raise


def _pending(folder: Path, settings: Build, targets: Sequence[str]) -> set[tuple[str, str]]:
    """Returns kind and name of each step that is not up to date."""
    command = [*_command(settings, targets), "-n"]
    done = subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False)
    return set(re.findall(r"^\[\d+/\d+\] (\w+) (\S+)$", done.stdout, re.MULTILINE))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Locks a build's folder, and removes what killed steps left; yields the lock's descriptor.

    Raises:
        KernelgenError: another build holds the lock.
        OSError: the folder can't be written.
    """
    scratch = folder / SERVERS / "tmp"
    for needed in (folder, scratch):
        needed.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KernelgenError(f"{folder.parent}: another build is at work there") from None
        try:
            yield lock.fileno()
        finally:
            for leftover in [*(folder / "hlo").glob(".*.tmp"), *(folder / "neff").glob(".*.tmp"), *scratch.iterdir()]:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
            # Servers inherit the descriptor, and outlive the build for some seconds.
            fcntl.flock(lock, fcntl.LOCK_UN)
