"""Compares the kernels that `kernelgen model` derives from a model's header with the kernels that a run of the model requests.

    ./bazelw run //tools/llama_cpp:derived_kernels                     every architecture of test-llama-archs
    ./bazelw run //tools/llama_cpp:derived_kernels -- -a llama,qwen3   only these
    ./bazelw run //tools/llama_cpp:derived_kernels -- --write-page     every architecture; writes docs/results/model-support.md

test-llama-archs writes a small random model of an architecture. The program derives its manifest. llama-bench runs the
model on a simulated NeuronCore, with flash attention and without, and records the ops that it requests: for a prompt of
64 tokens and 8 generated tokens, after a warm-up, and for llama.cpp's reservation of memory. The manifest is derived
for these numbers of tokens.

Exit status 1 if a run requested a kernel that was not derived.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.model.exporter import VARIABLE
from kernelgen.spec.kernel import KernelSpec

PROMPT = 64
GENERATED = 8
N_CTX = 256
"""The length to which llama-bench's contexts are padded."""

N_TOKENS = (1, 2, GENERATED, PROMPT)
"""The tokens per call: llama-bench warms up with 2, and a context for 8 tokens is reserved for 8."""

PAGE = (
    Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).parents[2]))
    / "docs"
    / "results"
    / "model-support.md"
)

EXPLAINED = {
    "deepseek4 (MoE)": "llama.cpp reserves memory for one more compressed row than a call has",
}
"""For each model whose runs request kernels that are not derived, the reason."""

_KINDS = {"dense": "{}", "moe": "{} (MoE)"}


@dataclass(frozen=True)
class Comparison:
    """The outcome of a model.

    Attributes:
        name: the architecture, and whether it is dense or has experts.
        nodes: the nodes of the graph of one token with flash attention.
        derived: the number of derived kernels.
        entries: the entries of the manifest.
        recorded: the number of kernels that the runs requested.
        missing: of these, the kernels that were not derived.
        refused: why a node has no kernel; empty if all have one.
        failure: the error message, if the comparison failed.
    """

    name: str
    nodes: int = 0
    derived: int = 0
    entries: int = 0
    recorded: int = 0
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    failure: str = ""

    @property
    def ok(self) -> bool:
        return (not self.missing or self.name in EXPLAINED) and not self.failure

    def __str__(self) -> str:
        if self.failure:
            return f"{self.name}: FAILED: {self.failure}"
        return (
            f"{self.name}: {self.derived} kernels derived in {self.entries} entries, {self.recorded} asked for, "
            f"{len(self.missing) or 'none'} missing{''.join(f'; {reason}' for reason in self.refused)}"
        )


def exporter() -> Path:
    """Returns the path of the exporter that Bazel built or the environment names."""
    here = harness.ROOT / "backend" / "exporter" / "exporter" / "export-graphs"
    return Path(os.environ.get(VARIABLE, here)).absolute()


