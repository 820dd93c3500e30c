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
import contextlib
import io
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import derived_kernels
import harness
import numpy as np
import random_llama

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library

N_TOKENS = (1, 8, 32, 128, 512)
"""For which there are kernels, as in the ready manifests."""

N_CTX = 2816
LESS_CTX = 1024
"""Cells of a smaller cache, for contexts of different sizes: kernels that write to a cache are for one size."""

N_UBATCH = 512
MOST = 513

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

TYPES = {"f16": 1, "q8_0": 8}
"""ggml's numbers of the cache's types."""

VARIABLE = "LLAMA_CALLS"


# --- models ----------------------------------------------------------------------------------------------------------------

SMALL = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=2, n_ctx=4096)
WIDER = random_llama.Size(n_embd=128, n_head=4, n_head_kv=2, n_ff=192, n_layer=2, n_ctx=4096)


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights, and the cache it is run with.

    Attributes:
        name: of the architecture.
        cache: type of the cache.
        window: whether a window slides over the cache, which forgets what is out of it.
        layers: that it has, where it is not one of test-llama-archs.
    """

    name: str
    cache: str = "f16"
    window: bool = False
    layers: int = 2

    def __str__(self) -> str:
        return f"{self.name}, {self.cache} cache"

    @property
    def key(self) -> str:
        """What -m calls it."""
        return self.name if self.cache == "f16" else f"{self.name}-{self.cache}"

    @property
    def options(self) -> str:
        """Of contexts. The CPU's flash attention adds values of an F16 cache up in F16 when tokens are few, and is wrong by more than the
        limit at a depth of 2,000; without it, it adds in F32. A quantized cache of values needs it, and is added up in F32.
        """
        return f"type_k={TYPES[self.cache]} type_v={TYPES[self.cache]} cpu_flash_attn={int(self.cache != 'f16')}"

    def write(self, programs: harness.Programs, folder: Path) -> Path:
        """Writes the model's file and returns where it is."""
        path = folder / f"{self.name}.gguf"
        if self.name == "llama":
            random_llama.write(path, size=replace(SMALL, n_layer=self.layers))
        elif self.name == "qwen3":
            size = replace(WIDER, n_layer=self.layers)
            random_llama.write(path, size=size, architecture="qwen3", tied=True)
        else:  # one of those that test-llama-archs makes
            ((_, made),) = derived_kernels.save(programs, f"^{self.name}$", folder)
            made.rename(path)
        return path


MODELS = (
    RandomModel("llama"),
    RandomModel("qwen3"),
    RandomModel("llama", "q8_0"),
    RandomModel("gemma3", window=True),
)


def derive(
    programs: harness.Programs,
    model: RandomModel,
    file: Path,
    output: Path,
    *,
    n_tokens: Sequence[int],
    n_ctx: Sequence[int] | None,
    fuse: str = "none",
    weights: str = "none",
    more: Sequence[str] = (),
) -> harness.BuiltManifest:
    """Builds into `output` the kernels that `kernelgen model`, with `--fuse`, `--weights` and `more` arguments, derives for a few
    numbers of tokens.

    Raises:
        RuntimeError: one can't be derived or built.
    """
    output.mkdir(parents=True, exist_ok=True)
    written = output / "derived.yaml"
    arguments = ["model", file, "-o", written, "--n-ctx", ",".join(map(str, n_ctx)) if n_ctx else "any"]
    arguments += ["--n-tokens", ",".join(map(str, n_tokens)), "--n-ubatch", max(n_tokens)]
    arguments += ["--type-k", model.cache, "--type-v", model.cache, "--flash-attn", "on", "--target", harness.target()]
    arguments += ["--fuse", fuse, "--weights", weights]
    arguments += ["--exporter", derived_kernels.exporter(), "--llama-cpp", programs.llama_cpp, *more]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.run(list(map(str, arguments)))
    if status:
        raise RuntimeError(said.getvalue())
    (request,) = manifest.load([written], Catalog([builtin_library()]))
    built = harness.build_request(request, output, say=lambda text: None)
    if built.failed or built.refused:
        raise RuntimeError(f"{model}: {built}")
    return built


# --- calls -----------------------------------------------------------------------------------------------------------------

_CALL = re.compile(
    r"(?P<script>\d+) (?P<context>\S+) (?P<parts>\S+(?: \S+)*) nmse=(?P<nmse>\S+) nll=(?P<nll>\S+) nll_cpu=(?P<nll_cpu>\S+) "
    r"rows=(?P<rows>\d+) changed=(?P<changed>\S+) graphs=(?P<graphs>\d+) device=(?P<device>\d+) cpu=(?P<cpu>\S+)"
)


