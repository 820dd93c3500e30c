"""A scratch copy of this checkout, and Bazel builds in it whose executed actions are counted.

Used by the benchmarks beside it and by the tests of the rules. Needs Bazel (through `bazelw`) and nothing of the user's build: each
scratch folder has an output root, so that it starts cold and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
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
    """

    path: Path
    output_root: Path
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
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
        words = [str(self.path / "bazelw"), f"--output_user_root={self.output_root}", "--max_idle_secs=60", command]
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


def copy(destination: Path) -> Path:
    """Copies the project, without what builds leave in it."""
    shutil.copytree(CHECKOUT, destination, ignore=_LEFT_OUT, symlinks=True)
    return destination


@contextlib.contextmanager
def checkout(**kwargs: object) -> Iterator[Checkout]:
    """Yields a scratch checkout; its server is stopped and its files are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-", ignore_cleanup_errors=True) as folder:
        scratch = Checkout(copy(Path(folder) / "project"), Path(folder) / "out", **kwargs)  # type: ignore[arg-type]
        try:
            yield scratch
        finally:
            scratch.bazel("shutdown", expect=None)
            # Bazel makes its output folders read-only, and a folder that can't be removed would stay.
            subprocess.run(["chmod", "-R", "u+w", folder], check=False)
