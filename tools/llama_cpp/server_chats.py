"""Compares the answers of six simultaneous chats with llama-server on a simulated NeuronCore with those on the CPU.

    ./bazelw run //tools/llama_cpp:server_chats                                all of it
    ./bazelw run //tools/llama_cpp:server_chats -- -p draft-and-adapter        only this case
    ./bazelw run //tools/llama_cpp:server_chats -- --model SmolLM2.gguf --f32 --layers 30 -p draft-and-adapter

The server has four slots in one cache. Six clients send their questions at once and read the answers as streams; one
client disconnects before its answer ends. In the case `longer`, one answer is longer than the cache, which drops the
oldest tokens. All answers consist of the likeliest tokens. Random models are in F32, and their answers must equal the
CPU's, token by token; the CPU does not draft. With `--model`, the model is a file; its draft is its first layers, and
its adapter is random. The program counts answers of quantized weights, and does not compare their text, because the CPU
rounds the activations that it multiplies with quantized weights. With `--f32`, the same weights are in F32, and the
answers must equal the CPU's.

Exit status 1 if the server fails, if answers in F32 differ, or if the CPU computes an op other than the embedding.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import call_models
import gguf
import harness
import numpy as np
import program_cases
import random_llama
import random_projector
import whole_programs
from server_client import Answer, ask, serving

N_SLOTS, N_CHATS = 4, 6
N_CTX = 512
N_TOKENS = (1, 8, 32)
N_LONGEST = 24
"""The most tokens of an answer."""
LEAVES = 5
"""The chat whose client disconnects."""
STORY = 4
"""The chat with the longest answer."""

SIZE = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=4, n_ctx=1024)
STEADY = 0.03
"""The factor of each layer's contribution, small enough that drafts are accepted."""
SEED = 2
QUESTIONS = ("Hello!", "What is the capital of France?", "Count to ten.", "Why?", "Tell me a story.", "abc")


@dataclass(frozen=True)
class ServerCase:
    """A configuration of the server.

    Attributes:
        name: the name for -p and for the table.
        model: the file of its model, in a folder.
        options: options of the server; `{folder}` is the folder of the files.
        only: options for the device only: drafting does not change an answer, so the CPU runs without it.
        derived: arguments of `kernelgen model`.
        drafts: whether tokens are drafted.
        pictures: whether each question has a picture.
        n_ctx: the cells of the cache.
        story: the tokens of the longest answer; if the cache can't hold them, the server shifts it.
    """

    name: str
    model: str
    options: tuple[str, ...]
    only: tuple[str, ...]
    derived: tuple[str, ...]
    drafts: bool = True
    pictures: bool = False
    n_ctx: int = N_CTX
    story: int = N_LONGEST

    @property
    def shifts(self) -> bool:
        """Whether an answer is longer than the cache."""
        return self.story > self.n_ctx


_DRAFT, _ADAPTER, _EAGLE3, _HEAD, _PROJECTOR = (
    f"{{folder}}/{name}.gguf" for name in ("draft", "adapter", "eagle3", "gemma4-head", "projector")
)
CASES = (
    ServerCase(
        "draft-and-adapter",
        "model.gguf",
        ("--lora-scaled", f"{_ADAPTER}:0.5"),
        ("--spec-type", "draft-simple", "--model-draft", _DRAFT, "-ngld", "99", "--spec-draft-n-max", "8"),
        ("--model-draft", _DRAFT, "--lora", f"{_ADAPTER}:0.5"),
    ),
    ServerCase(
        "mtp",
        "mtp.gguf",
        (),
        ("--spec-type", "draft-mtp", "--spec-draft-n-max", "4"),
        ("--spec-type", "draft-mtp", "--n-seq-max", str(N_SLOTS)),
    ),
    ServerCase(
        "gemma4-mtp",
        "gemma4.gguf",
        (),
        ("--spec-type", "draft-mtp", "--model-draft", _HEAD, "-ngld", "99", "--spec-draft-n-max", "4"),
        ("--spec-type", "draft-mtp", "--model-draft", _HEAD, "--n-seq-max", str(N_SLOTS)),
    ),
    ServerCase(
        "eagle3",
        "model.gguf",
        (),
        ("--spec-type", "draft-eagle3", "--model-draft", _EAGLE3, "-ngld", "99", "--spec-draft-n-max", "4"),
        ("--spec-type", "draft-eagle3", "--model-draft", _EAGLE3, "--n-seq-max", str(N_SLOTS)),
    ),
    ServerCase(
        "sampling",
        "model.gguf",
        (),
        ("--backend-sampling",),
        ("--samplers", program_cases.GREEDY_CHAIN, "--samplers", "none", "--n-seq-max", str(N_SLOTS)),
        drafts=False,
    ),
    ServerCase(
        "longer",
        "model.gguf",
        ("--context-shift", "--ignore-eos"),
        (),
        ("--context-shift", "--n-seq-max", str(N_SLOTS)),
        drafts=False,
        story=N_CTX + N_LONGEST,
    ),
    ServerCase(
        "pictures",
        "model.gguf",
        ("--mmproj", _PROJECTOR),
        (),
        ("--mmproj", _PROJECTOR),
        drafts=False,
        pictures=True,
        n_ctx=2 * N_CTX,
    ),
)


