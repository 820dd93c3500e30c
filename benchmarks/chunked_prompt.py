"""Compares a prompt of 300 tokens with kernels for other numbers of tokens with exact kernels on the simulator, in ms.

    ./bazelw run //benchmarks:chunked_prompt

llama-bench runs a random Llama of 12 layers with three sets of kernels that `kernelgen model` derives: exact kernels;
kernels for the default numbers of tokens, without 300; and kernels for 1 and 512 tokens only, which compute only these
numbers (GGML_NEURON_EXACT=1). The three take turns, and the fastest prompt of each counts. The simulator computes
padding like other data; benchmarks/served_lengths has the figures that matter on a device. Exit status 1 if the default
kernels leave a node to the CPU.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "tools" / "llama_cpp"))
sys.path.insert(0, str(Path(__file__).absolute().parent))

import harness
import kernel_builder
import random_llama

import backend_programs
import figures
from kernelgen import cli, manifest
from kernelgen.bundle.contents import pack_name

PROMPT = 300
N_CTX = 512
N_LAYER = 12
N_EMBD = 512
ROUNDS = 3
"""The number of turns of each way."""

_OPS = re.compile(
    r"(?P<device>\d+) of the (?P<ops>\d+) ops of a graph ran .*?, in (?P<splits>\d+) splits?, (?P<lacking>\d+) on the CPU"
)


@dataclass(frozen=True)
class RunMode:
    """A way to run the prompt.

    Attributes:
        name: its name in the table.
        n_tokens: the numbers of tokens for which there are kernels; None for the default.
        exact: whether kernels compute only the numbers of tokens for which they are made.
    """

    name: str
    n_tokens: str | None
    exact: bool


WAYS = (
    RunMode("exact kernels", f"1,2,{PROMPT},512", True),
    RunMode("default kernels, in pieces", None, False),
    RunMode("kernels for 1 and 512 tokens, uncut", "1,512", True),
)


@dataclass(frozen=True)
class PromptRun:
    """The result of a run.

    It has the milliseconds of the fastest prompt, the device's splits of the graph with the most splits, and that
    graph's nodes on the CPU for lack of a kernel.
    """

    ms: float
    splits: int
    lacking: int


def derive(
    programs: harness.Programs, builder: kernel_builder.KernelBuilder, model: Path, way: RunMode, folder: Path
) -> int:
    """Writes the pack of a way's kernels to `folder`, and returns the number of kernels.

    Raises:
        SystemExit: a kernel can't be derived or emitted.
    """
    folder.mkdir()
    output = folder / "derived.yaml"
    words = ["model", model, "-o", output, "--n-ctx", N_CTX, "--target", harness.target()]
    words += ["--fuse", "none"]  # so that single ops are cut and padded
    words += [*backend_programs.Programs.find().options(), *(["--n-tokens", way.n_tokens] if way.n_tokens else [])]
    with contextlib.redirect_stdout(sys.stderr):
        status = cli.run(list(map(str, words)))
    if status:
        raise SystemExit(f"{model}: no manifest")
    (request,) = manifest.load([output], builder.catalog)
    specs = {kernel.spec.id: kernel.spec for kernel in request.kernels}
    built = kernel_builder.BuiltGroup()
    path = folder / pack_name(f"group_{harness.target()}")
    refused = builder.pack(specs, request.configs[0], path, built, lambda stage, count: None)
    if refused or built.failed:
        raise SystemExit(f"kernels that should have been built: {refused | built.failed}")
    return len(built.sizes)


def run(programs: harness.Programs, model: Path, kernels: Path, compiled: Path, *, exact: bool) -> PromptRun:
    """Runs the prompt twice after a warm-up, which loads the kernels.

    Raises:
        SystemExit: llama-bench failed.
    """
    environment = programs.environment(kernels=kernels, log=True, buffers="device")
    environment |= {"NEURON_SIMULATOR_CACHE": str(compiled)} | ({"GGML_NEURON_EXACT": "1"} if exact else {})
    done = programs.run(
        "llama-bench",
        *("--model", model, "--n-prompt", PROMPT, "--n-gen", 0, "--repetitions", 2, "--n-gpu-layers", 99),
        *("--flash-attn", 1, "--output", "json"),
        environment=environment,
    )
    if done.returncode:
        raise SystemExit(f"llama-bench ended with status {done.returncode}: {done.stderr[-2000:]}")
    (result,) = json.loads(done.stdout)
    found = [{k: int(v) for k, v in m.groupdict().items()} for m in _OPS.finditer(done.stderr)]
    worst = max(found, key=lambda f: f["lacking"], default={"splits": 1, "lacking": 0})
    return PromptRun(min(result["samples_ns"]) / 1e6, worst["splits"], worst["lacking"])


def measure(quick: bool) -> Iterator[figures.Figure]:
    programs = harness.Programs.find()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = folder / "random.gguf"
        size = random_llama.Size(n_embd=N_EMBD, n_ff=2 * N_EMBD, n_layer=2 if quick else N_LAYER)
        random_llama.write(model, size=size)
        builder = kernel_builder.KernelBuilder()
        kernels = {way: derive(programs, builder, model, way, folder / str(i)) for i, way in enumerate(WAYS)}
        ran: dict[RunMode, list[PromptRun]] = {way: [] for way in WAYS}
        for _ in range(1 if quick else ROUNDS):
            for i, way in enumerate(WAYS):
                ran[way].append(run(programs, model, folder / str(i), folder / "xla", exact=way.exact))
    exact, few, fallback = WAYS
    ms = {way: min(one.ms for one in ran[way]) for way in WAYS}
    for way in (few, fallback):
        yield figures.Figure(
            f"a prompt of {PROMPT} tokens: {way.name}", ms[way], "ms", peer=figures.Peer(exact.name, ms[exact])
        )
    yield figures.Figure(
        f"a prompt of {PROMPT} tokens: {few.name}",
        ms[few],
        "ms",
        peer=figures.Peer(fallback.name, ms[fallback]),
        direction="peer / value",
    )
    for way, limit in ((few, figures.Limit("value", at_most=0)), (fallback, None)):
        yield figures.Figure(
            f"nodes on the CPU because no kernel computes them: {way.name} ({kernels[way]} kernels)",
            ran[way][0].lacking,
            "nodes",
            peer=figures.Peer(f"{exact.name} ({kernels[exact]} kernels)", ran[exact][0].lacking),
            limit=limit,
        )
    yield figures.Figure(
        f"the device's parts of the graph: {fallback.name}",
        ran[fallback][0].splits,
        "splits",
        peer=figures.Peer(few.name, ran[few][0].splits),
    )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
