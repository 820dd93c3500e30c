"""Compares calls of models over several simulated NeuronCores (llama.cpp's -sm tensor) with the same calls on one core.

    ./bazelw run //tools/llama_cpp:several_cores                                          all of it
    ./bazelw run //tools/llama_cpp:several_cores -- -m mixtral --cores 2,4 --fuse step    this model, over these numbers of cores
    ./bazelw run //tools/llama_cpp:several_cores -- --file MODEL.gguf --cores 2           your own model
    ./bazelw run //tools/llama_cpp:several_cores -- --file MODEL.gguf --f32 --cores 2     your own model, with its weights in F32

The program derives a model's manifest for 1, 8, 32, 128 and 512 tokens, once without a split, and for each number of
cores with each `--fuse`. Then it makes the same calls with each of them:

- prompts: of 1, 45, 300 and 512 tokens, at depths from 0 to 2,000;
- long: a prompt that llama.cpp computes in several calls; only the last one has an output;
- shared, own: four sequences with prompts and generated tokens side by side, in one cache and with a cache each;
- shift: positions are removed, later positions move up, and a text is generated (a context shift);
- state: a sequence's state and the whole context's state are saved and restored, and a text is generated from each;
- greedy: a text is generated from the likeliest tokens.

For a model given by --file, `by ggml` is the difference between the logits of ggml's CPU ops on the same slices (cores
without kernels) and those of one CPU. `ratio` is the error of several cores divided by that difference. llama.cpp's -sm
tensor does not run over CPU devices: its meta buffers report that they are host memory, and the scheduler makes the CPU
read their addresses.

Exit status 1 in these cases: a token's logits differ from one core's by more than 1e-5 (normalised mean squared error);
for random models without experts, they differ from the CPU's by more than 1e-3; a generated text differs; a call
changed a sequence that it did not name; an op ran on the CPU although a core could run it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import any_tokens
import harness
import numpy as np
import random_llama

CORES = (2, 4, 8)
FUSE = ("parts", "parts+sums", "layer", "step")
"""The values of `--fuse` for `kernelgen model`. A colon joins two bundles: the second serves calls that the first does not."""
KINDS = ("prompts", "long", "shared", "own", "shift", "state", "greedy")

NO_KERNELS = """\
format: 1
name: none
targets: [{target}]
kernels:
  - {{op: sgn, inputs: ["(1,1,1,1)/f32"], output: "(1,1,1,1)/f32"}}
"""
"""A bundle without a kernel for any model: the backend offers devices, and ggml's CPU ops do the work."""

LIMIT = 1e-5
"""The largest allowed normalised mean squared error of a token's logits against those of one core."""

N_CTX = 3072
"""The cells of the cache, enough for four sequences with a cache each, so that kernels are for one context length."""

# Lines that the backend prints at its end.
_GROUPED = re.compile(r"\d+ ops ran in groups, in (\d+) launches")
_REDUCED = re.compile(r"(\d+) reductions over NeuronCores went through the host's memory")


@dataclass(frozen=True)
class SplitModel(any_tokens.RandomModel):
    """A model that splits evenly over 2, 4 and 8 cores.

    Attributes:
        size: the sizes of the model; llama.cpp splits feed-forward networks in steps of 128, and heads in groups with
            the same keys.
        architecture: the architecture of a random model, as in random_llama.
        file: an existing model, or None for a random one.
        f32: whether to write the file's weights as F32 first.
    """

    size: random_llama.Size = field(default_factory=random_llama.Size)
    architecture: str = "llama"
    file: Path | None = None
    f32: bool = False

    def write(self, programs: harness.Programs, folder: Path) -> Path:
        if self.file and not self.f32:
            return self.file
        if self.file:
            path = folder / "f32.gguf"
            random_llama.write_f32(path, self.file)
            return path
        path = folder / f"{self.name}.gguf"
        random_llama.write(path, size=self.size, architecture=self.architecture, tied=self.architecture != "llama")
        return path


def _size(**more: int) -> random_llama.Size:
    sizes = {"n_embd": 128, "n_head": 8, "n_head_kv": 8, "n_ff": 1024, "n_layer": 2, "n_ctx": 4096, "n_vocab": 264}
    return random_llama.Size(**sizes | more)


