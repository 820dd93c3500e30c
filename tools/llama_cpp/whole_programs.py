"""llama.cpp's programs on a simulated NeuronCore with groups in one launch, node by node, and on the CPU: the same results?

    ./bazelw run //tools/llama_cpp:programs                           all of it
    ./bazelw run //tools/llama_cpp:programs -- -m llama               this model
    ./bazelw run //tools/llama_cpp:programs -- -p perplexity,bench    these programs

The kernels of a random model are derived for 1, 8 and 32 tokens, with one group for each different layer (`--fuse layer`). Each program
runs on the device with groups, on the device without (GGML_NEURON_FUSION=0), where kernels for a few numbers of tokens serve any
number, and on llama.cpp's CPU backend. Compared are texts, perplexities, and the tensors that llama-eval-callback prints from the
middle of groups.

Exit status 1 when a program fails, when results differ by more than a limit, or when no group ran in a program that has one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import any_tokens
import gguf
import harness
import numpy as np
import random_llama
import random_projector

N_TOKENS = (1, 8, 32)
N_CTX = (256, 2048)
"""Cells of the caches: of one sequence, and of four."""
ENCODER_N_CTX = (256, 512)
"""The same of models with an encoder: of short texts, and of one that needs more than 256."""

FUSION_LIMIT = 1e-6
"""Difference with groups and without, at most: a normalised mean squared error, or relative of perplexities."""
CPU_LIMIT = 1e-4
"""The same against the CPU."""
FLASH_LIMIT = 1e-3
"""The same with flash attention, for which the CPU adds up in F16."""

VARIABLE = "LLAMA_MORE_PROGRAMS"
"""Names the folder of programs that Bazel did not build."""
CHAT_VARIABLE = "LLAMA_CHAT_PROGRAMS"
"""The same for those of `CHAT_PROGRAMS`."""
SERVER_VARIABLE = "LLAMA_SERVER"
"""Names llama-server, with its libraries beside it, where Bazel did not build it."""
CHAT_PROGRAMS = ("ggml-rpc-server", "llama-cli", "llama-mtmd-cli")
"""Programs that need the libraries of llama-server."""

# The CPU computes in F16 what is stored in F16: so that texts can be compared to the letter, all is F32, and without flash attention,
# which stores F32 as F16.
F32 = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
FLASH = ("-fa", "on", "-ctk", "f16", "-ctv", "f16")
GREEDY = ("--temp", 0, "--seed", 1)
GREEDY_CHAIN = "top_k=40,top_p=0.95,min_p=0.05,temperature=0,dist"
"""What is sampled with on the device then."""

SIZE = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=4, n_ctx=1024)
MODELS = {"llama": False, "qwen3": True}
"""Architectures, and whether the embedding is the output's matrix."""
STEADY = 0.03
"""What a layer adds is multiplied by this in models that have drafts, so that drafts are accepted."""

ENCODERS: dict[str, Callable[[Path], None]] = {
    "bert": lambda path: random_llama.write_bert(path, SIZE),
    "bert-mean": lambda path: random_llama.write_bert(path, SIZE, pooling=gguf.PoolingType.MEAN),
    "reranker": lambda path: random_llama.write_bert(path, SIZE, rank=True),
    "t5": lambda path: random_llama.write_t5(path, SIZE, decoder=True),
}
"""Models with an encoder, and what writes them. Each has cases of its own."""


# --- what programs print -----------------------------------------------------------------------------------------------------

Value = str | float | np.ndarray
Results = dict[str, Value]
"""What a run came to, by name: texts, perplexities, or values of tensors."""


def texts(pattern: str) -> Callable[[str], Results]:
    """Returns what reads the texts that match a pattern from what a program prints."""

    def read(printed: str) -> Results:
        return {f"text {i}": text for i, text in enumerate(re.findall(pattern, printed, re.MULTILINE))}

    return read


def perplexities(printed: str) -> Results:
    """Returns the running perplexities that llama-perplexity prints."""
    return {f"chunk {chunk}": float(value) for chunk, value in re.findall(r"\[(\d+)\]([\d.]+),", printed)}


