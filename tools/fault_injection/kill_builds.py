"""Kills builds at random moments and compares the results with an undisturbed build.

    python3 tools/fault_injection/kill_builds.py --rounds 200 --seed 1

Each round builds a small manifest with a double of neuronx-cc, in one or two output folders that share a cache, and
kills one process by SIGKILL at a moment that the seed determines: a compiler, a worker, or a build. Before the next
round, some of the files are removed, so that there is work to do. After each round:

* every entry of the cache is complete, and equal to the entry of an undisturbed build;
* every bundle is byte for byte equal to the bundle of an undisturbed build.

After the last round, builds in the disturbed folders and in a new one produce the same bundles, the cache holds exactly
all entries, and no process is left. Exit status 1 if any of this fails. `./bazelw run
//tools/fault_injection:kill_builds -- --rounds 200` is the same.

It needs kernelgen's packages, and takes about two seconds of CPU time per round. A round does not count if the process
ended before it could be killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from kernelgen.cache import Folder, entry
from kernelgen.cache.entry import DamagedEntry

ROOT = Path(__file__).resolve().parents[2]

OPS = ("relu", "silu", "sqr", "tanh")
"""The kernels of the manifest, one each."""

COMPILE_SECONDS = 0.15
"""The duration of a compile in the double."""

VICTIMS = ("compiler", "worker", "build")


class Wrong(Exception):
    """A check failed; the message describes how."""


def neffs(folder: Folder) -> dict[str, bytes]:
    """Returns the NEFFs of a cache, by entry. The entries themselves also contain the duration of the compile."""
    return {
        stored.name: entry.unpack(folder.path(stored.name).read_bytes(), stored.name)[1] for stored in folder.entries()
    }


@dataclass
class Workspace:
    """A folder with a manifest, a double of neuronx-cc, a cache and output folders.

    Attributes:
        root: the folder.
    """

    root: Path
    expected: dict[str, bytes] = field(default_factory=dict)
    neffs: dict[str, bytes] = field(default_factory=dict)

    @property
    def cache(self) -> Folder:
        return Folder(self.root / "cache")

    def prepare(self) -> None:
        """Writes the inputs of rounds, and stores the results of an undisturbed build."""
        lines = ["format: 1", "name: few", "targets: [trn1]", "kernels:"]
        lines += [f'  - {{op: {op}, inputs: ["(8,4,1,1)/f32"], output: "(8,4,1,1)/f32"}}' for op in OPS]
        (self.root / "few.yaml").write_text("\n".join(lines) + "\n")
        double = (ROOT / "tests" / "compilers" / "fake_neuronx_cc").read_text().splitlines()
        program = self.root / "sdk" / "bin" / "neuronx-cc"
        program.parent.mkdir(parents=True)
        program.write_text("\n".join([f"#!{sys.executable}", *double[1:], ""]))
        program.chmod(0o755)
        program.with_name("neuronx-cc.json").write_text(json.dumps({"steady": True, "seconds": COMPILE_SECONDS}))
        self.finish("undisturbed", self.root / "undisturbed-cache")
        self.expected = self.bundles("undisturbed")
        self.neffs = neffs(Folder(self.root / "undisturbed-cache"))
        if len(self.neffs) != len(OPS) or not self.expected:
            raise Wrong("the undisturbed build did not build everything")

    def start(self, output: str, cache: Path | None = None, jobs: int = 1) -> subprocess.Popen[bytes]:
        """Starts a build. `KERNELGEN_WORKSPACE` marks the build, its workers and their compilers."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NEURON_")} | {
            "KERNELGEN_WORKSPACE": str(self.root),
            "NEURON_KERNELGEN_NEFF_CACHE": str(cache or self.cache.root),
            "NEURON_SDK": str(self.root / "sdk"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), *filter(None, sys.path)]),
        }
        words = ["build", "few.yaml", "-o", output, "-j", str(jobs), "--compiler", "neuronx-cc"]
        return subprocess.Popen(
            [sys.executable, "-m", "kernelgen", *words],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def finish(self, output: str, cache: Path | None = None) -> str:
        """Runs an undisturbed build and returns its output."""
        process = self.start(output, cache)
        said = process.communicate()[0].decode(errors="replace")
        if process.returncode:
            raise Wrong(f"an undisturbed build failed:\n{said}")
        return said

    def bundles(self, output: str) -> dict[str, bytes]:
        """Returns the files of the bundles in an output folder, by path, including incomplete files."""
        folder = self.root / output
        files = [p for p in folder.rglob("*") if p.is_file() and ".kernelgen" not in p.relative_to(folder).parts]
        return {str(p.relative_to(folder)): p.read_bytes() for p in files}

    def check(self, outputs: Sequence[str]) -> None:
        """Checks that the cache and the bundles have only the contents of an undisturbed build.

        Raises:
            Wrong: something differs.
        """
        for stored in self.cache.entries():
            data = self.cache.read(stored.name)
            if data is None:
                continue
            try:
                _, neff = entry.unpack(data, stored.name)
            except DamagedEntry as problem:
                raise Wrong(f"the cache has {stored.name}: {problem}") from None
            # Flags and identity are always the same here, so the names are too.
            if neff != self.neffs.get(stored.name):
                raise Wrong(f"the cache has {stored.name}, which is not what an undisturbed build stores")
        for output in outputs:
            for path, data in self.bundles(output).items():
                # A folder that is still being filled has a hidden name, which no build reads.
                if not Path(path).parts[0].startswith(".") and data != self.expected.get(path):
                    raise Wrong(f"{output}/{path} is not what an undisturbed build writes")


# --- processes ------------------------------------------------------------------------------------------------------------


def processes(root: Path) -> dict[str, list[int]]:
    """Returns the running processes of a workspace's builds: a list for each of `VICTIMS`."""
    found: dict[str, list[int]] = {victim: [] for victim in VICTIMS}
    mark = f"KERNELGEN_WORKSPACE={root}".encode()
    mine: dict[int, list[str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if stat[0] == "Z":
                continue
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # A compiler has its own environment, but its arguments name files in this folder.
            here = any(word.startswith(str(root)) for word in words)
            if here or mark in (folder / "environ").read_bytes().split(b"\0"):
                mine[int(folder.name)] = words
    for pid, words in mine.items():
        if "kernelgen.steps.worker" in words:
            found["worker"].append(pid)
        elif "build" in words and "kernelgen" in words:
            found["build"].append(pid)
        elif str(root / "sdk/bin/neuronx-cc") in words and "compile" in words and words[0] != "/bin/sh":
            found["compiler"].append(pid)
    return found


def wait(root: Path, victim: str, running: Callable[[], bool]) -> list[int]:
    """Waits for processes of a kind, and returns them; returns none if the builds end first."""
    while running():
        if there := sorted(processes(root)[victim]):
            return there
        time.sleep(0.02)
    return []


def kill(root: Path, victim: str, chance: random.Random, running: Callable[[], bool]) -> bool:
    """Waits for a process of a kind and kills it; returns False if the builds end first."""
    while there := wait(root, victim, running):
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(there), signal.SIGKILL)
            return True
    return False


def take_away(here: Workspace, outputs: Sequence[str], chance: random.Random) -> None:
    """Removes some results of earlier rounds, so that there is work to do."""
    for output in outputs:
        if chance.random() < 0.7:
            shutil.rmtree(here.root / output, ignore_errors=True)
    names = sorted(stored.name for stored in here.cache.entries())
    for name in chance.sample(names, chance.randint(min(2, len(names)), len(names))):
        here.cache.drop(name)


def one_round(here: Workspace, number: int, seed: int, seconds: float) -> str | None:
    """Disturbs one or two builds and checks the results; returns the kind of process that was killed, or None.

    Args:
        here: the workspace.
        number: the round's number.
        seed: the seed of the whole run; the round's own seed depends on both.
        seconds: the approximate duration of an undisturbed build.

    Raises:
        Wrong: a check failed.
    """
    chance = random.Random(f"{seed} {number}")
    outputs = ["one", "two"][: chance.choice((1, 1, 2))]
    take_away(here, outputs, chance)
    victim = chance.choice(VICTIMS)
    builds = [here.start(output, jobs=chance.choice((1, 1, 1, 2))) for output in outputs]
    try:
        if victim == "compiler":
            wait(here.root, victim, lambda: any(build.poll() is None for build in builds))
            seconds = len(OPS) * COMPILE_SECONDS
        time.sleep(chance.uniform(0, seconds))
        killed = kill(here.root, victim, chance, lambda: any(build.poll() is None for build in builds))
        for build in builds:
            said = build.communicate(timeout=120)[0].decode(errors="replace")
            if build.returncode not in (0, 1, -signal.SIGKILL) or "Traceback" in said:
                raise Wrong(f"a build ended with {build.returncode}:\n{said}")
            if not killed and build.returncode:
                raise Wrong(f"an undisturbed build failed:\n{said}")
    finally:
        for build in builds:
            build.kill()
            build.communicate()
    here.check(["one", "two"])
    return victim if killed else None


def gone(root: Path, patience: float = 60) -> None:
    """Waits until no process of the workspace's builds is left.

    Raises:
        Wrong: some processes do not end.
    """
    deadline = time.monotonic() + patience
    while any(left := processes(root).values()):
        if time.monotonic() > deadline:
            raise Wrong(f"processes are left: {list(left)}")
        time.sleep(0.1)


def run(root: Path, rounds: int, seed: int) -> Iterator[tuple[int, str | None]]:
    """Runs rounds until the given number of processes were killed; yields number and victim of each; then checks the end.

    Args:
        root: an empty folder.
        rounds: the number of processes to kill.
        seed: the seed that chooses them.

    Raises:
        Wrong: a check failed.
    """
    here = Workspace(root)
    here.prepare()
    begun = time.monotonic()
    here.finish("one")
    seconds = time.monotonic() - begun
    done = number = 0
    while done < rounds:
        number += 1
        victim = one_round(here, number, seed, seconds)
        done += victim is not None
        yield number, victim
    gone(root)
    for output in ("one", "two", "new"):
        here.finish(output)
        if here.bundles(output) != here.expected:
            raise Wrong(f"a clean build in {output} differs from an undisturbed one")
    # A build in an empty folder with an empty cache makes everything that is missing now.
    shutil.rmtree(root / "cache")
    here.finish("last")
    if neffs(here.cache) != here.neffs or here.bundles("last") != here.expected:
        raise Wrong("after all rounds, the cache holds something else than after an undisturbed build")
    gone(root)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kills builds at random moments and compares the results with an undisturbed build."
    )
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="the number of processes to kill (200)")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="the seed that chooses the processes and the moments (1)"
    )
    arguments = parser.parse_args()
    killed: Counter[str] = Counter()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kernelgen-faults-") as folder:
        try:
            for number, victim in run(Path(folder).resolve(), arguments.rounds, arguments.seed):
                if victim:
                    killed[victim] += 1
                if sys.stderr.isatty() or (victim and killed.total() % 20 == 0):
                    end = "\r" if sys.stderr.isatty() else "\n"
                    print(f"round {number}, {killed.total()} killed", end=end, file=sys.stderr, flush=True)
        except Wrong as wrong:
            print(f"seed {arguments.seed}: {wrong}", file=sys.stderr)
            return 1
    kinds = ", ".join(f"{killed[victim]} {victim}s" for victim in VICTIMS)
    print(
        f"{killed.total()} processes killed ({kinds}), seed {arguments.seed}, {time.monotonic() - begun:.0f} s: "
        "nothing was lost, nothing wrong was served"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
