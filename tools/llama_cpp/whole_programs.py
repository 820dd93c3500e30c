"""Compares llama.cpp's programs on a simulated NeuronCore with groups in one launch, node by node, and on the CPU.

    ./bazelw run //tools/llama_cpp:programs                           all of it
    ./bazelw run //tools/llama_cpp:programs -- -m llama               only this model
    ./bazelw run //tools/llama_cpp:programs -- -p perplexity,bench    only these programs
    ./bazelw run //tools/llama_cpp:programs -- --file MODEL.gguf      your own model, with its weights in F32

The kernels of a random model are derived for 1, 8 and 32 tokens, with one group for each different layer (`--fuse
layer`). Each program runs three times: on the device with groups; on the device without groups (GGML_NEURON_FUSION=0),
where kernels for a few numbers of tokens serve any number; and on llama.cpp's CPU backend. The comparison covers texts,
perplexities, and the tensors that llama-eval-callback prints from the middle of groups.

Exit status 1 if a program fails, if results differ by more than a limit, if no group ran in a program that has one, or
if the CPU computed an op that the device was given.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import call_models
import call_program
import harness
import numpy as np
import random_llama
from program_cases import CASES, WholeProgram
from program_models import ENCODERS, MODELS, SIZE, named, write_beside
from program_results import Results, compare

N_TOKENS = (1, 8, 32)
N_CTX = (256, 2048)
"""The cells of the caches: for one sequence, and for four."""
ENCODER_N_CTX = (256, 512)
"""The same for models with an encoder: for short texts, and for a text that needs more than 256."""

FUSION_LIMIT = 1e-6
"""The limit between runs with and without groups: normalised mean squared error, or the relative error of perplexities."""

VARIABLE = "LLAMA_MORE_PROGRAMS"
"""The variable with the folder of programs that Bazel did not build."""
CHAT_VARIABLE = "LLAMA_CHAT_PROGRAMS"
"""The same for the programs in `CHAT_PROGRAMS`."""
SERVER_VARIABLE = "LLAMA_SERVER"
"""The variable with the path of llama-server, with its libraries beside it, if Bazel did not build it."""
CHAT_PROGRAMS = ("ggml-rpc-server", "llama-cli", "llama-mtmd-cli")
"""Programs that need the libraries of llama-server."""


@dataclass
class Run:
    """The outcome of one run of a case.

    Attributes:
        results: the results read from its output.
        grouped, launches: the nodes that ran in groups, and their number of launches.
        device: the nodes that ran on the device.
        cpu: the nodes of each op that ran on the CPU although the device was given them.
        failure: the error message.
    """

    results: Results = dataclasses.field(default_factory=dict)
    grouped: int = 0
    launches: int = 0
    device: int = 0
    cpu: Counter[str] = dataclasses.field(default_factory=Counter)
    failure: str = ""


def folder_of(program: str, built: Path) -> Path:
    """Returns the folder of a program: `built` if it is there, else where Bazel or the environment has the other programs."""
    if (built / program).exists():
        return built
    if program in CHAT_PROGRAMS:
        return Path(os.environ.get(CHAT_VARIABLE, Path(__file__).parent / "llama_chat_programs")).absolute()
    return Path(os.environ.get(VARIABLE, Path(__file__).parent / "llama_programs")).absolute()


def server() -> Path:
    """Returns the path of the server that Bazel built or the environment names."""
    return Path(os.environ.get(SERVER_VARIABLE, Path(__file__).parent / "llama_server" / "llama-server")).absolute()


def libraries_of(program: str, programs: harness.Programs) -> Path:
    """Returns the folder of the libraries that a program needs."""
    return server().parent if program in CHAT_PROGRAMS else programs.llama_cpp


@contextlib.contextmanager
def remote_device(environment: dict[str, str], libraries: Path, log: Path) -> Iterator[str]:
    """Runs llama.cpp's RPC server with the device in an environment; yields its address, and writes its log when it ends.

    Raises:
        RuntimeError: the server ended by itself.
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
    """Runs a case; errors are recorded in the result."""
    folder.mkdir(parents=True)
    text = folder / "text"
    text.write_text(call_program.TEXT)
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
        words = [named(str(a), model).replace("{text}", str(text)).replace("{folder}", str(folder)) for a in arguments]
        file = named(case.model, model)
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
            # The program searches the CPU's backend in its working directory.
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
    """Returns the table's row of a case, and its errors."""
    groups = ways["groups"]
    wrong = [f"{model} {case.name}: {way}: {done.failure}" for way, done in ways.items() if done.failure]
    elsewhere = ", ".join(f"{count} {op}" for op, count in sorted(groups.cpu.items())) or "0"
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
    if groups.cpu:
        wrong.append(f"{model} {case.name}: the CPU computed {elsewhere}")
    if case.groups and not groups.launches and not groups.failure:
        wrong.append(f"{model} {case.name}: no group ran")
    if ways["nodes"].launches:
        wrong.append(f"{model} {case.name}: groups ran with GGML_NEURON_FUSION=0")
    figures = (groups.grouped, groups.launches, groups.device, elsewhere)
    return f"| {' | '.join(map(str, (model, case.name, case.what, *cells, *figures)))} |", wrong


