"""A scratch copy of this checkout, and Bazel builds in it whose executed actions are counted.

Used by the benchmarks beside it and by the tests of the rules. Needs Bazel (through `bazelw`) and nothing of the user's build: each
scratch folder has an output root, so that it starts cold and leaves nothing behind. Tests use the same folders and servers in turn
(`Checkouts`).
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
"""Options of a server that has a few small builds to do: threads that collect and compile side by side cost more than they save."""

ONE_WORKER = tuple(f"--worker_max_instances={mnemonic}=1" for mnemonic in ("NeuronEmit", "NeuronCompile"))
"""A few small kernels are not worth the start of two workers each, which import JAX."""


class BuildFailed(Exception):
    """Bazel exited with another status than expected; the message is its output."""


@dataclass(frozen=True)
class Result:
    """One Bazel invocation.

    Attributes:
        seconds: wall time, as the user waits for it.
        executed: actions that ran, by mnemonic; not those that a cache answered.
        cached: actions that a disk or remote cache answered, by mnemonic.
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
    """A copy of the project with an output root of its own.

    Attributes:
        path: the copy.
        output_root: Bazel's output user root.
        flags: options of every build.
        env: the environment's additions.
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
        """Runs a Bazel command and counts what it executed.

        Args:
            command: `build` and the like.
            *arguments: what follows it.
            expect: its exit status; None: any will do.
            flags: more options.
            count: whether to have Bazel write what it executed, which takes it a part of a second in a large build.

        Raises:
            BuildFailed: the exit status is not `expect` (None: any will do).
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
        """Starts a Bazel command; its standard output and error come through one pipe."""
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
        """Replaces text that must be there."""
        path = self.path / file
        text = path.read_text()
        if old not in text:
            raise ValueError(f"{file} does not contain {old!r}")
        path.write_text(text.replace(old, new))

    def append(self, file: str, text: str) -> None:
        with (self.path / file).open("a") as stream:
            stream.write(text)

    def output(self, label_path: str) -> Path:
        """Returns the file of `bazel-bin` at a path."""
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
    """Returns where the user's environments are kept, and the Bazel that `bazelw` unpacked."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NEURON_KERNELGEN_CACHE") or Path(base) / "neuron-kernelgen")


def provide_bazel(cache: Path) -> None:
    """Gives another cache folder the Bazel that `bazelw` unpacked for the user, if it did: it would download it again."""
    for unpacked in cache_folder().glob("debian-bazel-*"):
        if (unpacked / "bazel").is_file():
            provided = cache / unpacked.name
            provided.mkdir(parents=True)
            for entry in unpacked.iterdir():
                # `bazelw` writes the files at each call; the launcher among them names the folders where they are.
                if entry.is_dir():
                    (provided / entry.name).symlink_to(entry)
                else:
                    shutil.copy2(entry, provided)


def copy(destination: Path) -> Path:
    """Copies the project, without what builds leave in it."""
    shutil.copytree(CHECKOUT, destination, ignore=_LEFT_OUT, symlinks=True)
    return destination


def mirror(source: Path, destination: Path) -> None:
    """Makes the files of `destination` those of `source`, except for what builds leave in either; equal files are not touched."""
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
    """Returns the paths of files and links below a folder, without what builds leave in it."""
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
    """Yields a temporary folder that is removed even where Bazel made folders of it read-only."""
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        finally:
            subprocess.run(["chmod", "-R", "u+w", folder], check=False)


@contextlib.contextmanager
def checkout(**kwargs: object) -> Iterator[Checkout]:
    """Yields a scratch checkout; its server is stopped and its files are removed afterwards."""
    with _folder() as folder:
        scratch = Checkout(copy(folder / "project"), folder / "out", **kwargs)  # type: ignore[arg-type]
        try:
            yield scratch
        finally:
            scratch.bazel("shutdown", expect=None)


@dataclass
class Checkouts:
    """Scratch checkouts by name, each of which tests use in turn.

    A test finds in one the files of the project and nothing built. The server and what it fetched stay: to start a server, and to
    load and analyse the first time, costs it more than most tests do after that.

    Attributes:
        folder: where they are.
        flags: options of every build.
    """

    folder: Path
    flags: Sequence[str] = ()
    _known: dict[str, Checkout] = field(default_factory=dict)

    @contextlib.contextmanager
    def lend(
        self, name: str, *, source: Path = CHECKOUT, flags: Sequence[str] = (), folder: str = "."
    ) -> Iterator[Checkout]:
        """Yields a checkout; what is changed and built there is undone afterwards, or when it is lent the next time.

        Args:
            name: which; the path below `self.folder`.
            source: what it is a copy of.
            flags: options of every build, beside `self.flags`.
            folder: the workspace inside it, the same each time.
        """
        path = self.folder / name
        mirror(source, path)
        # The tests between may use other checkouts, or none.
        startup = ["--max_idle_secs=600", *SMALL_SERVER]
        lent = Checkout(path, self.folder / "out" / name, [*self.flags, *flags], startup=startup, folder=folder)
        self._known[name] = lent
        try:
            yield lent
        finally:
            lent.env = {}
            if lent.output_root.exists():
                # It ends workers, too.
                lent.bazel("clean")

    def close(self) -> None:
        for known in self._known.values():
            if known.output_root.exists():
                known.bazel("shutdown", expect=None)


@contextlib.contextmanager
def checkouts(flags: Sequence[str] = ()) -> Iterator[Checkouts]:
    """Yields checkouts for several tests; their servers are stopped and their files are removed afterwards."""
    with _folder() as folder:
        made = Checkouts(folder, flags)
        try:
            yield made
        finally:
            made.close()
