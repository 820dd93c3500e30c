"""Compares one, two and three launches in flight on the simulator: ms per token of a small model, and a prompt on two cores.

    ./bazelw run //benchmarks:launch_queue

The model is a Llama with random weights; each layer is one launch. A launch takes 180 µs on the simulator before the
kernel begins, as with a current runtime; launches in flight wait at the same time. The program also measures a prompt
in small batches, on one core and on two that share the layers: one core computes a batch while the other computes the
next. It repeats this with launches of 10 ms, which do not use the machine's processors. The second core has few layers,
because in a batch whose logits are not read, the last layer is one launch per node. Results are compared bit by bit.

llama.cpp waits for all cores before it computes the same graph again. Batches of a long prompt have different graphs if
each reads 256 more cells of the cache, as batches of 256 tokens do. Here batches are small, so a variable keeps
llama.cpp from reusing graphs.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import figures
from simulated_model import SimulatedModel, random_llama

LAUNCH_US = 180
LONG_LAUNCH_US = 10_000
DEPTHS = (1, 2, 3)
CORES = {
    1: "1",
    2: "10/3",
}  # numbers of cores, and how they share the layers, with the output as one layer: -ts of llama-bench
SIZE = random_llama.Size(n_layer=12)
QUICK = random_llama.Size(n_layer=4)
PROMPT = "A NeuronCore computes what its kernels say"
BATCH = 16


class Runs:
    """Runs llama.cpp's programs with a model on the simulator."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._folder = folder
        self._runs = 1 if quick else 5
        self._model = SimulatedModel(folder, size=QUICK if quick else SIZE, n_tokens=f"1,2,{BATCH}")

    def logits(self, name: str, **variables: object) -> bytes:
        """Returns the file with the logits of each token of a prompt."""
        output = self._folder / name
        words = ("--model", self._model.file, "--output", output, "--prompt", PROMPT, "--ctx-size", 256, "-ngl", 99)
        words += ("--fit", "off", "-fa", "on", "-ub", BATCH)
        self._model.run("llama-results", *words, NEURON_SIMULATOR_THREADS=1, **variables)
        return output.read_bytes()

    def token_ms(
        self, prompt: int, generated: int, launch_us: int = LAUNCH_US, cores: int = 1, **variables: object
    ) -> tuple[list[float], str]:
        """Returns the milliseconds per token in each repetition, and the backend's log of its launches."""
        return self._model.bench(
            prompt=prompt,
            generated=generated,
            runs=self._runs,
            options=("-ub", BATCH, "-t", 1, "-ts", CORES[cores]),
            NEURON_RT_NUM_CORES=cores,
            GGML_NEURON_LOG=1,
            NEURON_SIMULATOR_LAUNCH_US=launch_us,
            NEURON_SIMULATOR_THREADS=1,
            **variables,
        )


def _launches(log: str) -> tuple[int, int]:
    """Returns the number of launches, and how many of them began while another one was in flight."""
    found = re.findall(r"(\d+) launches, (\d+) of them while another one was in flight", log)
    return sum(int(n) for n, _ in found), sum(int(n) for _, n in found)


def measure(quick: bool) -> Iterator[figures.Figure]:
    rounds = 1 if quick else 4
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), quick=quick)

        wanted = runs.logits("one", GGML_NEURON_QUEUE_DEPTH=1)
        others = [runs.logits(f"depth-{n}", GGML_NEURON_QUEUE_DEPTH=n) for n in DEPTHS[1:]]
        others += [runs.logits(f"cores-{n}", NEURON_RT_NUM_CORES=n) for n in CORES if n > 1]
        yield figures.exactly("runs whose logits differ from those of depth 1", sum(o != wanted for o in others), 0)

        token: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        share = dict.fromkeys(DEPTHS, (0, 0))
        for _ in range(rounds):  # in turn, so that other work on the machine affects all alike
            for depth in DEPTHS:
                found, log = runs.token_ms(0, 8 if quick else 32, GGML_NEURON_QUEUE_DEPTH=depth)
                token[depth] += found
                share[depth] = _launches(log)
        first = statistics.median(token[1])
        for depth in DEPTHS:
            yield figures.Figure(
                f"a generated token, {depth} launch{'es' if depth > 1 else ''} in flight",
                statistics.median(token[depth]),
                "ms",
                peer=figures.Peer("one at a time", first),
                direction="peer / value",
            )
            if depth > 1:
                launches, overlapping = share[depth]
                yield figures.Figure(
                    "launches while another one is in flight",
                    overlapping,
                    "launches",
                    peer=figures.Peer("all launches", launches),
                )

        for launch_us in (LAUNCH_US, LONG_LAUNCH_US):
            yield from _prompt(runs, rounds, launch_us, quick=quick)


def _prompt(runs: Runs, rounds: int, launch_us: int, *, quick: bool) -> Iterator[figures.Figure]:
    """Yields the figures of a prompt on several cores against one core."""
    prompt: dict[int, list[float]] = {cores: [] for cores in CORES}
    for _ in range(rounds):
        for cores in CORES:
            prompt[cores] += runs.token_ms(64 if quick else 192, 0, launch_us, cores, LLAMA_GRAPH_REUSE_DISABLE=1)[0]
    for cores in list(CORES)[1:]:
        yield figures.Figure(
            f"a token of a prompt in batches of {BATCH}, layers on {cores} cores, launches of {launch_us / 1000:g} ms",
            statistics.median(prompt[cores]),
            "ms",
            peer=figures.Peer("on one core", statistics.median(prompt[1])),
            direction="peer / value",
        )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