def tensors(printed: str) -> Results:
    """Returns the values of tensors that llama-eval-callback prints, and their sums, by number, name and op."""
    found: Results = {}
    for i, block in enumerate(re.split(r"^common_debug_cb_eval: ", printed, flags=re.MULTILINE)[1:]):
        head = re.match(r"\s*(\S.*?) = \(\w+\)\s+(\w+)", block)
        if head is None:
            raise RuntimeError(f"llama-eval-callback: {block[:200]!r}")
        values = [float(v) for v in re.findall(r"(?<=[\[, ])-?(?:\d+\.\d+|nan|inf)(?=[, ])", block)]
        found[f"{i} {head[1]} {head[2]}"] = np.array(values)
    return found


def embeddings(printed: str) -> Results:
    """Returns the embeddings that llama-embedding prints as JSON."""
    found = re.findall(r'"embedding": *\[([^\]]*)\]', printed)
    return {f"embedding {i}": np.array([float(v) for v in values.split(",")]) for i, values in enumerate(found)}


def scores(printed: str) -> Results:
    """Returns the scores that llama-embedding prints with a reranker."""
    return {
        f"score {i}": np.array([float(v)]) for i, v in re.findall(r"^rerank score (\d+): *(\S+)", printed, re.MULTILINE)
    }


def answers_of_pictures(printed: str) -> Results:
    """Returns the answers of llama-mtmd-cli, which prints little else; they have to differ by the picture."""
    found = texts(r"^(.+)$")(printed)
    return found if len(set(found.values())) > 1 else {}


def numbers_of_tokens(printed: str) -> Results:
    """Returns how many tokens llama-bench's tests had; what it measures on a simulated device says nothing."""
    found = re.findall(r'"n_prompt": (\d+),\s+"n_gen": (\d+)', printed)
    return {f"test {i}": f"{prompt} and {generated} tokens" for i, (prompt, generated) in enumerate(found)}


@dataclass(frozen=True)
class RunDifference:
    """Between two runs.

    Attributes:
        size: the largest error; infinite where results have other names, or texts differ.
        where: it is.
    """

    size: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        return "equal" if self.size == 0 else f"differs: {self.where}" if math.isinf(self.size) else f"{self.size:.1e}"


def compare(one: Results, other: Results) -> RunDifference:
    """Returns the largest difference of two runs."""
    if one.keys() != other.keys():
        return RunDifference(math.inf, f"{len(one)} and {len(other)} results")
    worst = RunDifference()
    for name, value in one.items():
        size = _error(value, other[name])
        if size > worst.size or math.isnan(size):
            worst = RunDifference(math.inf if math.isnan(size) else size, name)
    return worst


def _error(a: Value, b: Value) -> float:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape:
            return math.inf
        finite = np.isfinite(a) & np.isfinite(b)  # masks hide with -inf
        if not np.array_equal(a[~finite], b[~finite]):
            return math.inf
        difference = a[finite] - b[finite]
        # Printed with four decimals: one of the last does not count.
        if np.all(np.abs(difference) <= 1.01e-4):
            return 0.0
        return float((difference**2).sum() / (b[finite] ** 2).sum())
    if isinstance(a, float) and isinstance(b, float):
        return abs(a / b - 1)
    return 0.0 if a == b else math.inf


# --- runs --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WholeProgram:
    """A program, and what it is asked for.

    Attributes:
        name: for -p and for the table; runs of one program have several.
        program: its file.
        arguments: of each call, in turn, in a folder that the calls share; `{text}` is a file with a text, `{models}` the folder of the
            model and of what is used beside it.
        read: reads the results from what the calls print.
        what: is compared, for the table.
        groups: whether some of its calls have as many tokens as a group's kernel.
        limit: of the difference from the CPU.
        derived: arguments of `kernelgen model` for kernels that it has besides those of the model alone.
        model: the file of the model that it runs; the random one by default.
        of: the models of `ENCODERS` that it is run with; none: those of `MODELS`.
        remote: whether the device is that of another process, as of another machine: llama.cpp's --rpc.
    """

    name: str
    program: str
    arguments: tuple[tuple[object, ...], ...]
    read: Callable[[str], Results]
    what: str
    groups: bool = True
    limit: float = CPU_LIMIT
    derived: tuple[str, ...] = ()
    model: str = "{models}/model.gguf"
    of: tuple[str, ...] = ()
    remote: bool = False