@dataclass(frozen=True)
class CallResult:
    """The outcome of a call: a line of the program `calls`, see there."""

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
    """Returns the program that Bazel built or the environment names."""
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
    """Makes the calls that scripts say, each in a thread when there are several; returns their outcomes, and the log.

    The tokens are those of `words`, by default of TEXT. The program has `options` before its arguments.

    Raises:
        RuntimeError: the program failed, or the CPU computed an op that is the device's.
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
        "NEURON_SIMULATOR_CACHE": str(folder / "xla"),  # each run loads the same kernels
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
                if not _CALL.match(line):  # what a program that ends with a signal prints
                    others.append(line)
                    continue
                calls.append(CallResult.read(line.rstrip("\n")))
                say(calls[-1])
    said = log.read_text(errors="replace")
    if process.returncode or others:
        raise RuntimeError(f"calls ended with status {process.returncode}:\n{said[-3000:]}{''.join(others)[-1000:]}")
    return calls, said


def _words(seed: int, n: int) -> Iterator[str]:
    """Yields words that repeat, as those of a language do."""
    rng = random.Random(seed)
    known = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(1, 9))) for _ in range(400)]
    for _ in range(n):
        yield known[min(int(rng.paretovariate(0.9)) - 1, len(known) - 1)]


TEXT = " ".join(_words(13, 1500))
"""The text whose tokens the sequences have; always the same."""


# --- scripts ---------------------------------------------------------------------------------------------------------------


def fill(before: int, depth: int, numbers: Sequence[int] = N_TOKENS) -> Iterator[str]:
    """Yields calls that fill the cache, of these numbers of tokens."""
    while before < depth:
        n = max(n for n in numbers if n <= depth - before)
        yield f"decode 0:{before}:{n}:none"
        before += n


def grid(
    model: RandomModel,
    pairs: Iterable[tuple[int, int]],
    *,
    n_ctx: int = N_CTX,
    n_ubatch: int = N_UBATCH,
    cpu: bool = True,
    numbers: Sequence[int] = N_TOKENS,
) -> Iterator[str]:
    """Yields the calls of pairs of a depth and a number of tokens, ascending in depth; after each the cache is what it was before.

    It is filled in calls of `numbers` of tokens.
    """
    yield f"context grid n_ctx={n_ctx} n_batch={max(n_ubatch, MOST)} n_ubatch={n_ubatch} {model.options} cpu={int(cpu)}"
    before = 0
    for depth, n in pairs:
        if depth > before:
            yield from fill(before, depth, numbers)
            before = depth
            if model.window:
                yield "save 0"
        yield f"decode 0:{depth}:{n}:all"
        # What was in a window before the call may be gone.
        yield "restore 0" if model.window and depth else f"forget 0 {depth} -1"
    yield "end grid"


def text_of(model: RandomModel, batch: int, windows: int, window: int, n_ctx: int) -> Iterator[str]:
    """Yields the calls of llama-perplexity: windows over a text, of whose second half the tokens count."""
    sizes = f"n_ctx={n_ctx} n_batch={batch} n_ubatch={batch} n_seq_max={windows} kv_unified=1"
    yield f"context text-{batch} {sizes} {model.options}"
    for seq in range(windows):  # sequences begin at different places in the text
        for pos in range(0, window - 1, batch):
            yield f"decode {seq}:{pos}:{min(batch, window - 1 - pos)}:{window // 2}"
        yield f"forget {seq} 0 -1"
    yield f"end text-{batch}"


def several(
    seed: int,
    model: RandomModel,
    name: str,
    *,
    unified: bool = True,
    rounds: int = 24,
    n_ubatch: int = N_UBATCH,
    n_ctx: int = N_CTX,
) -> Iterator[str]:
    """Yields calls as a server makes them for four sequences: each call has the next token of those that generate, and of the
    others more or less of a prompt. Sequences end and begin again, also with what another one has.
    """
    rng = random.Random(seed)
    longest = min(120, n_ctx // 4 // 3)  # three prompts fit into a sequence's own cache
    n_ubatch = rng.choice((n_ubatch // 8, n_ubatch // 5, n_ubatch))
    sizes = f"n_ctx={n_ctx} n_batch={4 * longest} n_ubatch={n_ubatch} n_seq_max=4 kv_unified={int(unified)}"
    yield f"context {name} {sizes} {model.options}"
    lengths = [0] * 4
    for _ in range(rounds):
        parts = []
        for seq in rng.sample(range(4), rng.randint(1, 4)):
            if lengths[seq] > 2 * longest or (lengths[seq] and rng.random() < 0.08):
                yield f"forget {seq} 0 -1"
                lengths[seq] = 0
                other = rng.randrange(4)
                taken = any(part.startswith(f"{other}:") for part in parts)
                if other != seq and lengths[other] and not taken and not model.window and rng.random() < 0.5:
                    # caches of their own can share whole sequences only
                    lengths[seq] = rng.randint(1, lengths[other]) if unified else lengths[other]
                    yield f"copy {other} {seq} 0 {lengths[seq] if unified else -1}"
            elif lengths[seq] > 4 and not model.window and rng.random() < 0.1:
                lengths[seq] -= rng.randint(1, 3)
                yield f"forget {seq} {lengths[seq]} -1"
            n = 1 if lengths[seq] and rng.random() < 0.6 else rng.randint(1, longest)
            parts.append(f"{seq}:{lengths[seq]}:{n}:{rng.choice(('last', 'last', 'odd', 'all'))}")
            lengths[seq] += n
        yield "decode " + " ".join(parts)
    yield f"end {name}"


def in_turn(
    seed: int, model: RandomModel, name: str, sizes: Sequence[int], *, rounds: int, n_ubatch: int
) -> Iterator[str]:
    """Yields calls of two contexts of different sizes, one after the other."""
    rng = random.Random(seed)
    lengths = {f"{name}-left": 0, f"{name}-right": 0}
    for context, n_ctx in zip(lengths, sizes, strict=True):
        yield f"context {context} n_ctx={n_ctx} n_batch=512 n_ubatch={n_ubatch} {model.options}"
    for _ in range(rounds):
        for context in rng.sample(sorted(lengths), 2):
            n = rng.choice((1, 1, rng.randint(2, 60)))
            yield f"use {context}"
            yield f"decode 0:{lengths[context]}:{n}:all"
            lengths[context] += n
    for context in lengths:
        yield f"end {context}"


# --- what is found -----------------------------------------------------------------------------------------------------------


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
