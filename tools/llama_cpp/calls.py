"""Calls of llama_decode by scripts for the program `calls` (calls/calls.cpp), on the device and on the CPU.

The suites `any_tokens`, `several_cores` and `accuracy` make such calls; docs/reference/llama-cpp-tests.md is the manual.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import architectures
import harness
import numpy as np
import random_llama
from harness import Programs

N_TOKENS = (1, 8, 32, 128, 512)
"""The numbers of tokens for which there are kernels, as in the ready manifests."""
N_CTX = 2816
LESS_CTX = 1024
"""The cells of a smaller cache, for contexts of different sizes: kernels that write to a cache are for one size."""
MOST = 513
DEPTHS = (0, 1, 255, 256, 257, 511, 512, 767, 1023, 1024, 1500, 1791, 2000)
"""The tokens in the cache before a call. They include both sides of each cache length at which another kernel is used."""
BATCHES = (7, 33, 100, 300, 511)
"""The tokens per call of the perplexity runs."""

LIMIT_CPU = 1e-3
"""The largest allowed normalised mean squared error of a token's logits against the CPU's."""
LIMIT_EXACT = 1e-6
"""The same limit against kernels for exactly this number of tokens and this length of the cache."""
LIMIT_CORES = 1e-5
"""The same limit of several cores against one core."""
LIMIT_PERPLEXITY = 1e-3


def _text(seed: int, n: int) -> str:
    """Returns words with repetitions, as in a language."""
    rng = random.Random(seed)
    known = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(1, 9))) for _ in range(400)]
    return " ".join(known[min(int(rng.paretovariate(0.9)) - 1, len(known) - 1)] for _ in range(n))


TEXT = _text(13, 1500)
"""The text from which the sequences take their tokens; it is always the same."""


# --- the program -----------------------------------------------------------------------------------------------------------

_CALL = re.compile(
    r"(?P<script>\d+) (?P<context>\S+) (?P<parts>\S+(?: \S+)*) nmse=(?P<nmse>\S+) nll=(?P<nll>\S+) nll_cpu=(?P<nll_cpu>\S+) "
    r"rows=(?P<rows>\d+) changed=(?P<changed>\S+) graphs=(?P<graphs>\d+) device=(?P<device>\d+) cpu=(?P<cpu>\S+)"
)


@dataclass(frozen=True)
class CallResult:
    """The outcome of a call: a line that the program `calls` prints (format there)."""

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
        if not match:  # other output, for example from a program that dies from a signal
            raise RuntimeError(f"calls: {line!r}")
        context, parts = match["context"], match["parts"]
        nmse, nll, nll_cpu = (float(match[name]) for name in ("nmse", "nll", "nll_cpu"))
        rows, graphs, device = (int(match[name]) for name in ("rows", "graphs", "device"))
        changed = () if match["changed"] == "-" else tuple(match["changed"].split(","))
        cpu = Counter({op: int(n) for op, n in re.findall(r"(\w+)\*(\d+)", match["cpu"])})
        return CallResult(context, parts, nmse, nll, nll_cpu, rows, changed, graphs, device, cpu)


def program(name: str) -> Path:
    """Returns the path of a program of the folder `calls`."""
    return harness.built("LLAMA_CALLS", "calls/calls") / name


def run(
    programs: Programs,
    model: Path,
    folder: Path,
    scripts: Sequence[Iterable[str]],
    environment: dict[str, str],
    *options: str,
    words: str = TEXT,
) -> tuple[list[CallResult], str]:
    """Makes the calls of scripts, each script in its own thread if there are several; returns their outcomes, and the log.

    The tokens come from `words`. `options` stand before the program's arguments.

    Raises:
        RuntimeError: the program failed.
    """
    text = folder / "text"
    text.write_text(words)
    files = [folder / f"script-{i}" for i in range(len(scripts))]
    for file, script in zip(files, scripts, strict=True):
        file.write_text("".join(f"{line}\n" for line in script))
    variables = {"LD_LIBRARY_PATH": str(programs.llama_cpp), "GGML_SCHED_DEBUG": "2", "GGML_NEURON_LOG": "1"}
    command = [program("calls"), *options, programs.llama_cpp, model, text, *files]
    done = harness.run(command, variables | {"OMP_THREAD_LIMIT": "1"} | environment)
    if done.returncode:
        raise RuntimeError(f"calls ended with status {done.returncode}:\n{done.stderr[-3000:]}{done.stdout[-1000:]}")
    return [CallResult.read(line) for line in done.stdout.splitlines()], done.stderr


# --- models and scripts ----------------------------------------------------------------------------------------------------

TYPES = {"f16": 1, "q8_0": 8}
"""ggml's numbers of the cache types."""
SMALL = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=2, n_ctx=4096)
WIDER = random_llama.Size(n_embd=128, n_head=4, n_head_kv=2, n_ff=192, n_layer=2, n_ctx=4096)
# Sizes that split evenly over 2, 4 and 8 cores. llama.cpp splits feed-forward networks in steps of 128, and heads in
# groups with the same keys.
EVEN = random_llama.Size(n_embd=128, n_head=8, n_head_kv=8, n_ff=1024, n_layer=2, n_ctx=4096, n_vocab=264)