def _perplexity(batch: int, ubatch: int, *more: object) -> tuple[object, ...]:
    return ("-f", "{text}", "-c", 128, "-b", batch, "-ub", ubatch, "--chunks", 4, *FLASH, *more)


_COMPLETE = ("-no-cnv", "--ignore-eos", "--no-display-prompt", "-ub", 32, *GREEDY, *F32)
_PARALLEL = ("-ns", 8, "-n", 20, "-c", 2048, "-b", 2048, "-ub", 32, "-kvu", "-pps", "--ignore-eos", *GREEDY, *F32)
_SHORT = ("-p", "abcdef", "-n", 20, "-c", 256, *_COMPLETE)
_SPECULATIVE = (
    "-p",
    "abcdef",
    "-n",
    30,
    "-c",
    256,
    "-ub",
    32,
    "-ngld",
    99,
    *GREEDY,
    *F32,
    "-ctkd",
    "f32",
    "-ctvd",
    "f32",
)
_FIRST, _SECOND, _CONTROL, _STEADY, _DRAFT, _MTP, _EAGLE3, _PROJECTOR = (
    f"{{models}}/{name}.gguf"
    for name in ("first-adapter", "second-adapter", "control", "steady", "draft", "mtp", "eagle3", "projector")
)
_PICTURES = tuple(f"{{models}}/{name}.ppm" for name in ("first", "second"))
_CHAT = ("-n", 40, "-c", 256, "-ub", 32, "--single-turn", "--simple-io", "--ignore-eos", *GREEDY, *F32)
_SEE = ("-n", 40, "-c", 256, "-ub", 32, "--chat-template", "chatml", "--ignore-eos", *GREEDY, *F32)
_ANSWER = r"^> abcdef\n((?:.|\n)*?)\n+(?:\[ Prompt: .*\n+)?Exiting\.\.\.$"
_RESPONSE = r"Response: (.*?)\x1b\[0m\n"
_TEXT = r"^((?!llama_completion: ).+)$"
_SEVERAL = ("-p", "abcdef\nabc\nabcdefghi", "-c", 256, "-b", 32, "-ub", 32)

