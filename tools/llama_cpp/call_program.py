"""Runs the program `calls` (calls/calls.cpp): calls of llama.cpp on the device, and the outcome of each."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness

VARIABLE = "LLAMA_CALLS"


def _words(seed: int, n: int) -> Iterator[str]:
    """Yields words with repetitions, as in a language."""
    rng = random.Random(seed)
    known = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(1, 9))) for _ in range(400)]
    for _ in range(n):
        yield known[min(int(rng.paretovariate(0.9)) - 1, len(known) - 1)]


TEXT = " ".join(_words(13, 1500))
"""The text from which the sequences take their tokens; it is always the same."""

_CALL = re.compile(
    r"(?P<script>\d+) (?P<context>\S+) (?P<parts>\S+(?: \S+)*) nmse=(?P<nmse>\S+) nll=(?P<nll>\S+) nll_cpu=(?P<nll_cpu>\S+) "
    r"rows=(?P<rows>\d+) changed=(?P<changed>\S+) graphs=(?P<graphs>\d+) device=(?P<device>\d+) cpu=(?P<cpu>\S+)"
)


@dataclass(frozen=True)
class CallResult:
    """The outcome of a call: a line that the program `calls` prints (format there)."""

    script: int
    context: str
    parts: str
    nmse: float
    nll: float
    nll_cpu: float
    rows: int
    changed: tuple[str, ...]
    graphs: int
    device: int
    cpu: Counter[str]

    @staticmethod
    def read(line: str) -> CallResult:
        match = _CALL.fullmatch(line)
        if not match:
            raise RuntimeError(f"calls: {line!r}")
        cpu = Counter[str]()
        for op, count in re.findall(r"(\w+)\*(\d+)", match["cpu"]):
            cpu[op] += int(count)
        return CallResult(
            int(match["script"]),
            match["context"],
            match["parts"],
            float(match["nmse"]),
            float(match["nll"]),
            float(match["nll_cpu"]),
            int(match["rows"]),
            () if match["changed"] == "-" else tuple(match["changed"].split(",")),
            int(match["graphs"]),
            int(match["device"]),
            cpu,
        )


def program() -> Path:
    """Returns the path of the program that Bazel built or the environment names."""
    return Path(os.environ.get(VARIABLE, Path(__file__).parent / "calls" / "calls" / "calls")).absolute()


def run(
    programs: harness.Programs,
    model: Path,
    folder: Path,
    scripts: Sequence[Iterable[str]],
    environment: dict[str, str],
    *,
    say: Callable[[CallResult], None] = lambda call: None,
    words: str = "",
    options: Sequence[str] = (),
) -> tuple[list[CallResult], str]:
    """Makes the calls of scripts, each script in its own thread if there are several; returns their outcomes, and the log.

    The tokens come from `words`, by default TEXT. `options` stand before the program's arguments.

    Raises:
        RuntimeError: the program failed, or the CPU computed an op that the device should compute.
    """
    text = folder / "text"
    text.write_text(words or TEXT)
    files = []
    for i, script in enumerate(scripts):
        files.append(folder / f"script-{i}")
        files[-1].write_text("".join(f"{line}\n" for line in script))
    environment = {
        "LD_LIBRARY_PATH": str(programs.llama_cpp),
        "GGML_SCHED_DEBUG": "2",
        "GGML_NEURON_LOG": "1",
        "OMP_THREAD_LIMIT": "1",
        "NEURON_SIMULATOR_CACHE": str(folder / "xla"),  # all runs load the same kernels
        **environment,
    }
    log = folder / "log"
    calls: list[CallResult] = []
    others: list[str] = []
    with log.open("w") as stderr:
        command = [program(), *options, programs.llama_cpp, model, text, *files]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                if not _CALL.match(line):  # other output, for example from a program that dies from a signal
                    others.append(line)
                    continue
                calls.append(CallResult.read(line.rstrip("\n")))
                say(calls[-1])
    said = log.read_text(errors="replace")
    if process.returncode or others:
        raise RuntimeError(f"calls ended with status {process.returncode}:\n{said[-3000:]}{''.join(others)[-1000:]}")
    return calls, said
