"""Tests calls of any number of tokens at any depth with few kernels on a simulated NeuronCore, against the CPU and exact kernels.

    ./bazelw run //tools/llama_cpp:any_tokens                             all of it
    ./bazelw run //tools/llama_cpp:any_tokens -- -m llama,gemma3          only these models
    ./bazelw run //tools/llama_cpp:any_tokens -- --depths 0,255 --step 7  these depths, and every seventh number of tokens
    ./bazelw run //tools/llama_cpp:any_tokens -- -m llama --fuse layer    with layers as kernels

The program derives a model's manifest for 1, 8, 32, 128 and 512 tokens. Then, for each model and type of the cache, it
compares:

- the logits of 1 to 513 tokens (two calls of the backend) at each depth, with the CPU's;
- the logits of some of these pairs, with those of kernels made for exactly these numbers;
- the perplexity of a text, in calls of odd numbers of tokens, with the CPU's;
- several sequences of different lengths: prompts and generation in one call, copied and removed sequences, in one cache
  and in a cache each, contexts in turn, and in threads. A call must not change one bit of the other sequences' cache.

Exit status 1 if a limit is missed, or if an op of a graph other than the embedding runs on the CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
from call_models import MODELS, RandomModel, derive
from call_program import CallResult, run
from call_scripts import MOST, N_CTX, N_TOKENS, grid, in_turn, several, text_of

LESS_CTX = 1024
"""The cells of a smaller cache, for contexts of different sizes: kernels that write to a cache are for one size."""

DEPTHS = (0, 1, 255, 256, 257, 511, 512, 767, 1023, 1024, 1500, 1791, 2000)
"""The tokens in the cache before a call. They include both sides of each cache length at which another kernel is used."""

SAMPLE = (2, 7, 9, 33, 127, 129, 300, 511, 513)
"""The numbers of tokens for which exact kernels are made; the depths are in the next list."""
SAMPLE_DEPTHS = (0, 255, 1000, 2000)

BATCHES = (7, 33, 100, 300, 511)
"""The tokens per call of the perplexity runs."""

LIMIT_CPU = 1e-3
"""The largest allowed normalised mean squared error of a token's logits against the CPU's."""
LIMIT_EXACT = 1e-6
"""The same limit against kernels for exactly this number of tokens and this length of the cache."""
LIMIT_PERPLEXITY = 1e-3

ON_THE_CPU = {"GET_ROWS"}
"""llama.cpp always keeps the embedding of the input tokens on the CPU."""


@dataclass
class SweepResult:
    """The results of a set of calls.

    Attributes:
        what: a description of the calls.
        calls: the number of calls; `rows` is their number of rows of logits.
        cpu: the largest error against the CPU; None if the CPU did not compute them.
        exact: the largest error against exact kernels; None if there are none.
        device: the ops of the graphs that the device got.
        elsewhere: the ops that the CPU got, without the embedding.
        perplexity: the largest relative difference of the perplexity; None if it was not computed.
        changed: the number of sequences that calls changed without naming them.
    """

    what: str
    calls: int = 0
    rows: int = 0
    cpu: float | None = 0.0
    exact: float | None = None
    device: int = 0
    elsewhere: Counter[str] = field(default_factory=Counter)
    perplexity: float | None = None
    changed: int = 0

    def add(self, call: CallResult) -> None:
        self.calls += 1
        self.rows += call.rows
        if self.cpu is not None:
            self.cpu = math.nan if math.isnan(self.cpu + call.nmse) else max(self.cpu, call.nmse)
        self.device += call.device
        self.elsewhere += Counter({op: n for op, n in call.cpu.items() if op not in ON_THE_CPU})
        self.changed += len(call.changed)
        # One GET_ROWS per graph is the tokens' embedding; any more would gather output rows.
        self.elsewhere["GET_ROWS"] += max(0, call.cpu["GET_ROWS"] - call.graphs)
        self.elsewhere += Counter()

    @property
    def ok(self) -> bool:
        return (
            self.calls > 0
            and self.device > 0
            and self.rows > 0
            and (self.cpu is None or self.cpu <= LIMIT_CPU)
            and (self.exact is None or self.exact <= LIMIT_EXACT)
            and (self.perplexity is None or self.perplexity <= LIMIT_PERPLEXITY)
            and not (self.cpu is None and self.exact is None)
            and not self.changed
            and not self.elsewhere.total()
        )

    def row(self) -> str:
        errors = ("" if x is None else f"{x:.1e}" for x in (self.cpu, self.exact, self.perplexity))
        elsewhere = ", ".join(f"{n} {op}" for op, n in sorted(self.elsewhere.items())) or "0"
        cells = (self.what, self.calls, self.rows, *errors, self.device, elsewhere, self.changed)
        return f"| {' | '.join(map(str, cells))} |{'' if self.ok else ' LIMIT MISSED'}"


HEAD = """\
| calls | number | rows of logits | NMSE against the CPU | NMSE against exact kernels | difference of the perplexity | ops on the device | on the CPU | sequences touched |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