CASES = (
    WholeProgram(
        "bench",
        "llama-bench",
        (("-p", "32,8", "-n", 8, "-r", 1, "-ub", 32, "-o", "json", "-fa", 1),),
        numbers_of_tokens,
        "its tests",
    ),
    WholeProgram(
        "perplexity", "llama-perplexity", (_perplexity(128, 32),), perplexities, "-b 128 -ub 32", limit=FLASH_LIMIT
    ),
    WholeProgram(
        "perplexity-odd", "llama-perplexity", (_perplexity(100, 33),), perplexities, "-b 100 -ub 33", False, FLASH_LIMIT
    ),
    WholeProgram(
        "perplexity-short", "llama-perplexity", (_perplexity(77, 13),), perplexities, "-b 77 -ub 13", False, FLASH_LIMIT
    ),
    WholeProgram(
        "eval-callback",
        "llama-eval-callback",
        (("-p", "abcdef", "-c", 256, "-ub", 32, *F32),),
        tensors,
        "every tensor",
        groups=False,
    ),
    WholeProgram(
        "parallel",
        "llama-parallel",
        (("-np", 4, *_PARALLEL),),
        texts(_RESPONSE),
        "texts of 8 clients, -np 4",
        groups=False,
    ),
    WholeProgram(
        "completion", "llama-completion", (("-p", "abcdef", "-n", 60, "-c", 256, *_COMPLETE),), texts(_TEXT), "a text"
    ),
    WholeProgram(
        "context-shift",
        "llama-completion",
        (("-p", "abcdef", "-n", 320, "-c", 256, "--context-shift", *_COMPLETE),),
        texts(_TEXT),
        "a text longer than the cache",
        derived=("--context-shift",),
    ),
    WholeProgram(
        "saved-state",
        "llama-completion",
        (
            ("-p", "abcdef", "-n", 40, "-c", 256, "--prompt-cache", "{folder}/state", "--prompt-cache-all", *_COMPLETE),
            ("-p", "abcdef", "-n", 40, "-c", 256, "--prompt-cache", "{folder}/state", "--prompt-cache-ro", *_COMPLETE),
        ),
        texts(_TEXT),
        "texts before and after loading",
    ),
    WholeProgram(
        "save-load-state",
        "test-save-load-state",
        (("-c", 256, "-ub", 32, *FLASH),),
        texts(r"(All tests passed)"),
        "its own checks",
    ),
    WholeProgram(
        "adapters",
        "llama-completion",
        (("--lora-scaled", f"{_FIRST}:0.5", "--lora", _SECOND, *_SHORT),),
        texts(_TEXT),
        "a text with two adapters",
        derived=("--lora", f"{_FIRST}:0.5", "--lora", _SECOND),
    ),
    WholeProgram(
        "control-vector",
        "llama-completion",
        (("--control-vector", _CONTROL, *_SHORT),),
        texts(_TEXT),
        "a text with a control vector",
        derived=("--control-vector",),
    ),
    WholeProgram(
        "draft",
        "llama-speculative-simple",
        (("--spec-type", "draft-simple", "--model-draft", _DRAFT, "--spec-draft-n-max", 8, *_SPECULATIVE),),
        texts(_TEXT),
        "a text with a draft",
        derived=("--model-draft", _DRAFT),
        model=_STEADY,
    ),
    WholeProgram(
        "mtp",
        "llama-speculative-simple",
        (("--spec-type", "draft-mtp", "--spec-draft-n-max", 4, *_SPECULATIVE),),
        texts(_TEXT),
        "a text with an MTP head",
        derived=("--spec-type", "draft-mtp"),
        model=_MTP,
    ),
    WholeProgram(
        "eagle3",
        "llama-speculative-simple",
        (("--spec-type", "draft-eagle3", "--model-draft", _EAGLE3, "--spec-draft-n-max", 4, *_SPECULATIVE),),
        texts(_TEXT),
        "a text with an Eagle3 draft",
        derived=("--spec-type", "draft-eagle3", "--model-draft", _EAGLE3),
        model=_STEADY,
    ),
    WholeProgram(
        "n-gram",
        "llama-speculative-simple",
        (("--spec-type", "ngram-simple", *_SPECULATIVE),),
        texts(_TEXT),
        "a text with n-grams as a draft",
    ),
    WholeProgram(
        "sampling",
        "llama-completion",
        (("-p", "abcdef", "-n", 60, "-c", 256, "--backend-sampling", *(w for w in _COMPLETE if w != "--ignore-eos")),),
        texts(_TEXT),
        "a text that is sampled on the device",
        derived=("--samplers", GREEDY_CHAIN),
    ),
    WholeProgram("chat", "llama-cli", (("-p", "abcdef", *_CHAT),), texts(_ANSWER), "an answer"),
    WholeProgram(
        "remote", "llama-cli", (("-p", "abcdef", *_CHAT),), texts(_ANSWER), "an answer, with --rpc", remote=True
    ),
    WholeProgram(
        "pictures",
        "llama-mtmd-cli",
        tuple(("--mmproj", _PROJECTOR, "--image", picture, "-p", "abcdef", *_SEE) for picture in _PICTURES),
        answers_of_pictures,
        "answers about two pictures",
        derived=("--mmproj", _PROJECTOR),
    ),
    WholeProgram(
        "embedding",
        "llama-embedding",
        (("-p", "abcdef", "-c", 256, "-ub", 32, "--pooling", "last", "--embd-output-format", "json", *F32),),
        embeddings,
        "an embedding",
        derived=("--embeddings", "--pooling", "last"),
    ),
    WholeProgram(
        "encoder",
        "llama-embedding",
        ((*_SEVERAL, "--embd-output-format", "json", *F32),),
        embeddings,
        "embeddings of three texts",
        of=("bert", "bert-mean"),
    ),
    WholeProgram(
        "encoder-flash",
        "llama-embedding",
        ((*_SEVERAL, "--embd-output-format", "json", *FLASH),),
        embeddings,
        "embeddings of three texts, -fa on",
        limit=FLASH_LIMIT,
        of=("bert", "bert-mean"),
    ),
    WholeProgram(
        "reranker",
        "llama-embedding",
        ((*_SEVERAL, *F32),),
        scores,
        "scores of three texts",
        of=("reranker",),
    ),
    WholeProgram("encoder-decoder", "llama-completion", (_SHORT,), texts(_TEXT), "a text", of=("t5",)),
    WholeProgram(
        "encoder-decoder-long",
        "llama-completion",
        (("-p", "abcdef", "-n", 280, "-c", 512, *_COMPLETE),),
        texts(_TEXT),
        "a text of more than 256 tokens",
        of=("t5",),
    ),
    *(
        WholeProgram(name, "llama-completion", ((*options, *_SHORT),), texts(_TEXT), "a text", groups=groups)
        for name, options, groups in (
            ("two-layers", ("-ngl", 2), False),
            ("cache-on-the-cpu", ("--no-kv-offload",), False),
            ("not-mapped", ("--load-mode", "none"), True),
            ("locked", ("--load-mode", "mlock"), True),
            ("tensors-on-the-cpu", ("-ot", "ffn_.*=CPU"), False),
            ("grammar", ("--grammar", "root ::= [a-z]+"), True),
        )
    ),
)