@dataclass(frozen=True)
class Model:
    """A model and its cache.

    Attributes:
        name: the name of the model.
        size: the sizes of a random model; None for a file or for a model that test-llama-archs writes.
        architecture: the architecture of a random model.
        cache: the type of the cache.
        window: whether the cache has a sliding window, and drops positions outside of it.
        file: an existing file.
        f32: whether to write the file's weights as F32 first.
    """

    name: str
    size: random_llama.Size | None = None
    architecture: str = "llama"
    cache: str = "f16"
    window: bool = False
    file: Path | None = None
    f32: bool = False

    @property
    def options(self) -> str:
        """The options of contexts.

        For few tokens, the CPU's flash attention accumulates the values of an F16 cache in F16, and its error at a
        depth of 2,000 exceeds the limit. Without flash attention it accumulates in F32. A quantized cache of values
        requires flash attention, which accumulates it in F32.
        """
        return f"type_k={TYPES[self.cache]} type_v={TYPES[self.cache]} cpu_flash_attn={int(self.cache != 'f16')}"

    def with_layers(self, n_layer: int) -> Model:
        return replace(self, size=replace(self.size, n_layer=n_layer) if self.size else None)

    def write(self, programs: Programs, folder: Path) -> Path:
        """Writes the model's file and returns its path."""
        path = folder / f"{self.name}.gguf"
        if self.file and self.f32:
            random_llama.write_f32(path, self.file)
        elif self.file:
            return self.file
        elif self.size:
            tied = self.architecture != "llama"
            random_llama.write(path, size=self.size, architecture=self.architecture, tied=tied)
        else:
            (path,) = architectures.save(programs, self.name, folder)
        return path


QWEN3 = Model("qwen3", WIDER, "qwen3")
MODELS = (
    Model("llama", SMALL),
    QWEN3,
    Model("llama-q8_0", SMALL, cache="q8_0"),
    Model("gemma3", window=True),
)
SPLIT_MODELS = (
    Model("llama", EVEN),
    Model("qwen3", replace(EVEN, n_embd=256, n_head=16), "qwen3"),
    Model("gemma3", replace(EVEN, n_swa=64), "gemma3", window=True),
    Model("mixtral", replace(EVEN, n_expert=8, n_expert_used=2)),
)


def fill(before: int, depth: int, numbers: Sequence[int] = N_TOKENS) -> Iterator[str]:
    """Yields calls of these numbers of tokens that fill the cache."""
    while before < depth:
        n = max(n for n in numbers if n <= depth - before)
        yield f"decode 0:{before}:{n}:none"
        before += n


def grid(
    model: Model,
    pairs: Iterable[tuple[int, int]],
    *,
    n_ctx: int = N_CTX,
    cpu: bool = True,
    numbers: Sequence[int] = N_TOKENS,
) -> Iterator[str]:
    """Yields the calls of pairs of a depth and a number of tokens, ascending in depth; each call leaves the cache unchanged.

    Calls of `numbers` of tokens fill the cache.
    """
    n_ubatch = max(numbers)
    yield f"context grid n_ctx={n_ctx} n_batch={max(n_ubatch, MOST)} n_ubatch={n_ubatch} {model.options} cpu={int(cpu)}"
    before = 0
    for depth, n in pairs:
        if depth > before:
            yield from fill(before, depth, numbers)
            before = depth
            if model.window:
                yield "save 0"
        yield f"decode 0:{depth}:{n}:all"
        # Tokens that were in the window before the call may be overwritten.
        yield "restore 0" if model.window and depth else f"forget 0 {depth} -1"
    yield "end grid"


