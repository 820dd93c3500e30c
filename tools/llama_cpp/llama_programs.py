"""Runs whole programs of llama.cpp with groups in one launch, node by node, and on the CPU; docs/reference/llama-cpp-tests.md is the manual."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import calls
import gguf
import harness
import numpy as np
import random_llama
import random_projector
from harness import Programs
from program_cases import CASES, Case, Results, Value

N_TOKENS = (1, 8, 32)
N_CTX, ENCODER_N_CTX = (256, 2048), (256, 512)
"""The cells of the caches: for one sequence and for four; and for models with an encoder."""
FUSION_LIMIT = 1e-6
"""The limit between runs with and without groups: normalised mean squared error, or the relative error of perplexities."""
CHAT_PROGRAMS = ("ggml-rpc-server", "llama-cli", "llama-mtmd-cli")
"""Programs that need the libraries of llama-server."""

SIZE = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=4, n_ctx=1024)
STEADY = 0.03
"""The factor of each layer's contribution in models with drafts, small enough that drafts are accepted."""
MODELS = {"llama": False, "qwen3": True}
"""The architectures, and whether the embedding is also the output matrix."""
ENCODERS: dict[str, Callable[[Path], None]] = {
    "bert": lambda path: random_llama.write_bert(path, SIZE),
    "bert-mean": lambda path: random_llama.write_bert(path, SIZE, pooling=gguf.PoolingType.MEAN),
    "reranker": lambda path: random_llama.write_bert(path, SIZE, rank=True),
    "t5": lambda path: random_llama.write_t5(path, SIZE, decoder=True),
}
"""Models with an encoder, and the functions that write them. Each has its own cases."""


