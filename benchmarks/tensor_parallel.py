"""Compares a token over several NeuronCores (`-sm tensor`) with one core: launches, bytes and ms.

    ./bazelw run //benchmarks:tensor_parallel [-- --table]

Llama-3-8B in F16 is not run: llama.cpp exports each device's graph from the model's header, and kernels are cut from it
as `kernelgen model --fuse` cuts them. The program prints the launches and the bytes of weights per token and core, and
the forecast time of a token on each target. `--table` prints only the table of
docs/results/tensor-parallel-forecast.md.

A small Llama with random weights runs on a simulated trn2, whose 2 and 4 cores are on one chip. The ways are: the whole
step in one launch; two layers or one layer per launch; a part and the preceding sum per launch; and parts whose sums go
through the host. The simulator's clock counts launches, bytes and time, independently of this machine: a launch takes
the time in the table of chips, and tensors are read and written at a rate at which the weights of a layer take 10 ms on
one core. So a layer on one core takes 10 ms, and a smaller part takes less. Computation in the engines takes no time on
this clock. Nor do transfers through the host: for each sum through the host, the program adds a read and a write per
core, at the table's price of transfers. The figures of a token are the difference between a long and a short run,
divided by the number of tokens.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import figures
import tensor_plan
from backend_programs import Programs
from kernelgen.dispatch import chips
from simulated_model import SimulatedModel, random_llama
from tensor_plan import MORE_BYTES, WAYS

SIZE = random_llama.Size(n_embd=512, n_head=8, n_head_kv=8, n_ff=1024, n_layer=4, n_ctx=256, n_vocab=1024)
LAYER_MS = 10
QUICKER = {2: 1.7, 4: 3.0}
"""The smallest allowed speedup of a token, by number of cores."""


@dataclass(frozen=True)
class Counts:
    """The counts of a token: launches and bytes of a core, milliseconds of all, sums through the host.

    Attributes:
        launches: the launches of the core with the most.
        read: the bytes of inputs that launches do not write (weights, masks, activations), of the core with the most.
        core_ms: the milliseconds of the slowest core.
        sums: the number of sums through the host.
        sums_ms: the milliseconds of these.
    """

    launches: float
    read: float
    core_ms: float
    sums: float
    sums_ms: float

    @property
    def ms(self) -> float:
        return self.core_ms + self.sums_ms


def layer_bytes(size: random_llama.Size) -> int:
    """Returns the bytes of a layer's matrices in F16."""
    head = size.n_embd // size.n_head
    return 2 * size.n_embd * (2 * size.n_embd + 2 * size.n_head_kv * head + 3 * size.n_ff)


