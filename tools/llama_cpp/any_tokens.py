"""Calls of any number of tokens at any depth, on a simulated NeuronCore with kernels for a few: against llama.cpp's CPU backend and exact kernels.

    ./bazelw run //tools/llama_cpp:any_tokens                             all of it
    ./bazelw run //tools/llama_cpp:any_tokens -- -m llama,gemma3          these models
    ./bazelw run //tools/llama_cpp:any_tokens -- --depths 0,255 --step 7  these depths, and every seventh number of tokens
    ./bazelw run //tools/llama_cpp:any_tokens -- -m llama --fuse layer    with layers as kernels

A model's manifest is derived for 1, 8, 32, 128 and 512 tokens. Then, for each model and type of the cache:

- 1 to 513 tokens (two calls of the backend) at each depth: the logits of all of them, against the CPU's;
- some of these pairs once more with kernels made for exactly their numbers: the logits, against those;
- the perplexity of a text, in calls of odd numbers of tokens, against the CPU's;
- several sequences of different lengths: prompts and generation in one call, copied and forgotten ones, in one cache and in a
  cache for each, contexts in turn, and in threads. What the cache has of the other sequences must stay to the bit.

Exit status 1 when a limit is missed, or an op of a graph but the embedding is the CPU's.
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
"""Cells of a smaller cache, for contexts of different sizes: kernels that write to a cache are for one size."""

DEPTHS = (0, 1, 255, 256, 257, 511, 512, 767, 1023, 1024, 1500, 1791, 2000)
"""Tokens that are in the cache before a call. Where a kernel for a longer cache begins is met with each."""

SAMPLE = (2, 7, 9, 33, 127, 129, 300, 511, 513)
"""Numbers of tokens for which kernels are made that fit exactly, and the depths at which they are."""
SAMPLE_DEPTHS = (0, 255, 1000, 2000)

BATCHES = (7, 33, 100, 300, 511)
"""Tokens per call when the perplexity is taken."""

LIMIT_CPU = 1e-3
"""Normalised mean squared error of a token's logits against the CPU's, at most."""
LIMIT_EXACT = 1e-6
"""The same, against kernels for exactly these numbers of tokens and this length of the cache."""
LIMIT_PERPLEXITY = 1e-3

ON_THE_CPU = {"GET_ROWS"}
"""llama.cpp itself keeps the embedding of the input tokens on the CPU."""


@dataclass
class Found:
    """What a lot of calls came to.

    Attributes:
        what: they are.
        calls: how many, and `rows` of logits in them.
        cpu: largest error against the CPU; None: it did not compute them.
        exact: largest error against exact kernels; the same.
        device: ops of the graphs that the device was given.
        elsewhere: ops that the CPU was given, the embedding not among them.
        perplexity: largest relative difference of it; None: it was not taken.
        changed: sequences that were touched by calls that did not name them.
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
        # The embedding of the tokens, once per graph; more would be the gathering of output rows.
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
        programs: what runs them.
        model: of the calls.
        folder: for files and kernels.
        n_tokens: numbers of tokens for which there are kernels.
        n_ctx: cells of the cache; None: kernels are for caches of any length.
        less_ctx: cells of a smaller one, in a context beside.
        fuse: what is one kernel: `layer`, `step` or `none`.
        more: arguments of `kernelgen model`.
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
        """Makes calls with the few kernels; the program has `options`.

        Raises:
            RuntimeError: the CPU computed an op that is the device's.
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
    ) -> list[Found]:
        """Returns what calls of one program came to, by kind.

        Args:
            pairs: of a depth and a number of tokens, see `grid`.
            batches: tokens per call when the perplexity of a text is taken.
            seeds: of random calls with several sequences.
            window: tokens of the text that a perplexity is taken of.
            rounds: random calls for each seed.
            say: is told of each call.
        """
        most, (first, last) = max(n for _, n in pairs), (min(pairs)[0], max(pairs)[0])
        kinds = {
            "grid": Found(
                f"{self.model}: 1 to {most} tokens, {len({d for d, _ in pairs})} depths from {first} to {last}"
            ),
            "text": Found(f"{self.model}: a text, {', '.join(map(str, batches))} tokens per call"),
            "shared": Found(f"{self.model}: four sequences in one cache"),
            "own": Found(f"{self.model}: four sequences with a cache each"),
            "turns": Found(f"{self.model}: two contexts in turn"),
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

    def threads(self, seeds: Iterable[int], rounds: int = 24) -> Found:
        """Returns what the random calls of `calls` came to in two threads, each with contexts of its own."""
        found = Found(f"{self.model}: two threads with contexts of their own")
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

    def exact(self, pairs: Sequence[tuple[int, int]], numbers: Sequence[int] = N_TOKENS) -> Found:
        """Returns what the calls of pairs came to against kernels that are made for them; for `numbers`, see `grid`.

        Raises:
            RuntimeError: there are not kernels for all of them.
        """

        def script(output: Path) -> list[str]:
            calls = grid(self.model, pairs, n_ctx=self.n_ctx, n_ubatch=self.n_ubatch, cpu=False, numbers=numbers)
            return [f"logits {output}", *calls]

        def exactly(**variables: str) -> tuple[list[CallResult], str]:
            environment = self.environment | variables | {"GGML_NEURON_EXACT": "1"}
            return run(self.programs, self.file, self.folder, [script(self.folder / "exact.f32")], environment)

        recorded, kernels = self.folder / "recorded.yaml", self.folder / "exact"
        exactly(GGML_NEURON_RECORD=str(recorded))  # the CPU computes what has no kernel
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
        found = Found(f"{self.model}: {len(pairs)} of these, against exact kernels")
        for call in calls:
            found.add(call)
        found.cpu, found.exact = None, float((((a - b) ** 2).sum(1) / (b**2).sum(1)).max())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-m", dest="models", metavar="NAMES", help=f"of {', '.join(m.key for m in MODELS)}; all by default"
    )
    parser.add_argument("--depths", help="tokens in the cache before a call; by default " + ",".join(map(str, DEPTHS)))
    parser.add_argument(
        "--step", type=int, default=1, help="between numbers of tokens, beside those of kernels and their neighbours"
    )
    parser.add_argument("--fuse", choices=("none", "layer"), default="none", help="as of `kernelgen model`")
    parser.add_argument("--seeds", type=int, default=4, help="of random calls with several sequences")
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
    results: list[Found] = []
    print(HEAD, flush=True)

    def done(found: Found) -> None:
        results.append(found)
        print(found.row(), flush=True)

    for model in MODELS:
        if model.key not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            layered = model if args.fuse == "none" else replace(model, layers=4)  # of which several are alike
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