def write_models(folder: Path, architecture: str = "llama", *, seed: int = 1, gemma4_added: float = STEADY) -> None:
    """Writes a steady model, the files that programs use with it, and models with drafts of their own."""
    layers = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    file = {name: folder / f"{name}.gguf" for name in ("steady", "draft", "mtp", "eagle3", "gemma4", "gemma4-head")}
    adapters = folder / "first-adapter.gguf", folder / "second-adapter.gguf"
    random_llama.write_adapter(adapters[0], SIZE, rank=8, targets=("attn_q", "attn_v"), architecture=architecture)
    random_llama.write_adapter(
        adapters[1], SIZE, rank=4, targets=layers, weights=np.float32, seed=2, architecture=architecture
    )
    random_llama.write_control_vector(folder / "control.gguf", SIZE, architecture=architecture)
    random_llama.write(
        file["steady"], weights=np.float32, size=SIZE, architecture=architecture, added=STEADY, seed=seed
    )
    random_llama.write_shorter(file["draft"], file["steady"], n_layer=2)
    random_llama.write_glm4_moe(file["mtp"], replace(SIZE, n_expert=4, n_expert_used=2), added=STEADY, seed=seed)
    random_llama.write_eagle3(file["eagle3"], SIZE, (1, SIZE.n_layer // 2, SIZE.n_layer))
    windowed = replace(SIZE, n_swa=32)
    random_llama.write_gemma4(file["gemma4"], windowed, added=gemma4_added, seed=seed)
    random_llama.write_gemma4_head(file["gemma4-head"], file["gemma4"], windowed, added=gemma4_added)
    seen = random_projector.Size(n_out=SIZE.n_embd)
    random_projector.write(folder / "projector.gguf", "gemma3", size=seen, weights=np.float32)
    for i, name in enumerate(("first", "second")):
        (folder / f"{name}.ppm").write_bytes(random_projector.picture(100, 80, seed=i))


def split(words: str, models: Path, **names: Path) -> list[str]:
    """Returns the words of options, with `{models}` and other names replaced."""
    replaced = {"models": models, **names}
    for name, path in replaced.items():
        words = words.replace(f"{{{name}}}", shlex.quote(str(path)))
    return shlex.split(words)


# --- processes -------------------------------------------------------------------------------------------------------------


def server_program() -> Path:
    return harness.built("LLAMA_SERVER", "llama_server/llama-server")


def path_of(program: str, programs: Programs) -> Path:
    """Returns the path of a program: of llama.cpp's first build, else where Bazel or the environment has the others."""
    if (programs.llama_cpp / program).exists():
        return programs.llama_cpp / program
    if program in CHAT_PROGRAMS:
        return harness.built("LLAMA_CHAT_PROGRAMS", "llama_chat_programs") / program
    return harness.built("LLAMA_MORE_PROGRAMS", "llama_programs") / program


@contextlib.contextmanager
def serving(
    command: Sequence[object], environment: dict[str, str], folder: Path, log: Path, is_ready: Callable[[int], bool]
) -> Iterator[int]:
    """Runs a server until it is ready; yields its port, and ends it afterwards as Ctrl+C does. `log` receives its output.

    Raises:
        RuntimeError: the server ended by itself, or is not ready after half an hour.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
    with (
        log.open("w") as written,
        subprocess.Popen(words, env=environment, cwd=folder, stdout=written, stderr=written) as server,
    ):
        try:
            begun = time.monotonic()
            while not is_ready(port):
                if server.poll() is not None or time.monotonic() - begun > 1800:
                    raise RuntimeError(f"{words[0]} does not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield port
        finally:
            server.terminate()
            server.wait(timeout=120)


def is_open(port: int) -> bool:
    """Whether a server listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# --- runs and their comparison ---------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The outcome of one run of a case: the results read from its output, what ran, and an error message."""

    results: Results = field(default_factory=dict)
    ran: harness.Ran = field(default_factory=harness.Ran)
    failure: str = ""


def run(case: Case, programs: Programs, models: Path, folder: Path, environment: dict[str, str]) -> Run:
    """Runs a case; errors are recorded in the result."""
    folder.mkdir(parents=True)
    (folder / "text").write_text(calls.TEXT)
    printed = log = ""
    for words in (case.commands,) if isinstance(case.commands, str) else case.commands:
        program, *options = split(words, models, text=folder / "text", folder=folder)
        libraries = server_program().parent if program in CHAT_PROGRAMS else programs.llama_cpp
        variables = {"LD_LIBRARY_PATH": str(libraries), "OMP_NUM_THREADS": "1", **environment}
        command = [path_of(program, programs), "-m", models / f"{case.model}.gguf", "-t", 1, "-ngl", 99, *options]
        with contextlib.ExitStack() as stack:
            remote = folder / "remote.log"
            if case.remote and "GGML_BACKEND_PATH" in environment:
                server = [path_of("ggml-rpc-server", programs)]
                port = stack.enter_context(serving(server, variables, libraries, remote, is_open))
                command += ["--rpc", f"127.0.0.1:{port}"]
                variables = {key: value for key, value in variables.items() if not key.startswith("GGML_")}
            # The program searches the CPU's backend in its working directory.
            done = harness.run(command, variables, cwd=libraries)
        log += done.stderr + (remote.read_text(errors="replace") if remote.exists() else "")
        if done.returncode:
            return Run(failure=f"status {done.returncode}: {' / '.join(done.stderr.strip().splitlines()[-3:])}")
        printed += done.stdout if case.name != "parallel" else done.stdout + done.stderr
    results = case.read(printed)
    failure = "" if results else f"nothing that can be compared in {printed[-300:]!r}"
    return Run(results, harness.ran(log), failure)


def compare(one: Results, other: Results) -> tuple[float, str]:
    """Returns the largest error between two runs, and the result that has it; infinite if names or texts differ."""
    if one.keys() != other.keys():
        return math.inf, f"{len(one)} and {len(other)} results"
    errors = [(_error(value, other[name]), name) for name, value in one.items()]
    return max([(0.0, ""), *((math.inf if math.isnan(error) else error, name) for error, name in errors)])


def _error(a: Value, b: Value) -> float:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape:
            return math.inf
        finite = np.isfinite(a) & np.isfinite(b)  # masked elements are -inf
        if not np.array_equal(a[~finite], b[~finite]):
            return math.inf
        difference = a[finite] - b[finite]
        # The program prints four decimals, so a difference of one in the last does not count.
        if np.all(np.abs(difference) <= 1.01e-4):
            return 0.0
        return float((difference**2).sum() / (b[finite] ** 2).sum())
    if isinstance(a, float) and isinstance(b, float):
        return abs(a / b - 1)
    return 0.0 if a == b else math.inf


HEAD = """\
| model | program | compared | groups or nodes | groups or the CPU | nodes or the CPU | nodes in groups | launches | nodes on the device | ran on the CPU |
|---|---|---|---|---|---|--:|--:|--:|--:|"""


def check(model: str, case: Case, ways: dict[str, Run]) -> tuple[str, list[str]]:
    """Returns the table's row of a case, and its errors."""
    groups = ways["groups"]
    wrong = [f"{way}: {done.failure}" for way, done in ways.items() if done.failure]
    cells = []
    for one, other in (("groups", "nodes"), ("groups", "cpu"), ("nodes", "cpu")):
        error, where = compare(ways[one].results, ways[other].results)
        cells.append("equal" if error == 0 else f"differs: {where}" if math.isinf(error) else f"{error:.1e}")
        limit = case.limit if other == "cpu" else FUSION_LIMIT
        if error > limit:
            wrong.append(f"{one} or {other}: {error:.1e} at {where}, more than {limit}")
    if groups.ran.cpu:
        wrong.append(f"the CPU computed {groups.ran.on_cpu}")
    if case.groups and not groups.ran.launches:
        wrong.append("no group ran")
    if ways["nodes"].ran.launches:
        wrong.append("groups ran with GGML_NEURON_FUSION=0")
    figures = (groups.ran.grouped, groups.ran.launches, groups.ran.device.total(), groups.ran.on_cpu)
    row = harness.row(model, case.name, case.what, *cells, *figures)
    return row, [f"{model} {case.name}: {what}" for what in wrong]


def check_all(
    programs: Programs, models: Sequence[str], cases: Sequence[Case], folder: Path, file: Path | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Yields the row of each case of each model, and its errors.

    Args:
        programs: the programs under test.
        models: names of random models.
        cases: the cases to run.
        folder: the folder for all files.
        file: a model in place of the random ones. Its weights are written in F32: with other weights, the CPU rounds
            the activations.

    Raises:
        RuntimeError: a model's kernels can't be derived or built.
    """
    for name in [file.stem] if file else models:
        of_model = [case for case in cases if name in case.of or (not case.of and name not in ENCODERS)]
        if of_model:
            (folder / name).mkdir()
            _write(folder / name, name, file)
            for case, ways in _run_all(programs, name, of_model, folder / name):
                yield check(name, case, ways)


def _write(folder: Path, name: str, file: Path | None) -> None:
    path = folder / "model.gguf"
    if file:
        random_llama.write_f32(path, file)
    elif name in ENCODERS:
        ENCODERS[name](path)
    else:
        random_llama.write(path, weights=np.float32, size=SIZE, architecture=name, tied=MODELS[name])
        write_models(folder, name)


def _run_all(
    programs: Programs, name: str, cases: Sequence[Case], folder: Path
) -> Iterator[tuple[Case, dict[str, Run]]]:
    """Yields the runs of a model's cases: with groups, node by node, and on the CPU."""

    def derive(kernels: str, cache: str, flash: str, *more: str, model: str = "model", fuse: str = "layer") -> Path:
        n_ctx = ENCODER_N_CTX if name in ENCODERS else N_CTX
        options = {"n_tokens": N_TOKENS, "n_ctx": n_ctx, "cache": cache, "fuse": fuse}
        harness.derive(programs, folder / f"{model}.gguf", folder / kernels, "--flash-attn", flash, *more, **options)
        return folder / kernels

    embeds = ("--embeddings",) if name in ENCODERS and name != "t5" else ()
    common = [derive("kernels-f32", "f32", "off", *embeds), derive("kernels-f16", "f16", "on", *embeds)]
    for case in cases:
        folders = common
        if case.derived or case.fuse != "layer":
            more = split(case.derived, folder)
            own = derive(f"kernels-{case.name}", "f32", "off", *more, model=case.model, fuse=case.fuse)
            folders = [own] if case.fuse != "layer" else [own, *common]
        device = programs.environment(kernels=folders, log=True)
        environments = {
            "groups": device,
            "nodes": device | {"GGML_NEURON_FUSION": "0"},
            "cpu": harness.without_device(device),
        }
        runs = {
            way: run(case, programs, folder, folder / f"{case.name}-{way}", variables)
            for way, variables in environments.items()
        }
        yield case, runs


def main(programs: Programs, args: argparse.Namespace) -> bool:
    """Runs the suite; returns whether nothing is wrong."""
    only = args.only.split(",") if args.only else []
    models = [name for name in [*MODELS, *ENCODERS] if name in only] or [*MODELS, *ENCODERS]
    names = ",".join(name for name in only if name not in models or name == "reranker")
    cases = calls.chosen(CASES, names or None)
    wrong: list[str] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row, errors in check_all(programs, models, cases, Path(folder), args.file):
            print(row, flush=True)
            wrong += errors
    for error in wrong:
        print(f"WRONG: {error}")
    return not wrong