class Runs:
    """Runs the small model with the kernels of one way to cut it."""

    def __init__(self, folder: Path, way: str, cores: Sequence[int], *, quick: bool) -> None:
        devices = ",".join(map(str, (1, *cores)))
        self._model = SimulatedModel(
            folder,
            size=SIZE,
            n_tokens="1",
            target="trn2",
            more=(f"--fuse={way}", "--split-mode=tensor", f"--devices={devices}"),
        )
        self._tokens = (2, 4) if quick else (4, 20)
        self._chip = chips.of("trn2")

    def token(self, cores: int, *, waited: bool) -> Counts:
        """Returns the counts of a generated token over a number of cores."""
        short, long = (self._totals(cores, n, waited=waited) for n in self._tokens)
        n = self._tokens[1] - self._tokens[0]
        launches, read, ns = (
            max(b - a for a, b in zip(short[i], long[i], strict=True)) / n for i in ("launches", "read", "ns")
        )
        sums = (long["sums"][0] - short["sums"][0]) / n
        bytes_of_sum = SIZE.n_embd * 4
        transfers = 2 * self._chip.number("host_transfer_us")
        rate = sum(1 / self._chip.by("host_gb_per_s", way) for way in ("from_device", "to_device"))
        return Counts(launches, read, ns / 1e6, sums, sums * cores * (transfers + bytes_of_sum * rate / 1e3) / 1e3)

    def _totals(self, cores: int, tokens: int, *, waited: bool) -> dict[str, list[int]]:
        _, log = self._model.bench(
            prompt=0,
            generated=tokens,
            runs=1,
            options=("-ngl", 99, "-t", 1, "-sm", "tensor" if cores > 1 else "none"),
            NEURON_SIMULATOR_INSTANCE="trn2.48xlarge",
            NEURON_SIMULATOR_GB_PER_S=layer_bytes(SIZE) / LAYER_MS / 1e6,
            NEURON_RT_NUM_CORES=cores,
            NEURON_RT_LOG_LEVEL="INFO",
            GGML_NEURON_BUFFERS="device",
            GGML_NEURON_LOG=1,
            GGML_NEURON_QUEUE_DEPTH=1 if waited else 3,
        )
        if not re.search(r"\b0 ops ran on the CPU instead", log):
            raise SystemExit(f"ops ran on the CPU\n{log[-4000:]}")
        found = re.findall(
            r"exit: core \d+: (\d+) executions, which read (\d+) bytes of inputs and take (\d+) ns on a device", log
        )
        launches, read, ns = ([int(core[i]) for core in found] for i in range(3))
        sums = re.search(r"(\d+) reductions over NeuronCores went through the host's memory", log)
        return {"launches": launches, "read": read, "ns": ns, "sums": [int(sums[1]) if sums else 0]}


def simulated(cores: Sequence[int], *, quick: bool) -> Iterator[figures.Figure]:
    """Yields the figures of a token of the small model, by way and cores."""
    n = SIZE.n_layer
    most = {"step": 4, "layers:2": n // 2 + 2, "layer": n + 2, "parts+sums": 2 * n + 2, "parts": None}
    with tempfile.TemporaryDirectory() as folder:
        runs = {way: Runs(Path(folder) / way.replace(":", "_"), way, cores, quick=quick) for way in WAYS}
        for waited in (False, True):
            how = "waited for" if waited else "queued"
            one = runs["step"].token(1, waited=waited)
            yield figures.Figure(f"one core, launches {how}: a token", one.ms, "ms")
            for way, run in runs.items():
                for n in cores:
                    found = run.token(n, waited=waited)
                    what = f"{way}, {n} cores, launches {how}: a token"
                    quicker = figures.Limit("ratio", at_least=QUICKER[n]) if way == "step" else None
                    yield figures.Figure(
                        what,
                        found.ms,
                        "ms",
                        peer=figures.Peer("one core", one.ms),
                        direction="peer / value",
                        limit=quicker,
                    )
                    if waited:
                        continue
                    limit = most[way]
                    yield figures.Figure(
                        f"{what}, launches of a core",
                        found.launches,
                        "launches",
                        limit=None if limit is None else figures.Limit("value", at_most=limit),
                    )
                    yield figures.Figure(f"{what}, sums over the host", found.sums, "times")
                    yield figures.Figure(
                        f"{what}, inputs that a core reads",
                        found.read / 2**20,
                        "MiB",
                        peer=figures.Peer("one core", one.read / 2**20),
                        limit=figures.Limit("ratio", at_most=1 / n + MORE_BYTES),
                    )


def main() -> int:
    parser = figures.arguments(__doc__)
    parser.add_argument(
        "--table", action="store_true", help="Print only the table of docs/results/tensor-parallel-forecast.md."
    )
    args = parser.parse_args()
    programs = Programs.find()
    if args.table:
        tensor_plan.print_table(tensor_plan.graphs(programs, tensor_plan.CORES))
        return 0

    def measure() -> Iterator[figures.Figure]:
        yield from simulated((2,) if args.quick else (2, 4), quick=args.quick)
        found = tensor_plan.graphs(programs, (1, 2) if args.quick else tensor_plan.CORES)
        yield from tensor_plan.planned(found)
        yield from tensor_plan.forecast_figures(found, "parts" if args.quick else "step")

    return figures.report(args, measure)


if __name__ == "__main__":
    sys.exit(main())