@dataclass
class Run:
    """The outcome of a case in one way.

    Attributes:
        results: what was read.
        grouped, launches: nodes that ran in groups, and in how many launches.
        device: nodes that ran on the device.
        cpu: nodes of each op that ran on the CPU instead, though the device had them.
        failure: what went wrong.
    """

    results: Results = dataclasses.field(default_factory=dict)
    grouped: int = 0
    launches: int = 0
    device: int = 0
    cpu: Counter[str] = dataclasses.field(default_factory=Counter)
    failure: str = ""


def folder_of(program: str, built: Path) -> Path:
    """Returns the folder of a program: one that is built anyway, where Bazel built others, or where the environment says that they are."""
    if (built / program).exists():
        return built
    if program in CHAT_PROGRAMS:
        return Path(os.environ.get(CHAT_VARIABLE, Path(__file__).parent / "llama_chat_programs")).absolute()
    return Path(os.environ.get(VARIABLE, Path(__file__).parent / "llama_programs")).absolute()


def server() -> Path:
    """Returns the server that Bazel built or the environment names."""
    return Path(os.environ.get(SERVER_VARIABLE, Path(__file__).parent / "llama_server" / "llama-server")).absolute()


def libraries_of(program: str, programs: harness.Programs) -> Path:
    """Returns the folder of the libraries that a program needs."""
    return server().parent if program in CHAT_PROGRAMS else programs.llama_cpp


def _named(argument: str, model: Path) -> str:
    return argument.replace("{models}", str(model.parent))