def windows(options: str, batch: int, n_windows: int, window: int) -> Iterator[str]:
    """Yields the calls of llama-perplexity: windows over a text; the tokens of each window's second half count.

    Each window is a sequence that begins elsewhere in the text.
    """
    yield f"context text-{batch} n_batch={batch} n_ubatch={batch} n_seq_max={n_windows} kv_unified=1 {options}"
    for seq in range(n_windows):
        for pos in range(0, window - 1, batch):
            yield f"decode {seq}:{pos}:{min(batch, window - 1 - pos)}:{window // 2}"
        yield f"forget {seq} 0 -1"
    yield f"end text-{batch}"


def several(
    seed: int,
    model: Model,
    name: str,
    *,
    unified: bool = True,
    rounds: int = 24,
    n_ubatch: int = 512,
    n_ctx: int = N_CTX,
) -> Iterator[str]:
    """Yields calls for four sequences, as a server makes them.

    Each call has the next token of each generating sequence, and a part of the prompt of each other sequence. Sequences
    end and restart, some with a copy of another sequence.
    """
    rng = random.Random(seed)
    longest = min(120, n_ctx // 4 // 3)  # three prompts fit into a sequence's own cache
    n_ubatch = rng.choice((n_ubatch // 8, n_ubatch // 5, n_ubatch))
    sizes = f"n_ctx={n_ctx} n_batch={4 * longest} n_ubatch={n_ubatch} n_seq_max=4 kv_unified={int(unified)}"
    yield f"context {name} {sizes} {model.options}"
    lengths = [0] * 4
    for _ in range(rounds):
        parts: list[str] = []
        for seq in rng.sample(range(4), rng.randint(1, 4)):
            if lengths[seq] > 2 * longest or (lengths[seq] and rng.random() < 0.08):
                yield f"forget {seq} 0 -1"
                lengths[seq] = 0
                other = rng.randrange(4)
                taken = any(part.startswith(f"{other}:") for part in parts)
                if other != seq and lengths[other] and not taken and not model.window and rng.random() < 0.5:
                    # separate caches can only share whole sequences
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


def in_turn(seed: int, model: Model, name: str, sizes: Sequence[int], *, rounds: int, n_ubatch: int) -> Iterator[str]:
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


# --- any number of tokens --------------------------------------------------------------------------------------------------


@dataclass
class SweepResult:
    """The results of a set of calls.

    Attributes:
        name: a description of the calls.
        calls: the number of calls; `rows` is their number of rows of logits.
        cpu: the largest error against the CPU; None if the CPU did not compute them.
        exact: the largest error against exact kernels; None if there are none.
        device: the ops of the graphs that the device got.
        elsewhere: the ops that the CPU got, without the embedding.
        perplexity: the largest relative difference of the perplexity; None if it was not computed.
        changed: the number of sequences that calls changed without naming them.
    """

    name: str
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
            self.cpu = worst(self.cpu, call.nmse)
        self.device += call.device
        # One GET_ROWS per graph is the tokens' embedding; any more would gather output rows.
        self.elsewhere += call.cpu - Counter(GET_ROWS=call.graphs)
        self.changed += len(call.changed)

    @property
    def ok(self) -> bool:
        errors = ((self.cpu, LIMIT_CPU), (self.exact, LIMIT_EXACT), (self.perplexity, LIMIT_PERPLEXITY))
        return (
            min(self.calls, self.device, self.rows) > 0
            and all(error is None or error <= limit for error, limit in errors)
            and not (self.cpu is None and self.exact is None)
            and not self.changed
            and not self.elsewhere
        )

    def row(self) -> str:
        errors = ["" if x is None else f"{x:.1e}" for x in (self.cpu, self.exact, self.perplexity)]
        elsewhere = harness.counts(self.elsewhere) or "0"
        cells = (self.name, self.calls, self.rows, *errors, self.device, elsewhere, self.changed)
        return harness.row(*cells) + ("" if self.ok else " LIMIT MISSED")


HEAD = """\
| calls | number | rows of logits | NMSE against the CPU | NMSE against exact kernels | difference of the perplexity | ops on the device | on the CPU | sequences touched |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


def worst(a: float, b: float) -> float:
    """Returns the larger error; not a number if one of them is none."""
    return math.nan if math.isnan(a + b) else max(a, b)


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest normalised mean squared error of a row against `b`: [rows, n_vocab] f32 each."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((((a - b) ** 2).sum(1) / (b**2).sum(1)).max())


class Sweep:
    """The calls of one model with few kernels.

    Args:
        programs: the programs to run.
        model: the model.
        folder: the folder for files and kernels.
        more: more arguments of `kernelgen model`.
        n_tokens: the numbers of tokens for which there are kernels.
        n_ctx: the cells of the cache; None if kernels are for caches of any length.
        less_ctx: the cells of a smaller cache, in a second context.
        fuse: `layer`, `step` or `none`, as for `kernelgen model`.
    """

    def __init__(
        self,
        programs: Programs,
        model: Model,
        folder: Path,
        *more: str,
        n_tokens: Sequence[int] = N_TOKENS,
        n_ctx: int | None = N_CTX,
        less_ctx: int = LESS_CTX,
        fuse: str = "none",
    ) -> None:
        self.programs, self.model, self.folder, self.numbers = programs, model, folder, n_tokens
        self.n_ctx = n_ctx or N_CTX
        self.sizes = (less_ctx, self.n_ctx)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = model.write(programs, folder)
        cells = self.sizes if n_ctx else None
        kernels = folder / "few"
        harness.derive(
            programs, self.file, kernels, *more, n_tokens=n_tokens, n_ctx=cells, cache=model.cache, fuse=fuse
        )
        self.environment = programs.environment(kernels=kernels)

    def run(self, *scripts: Iterable[str], options: Sequence[str] = ()) -> list[CallResult]:
        """Makes calls; `options` are options of the program. `log` receives the backend's log."""
        calls, self.log = run(self.programs, self.file, self.folder, scripts, self.environment, *options)
        return calls

    def calls(
        self,
        pairs: Sequence[tuple[int, int]],
        batches: Sequence[int],
        seeds: Iterable[int],
        *,
        window: int = 512,
        rounds: int = 24,
    ) -> list[SweepResult]:
        """Returns the results of the calls in one run of the program, by kind.

        Args:
            pairs: pairs of a depth and a number of tokens, see `grid`.
            batches: the tokens per call of the perplexity runs.
            seeds: the seeds of random calls with several sequences.
            window: the tokens of the text for a perplexity.
            rounds: the random calls for each seed.
        """
        most, depths = max(n for _, n in pairs), {depth for depth, _ in pairs}
        kinds = {
            "grid": f"1 to {most} tokens, {len(depths)} depths from {min(depths)} to {max(depths)}",
            "text": f"a text, {', '.join(map(str, batches))} tokens per call",
            "shared": "four sequences in one cache",
            "own": "four sequences with a cache each",
            "turns": "two contexts in turn",
        }
        results = {kind: SweepResult(f"{self.model.name}: {name}") for kind, name in kinds.items()}
        script = list(grid(self.model, pairs, n_ctx=self.n_ctx, numbers=self.numbers))
        for batch in batches:
            script += windows(f"n_ctx={self.n_ctx} {self.model.options}", batch, 2, window)
        for seed in seeds:
            script += [*self._several(seed, rounds), *self._several(seed, rounds, unified=False)]
            script += self._in_turn(seed, rounds // 2)
        texts: dict[str, list[CallResult]] = {}
        for call in self.run(script):
            kind, _, which = call.context.partition("-")
            results[kind].add(call)
            if kind == "text":
                texts.setdefault(which, []).append(call)
        for of in texts.values():
            device, self.perplexity = perplexities(of)
            results["text"].perplexity = max(results["text"].perplexity or 0.0, abs(device / self.perplexity - 1))
        return list(results.values())

    def threads(self, seeds: Iterable[int], rounds: int = 24) -> SweepResult:
        """Returns the results of the random calls of `calls` in two threads, each with its own contexts."""
        result = SweepResult(f"{self.model.name}: two threads with contexts of their own")
        scripts: list[list[str]] = [[], []]
        for seed in seeds:
            scripts[0] += self._several(seed, rounds)
            scripts[1] += self._in_turn(seed, rounds // 2)
        for call in self.run(*scripts):
            result.add(call)
        return result

    def _several(self, seed: int, rounds: int, *, unified: bool = True) -> Iterator[str]:
        name = f"{'shared' if unified else 'own'}-{seed}"
        sizes: dict[str, Any] = {"n_ubatch": max(self.numbers), "n_ctx": self.n_ctx}
        return several(seed, self.model, name, unified=unified, rounds=rounds, **sizes)

    def _in_turn(self, seed: int, rounds: int) -> Iterator[str]:
        name, n_ubatch = f"turns-{seed}", max(self.numbers)
        return in_turn(seed, self.model, name, self.sizes, rounds=rounds, n_ubatch=n_ubatch)

    def exact(self, pairs: Sequence[tuple[int, int]]) -> SweepResult:
        """Compares the calls of pairs with calls of kernels made for them.

        Raises:
            RuntimeError: some exact kernels can't be built.
        """
        recorded, kernels, logits = (self.folder / name for name in ("recorded.graphs", "exact", "logits"))
        script = [
            f"logits {logits}",
            *grid(self.model, pairs, n_ctx=self.n_ctx, cpu=False, numbers=self.numbers),
        ]
        few, rows = self.run(script), np.fromfile(logits, np.float32)
        exactly = self.environment | {"GGML_NEURON_EXACT": "1"}
        # the CPU computes the nodes without a kernel
        run(self.programs, self.file, self.folder, [script], exactly | {"GGML_NEURON_RECORD": str(recorded)})
        harness.build_recording(recorded, kernels)
        exactly["GGML_NEURON_KERNEL_DIR"] += f":{kernels}"
        calls, log = run(self.programs, self.file, self.folder, [script], exactly)
        ran = harness.ran(log)
        if ran.cpu or ran.padded or any(set(call.cpu) - harness.ON_THE_CPU for call in calls):
            raise RuntimeError(f"{self.model.name}: exact kernels are missing:\n{log[-2000:]}")
        result = SweepResult(f"{self.model.name}: {len(pairs)} of these, against exact kernels")
        for call in few:
            result.add(call)
        exact = np.fromfile(logits, np.float32)
        assert rows.shape == exact.shape and result.rows > 0
        result.cpu, result.exact = None, nmse(rows.reshape(result.rows, -1), exact.reshape(result.rows, -1))
        return result


def perplexities(calls: Sequence[CallResult]) -> tuple[float, float]:
    """Returns the perplexities of a text by the device and by the CPU."""
    rows = sum(call.rows for call in calls)
    return math.exp(sum(call.nll for call in calls) / rows), math.exp(sum(call.nll_cpu for call in calls) / rows)


def any_tokens(programs: Programs, args: argparse.Namespace) -> bool:
    """Runs the suite; returns whether no limit was missed."""
    edges = {n + by for n in N_TOKENS for by in (-1, 0, 1)}
    numbers = sorted((set(range(1, MOST + 1, args.step)) | edges) & set(range(1, MOST + 1)))
    pairs = [(depth, n) for depth in DEPTHS for n in numbers]
    sample = [(depth, n) for depth in (0, 255, 1000, 2000) for n in (2, 7, 9, 33, 127, 129, 300, 511, 513)]
    results: list[SweepResult] = []
    print(HEAD, flush=True)
    for model in chosen(MODELS, args.only):
        with tempfile.TemporaryDirectory() as folder:
            layered = model.with_layers(4) if args.fuse == "layer" else model  # enough layers that several are alike
            sweep = Sweep(programs, layered, Path(folder), fuse=args.fuse or "none")
            for result in (*sweep.calls(pairs, BATCHES, range(4)), sweep.threads(range(4)), sweep.exact(sample)):
                results.append(result)
                print(result.row(), flush=True)
    return all(result.ok for result in results)


def chosen(known: Sequence[Any], only: str | None) -> list[Any]:
    """Returns the cases that `--only` names; all if it is not given.

    Raises:
        RuntimeError: there is no such case.
    """
    names = only.split(",") if only else [case.name for case in known]
    if unknown := set(names) - {case.name for case in known}:
        raise RuntimeError(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(case.name for case in known)}")
    return [case for case in known if case.name in names]


# --- several cores ---------------------------------------------------------------------------------------------------------

KINDS = ("prompts", "long", "shared", "own", "shift", "state", "greedy")
FUSE = ("parts", "parts+sums", "layer", "step")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the calls and of the kernels.

    Attributes:
        n_tokens: the numbers of tokens for which there are kernels.
        n_ctx: the cells of the cache; the default is enough for four sequences with a cache each.
        prompts: the numbers of tokens of prompts; `depths` are the positions of the prompts.
        long: the tokens of a prompt that is longer than a call; only its last call has an output.
        rounds: the number of calls with several sequences.
        text: the number of generated tokens.
        kinds: the kinds of calls to make.
    """

    n_tokens: Sequence[int] = N_TOKENS
    n_ctx: int = 3072
    prompts: Sequence[int] = (1, 45, 300, 512)
    depths: Sequence[int] = (0, 255, 1000, 2000)
    long: int = 1100
    rounds: int = 12
    text: int = 24
    kinds: Sequence[str] = KINDS

    def script(self, model: Model, logits: Path) -> Iterator[str]:
        """Yields the calls."""
        n_ubatch = max(self.n_tokens)
        context = f"n_ctx={self.n_ctx} n_batch={max(512, self.long)} n_ubatch={n_ubatch} {model.options}"
        half = self.text // 2
        lines = {
            "long": [f"decode 0:0:{self.long}:last"],
            # a context shift: positions are removed, and later positions move up
            "shift": ["decode 0:0:120:last", "forget 0 8 40", "shift 0 40 120 -32", "decode 0:88:20:all"],
            # the state of a sequence and of the whole context is restored
            "state": ["decode 0:0:44:last"],
            "greedy": ["decode 0:0:45:last", f"greedy 0 45 {self.text}"],
        }
        lines["shift"].append(f"greedy 0 108 {self.text}")
        for seq in (0, -1):
            lines["state"].append(f"save {seq}")
            lines["state"] += 2 * ["decode 0:44:1:last", f"greedy 0 45 {half}", f"restore {seq}"]
        yield f"logits {logits}"
        for kind in self.kinds:
            if kind == "prompts":
                pairs = [(depth, n) for depth in self.depths for n in self.prompts]
                for line in grid(model, pairs, n_ctx=self.n_ctx, numbers=self.n_tokens):
                    # for a given file, with its large vocabulary: only the logits of the prompt's last token
                    yield line.replace("grid", kind).replace(":all", ":last" if model.file else ":all")
            elif kind in ("shared", "own"):
                sizes = {"rounds": self.rounds, "n_ubatch": n_ubatch, "n_ctx": self.n_ctx}
                yield from several(1, model, kind, unified=kind == "shared", **sizes)
            else:
                # llama.cpp can't shift a cache that drops positions outside a window
                yield from (f"context {kind} {context} swa_full={int(kind == 'shift')}", *lines[kind], f"end {kind}")


@dataclass
class Compared:
    """The results of one model's calls over some number of cores with one `--fuse`.

    Attributes:
        name: the model, the number of cores, and `--fuse`.
        errors: the largest normalised mean squared error of a token's logits against one core, by kind of calls.
        cpu: the same against the CPU, over all calls; None if it does not count. With quantized weights, the CPU is further
            from F32 than the device is (docs/results/llama-cpp.md). If two experts are nearly equally likely, rounding
            decides (docs/results/tensor-parallel.md).
        texts: the number of generated tokens that differ.
        touched: the number of sequences that calls changed without naming them.
        rows: the number of rows of logits.
        ran: what ran on all cores.
    """

    name: tuple[object, ...]
    errors: dict[str, float] = field(default_factory=dict)
    cpu: float | None = None
    texts: int = 0
    touched: int = 0
    rows: int = 0
    ran: harness.Ran = field(default_factory=harness.Ran)

    @property
    def ok(self) -> bool:
        return (
            self.rows > 0
            and all(error <= LIMIT_CORES for error in self.errors.values())
            and (self.cpu is None or self.cpu <= LIMIT_CPU)
            and not (self.texts or self.touched or self.ran.cpu)
        )

    def row(self) -> str:
        errors = [f"{self.errors[kind]:.0e}" if kind in self.errors else "" for kind in KINDS]
        cpu = "" if self.cpu is None else f"{self.cpu:.0e}"
        numbers = (self.texts, self.touched, self.ran.launches, self.ran.reductions, self.ran.on_cpu)
        return harness.row(*self.name, self.rows, *errors, cpu, *numbers) + ("" if self.ok else " LIMIT MISSED")


SPLIT_HEAD = f"""\
| model | cores | --fuse | rows of logits | {" | ".join(KINDS)} | against the CPU | other texts | sequences touched | launches of groups | sums on the host | on the CPU |
|---|--:|---|--:|{"--:|" * len(KINDS)}--:|--:|--:|--:|--:|---|"""


class ModelCalls:
    """A model's calls on one core, and their comparison with calls on several cores.

    Raises:
        RuntimeError: kernels can't be derived or built, or calls fail.
    """

    def __init__(self, programs: Programs, model: Model, folder: Path, sizes: Sizes) -> None:
        self.programs, self.model, self.folder, self.sizes = programs, model, folder, sizes
        self.file = model.write(programs, folder)
        self.calls, self.logits, _ = self._run(1, "none")

    def _run(self, cores: int, fuse: str) -> tuple[list[CallResult], np.ndarray, str]:
        """Returns the calls, all logits ([rows, n_vocab] f32) and the log."""
        split = ("--split-mode", "tensor", "--devices", str(cores)) if cores > 1 else ()
        kernels, logits = self.folder / f"{fuse}-{cores}", self.folder / f"logits-{fuse}-{cores}"
        more = (*split, "--context-shift")
        harness.derive(self.programs, self.file, kernels, *more, n_tokens=self.sizes.n_tokens, n_ctx=None, fuse=fuse)
        environment = self.programs.environment(kernels=kernels, buffers="device", cores=cores) | {
            "NEURON_RT_EXEC_TIMEOUT": harness.WAIT,
            "GGML_NO_BACKTRACE": "1",
        }
        script = self.sizes.script(self.model, logits)
        options = ("-sm", "tensor") if cores > 1 else ()
        calls, log = run(self.programs, self.file, self.folder, [script], environment, *options)
        return calls, np.fromfile(logits, np.float32).reshape(sum(call.rows for call in calls), -1), log

    def compare(self, cores: int, fuse: str) -> Compared:
        """Returns the comparison for a number of cores."""
        calls, logits, log = self._run(cores, fuse)
        judge_cpu = self.model.size is not None and not self.model.size.n_expert
        result = Compared((self.model.name, cores, fuse), cpu=0.0 if judge_cpu else None, ran=harness.ran(log))
        assert [(call.parts, call.rows) for call in calls] == [(call.parts, call.rows) for call in self.calls]
        for call in calls:
            a, b = (x[result.rows : result.rows + call.rows] for x in (logits, self.logits))
            result.rows += call.rows
            if call.rows:
                result.errors[call.context] = worst(result.errors.get(call.context, 0.0), nmse(a, b))
            if call.context in ("greedy", "shift", "state"):
                result.texts += int((a.argmax(1) != b.argmax(1)).sum())
            if result.cpu is not None:
                result.cpu = worst(result.cpu, call.nmse)
            result.touched += len(call.changed)
        return result


def several_cores(programs: Programs, args: argparse.Namespace) -> bool:
    """Runs the suite; returns whether no limit was missed."""
    sizes, models = Sizes(), chosen(SPLIT_MODELS, args.only)
    if args.file:
        sizes = Sizes(prompts=(1, 45, 300), depths=(0, 200), kinds=("prompts", "shift", "state", "greedy"))
        models = [Model(args.file.stem + " F32" * args.f32, file=args.file.absolute(), f32=args.f32)]
    results = []
    print(SPLIT_HEAD, flush=True)
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            one = ModelCalls(programs, model, Path(folder), sizes)
            for cores in [args.cores] if args.cores else (2, 4, 8):
                for fuse in [args.fuse] if args.fuse else FUSE:
                    results.append(one.compare(cores, fuse))
                    print(results[-1].row(), flush=True)
    return all(result.ok for result in results)


# --- the accuracy of a file ------------------------------------------------------------------------------------------------

WINDOW, BATCH, ACCURACY_CTX = 256, 32, 256
_WHOLE = ("--n-kv", str(ACCURACY_CTX), "--n-outputs", str(WINDOW // 2))
PLAIN, CAUSAL, ROUNDED = "device, layers", "device, layers, causal", "device, weights in f8_e4m3_128x128"
DEVICE: dict[str, tuple[int, dict[str, str], tuple[str, ...]]] = {
    "device": (BATCH, {}, ()),
    "device, weights in planes": (BATCH, {"weights": "planes"}, ()),
    "device, weights in bf16": (BATCH, {"weights": "bf16"}, ()),
    ROUNDED: (BATCH, {"weights": "f8_e4m3_128x128"}, ()),
    PLAIN: (WINDOW, {"fuse": "layer"}, _WHOLE),
    CAUSAL: (WINDOW, {"fuse": "layer"}, (*_WHOLE, "--causal")),
}
"""The runs on the device: the tokens of a call, and the options of `harness.derive`."""
LIMIT_CAUSAL = 1e-9
"""The limit of the normalised mean squared error of causal kernels' logits against others: the order of sums differs."""


@dataclass(frozen=True)
class Distance:
    """The distance of a run from the reference.

    Attributes:
        perplexity: the perplexity of the text.
        divergence: the mean Kullback-Leibler divergence of the next token's distribution, in nats.
        nmse: the normalised mean squared error of the logits.
        same: the share of tokens with the same likeliest next token.
    """

    perplexity: float
    divergence: float
    nmse: float
    same: float


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def distance(logits: np.ndarray, reference: np.ndarray, perplexity: float) -> Distance:
    """Returns the distance of a run's logits, [tokens, n_vocab] f32, from the reference's."""
    divergence = error = size = same = 0.0
    for start in range(0, len(reference), 64):
        a, b = (x[start : start + 64].astype(np.float64) for x in (logits, reference))
        p, q = _log_softmax(b), _log_softmax(a)
        divergence += float((np.exp(p) * (p - q)).sum())
        error += float(((a - b) ** 2).sum())
        size += float((b**2).sum())
        same += float((a.argmax(axis=1) == b.argmax(axis=1)).sum())
    return Distance(perplexity, divergence / len(reference), error / size, same / len(reference))


def measure(programs: Programs, model: Path, text: str, n_windows: int, folder: Path) -> dict[str, Distance]:
    """Returns the distances of the runs "reference", "CPU" and those of `DEVICE` from the reference, and of `CAUSAL` from `PLAIN`.

    The reference runs on the CPU with the weights of the file in F32 and a cache in F32, so only the rounding of products
    differs.

    Raises:
        RuntimeError: kernels can't be derived or built, a program failed, or layers did not run in their kernels.
    """
    exact = folder / "f32.gguf"
    random_llama.write_f32(exact, model)

    def logits_of(name: str, file: Path, cache: str) -> tuple[list[np.ndarray], list[float]]:
        """Returns the logits and the perplexities of the device and of the CPU."""
        batch, options, more = DEVICE[name]
        kernels = folder / f"kernels-{list(DEVICE).index(name)}"
        if not kernels.exists():
            harness.derive(programs, model, kernels, *more, n_tokens=(1, batch), n_ctx=(ACCURACY_CTX,), **options)
        files = [folder / f"{kernels.name}-{file.stem}-{side}" for side in ("device", "cpu")]
        script = [f"logits {files[0]} {files[1]}", *windows(f"n_ctx={ACCURACY_CTX} {cache}", batch, n_windows, WINDOW)]
        calls, log = run(programs, file, folder, [script], programs.environment(kernels=kernels), words=text)
        if file == model:
            if on_cpu := sum((call.cpu for call in calls), Counter[str]()).keys() - harness.ON_THE_CPU:
                raise RuntimeError(f"{name}: the CPU computed ops that are the device's: {on_cpu}")
            if "fuse" in options and harness.ran(log).grouped < 0.9 * sum(call.device for call in calls):
                raise RuntimeError(f"{name}: layers were not computed by their kernels:\n{log[-1000:]}")
        rows = sum(call.rows for call in calls)
        return [np.memmap(side, np.float32, "r").reshape(rows, -1) for side in files], list(perplexities(calls))

    (_, reference), (_, perplexity) = logits_of("device", exact, "type_k=0 type_v=0 cpu_flash_attn=0")
    results = {"reference": distance(reference, reference, perplexity)}
    runs = {name: logits_of(name, model, "type_k=1 type_v=1") for name in DEVICE}
    for name, (sides, perplexity_of) in runs.items():
        results[name] = distance(sides[0], reference, perplexity_of[0])
    sides, perplexity_of = runs["device"]
    results["CPU"] = distance(sides[1], reference, perplexity_of[1])
    (causal, _), (plain, _) = runs[CAUSAL][0], runs[PLAIN][0]
    results["causal layers, from the others"] = distance(causal, plain, runs[CAUSAL][1][0])
    return results


def accuracy(programs: Programs, args: argparse.Namespace) -> bool:
    """Prints the distances of a file's runs from F32; returns whether the device is nearer than the CPU."""
    if not args.file or not args.text:
        raise RuntimeError("accuracy needs --file MODEL.gguf and --text TEXT, which has more tokens than the windows")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(programs, args.file.absolute(), args.text.read_text(), args.windows, Path(folder))
    print("| | perplexity | divergence | error of the logits | same likeliest token |\n|---|--:|--:|--:|--:|")
    for name, one in results.items():
        print(harness.row(name, f"{one.perplexity:.4f}", f"{one.divergence:.2e}", f"{one.nmse:.1e}", f"{one.same:.1%}"))
    further = [n for n in DEVICE if n != ROUNDED and not results[n].divergence <= results["CPU"].divergence]
    for name in further:
        print(f"WRONG: the {name} is further from F32 than the CPU is")
    differs = not results["causal layers, from the others"].nmse <= LIMIT_CAUSAL
    if differs:
        print(f"WRONG: logits of causal layers are further than {LIMIT_CAUSAL} from those of others")
    return not further and not differs