class Sweep:
    """The calls of one model.

    Args:
        programs: the programs to run.
        model: the model.
        folder: the folder for files and kernels.
        n_tokens: the numbers of tokens for which there are kernels.
        n_ctx: the cells of the cache; None if kernels are for caches of any length.
        less_ctx: the cells of a smaller cache, in a second context.
        fuse: `layer`, `step` or `none`, as for `kernelgen model`.
        more: more arguments of `kernelgen model`.
    """

    def __init__(
        self,
        programs: harness.Programs,
        model: RandomModel,
        folder: Path,
        *,
        n_tokens: Sequence[int] = N_TOKENS,
        n_ctx: int | None = N_CTX,
        less_ctx: int = LESS_CTX,
        fuse: str = "none",
        more: Sequence[str] = (),
    ) -> None:
        self.programs, self.model, self.folder, self.n_ctx = programs, model, folder, n_ctx or N_CTX
        self.sizes = (less_ctx, self.n_ctx)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = model.write(programs, folder)
        self.built = derive(
            programs,
            model,
            self.file,
            folder / "few",
            n_tokens=n_tokens,
            n_ctx=self.sizes if n_ctx else None,
            fuse=fuse,
            more=more,
        )
        self.environment = programs.environment(kernels=folder / "few")
        self.numbers = n_tokens
        self.n_ubatch = max(n_tokens)

    def run(
        self,
        *scripts: Iterable[str],
        say: Callable[[CallResult], None] = lambda call: None,
        options: Sequence[str] = (),
        **variables: str,
    ) -> list[CallResult]:
        """Makes calls with the few kernels; `options` are options of the program.

        Raises:
            RuntimeError: the CPU computed an op that the device should compute.
        """
        environment = self.environment | variables
        calls, log = run(self.programs, self.file, self.folder, scripts, environment, say=say, options=options)
        self.log = log
        return calls

    def calls(
        self,
        pairs: Sequence[tuple[int, int]],
        batches: Sequence[int],
        seeds: Iterable[int],
        *,
        window: int = 512,
        rounds: int = 24,
        say: Callable[[CallResult], None] = lambda call: None,
    ) -> list[SweepResult]:
        """Returns the results of the calls in one run of the program, by kind.

        Args:
            pairs: pairs of a depth and a number of tokens, see `grid`.
            batches: the tokens per call of the perplexity runs.
            seeds: the seeds of random calls with several sequences.
            window: the tokens of the text for a perplexity.
            rounds: the random calls for each seed.
            say: called with each call.
        """
        most, (first, last) = max(n for _, n in pairs), (min(pairs)[0], max(pairs)[0])
        kinds = {
            "grid": SweepResult(
                f"{self.model}: 1 to {most} tokens, {len({d for d, _ in pairs})} depths from {first} to {last}"
            ),
            "text": SweepResult(f"{self.model}: a text, {', '.join(map(str, batches))} tokens per call"),
            "shared": SweepResult(f"{self.model}: four sequences in one cache"),
            "own": SweepResult(f"{self.model}: four sequences with a cache each"),
            "turns": SweepResult(f"{self.model}: two contexts in turn"),
        }
        script = list(grid(self.model, pairs, n_ctx=self.n_ctx, n_ubatch=self.n_ubatch))
        for batch in batches:
            script += text_of(self.model, batch, 2, window, self.n_ctx)
        for seed in seeds:
            script += self._several(seed, rounds)
            script += self._several(seed, rounds, unified=False)
            script += self._in_turn(seed, rounds // 2)
        texts: dict[str, list[CallResult]] = {}
        for call in self.run(script, say=say):
            kind, _, which = call.context.partition("-")
            kinds[kind].add(call)
            if kind == "text":
                texts.setdefault(which, []).append(call)
        for of in texts.values():
            rows = sum(call.rows for call in of)
            device, cpu = math.exp(sum(c.nll for c in of) / rows), math.exp(sum(c.nll_cpu for c in of) / rows)
            kinds["text"].perplexity = max(kinds["text"].perplexity or 0.0, abs(device / cpu - 1))
            self.perplexity = cpu
        return list(kinds.values())

    def threads(self, seeds: Iterable[int], rounds: int = 24) -> SweepResult:
        """Returns the results of the random calls of `calls` in two threads, each with its own contexts."""
        found = SweepResult(f"{self.model}: two threads with contexts of their own")
        scripts: list[list[str]] = [[], []]
        for seed in seeds:
            scripts[0] += self._several(seed, rounds)
            scripts[1] += self._in_turn(seed, rounds // 2)
        for call in self.run(*scripts):
            found.add(call)
        return found

    def _several(self, seed: int, rounds: int, *, unified: bool = True) -> Iterator[str]:
        name = f"{'shared' if unified else 'own'}-{seed}"
        sizes = {"n_ubatch": self.n_ubatch, "n_ctx": self.n_ctx}
        return several(seed, self.model, name, unified=unified, rounds=rounds, **sizes)

    def _in_turn(self, seed: int, rounds: int) -> Iterator[str]:
        return in_turn(seed, self.model, f"turns-{seed}", self.sizes, rounds=rounds, n_ubatch=self.n_ubatch)

    def exact(self, pairs: Sequence[tuple[int, int]], numbers: Sequence[int] = N_TOKENS) -> SweepResult:
        """Compares the calls of pairs with calls of kernels made for them; for `numbers`, see `grid`.

        Raises:
            RuntimeError: some exact kernels can't be built.
        """

        def script(output: Path) -> list[str]:
            calls = grid(self.model, pairs, n_ctx=self.n_ctx, n_ubatch=self.n_ubatch, cpu=False, numbers=numbers)
            return [f"logits {output}", *calls]

        def exactly(**variables: str) -> tuple[list[CallResult], str]:
            environment = self.environment | variables | {"GGML_NEURON_EXACT": "1"}
            return run(self.programs, self.file, self.folder, [script(self.folder / "exact.f32")], environment)

        recorded, kernels = self.folder / "recorded.graphs", self.folder / "exact"
        exactly(GGML_NEURON_RECORD=str(recorded))  # the CPU computes the nodes without a kernel
        built = harness.build(recorded, kernels, say=lambda text: None)
        if built.failed or built.refused:
            raise RuntimeError(f"{self.model}: {built}")
        calls, log = exactly(GGML_NEURON_KERNEL_DIR=f"{self.folder / 'few'}:{kernels}")
        if "0 ops ran on the CPU in" not in log or any(set(call.cpu) - ON_THE_CPU for call in calls):
            raise RuntimeError(f"{self.model}: exact kernels are missing:\n{log[-2000:]}")
        if "kernels for other numbers of tokens" in log:
            raise RuntimeError(f"{self.model}: the kernels are not exact:\n{log[-2000:]}")
        calls = self.run(script(self.folder / "few.f32"))
        few, exact = (np.fromfile(self.folder / f"{name}.f32", np.float32) for name in ("few", "exact"))
        rows = sum(call.rows for call in calls)
        assert rows > 0 and few.shape == exact.shape and few.size % rows == 0
        a, b = (x.reshape(rows, -1).astype(np.float64) for x in (few, exact))
        found = SweepResult(f"{self.model}: {len(pairs)} of these, against exact kernels")
        for call in calls:
            found.add(call)
        found.cpu, found.exact = None, float((((a - b) ** 2).sum(1) / (b**2).sum(1)).max())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-m", dest="models", metavar="NAMES", help=f"models, from {', '.join(m.key for m in MODELS)}; all by default"
    )
    parser.add_argument(
        "--depths", help="numbers of tokens in the cache before a call; by default " + ",".join(map(str, DEPTHS))
    )
    parser.add_argument(
        "--step",
        type=int,
        default=1,
        help="test every STEP-th number of tokens, and those next to the kernels' numbers",
    )
    parser.add_argument("--fuse", choices=("none", "layer"), default="none", help="--fuse of `kernelgen model`")
    parser.add_argument(
        "--seeds", type=int, default=4, help="the number of seeds of random calls with several sequences"
    )
    args = parser.parse_args()
    programs = harness.Programs.find()
    names = args.models.split(",") if args.models else [model.key for model in MODELS]
    unknown = set(names) - {model.key for model in MODELS}
    if unknown:
        parser.error(f"-m: {', '.join(sorted(unknown))} is not one of these models")
    depths = sorted({int(depth) for depth in args.depths.split(",")} if args.depths else DEPTHS)
    edges = {n + by for n in N_TOKENS for by in (-1, 0, 1)}
    numbers = sorted((set(range(1, MOST + 1, args.step)) | edges) & set(range(1, MOST + 1)))
    pairs = [(depth, n) for depth in depths for n in numbers]
    results: list[SweepResult] = []
    print(HEAD, flush=True)

    def done(found: SweepResult) -> None:
        results.append(found)
        print(found.row(), flush=True)

    for model in MODELS:
        if model.key not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            layered = model if args.fuse == "none" else replace(model, layers=4)  # enough layers that several are alike
            sweep = Sweep(programs, layered, Path(folder), fuse=args.fuse)
            begun, number = time.monotonic(), 0

            def say(call: CallResult, total: int = len(pairs), model: RandomModel = model) -> None:
                nonlocal begun, number
                number += call.rows > 0 and call.context == "grid"
                if time.monotonic() - begun > 30:
                    begun = time.monotonic()
                    print(f"{model}: {number} of {total} pairs", file=sys.stderr, flush=True)

            for found in sweep.calls(pairs, BATCHES, range(args.seeds), say=say):
                done(found)
            done(sweep.threads(range(args.seeds)))
            done(sweep.exact([(depth, n) for depth in SAMPLE_DEPTHS for n in SAMPLE]))
    return 0 if results and all(found.ok for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