def check_all(
    programs: harness.Programs,
    models: Sequence[str],
    cases: Sequence[WholeProgram],
    folder: Path,
    file: Path | None = None,
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
        path = folder / name / "model.gguf"
        path.parent.mkdir()
        if file:
            random_llama.write_f32(path, file)
        elif name in ENCODERS:
            ENCODERS[name](path)
        else:
            random_llama.write(path, weights=np.float32, size=SIZE, architecture=name, tied=MODELS[name])
            write_beside(path, name)

        def derive(
            cache: str, flash: str, more: Sequence[str], file: Path = path, name: str = name, fuse: str = "layer"
        ) -> Path:
            folder = file.parent / f"kernels-{len(list(file.parent.glob('kernels-*')))}"
            options = ("--flash-attn", flash, *(named(word, file) for word in more))
            kind = call_models.RandomModel(name, cache)
            n_ctx = ENCODER_N_CTX if name in ENCODERS else N_CTX
            call_models.derive(programs, kind, file, folder, n_tokens=N_TOKENS, n_ctx=n_ctx, fuse=fuse, more=options)
            return folder

        embeds: tuple[str, ...] = ("--embeddings",) if name in ENCODERS and name != "t5" else ()
        folders = [derive("f32", "off", embeds), derive("f16", "on", embeds)]
        device = programs.environment(log=True)
        cpu = {key: value for key, value in device.items() if not key.startswith(("GGML_", "NEURON_"))}
        for case in cases:
            if (name in case.of) != (name in ENCODERS):
                continue
            apart = case.fuse != "layer"
            of_case = Path(named(case.model, path))
            own = [derive("f32", "off", case.derived, of_case, fuse=case.fuse)] if case.derived or apart else []
            device["GGML_NEURON_KERNEL_DIR"] = ":".join(map(str, own if apart else [*own, *folders]))
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
    parser.add_argument(
        "-m", dest="models", metavar="NAMES", help=f"models, from {', '.join(known_models)}; all by default"
    )
    parser.add_argument(
        "-p", dest="cases", metavar="NAMES", help=f"cases, from {', '.join(c.name for c in CASES)}; all by default"
    )
    parser.add_argument(
        "--file", type=Path, help="a GGUF file in place of the random models; its weights are written in F32"
    )
    args = parser.parse_args()
    if args.file and not args.file.is_file():
        parser.error(f"--file: {args.file} is not a file")
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
            harness.Programs.find(), models, [case for case in CASES if case.name in names], Path(folder), args.file
        ):
            print(row, flush=True)
            wrong += mistakes
    for mistake in wrong:
        print(f"WRONG: {mistake}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