def save(programs: harness.Programs, pattern: str, folder: Path) -> list[tuple[str, Path]]:
    """Writes a small model of each architecture that matches; returns the names and files."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "NEURON_"))}
    programs.run("test-llama-archs", "-a", pattern, "-s", "1", "-o", folder, environment=environment, preload=True)
    found = []
    for path in sorted(folder.glob("*.gguf")):
        architecture, _, kind = path.stem.rpartition("-")
        found.append((_KINDS[kind].format(architecture), path))
    return found


def compare(programs: harness.Programs, name: str, model: Path, folder: Path) -> Comparison:
    """Derives a model's manifest, runs the model, and compares the kernels."""
    said, output = io.StringIO(), folder / "derived.yaml"
    arguments = ["model", model, "-o", output, "--n-ctx", N_CTX, "--n-ubatch", PROMPT, "--flash-attn", "both"]
    arguments += ["--fuse", "none", "--weights", "none"]  # a run requests the kernels of single ops
    arguments += [
        "--n-tokens",
        ",".join(map(str, N_TOKENS)),
        "--exporter",
        exporter(),
        "--llama-cpp",
        programs.llama_cpp,
    ]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.run(list(map(str, arguments)))
    lines = said.getvalue().splitlines()
    if status:
        return Comparison(name, failure=lines[0] if lines else f"exit status {status}")
    derived = _kernels(output)
    recorded: set[KernelSpec] = set()
    for flash in ("0", "1"):
        record = folder / f"recorded-{flash}.yaml"
        record.unlink(missing_ok=True)
        done = programs.run(
            "llama-bench",
            *("--model", model, "--n-prompt", PROMPT, "--n-gen", GENERATED, "--ubatch-size", PROMPT),
            *("--n-gpu-layers", 99, "--repetitions", 1, "--flash-attn", flash, "--output", "json"),
            environment=programs.environment(record=record),
        )
        if done.returncode or not record.is_file():
            return Comparison(name, failure=f"llama-bench: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        recorded |= _kernels(record)
    missing = sorted(f"{s.op}: {', '.join(map(str, s.inputs))} -> {s.output}" for s in recorded - derived)
    nodes = [re.match(r"  1 token, 1 output, flash attention \w+: (\d+) nodes", line) for line in lines]
    refused = tuple(line.removeprefix("no kernel: ") for line in lines if line.startswith("no kernel: "))
    entries = output.read_text().count("\n  - op: ")
    (first, *_) = (int(match[1]) for match in nodes if match)
    return Comparison(name, first, len(derived), entries, len(recorded), tuple(missing), refused)


def _kernels(path: Path) -> set[KernelSpec]:
    (request,) = manifest.load([path], Catalog([builtin_library()]))
    return {kernel.spec for kernel in request.kernels}


def compare_all(programs: harness.Programs, names: Sequence[str], say: harness.Say = print) -> list[Comparison]:
    """Compares the named architectures; if none is named, all that test-llama-archs supports."""
    found = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        pattern = f"^({'|'.join(map(re.escape, names))})$" if names else ".*"
        models = save(programs, pattern, folder)
        for name, model in sorted(models):
            found.append(compare(programs, name, model, folder))
            model.unlink()
            say(str(found[-1]))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    return found


_INTRO = """\
# Which model architectures work

This page lists every architecture for which llama.cpp's `test-llama-archs` writes a model. It compares the kernels that [`kernelgen model`](../reference/models.md) derives from the header of the file
with those that a run of the model uses on a [simulated](../reference/simulator.md) NeuronCore. This command writes the page:

    ./bazelw run //tools/llama_cpp:derived_kernels -- --write-page

Models are small and random, with about two layers. The run is `llama-bench` with a prompt of {prompt} tokens and {generated} generated ones, with flash attention and without.
The manifest is for {tokens} tokens per call and a cache of {n_ctx} cells. kernelgen also derives combinations that do not occur in this run. *Asked for* counts the kernels that the run uses.

| architecture | nodes for one token | entries | kernels | asked for | missing | without a kernel |
|---|--:|--:|--:|--:|--:|---|
"""


def page(rows: Iterable[Comparison]) -> str:
    """Returns the page's text."""
    *tokens, last = map(str, N_TOKENS)
    lines = [
        _INTRO.format(prompt=PROMPT, generated=GENERATED, tokens=f"{', '.join(tokens)} and {last}", n_ctx=N_CTX).rstrip(
            "\n"
        )
    ]
    rows = list(rows)
    for row in rows:
        if row.failure:
            lines.append(f"| {row.name} | | | | | | {row.failure.replace('|', '/')} |")
            continue
        refused = "; ".join(row.refused).replace("|", "/")
        lines.append(
            f"| {row.name} | {row.nodes} | {row.entries} | {row.derived} | {row.recorded} | {len(row.missing)} | {refused} |"
        )
    notes = [f"- {row.name}: {EXPLAINED[row.name]}." for row in rows if row.missing and row.name in EXPLAINED]
    return "\n".join([*lines, *([""] * bool(notes)), *notes]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-a", dest="names", metavar="NAMES", default="", help="architectures; all by default")
    parser.add_argument("--write-page", action="store_true", help="write docs/results/model-support.md")
    args = parser.parse_args()
    rows = compare_all(harness.Programs.find(), [name for name in args.names.split(",") if name])
    if args.write_page:
        PAGE.write_text(page(rows), encoding="utf-8")
    for row in rows:
        for kernel in row.missing:
            print(f"{row.name}: missing: {kernel}")
    print(f"{len(rows)} models, {sum(row.ok for row in rows)} with all kernels that their runs ask for")
    return 0 if rows and all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