def write_beside(model: Path, architecture: str) -> None:
    """Writes what programs use beside a model: two adapters, a control vector, and models with drafts."""
    layers = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    random_llama.write_adapter(
        Path(_named(_FIRST, model)), SIZE, rank=8, targets=("attn_q", "attn_v"), architecture=architecture
    )
    random_llama.write_adapter(
        Path(_named(_SECOND, model)),
        SIZE,
        rank=4,
        targets=layers,
        weights=np.float32,
        seed=2,
        architecture=architecture,
    )
    random_llama.write_control_vector(Path(_named(_CONTROL, model)), SIZE, architecture=architecture)
    steady, draft, mtp, eagle3 = (Path(_named(name, model)) for name in (_STEADY, _DRAFT, _MTP, _EAGLE3))
    random_llama.write(steady, weights=np.float32, size=SIZE, architecture=architecture, added=STEADY)
    random_llama.write_shorter(draft, steady, n_layer=2)
    random_llama.write_glm4_moe(mtp, dataclasses.replace(SIZE, n_expert=4, n_expert_used=2), added=STEADY)
    random_llama.write_eagle3(eagle3, SIZE, (1, SIZE.n_layer // 2, SIZE.n_layer))
    seen = random_projector.Size(n_out=SIZE.n_embd)
    random_projector.write(Path(_named(_PROJECTOR, model)), "gemma3", size=seen, weights=np.float32)
    for seed, picture in enumerate(_PICTURES):
        Path(_named(picture, model)).write_bytes(random_projector.picture(100, 80, seed=seed))


@contextlib.contextmanager
def remote_device(environment: dict[str, str], libraries: Path, log: Path) -> Iterator[str]:
    """Runs llama.cpp's RPC server with the device in an environment; yields its address, and has its log written when it ends.

    Raises:
        RuntimeError: it ended by itself.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = folder_of("ggml-rpc-server", libraries) / "ggml-rpc-server"
    command: list[str | Path] = [program, "--host", "127.0.0.1", "--port", str(port)]
    silent = subprocess.DEVNULL
    with (
        log.open("w") as written,
        subprocess.Popen(command, env=environment, stdout=silent, stderr=written, cwd=libraries) as server,
    ):
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.2)
            else:
                raise RuntimeError(f"ggml-rpc-server ended: {log.read_text()[-2000:]}")
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=60)


def run(case: WholeProgram, programs: harness.Programs, model: Path, folder: Path, environment: dict[str, str]) -> Run:
    """Runs a case; what goes wrong is noted in what is returned."""
    folder.mkdir(parents=True)
    text = folder / "text"
    text.write_text(any_tokens.TEXT)
    done = Run()
    printed = ""
    libraries = libraries_of(case.program, programs)
    environment = {
        "LD_LIBRARY_PATH": str(libraries),
        "OMP_NUM_THREADS": "1",
        "NEURON_SIMULATOR_CACHE": str(model.parent / "xla"),
        **environment,
    }
    for arguments in case.arguments:
        words = [_named(str(a), model).replace("{text}", str(text)).replace("{folder}", str(folder)) for a in arguments]
        file = _named(case.model, model)
        command: list[str | Path] = [
            folder_of(case.program, programs.llama_cpp) / case.program,
            "-m",
            file,
            "-t",
            "1",
            "-ngl",
            "99",
            *words,
        ]
        remote = folder / "remote.log"
        own = environment
        with contextlib.ExitStack() as stack:
            if case.remote and "GGML_BACKEND_PATH" in environment:
                command += ["--rpc", stack.enter_context(remote_device(environment, libraries, remote))]
                own = {key: value for key, value in environment.items() if not key.startswith("GGML_")}
            # The CPU's backend is looked for in the folder that a program is called in.
            ended = subprocess.run(
                command,
                env=own,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                cwd=libraries,
                stdin=subprocess.DEVNULL,
            )
        log = ended.stderr + (remote.read_text(errors="replace") if remote.exists() else "")
        if ended.returncode:
            last = " / ".join(log.strip().splitlines()[-3:])
            done.failure = f"status {ended.returncode}: {last}"
            return done
        printed += ended.stdout if case.name != "parallel" else ended.stdout + ended.stderr
        for nodes, launches in re.findall(r"(\d+) ops ran in groups, in (\d+) launches", log):
            done.grouped += int(nodes)
            done.launches += int(launches)
        counts = harness.ran(log)
        done.device += counts["device"].total()
        done.cpu += counts["cpu"]
    done.results = case.read(printed)
    if not done.results:
        done.failure = f"nothing that can be compared in {printed[-300:]!r}"
    return done


# --- the table ---------------------------------------------------------------------------------------------------------------

HEAD = """\
| model | program | compared | groups or nodes | groups or the CPU | nodes or the CPU | nodes in groups | launches | nodes on the device | ran on the CPU |
|---|---|---|---|---|---|--:|--:|--:|--:|"""


def check(model: str, case: WholeProgram, ways: dict[str, Run]) -> tuple[str, list[str]]:
    """Returns the table's row of a case, and what is wrong."""
    groups = ways["groups"]
    wrong = [f"{model} {case.name}: {way}: {done.failure}" for way, done in ways.items() if done.failure]
    cells = []
    for one, other, limit in (
        ("groups", "nodes", FUSION_LIMIT),
        ("groups", "cpu", case.limit),
        ("nodes", "cpu", case.limit),
    ):
        if ways[one].failure or ways[other].failure:
            cells.append("failed")
            continue
        found = compare(ways[one].results, ways[other].results)
        cells.append(str(found))
        if found.size > limit:
            wrong.append(f"{model} {case.name}: {one} or {other}: {found.size:.1e} at {found.where}, more than {limit}")
    if case.groups and not groups.launches and not groups.failure:
        wrong.append(f"{model} {case.name}: no group ran")
    if ways["nodes"].launches:
        wrong.append(f"{model} {case.name}: groups ran with GGML_NEURON_FUSION=0")
    elsewhere = ", ".join(f"{count} {op}" for op, count in sorted(groups.cpu.items())) or "0"
    figures = (groups.grouped, groups.launches, groups.device, elsewhere)
    return f"| {' | '.join(map(str, (model, case.name, case.what, *cells, *figures)))} |", wrong


def check_all(
    programs: harness.Programs, models: Sequence[str], cases: Sequence[WholeProgram], folder: Path
) -> Iterator[tuple[str, list[str]]]:
    """Yields the row of each case of each model, and what is wrong with it.

    Raises:
        RuntimeError: a model's kernels can't be derived or built.
    """
    for name in models:
        path = folder / name / "model.gguf"
        path.parent.mkdir()
        if name in ENCODERS:
            ENCODERS[name](path)
        else:
            random_llama.write(path, weights=np.float32, size=SIZE, architecture=name, tied=MODELS[name])
            write_beside(path, name)

        def derive(cache: str, flash: str, more: Sequence[str], file: Path = path, name: str = name) -> Path:
            folder = file.parent / f"kernels-{len(list(file.parent.glob('kernels-*')))}"
            options = ("--flash-attn", flash, *(_named(word, file) for word in more))
            kind = any_tokens.RandomModel(name, cache)
            n_ctx = ENCODER_N_CTX if name in ENCODERS else N_CTX
            any_tokens.derive(programs, kind, file, folder, n_tokens=N_TOKENS, n_ctx=n_ctx, fuse="layer", more=options)
            return folder

        embeds: tuple[str, ...] = ("--embeddings",) if name in ENCODERS and name != "t5" else ()
        folders = [derive("f32", "off", embeds), derive("f16", "on", embeds)]
        device = programs.environment(log=True)
        cpu = {key: value for key, value in device.items() if not key.startswith(("GGML_", "NEURON_"))}
        for case in cases:
            if (name in case.of) != (name in ENCODERS):
                continue
            own = [derive("f32", "off", case.derived, Path(_named(case.model, path)))] if case.derived else []
            device["GGML_NEURON_KERNEL_DIR"] = ":".join(map(str, [*own, *folders]))
            environments = {"groups": device, "nodes": device | {"GGML_NEURON_FUSION": "0"}, "cpu": cpu}
            ways = {
                way: run(case, programs, path, path.parent / f"{case.name}-{way}", environment)
                for way, environment in environments.items()
            }
            yield check(name, case, ways)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known_models = [*MODELS, *ENCODERS]
    parser.add_argument("-m", dest="models", metavar="NAMES", help=f"of {', '.join(known_models)}; all by default")
    parser.add_argument(
        "-p", dest="cases", metavar="NAMES", help=f"of {', '.join(c.name for c in CASES)}; all by default"
    )
    args = parser.parse_args()
    models = args.models.split(",") if args.models else known_models
    names = args.cases.split(",") if args.cases else [case.name for case in CASES]
    for option, given, known in (("-m", models, known_models), ("-p", names, [case.name for case in CASES])):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"{option}: {', '.join(unknown)} is none of {', '.join(known)}")
    wrong: list[str] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row, mistakes in check_all(
            harness.Programs.find(), models, [case for case in CASES if case.name in names], Path(folder)
        ):
            print(row, flush=True)
            wrong += mistakes
    for mistake in wrong:
        print(f"WRONG: {mistake}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
