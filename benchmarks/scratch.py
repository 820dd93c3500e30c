"""A scratch copy of this checkout, and Bazel builds in it whose executed actions are counted.

The benchmarks in this folder and the tests of the rules use it. It needs Bazel (through `bazelw`) and none of the
user's build: each scratch folder has its own output root, so it starts cold and leaves nothing behind. Tests use the
same folders and servers in turn (`Checkouts`).
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
_LEFT_OUT = shutil.ignore_patterns(
    ".git", "bazel-*", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", ".venv", ".user.bazelrc"
)

SMALL_SERVER = ("--host_jvm_args=-XX:+UseSerialGC", "--host_jvm_args=-XX:CICompilerCount=1")
"""Options of a server for a few small builds: parallel garbage collection and compilation threads cost more than they save."""

ONE_WORKER = tuple(f"--worker_max_instances={mnemonic}=1" for mnemonic in ("NeuronEmit", "NeuronCompile"))
"""For a few small kernels, a second worker of each kind is not worth its start, which imports JAX."""


class BuildFailed(Exception):
    """Bazel exited with another status than expected; the message is its output."""


@dataclass(frozen=True)
class Result:
    """One Bazel invocation.

    Attributes:
        seconds: wall time.
        executed: the actions that ran, by mnemonic, without cache hits.
        cached: the hits in a disk or remote cache, by mnemonic.
        output: standard output and error.
    """

    seconds: float
    executed: Mapping[str, int]
    cached: Mapping[str, int]
    output: str

    @property
    def emits(self) -> int:
        return self.executed.get("NeuronEmit", 0)

    @property
    def compiles(self) -> int:
        return self.executed.get("NeuronCompile", 0)


@dataclass
class Checkout:
    """A copy of the project with its own output root.

    Attributes:
        path: the copy.
        output_root: Bazel's output user root.
        flags: options of every build.
        env: additional environment variables.
        startup: options of the server.
    """

    path: Path
    output_root: Path
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    startup: Sequence[str] = ("--max_idle_secs=60",)
    folder: str = "."
    """The workspace inside the copy (`e2e/smoke`)."""

    def bazel(
        self, command: str, *arguments: str, expect: int | None = 0, flags: Sequence[str] = (), count: bool = True
    ) -> Result:
        """Runs a Bazel command and counts the executed actions.

        Args:
            command: the command, such as `build`.
            *arguments: its arguments.
            expect: the expected exit status; None to accept any.
            flags: more options.
            count: whether to write an execution log, which takes part of a second in a large build.

        Raises:
            BuildFailed: the exit status is not `expect`.
        """
        log = self.output_root / "execution.json"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        counting = command in ("build", "test", "run") and count
        begin = time.perf_counter()
        with self.start(
            command, *arguments, flags=[f"--execution_log_json_file={log}", *flags] if counting else flags
        ) as process:
            output, _ = process.communicate()
        seconds = time.perf_counter() - begin
        if expect is not None and process.returncode != expect:
            raise BuildFailed(f"exit status {process.returncode}: {shlex.join(map(str, process.args))}\n{output}")  # type: ignore[arg-type]
        executed: Counter[str] = Counter()
        cached: Counter[str] = Counter()
        for spawn in spawns(log):
            (cached if spawn.get("cacheHit") else executed)[spawn["mnemonic"]] += 1
        return Result(seconds, executed, cached, output)

    def start(self, command: str, *arguments: str, flags: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Starts a Bazel command; one pipe carries its standard output and error."""
        words = [str(self.path / "bazelw"), f"--output_user_root={self.output_root}", *self.startup, command]
        if command in ("build", "test", "run"):
            words += ["--color=no", "--curses=no", *self.flags, *flags]
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("TEST_", "RUNFILES", "BUILD_", "PYTHON", "BAZEL"))
        }
        return subprocess.Popen(
            [*words, *arguments],
            cwd=self.path / self.folder,
            env=env | dict(self.env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def edit(self, file: str, old: str, new: str) -> None:
        """Replaces text in a file; raises ValueError if the text is missing."""
        path = self.path / file
        text = path.read_text()
        if old not in text:
            raise ValueError(f"{file} does not contain {old!r}")
        path.write_text(text.replace(old, new))

    def append(self, file: str, text: str) -> None:
        with (self.path / file).open("a") as stream:
            stream.write(text)

    def output(self, label_path: str) -> Path:
        """Returns the path of a file in `bazel-bin`."""
        return self.path / self.folder / "bazel-bin" / label_path


def spawns(log: Path) -> Iterator[dict[str, object]]:
    """Yields the actions in an execution log in JSON."""
    if not log.exists():
        return
    decoder, text, at = json.JSONDecoder(), log.read_text(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        spawn, at = decoder.raw_decode(text, at)
        yield spawn


def cache_folder() -> Path:
    """Returns the folder with the user's environments and with the Bazel that `bazelw` unpacked."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NEURON_KERNELGEN_CACHE") or Path(base) / "neuron-kernelgen")


def provide_bazel(cache: Path) -> None:
    """Copies the Bazel that `bazelw` unpacked for the user to another cache folder, to avoid another download."""
    for unpacked in cache_folder().glob("debian-bazel-*"):
        if (unpacked / "bazel").is_file():
            provided = cache / unpacked.name
            provided.mkdir(parents=True)
            for entry in unpacked.iterdir():
                # `bazelw` rewrites the files at each call; one of them, the launcher, contains the folders' paths.
                if entry.is_dir():
                    (provided / entry.name).symlink_to(entry)
                else:
                    shutil.copy2(entry, provided)


def copy(destination: Path) -> Path:
    """Copies the project without build outputs."""
    shutil.copytree(CHECKOUT, destination, ignore=_LEFT_OUT, symlinks=True)
    return destination


def mirror(source: Path, destination: Path) -> None:
    """Makes the files of `destination` equal to those of `source`, except build outputs; does not touch equal files."""
    wanted, found = _files(source), _files(destination)
    for name in found - wanted:
        (destination / name).unlink()
    for name in sorted(wanted):
        ours, theirs = source / name, destination / name
        if name not in found:
            theirs.parent.mkdir(parents=True, exist_ok=True)
        elif _same(ours, theirs):
            continue
        else:
            theirs.unlink()
        shutil.copy2(ours, theirs, follow_symlinks=False)


def _files(folder: Path) -> set[str]:
    """Returns the paths of files and links below a folder, without build outputs."""
    found: set[str] = set()
    for parent, folders, files in os.walk(folder):
        left_out = _LEFT_OUT(parent, [*folders, *files])
        links = {name for name in folders if Path(parent, name).is_symlink()}
        folders[:] = [name for name in folders if name not in left_out | links]
        found |= {os.path.relpath(Path(parent, name), folder) for name in {*files, *links} - left_out}
    return found


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return filecmp.cmp(one, other, shallow=False) and one.stat().st_mode == other.stat().st_mode


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Yields a temporary folder, and removes it afterwards, even if Bazel made folders in it read-only."""
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        finally:
            subprocess.run(["chmod", "-R", "u+w", folder], check=False)


@contextlib.contextmanager
def checkout(**kwargs: object) -> Iterator[Checkout]:
    """Yields a scratch checkout; afterwards stops its server and removes its files."""
    with _folder() as folder:
        scratch = Checkout(copy(folder / "project"), folder / "out", **kwargs)  # type: ignore[arg-type]
        try:
            yield scratch
        finally:
            scratch.bazel("shutdown", expect=None)


@dataclass
class Checkouts:
    """Scratch checkouts by name, which tests use in turn.

    A checkout that a test receives has the project's files and no built files. The server and its fetched files stay:
    for most tests, starting a server, loading and analysing the first time cost more than the rest.

    Attributes:
        folder: the folder of the checkouts.
        flags: options of every build.
    """

    folder: Path
    flags: Sequence[str] = ()
    _known: dict[str, Checkout] = field(default_factory=dict)

    @contextlib.contextmanager
    def lend(
        self, name: str, *, source: Path = CHECKOUT, flags: Sequence[str] = (), folder: str = "."
    ) -> Iterator[Checkout]:
        """Yields a checkout; undoes its changes and builds afterwards, or when it is lent the next time.

        Args:
            name: the name of the checkout, its path below `self.folder`.
            source: the folder to copy.
            flags: options of every build, in addition to `self.flags`.
            folder: the workspace inside the copy, the same each time.
        """
        path = self.folder / name
        mirror(source, path)
        # The tests in between may use other checkouts, or none.
        startup = ["--max_idle_secs=600", *SMALL_SERVER]
        lent = Checkout(path, self.folder / "out" / name, [*self.flags, *flags], startup=startup, folder=folder)
        self._known[name] = lent
        try:
            yield lent
        finally:
            lent.env = {}
            if lent.output_root.exists():
                # `clean` also ends the workers.
                lent.bazel("clean")

    def close(self) -> None:
        for known in self._known.values():
            if known.output_root.exists():
                known.bazel("shutdown", expect=None)


@contextlib.contextmanager
def checkouts(flags: Sequence[str] = ()) -> Iterator[Checkouts]:
    """Yields checkouts for several tests; afterwards stops their servers and removes their files."""
    with _folder() as folder:
        made = Checkouts(folder, flags)
        try:
            yield made
        finally:
            made.close()