@dataclass(frozen=True)
class Chats:
    """The results of chats with a server.

    Attributes:
        answers: the answer of each chat.
        log: the server's log.
        seconds: the time from the first question to the last answer.
    """

    answers: list[Answer]
    log: str
    seconds: float

    @property
    def launches(self) -> int:
        """The number of launches of groups."""
        return sum(int(n) for n in re.findall(r"ops ran in groups, in (\d+) launches", self.log))

    @property
    def accepted(self) -> tuple[int, int]:
        """The numbers of accepted and of drafted tokens."""
        return sum(a.accepted for a in self.answers), sum(a.drafted for a in self.answers)


def write_random(folder: Path) -> None:
    """Writes the models of all cases, their drafts, an adapter, and a projector."""
    model = folder / "model.gguf"
    random_llama.write(model, weights=np.float32, size=SIZE, added=STEADY, seed=SEED)
    random_llama.write_shorter(folder / "draft.gguf", model, 2)
    targets = ("attn_q", "attn_v", "ffn_down")
    adapter = folder / "adapter.gguf"
    random_llama.write_adapter(adapter, SIZE, rank=4, targets=targets, weights=np.float32, added=STEADY)
    head = dataclasses.replace(SIZE, n_expert=4, n_expert_used=2)
    random_llama.write_glm4_moe(folder / "mtp.gguf", head, added=STEADY, seed=SEED)
    windowed = dataclasses.replace(SIZE, n_swa=32)
    random_llama.write_gemma4(folder / "gemma4.gguf", windowed, added=5 * STEADY, seed=SEED)
    random_llama.write_gemma4_head(folder / "gemma4-head.gguf", folder / "gemma4.gguf", windowed, added=5 * STEADY)
    random_llama.write_eagle3(folder / "eagle3.gguf", SIZE, (1, SIZE.n_layer // 2, SIZE.n_layer))
    seen = random_projector.Size(n_out=SIZE.n_embd)
    random_projector.write(folder / "projector.gguf", "gemma3", size=seen, weights=np.float32)


def write_beside(folder: Path, model: Path, n_layer: int, f32: bool) -> None:
    """Writes a draft of a model's first layers, and a random adapter for it; with `f32`, all weights in F32."""
    if f32:
        random_llama.write_f32(folder / "model.gguf", model)
        model = folder / "model.gguf"
    else:
        (folder / "model.gguf").symlink_to(model.absolute())
    random_llama.write_shorter(folder / "draft.gguf", model, n_layer)
    fields = gguf.GGUFReader(model).fields

    def number(name: str) -> int:
        return int(fields[f"{fields['general.architecture'].contents()}.{name}"].contents())

    size = random_llama.Size(
        n_embd=number("embedding_length"),
        n_head=number("attention.head_count"),
        n_head_kv=number("attention.head_count_kv"),
        n_ff=number("feed_forward_length"),
        n_layer=number("block_count"),
    )
    weights = np.float32 if f32 else np.float16
    targets = ("attn_q", "attn_v")
    random_llama.write_adapter(folder / "adapter.gguf", size, rank=8, targets=targets, weights=weights, added=0.02)


def chat(case: ServerCase, folder: Path, environment: Mapping[str, str], options: Sequence[str], way: str) -> Chats:
    """Runs the server of a case, and the chats with it.

    Args:
        case: the case.
        folder: the folder with the models; the log is written there.
        environment: the server's environment.
        options: more options of the server.
        way: `device` or `cpu`.

    Raises:
        RuntimeError: the server fails.
    """
    server = whole_programs.server()
    only = case.only if way == "device" else ()
    words = [word.replace("{folder}", str(folder)) for word in (*case.options, *only)]
    command = [
        server,
        "-m",
        folder / case.model,
        "-ngl",
        99,
        "-t",
        1,
        "-np",
        N_SLOTS,
        "-c",
        case.n_ctx,
        "--kv-unified",
        "--temp",
        0,
    ]
    command += ["-ub", max(N_TOKENS), "-b", 512, *options, *words]
    environment = {**environment, "LD_LIBRARY_PATH": str(server.parent), "OMP_NUM_THREADS": "1"}
    log = folder / f"{case.name}-{way}.log"
    with serving(command, environment, log) as port, ThreadPoolExecutor(N_CHATS) as clients:
        begun = time.monotonic()
        leave = [3 if i == LEAVES else None for i in range(N_CHATS)]
        pictures = [random_projector.picture(100, 80, seed=i) if case.pictures else None for i in range(N_CHATS)]
        longest = [case.story if i == STORY else N_LONGEST for i in range(N_CHATS)]
        chats = zip(QUESTIONS, leave, pictures, longest, strict=True)
        answers = list(clients.map(lambda one: ask(port, *one[:3], longest=one[3]), chats))
        seconds = time.monotonic() - begun
    return Chats(answers, log.read_text(errors="replace"), seconds)


def check(case: ServerCase, device: Chats, cpu: Chats, exact: bool) -> list[str]:
    """Returns the errors in the chats of a case."""
    wrong = []
    whole = [i for i in range(N_CHATS) if i != LEAVES]
    for i in whole if exact else ():
        if device.answers[i].tokens != cpu.answers[i].tokens:
            wrong.append(f"{QUESTIONS[i]!r}: {device.answers[i].tokens!r}, on the CPU {cpu.answers[i].tokens!r}")
    if exact and len({device.answers[i].tokens for i in whole}) < 2:
        wrong.append("answers are alike")
    if not device.answers[LEAVES].pieces:
        wrong.append("the client that goes away reads nothing")
    on_cpu = harness.ran(device.log)["cpu"]
    if on_cpu or " 0 ops ran on the CPU instead of a NeuronCore" not in device.log:
        wrong.append(f"on the CPU: {dict(on_cpu)}")
    if "because no kernel computes them" in device.log:
        wrong.append("an op has no kernel")
    if not device.launches:
        wrong.append("no group ran")
    if case.shifts and device.answers[STORY].n_tokens != case.story:
        wrong.append(f"the longest answer has {device.answers[STORY].n_tokens} tokens instead of {case.story}")
    if case.drafts and not device.accepted[0]:
        wrong.append(f"of {device.accepted[1]} drafted tokens none is accepted")
    if "does not have support" in device.log:
        wrong.append("llama.cpp samples on the CPU")
    return [f"{case.name}: {what}" for what in wrong]


def run(
    programs: harness.Programs, case: ServerCase, folder: Path, *, exact: bool = True, weights: str = "none"
) -> tuple[str, list[str]]:
    """Returns a row of the table, and the errors of a case whose models are in a folder.

    Raises:
        RuntimeError: kernels can't be derived or built, or the server fails.
    """
    # The CPU computes with F16 values in F16, so random models and their caches are in F32. Flash attention would store
    # F16.
    cache, flash = ("f32", "off") if exact else ("f16", "on")
    more = [word.replace("{folder}", str(folder)) for word in case.derived]
    n_kv = [n for n in (256, 512, 1024) if n <= case.n_ctx]
    kernels = folder / f"kernels-{case.name}"
    call_models.derive(
        programs,
        call_models.RandomModel("llama", cache),
        folder / case.model,
        kernels,
        n_tokens=N_TOKENS,
        n_ctx=(case.n_ctx,) if exact else None,
        fuse="layer",
        weights=weights,
        more=("--flash-attn", flash, "--kv-unified", "--n-kv", ",".join(map(str, n_kv)), *more),
    )
    environment = programs.environment(kernels=kernels, log=True)
    environment["NEURON_SIMULATOR_CACHE"] = str(folder / "xla")
    plain = {key: value for key, value in environment.items() if not key.startswith(("GGML_", "NEURON_"))}
    options = ("-fa", flash, "-ctk", cache, "-ctv", cache, "-ctkd", cache, "-ctvd", cache)
    device = chat(case, folder, environment, options, "device")
    cpu = chat(case, folder, plain, options, "cpu")
    equal = sum(
        a.tokens == b.tokens for i, (a, b) in enumerate(zip(device.answers, cpu.answers, strict=True)) if i != LEAVES
    )
    accepted, drafted = device.accepted
    counts = harness.ran(device.log)
    cells = (
        case.name,
        f"{equal} of {N_CHATS - 1}",
        f"{accepted} of {drafted}" if case.drafts else "–",
        device.launches,
        counts["device"].total(),
        ", ".join(f"{count} {op}" for op, count in sorted(counts["cpu"].items())) or "0",
    )
    return f"| {' | '.join(map(str, cells))} |", check(case, device, cpu, exact)


HEAD = """\
| llama-server | answers as the CPU's | drafted tokens that are accepted | launches of groups | nodes on the device | ran on the CPU |
|---|--:|--:|--:|--:|--:|"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-p", dest="cases", help=f"cases, from {', '.join(c.name for c in CASES)}; all by default")
    parser.add_argument("--model", type=Path, help="a GGUF file in place of a random model")
    parser.add_argument("--f32", action="store_true", help="write this model's weights in F32, and compare the answers")
    parser.add_argument(
        "--layers", type=int, default=8, help="the number of layers of this model's draft (%(default)s)"
    )
    args = parser.parse_args()
    known = [
        case.name
        for case in CASES
        if args.model is None or (case.model == "model.gguf" and case.name not in ("eagle3", "pictures"))
    ]
    names = args.cases.split(",") if args.cases else known
    if not set(names) <= set(known):
        parser.error(f"-p: expected some of {', '.join(known)}")
    wrong: list[str] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.model:
            write_beside(folder, args.model, args.layers, args.f32)
        else:
            write_random(folder)
        for case in CASES:
            if case.name in names:
                row, mistakes = run(harness.Programs.find(), case, folder, exact=args.model is None or args.f32)
                print(row, flush=True)
                wrong += mistakes
    for mistake in wrong:
        print(f"WRONG: {mistake}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