MODELS = (
    SplitModel("llama", size=_size()),
    SplitModel("qwen3", size=_size(n_embd=256, n_head=16), architecture="qwen3"),
    SplitModel("gemma3", size=_size(n_swa=64), architecture="gemma3", window=True),
    SplitModel("mixtral", size=_size(n_expert=8, n_expert_used=2)),
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the calls and of the kernels.

    Attributes:
        n_tokens: the numbers of tokens for which there are kernels.
        n_ctx: the cells of the cache.
        prompts: the numbers of tokens of prompts; `depths` are the positions of the prompts.
        long: the tokens of a prompt that is longer than a call.
        rounds: the number of calls with several sequences.
        text: the number of generated tokens.
        kinds: the kinds of calls to make.
    """

    n_tokens: Sequence[int] = any_tokens.N_TOKENS
    n_ctx: int = N_CTX
    prompts: Sequence[int] = (1, 45, 300, 512)
    depths: Sequence[int] = (0, 255, 1000, 2000)
    long: int = 1100
    rounds: int = 12
    text: int = 24
    kinds: Sequence[str] = KINDS

    def script(self, model: SplitModel, logits: Path) -> Iterator[str]:
        """Yields the calls."""
        n_ubatch = max(self.n_tokens)
        context = f"n_ctx={self.n_ctx} n_batch={max(512, self.long)} n_ubatch={n_ubatch} {model.options}"
        yield f"logits {logits}"
        for kind in self.kinds:
            if kind == "prompts":
                pairs = [(depth, n) for depth in self.depths for n in self.prompts]
                for line in any_tokens.grid(model, pairs, n_ctx=self.n_ctx, n_ubatch=n_ubatch, numbers=self.n_tokens):
                    # for a given file, with its large vocabulary: only the logits of the prompt's last token
                    yield line.replace("grid", kind).replace(":all", ":last" if model.file else ":all")
            elif kind in ("shared", "own"):
                sizes = {"rounds": self.rounds, "n_ubatch": n_ubatch, "n_ctx": self.n_ctx}
                yield from any_tokens.several(1, model, kind, unified=kind == "shared", **sizes)
            else:
                # llama.cpp can't shift a cache that drops positions outside a window
                yield f"context {kind} {context} swa_full={int(kind == 'shift')}"
                yield from getattr(self, f"_{kind}")()
                yield f"end {kind}"

    def _long(self) -> Iterator[str]:
        yield f"decode 0:0:{self.long}:last"

    def _shift(self) -> Iterator[str]:
        yield "decode 0:0:120:last"
        yield "forget 0 8 40"
        yield "shift 0 40 120 -32"
        yield "decode 0:88:20:all"
        yield f"greedy 0 108 {self.text}"

    def _state(self) -> Iterator[str]:
        yield "decode 0:0:44:last"
        for seq in (0, -1):
            yield f"save {seq}"
            for _ in range(2):
                yield "decode 0:44:1:last"
                yield f"greedy 0 45 {self.text // 2}"
                yield f"restore {seq}"

    def _greedy(self) -> Iterator[str]:
        yield "decode 0:0:45:last"
        yield f"greedy 0 45 {self.text}"


@dataclass
class Compared:
    """The results of one model's calls over some number of cores with one `--fuse`.

    Attributes:
        errors: the largest normalised mean squared error of a token's logits against one core, by kind of calls.
        cpu: the same against the CPU, over all calls.
        judge_cpu: whether `cpu` counts. With quantized weights, the CPU is further from F32 than the device is
            (docs/results/llama-cpp.md). If two experts are nearly equally likely, rounding decides
            (docs/results/tensor-parallel.md).
        texts: the number of generated tokens that differ.
        touched: the number of sequences that calls changed without naming them.
        rows: the number of rows of logits.
        launches: the launches of groups on all cores.
        reductions: the reductions that went through the host's memory.
        elsewhere: the ops that ran on the CPU.
        by_ggml: for a given file, the errors of ggml's CPU ops on the same slices against one CPU.
        failure: an error message.
    """

    model: str
    cores: int
    fuse: str
    errors: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0
    judge_cpu: bool = True
    texts: int = 0
    touched: int = 0
    rows: int = 0
    launches: int = 0
    reductions: int = 0
    elsewhere: Counter[str] = field(default_factory=Counter)
    by_ggml: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def ok(self) -> bool:
        return (
            not self.failure
            and self.rows > 0
            and all(error <= LIMIT for error in self.errors.values())
            and (self.cpu <= any_tokens.LIMIT_CPU or not self.judge_cpu)
            and not self.texts
            and not self.touched
            and not self.elsewhere
        )

    def row(self) -> str:
        errors = [f"{self.errors[kind]:.0e}" if kind in self.errors else "" for kind in KINDS]
        elsewhere = ", ".join(f"{n} {op}" for op, n in sorted(self.elsewhere.items())) or "0"
        ratio = max((self.errors[kind] / error for kind, error in self.by_ggml.items()), default=None)
        by_ggml = (f"{max(self.by_ggml.values()):.0e}", f"{ratio:.2f}") if ratio is not None else ("", "")
        counts = (f"{self.cpu:.0e}", *by_ggml, self.texts, self.touched, self.launches, self.reductions, elsewhere)
        cells = (self.model, self.cores, self.fuse, self.rows, *errors, *counts)
        said = self.failure.strip().splitlines()
        return f"| {' | '.join(map(str, cells))} |" + ("" if self.ok else f" LIMIT MISSED {' / '.join(said[-6:])}")


HEAD = f"""\
| model | cores | --fuse | rows of logits | {" | ".join(KINDS)} | against the CPU | by ggml | ratio | other texts | sequences touched | launches of groups | sums on the host | on the CPU |
|---|--:|---|--:|{"--:|" * len(KINDS)}--:|--:|--:|--:|--:|--:|--:|---|"""


class ModelCalls:
    """A model's calls on one core, and their comparison with calls on several cores.

    Raises:
        RuntimeError: kernels can't be derived or built, or the calls on one core fail.
    """

    def __init__(self, programs: harness.Programs, model: SplitModel, folder: Path, sizes: Sizes) -> None:
        self.programs, self.model, self.folder, self.sizes = programs, model, folder, sizes
        folder.mkdir(parents=True, exist_ok=True)
        self.file = model.write(programs, folder)
        self.calls, self.logits, _ = self._run(1, "none")
        self._by_ggml: dict[int, dict[str, float]] = {}

    def by_ggml(self, cores: int) -> dict[str, float]:
        """Returns, by kind, the largest errors of ggml's CPU ops on slices for this number of cores, against one CPU.

        Raises:
            RuntimeError: the calls fail.
        """
        if cores not in self._by_ggml:
            bundle = self.folder / "no-kernels"
            bundle.mkdir(exist_ok=True)
            manifest = bundle / "none.yaml"
            manifest.write_text(NO_KERNELS.format(target=harness.target()))
            harness.build(manifest, bundle, say=lambda text: None)
            environment = self._environment(cores, [bundle])
            lines = self.sizes.script(self.model, self.folder / "logits-by-ggml")
            script = [line.replace("cpu_flash_attn=0", "cpu_flash_attn=1") for line in lines]
            calls, _ = any_tokens.run(
                self.programs, self.file, self.folder, [script], environment, options=("-sm", "tensor")
            )
            found = self._by_ggml[cores] = {}
            for call in calls:
                if call.rows:
                    found[call.context] = max(found.get(call.context, 0.0), call.nmse)
        return self._by_ggml[cores]

    def _environment(self, cores: int, bundles: Iterable[Path]) -> dict[str, str]:
        return self.programs.environment(buffers="device") | {
            "GGML_NEURON_KERNEL_DIR": ":".join(map(str, bundles)),
            "NEURON_RT_NUM_CORES": str(cores),
            "NEURON_RT_EXEC_TIMEOUT": harness.WAIT,
            "GGML_NO_BACKTRACE": "1",
        }

    def _run(self, cores: int, fuse: str) -> tuple[list[any_tokens.CallResult], np.ndarray, str]:
        """Returns the calls, all logits ([rows, n_vocab] f32) and the log."""
        split = ("--split-mode", "tensor", "--devices", str(cores)) if cores > 1 else ()
        folders = {way: self.folder / f"{way}-{cores}" for way in fuse.split(":")}
        for way, folder in folders.items():
            if folder.exists():
                continue
            any_tokens.derive(
                self.programs,
                self.model,
                self.file,
                folder,
                n_tokens=self.sizes.n_tokens,
                n_ctx=None,
                fuse=way,
                more=(*split, "--context-shift"),
            )
        environment = self._environment(cores, folders.values())
        logits = self.folder / f"logits-{fuse}-{cores}"
        script = self.sizes.script(self.model, logits)
        options = ("-sm", "tensor") if cores > 1 else ()
        calls, log = any_tokens.run(self.programs, self.file, self.folder, [script], environment, options=options)
        rows = sum(call.rows for call in calls)
        return calls, np.fromfile(logits, np.float32).reshape(rows, -1), log

    def compare(self, cores: int, fuse: str) -> Compared:
        """Returns the comparison for a number of cores; failures are recorded in it."""
        judge_cpu = self.model.file is None and not self.model.size.n_expert
        found = Compared(self.model.name, cores, fuse, judge_cpu=judge_cpu)
        try:
            calls, logits, log = self._run(cores, fuse)
            if self.model.file:
                found.by_ggml = self.by_ggml(cores)
        except RuntimeError as error:
            found.failure = str(error)
            return found
        assert [(call.parts, call.rows) for call in calls] == [(call.parts, call.rows) for call in self.calls]
        at = 0
        for call in calls:
            have, want = (x[at : at + call.rows].astype(np.float64) for x in (logits, self.logits))
            at += call.rows
            if call.rows:
                error = float((((have - want) ** 2).sum(1) / (want**2).sum(1)).max())
                worst = found.errors.get(call.context, 0.0)
                found.errors[call.context] = math.nan if math.isnan(error + worst) else max(worst, error)
            if call.context in ("greedy", "shift", "state"):
                found.texts += int((have.argmax(1) != want.argmax(1)).sum())
            found.cpu = math.nan if math.isnan(found.cpu + call.nmse) else max(found.cpu, call.nmse)
            found.touched += len(call.changed)
        found.rows = at
        for launches in _GROUPED.findall(log):
            found.launches += int(launches)
        for reductions in _REDUCED.findall(log):
            found.reductions += int(reductions)
        found.elsewhere = harness.ran(log)["cpu"]
        return found


def _choose(parser: argparse.ArgumentParser, option: str, given: str | None, known: Sequence[str]) -> list[str]:
    chosen = given.split(",") if given else list(known)
    for name in chosen:
        if name not in known:
            parser.error(f"{option}: {name} is none of {', '.join(known)}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [model.name for model in MODELS]
    parser.add_argument("-m", dest="models", metavar="NAMES", help=f"models, from {', '.join(names)}; all by default")
    parser.add_argument("--file", type=Path, help="a GGUF file in place of these models")
    parser.add_argument("--f32", action="store_true", help="write this file's weights in F32")
    parser.add_argument("--cores", metavar="N,…", help=f"numbers of cores; by default {','.join(map(str, CORES))}")
    parser.add_argument(
        "--fuse", metavar="NAMES", help=f"--fuse of `kernelgen model`, from {', '.join(FUSE)}; all by default"
    )
    parser.add_argument("--calls", metavar="NAMES", help=f"kinds of calls, from {', '.join(KINDS)}; all by default")
    parser.add_argument("--prompts", metavar="N,…", help="numbers of tokens of prompts; by default 1,45,300,512")
    parser.add_argument(
        "--depths", metavar="N,…", help="numbers of tokens in the cache before a prompt; by default 0,255,1000,2000"
    )
    args = parser.parse_args()
    chosen = _choose(parser, "-m", args.models, names)
    cores = [int(n) for n in args.cores.split(",")] if args.cores else CORES
    fuse = _choose(parser, "--fuse", args.fuse, FUSE)
    kinds = _choose(parser, "--calls", args.calls, KINDS)
    depths = sorted(map(int, args.depths.split(","))) if args.depths else Sizes.depths
    prompts = tuple(map(int, args.prompts.split(","))) if args.prompts else Sizes.prompts
    sizes = Sizes(kinds=kinds, depths=depths, prompts=prompts)
    models = [model for model in MODELS if model.name in chosen]
    if args.file:
        models = [SplitModel(args.file.stem + " F32" * args.f32, file=args.file.absolute(), f32=args.f32)]
    elif args.f32:
        parser.error("--f32: give --file, too")
    programs = harness.Programs.find()
    results = []
    print(HEAD, flush=True)
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            one = ModelCalls(programs, model, Path(folder), sizes)
            for n in cores:
                for way in fuse:
                    results.append(one.compare(n, way))
                    print(results[-1].row(), flush=True)
    return 0 if results and all(found.ok for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
