"""Runs llama.cpp's test-llama-archs, whose models are small and random, for every architecture; docs/reference/llama-cpp-tests.md is the manual.

`SURVEYS` lists where the kernels come from. `compare_derived` compares the kernels that `kernelgen model` derives with
those that a run requests.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import random_llama
import recordings
from harness import Programs

from kernelgen.errors import KernelgenError
from kernelgen.ggml.ops import op
from kernelgen.ggml.tokens import cuts
from kernelgen.model import exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import layers
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.spec.kernel import KernelSpec

LIMIT = 1e-4
"""The largest allowed normalised mean squared error of the logits against the CPU's; test-llama-archs has the same limit."""
LIMIT_FUSED = 1e-6
"""The same of logits with groups against logits without groups."""
SHARE = 0.95
"""The smallest share of the graphs' ops that the device must compute with recorded kernels."""
ROUNDS = 6
TIMEOUT = 1800.0
N_CTX = 256
"""The cells of the context that test-llama-archs creates, and the length to which llama-bench pads a context."""
OVER_ALL = "Meta"
"""The name of the device of all cores in test-llama-archs."""
NOT_SPLIT, NO_FILE = "llama.cpp splits no tensors of it", "test-llama-archs writes no file of it"
TIMES = (4, 12)
"""The factors for the number of layers; the larger one is for models whose kinds of layers repeat with a long period."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A line of the scheduler's log: "node # 12 (   MUL_MAT):  Qcur-0 (  16K) [NEURO         ] use=…"
_NODE = re.compile(r"node #\s*(?P<index>\d+) \(\s*(?P<op>\S+)\s*\):.*?\) \[\s*(?P<backend>\S+)\s")
_LACKING = re.compile(r"of the (\d+) ops of a graph ran .*?, (\d+) on the CPU because no kernel computes them")
_FUSED = re.compile(r" (?:dense|moe) +\w+ +\S+ +\d+ +\d+ +\d+ +(\S+) +\S+ \w+$", re.MULTILINE)


@dataclass(frozen=True)
class Survey:
    """Where the kernels of the architectures come from.

    Attributes:
        page: the page that a run of all architectures writes.
        options: options of `kernelgen model`; None for no derived kernels: a model runs until it requests no new ops, and
            kernels are built for what it requests.
        fuse: `--fuse`.
        cores: the number of cores; several cores have slices of each tensor (`-sm tensor`).
    """

    page: str = ""
    options: tuple[str, ...] | None = ()
    fuse: str = "none"
    cores: int = 1


SURVEYS = {
    "models": Survey(options=None),
    "default_kernels": Survey("default-kernels.md"),
    "layers": Survey("layers.md", fuse="layer"),
    "split_architectures": Survey("split-architectures.md", ("--n-tokens", "32,64,128", "--weights", "none"), cores=2),
}


@dataclass(frozen=True)
class Row:
    """A row of test-llama-archs: its error, its status, the device, and the kind of model."""

    nmse: float
    status: str
    roundtrip: str
    device: str = ""
    config: str = ""

    @property
    def ok(self) -> bool:
        return self.nmse <= LIMIT and self.status == "OK" and self.roundtrip in ("OK", "SKIP")


@dataclass(frozen=True)
class Folded:
    """How a graph of one token of a model with more layers is cut.

    Attributes:
        nodes: the nodes of the graph.
        launches: the launches of kernels, including kernels of single nodes.
        kernels: the number of different kernels.
        most: the launches of the most frequent kernel of several nodes.
        why: why no kernel computes several parts; empty if one does.
    """

    nodes: int = 0
    launches: int = 0
    kernels: int = 0
    most: int = 0
    why: str = ""


@dataclass
class Result:
    """The outcome of an architecture.

    Attributes:
        rows: its runs, dense or with experts, on each device except the CPU.
        left_out: why the architecture does not run; empty if it does.
        failure: what is wrong; empty if nothing is.
        kernels: the number of kernels in its pack.
        needs: the ops that it requested, by kernelgen's names.
        device: the ops that the scheduler gave to the device, by op; its log cuts names after ten characters.
        cpu: the same for the CPU.
        ran: what the backend counts in the whole test.
        ops, lacking: the ops of the graph that lacks the most kernels, and those of them that the CPU computed.
        reasons: why nodes have no kernel, with the number of different nodes.
        outside: the ops that were in no group, by reason.
        fused: the largest error of logits with groups against logits without; None if there were no groups.
        folds: for each model, how its graph with more layers is cut.
    """

    rows: list[Row] = field(default_factory=list)
    left_out: str = ""
    failure: str = ""
    kernels: int = 0
    needs: list[str] = field(default_factory=list)
    device: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)
    ran: harness.Ran = field(default_factory=harness.Ran)
    ops: int = 0
    lacking: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    fused: float | None = None
    folds: list[Folded] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failure and not self.left_out

    @property
    def share(self) -> float:
        return self.device.total() / max(1, self.device.total() + self.cpu.total())

    @property
    def split(self) -> list[Row]:
        """The rows over all cores."""
        return [row for row in self.rows if row.device == OVER_ALL]


# --- the programs' output --------------------------------------------------------------------------------------------------


def read_rows(output: str) -> dict[str, list[Row]]:
    """Returns the rows of test-llama-archs' table, by architecture; skipped architectures have none."""
    rows: dict[str, list[Row]] = {}
    for line in _COLOUR.sub("", output).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 6 or "(" not in cells[4]:
            continue
        status, _, error = cells[4].partition("(")
        status, error = ("FAIL", error.rpartition("(")[2]) if "toggle" in error else (status, error)
        row = Row(float(error.split(")")[0]), status.strip(), cells[5], cells[2], cells[3])
        rows.setdefault(cells[1], []).append(row)
    return rows


def dispatched(log: str, device: str = "NEURO") -> tuple[Counter[str], Counter[str]]:
    """Returns how many nodes of each op the scheduler gave to the device and to the CPU, from a log with GGML_SCHED_DEBUG=2.

    The log cuts names of backends after five characters and names of ops after ten. Graphs without a node on the device
    don't count: they are the CPU's reference runs.

    Args:
        log: the scheduler's log.
        device: the first characters of the backend's name: a core's name, or `Meta(` for tensors that are split over cores.
    """
    graphs: list[tuple[Counter[str], Counter[str]]] = []
    last = 0
    for match in _NODE.finditer(log):
        if not graphs or int(match["index"]) <= last:
            graphs.append((Counter(), Counter()))
        last = int(match["index"])
        graphs[-1][not match["backend"].startswith(device)][match["op"]] += 1
    on_device, on_cpu = Counter[str](), Counter[str]()
    for graph in graphs:
        if graph[0]:
            on_device.update(graph[0])
            on_cpu.update(graph[1])
    return on_device, on_cpu


def missing_nodes(log: str) -> dict[str, str | None]:
    """Returns the manifest entry of each node without a kernel, and the backend's reason or None."""
    return dict(node for line in log.splitlines() if (node := harness.missing_node(line)))


def reasons(nodes: Mapping[str, str | None]) -> Counter[str]:
    """Returns why nodes have no kernel, with their counts: the backend's reason, the emitter's, or why none for other tokens serves."""
    buildable = sorted(node for node, reason in nodes.items() if reason is None)
    kernels, _, refused = harness.builder().read(buildable)
    found: Counter[str] = Counter()
    for node, reason in nodes.items():
        if reason := reason or refused.get(node):
            found[f"{harness.op_of_node(node).upper()}: {harness.generalize(reason)}"] += 1
        else:
            found[_why(kernels[node].spec)] += 1
    return found


def _why(spec: Any) -> str:
    """Returns why kernels for other numbers of tokens do not compute a node that has no kernel of its own."""
    name = spec.op.upper()
    if not op(spec.op).tokens:
        return f"{name}: not cut along tokens"
    if not list(cuts(spec.op, spec.inputs, spec.output)):
        return f"{name}: these tensors are not cut along tokens"
    return f"{name}: no kernel for other numbers of tokens"


# --- one architecture ------------------------------------------------------------------------------------------------------


def save(programs: Programs, name: str, folder: Path) -> list[Path]:
    """Writes the files of an architecture's models: dense, with experts, or both."""
    words = ("-a", f"^{re.escape(name)}$", "-s", "1", "-o", folder)
    environment = harness.without_device(programs.environment())
    programs.run("test-llama-archs", *words, environment=environment, preload=True)
    return sorted(folder.glob("*.gguf"))


def run_architecture(programs: Programs, survey: Survey, name: str) -> Result:
    """Makes an architecture's kernels, runs it, and judges the run."""
    with tempfile.TemporaryDirectory() as folder:
        return _Run(programs, survey, name, Path(folder)).result


class _Run:
    def __init__(self, programs: Programs, survey: Survey, name: str, folder: Path) -> None:
        self.programs, self.survey, self.name, self.folder = programs, survey, name, folder
        self.files = save(programs, name, folder) if survey.options is not None else []
        if survey.options is not None and survey.cores == 1 and not self.files:
            self.result = Result(left_out=NO_FILE)
            return
        try:
            self.manifests = [self._derive(file) for file in self.files]
        except RuntimeError as error:
            split = "LLAMA_SPLIT_MODE_TENSOR not implemented for architecture" not in str(error)
            self.result = Result(failure=str(error)) if split else Result(left_out=NOT_SPLIT)
            return
        self.result = self._run()

    def _derive(self, file: Path) -> Path:
        output = file.with_suffix(".yaml")
        words = [file, "--n-ctx", N_CTX, "--fuse", self.survey.fuse, *(self.survey.options or ())]
        if self.survey.cores > 1:
            words += ["--split-mode", "tensor", "--devices", f"1,{self.survey.cores}"]
        harness.write_manifest(self.programs, output, *words)
        return output

    def _run(self) -> Result:
        builder, survey = harness.builder(), self.survey
        pack = harness.BuiltPack()
        request = builder.load(*self.manifests) if self.manifests else None
        requested: dict[str, str | None] = {}
        for number in range(ROUNDS):
            kernels = harness.odd_kernel(self.folder / "odd-kernel")
            if request:
                pack = builder.pack(request, self.folder / f"kernels-{number}")
                kernels = self.folder / f"kernels-{number}"
            buffers = "device" if survey.cores > 1 else None
            self.environment = self.programs.environment(
                kernels=kernels, log=2, cores=survey.cores, buffers=buffers
            ) | {"GGML_SCHED_DEBUG": "2", "NEURON_RT_EXEC_TIMEOUT": harness.WAIT, "OMP_THREAD_LIMIT": "1"}
            words = ["-a", f"^{re.escape(self.name)}$", "-s", "1", "-v", "9"]
            words += ["-b", harness.DEVICE] if survey.cores == 1 else []
            done = self.programs.run(
                "test-llama-archs", *words, environment=self.environment, preload=True, timeout=TIMEOUT
            )
            log = done.stderr + done.stdout
            missing = missing_nodes(log)
            new = [node for node, why in missing.items() if why is None and node not in requested]
            requested |= missing
            if self.manifests or not new:
                break
            buildable = sorted(node for node, why in requested.items() if why is None)
            _, request, _ = builder.read(buildable)
        result = Result(read_rows(done.stdout).get(self.name, []), kernels=pack.kernels, ran=harness.ran(log))
        result.needs = sorted({harness.op_of_node(node) for node in requested})
        result.device, result.cpu = dispatched(log, "NEURO" if survey.cores == 1 else "Meta(")
        lacking = [(int(n), int(ops)) for ops, n in _LACKING.findall(log)]
        result.lacking, result.ops = max(lacking, default=(0, 0))
        result.reasons = reasons(missing) if result.ran.cpu or not self.manifests else Counter()
        for match in re.findall(r"\d+ ops were in no group: (.*)", log):
            for part in match.split("; "):
                n, _, reason = part.partition(" because ")
                result.outside[reason] += int(n)
        # The table has the rows of the CPU and of each core, and the row over all cores reads SKIP.
        if survey.cores > 1 and not done.returncode and len(result.rows) > survey.cores and not result.split:
            return Result(left_out=NOT_SPLIT)
        if result.ran.grouped and survey.cores == 1:
            self._compare(result)
        if survey.fuse == "layer" and survey.cores == 1:
            program = exporter.find(harness.exporter(), self.programs.llama_cpp)
            result.folds = [folded(file, self.folder, program) for file in self.files]
        failed = pack.failed | (pack.refused if self.manifests else {})
        wrong = [row for row in result.rows if not row.ok]
        failures = [
            (failed, f"kernels that should have been built: {dict(list(failed.items())[:3])}"),
            (wrong, f"test-llama-archs: {wrong}"),
            (done.returncode, f"exit status {done.returncode}: {log[-1500:]}"),
            (not result.rows, "test-llama-archs does not run it"),
            (survey.cores > 1 and not result.split, "it did not run over all cores"),
            (not result.ran.device, "nothing ran on the device"),
            (not self.manifests and new, f"after {ROUNDS} rounds it still requests something new"),
            (survey.options is None and result.share < SHARE, f"the device has {result.share:.1%} of its ops"),
            (result.ran.cpu and self._is_refused(result), f"the backend ran ops on the CPU: {result.ran.on_cpu}"),
            ((result.fused or 0) > LIMIT_FUSED, f"the error against no groups is {result.fused}"),
        ]
        result.failure = result.failure or next((text for condition, text in failures if condition), "")
        return result

    def _is_refused(self, result: Result) -> bool:
        """Whether ops may not run on the CPU: over several cores, or without a message that no kernel computes them."""
        explained = result.lacking if self.survey.options is not None else result.reasons
        return self.survey.cores > 1 or not explained

    def _compare(self, result: Result) -> None:
        """Adds the error of the logits with groups against the logits without."""
        result.fused = 0.0
        for file in self.files:
            words = ("--model", file, "--device", harness.DEVICE, "--record", file.with_suffix(".csv"))
            done = self.programs.run("test-fusion", *words, environment=self.environment, preload=True, timeout=TIMEOUT)
            errors = [float(error) for error in _FUSED.findall(done.stdout + done.stderr)]
            result.fused = max([result.fused, *errors])
            if done.returncode or not errors:
                result.failure = f"test-fusion: {(done.stdout + done.stderr)[-1500:]}"


# --- whether layers fold ---------------------------------------------------------------------------------------------------


def folded(source: Path, folder: Path, program: exporter.Exporter) -> Folded:
    """Returns how the graph of one token is cut for a model with more layers of the same kinds as in `source`.

    The models of test-llama-archs have about two layers, and the last differs: it gathers the rows of the outputs.
    """
    file = folder / f"{source.stem}-more-layers.gguf"
    settings = Settings((N_CTX,), N_CTX, 1, (1,), (1,), (N_CTX,), "f16", "f16", (True,), False, False)
    result = Folded(why="llama.cpp does not load it with more layers")
    starts = range(random_llama.n_layer(source))  # the first layers may be of other kinds than all later ones
    for times, first in itertools.product(TIMES, starts):
        try:
            random_llama.write_longer(file, source, first, times)
            ((_, _, graph),) = program.graphs(file, settings, [DecodeCall(N_CTX, 1, 1, 1, N_CTX)])
        except KernelgenError:
            continue
        finally:
            file.unlink(missing_ok=True)
        result = cut(graph)
        if not result.why:
            break
    return result


def cut(graph: Graph) -> Folded:
    """Returns how a graph is cut."""
    segments = layers(graph)
    groups: Counter[Any] = Counter()
    for segment in segments:
        with contextlib.suppress(ValueError):  # not a group: its nodes run one by one
            groups[segment_spec(graph, segment, apart=True)] += 1
    most = max((n for spec, n in groups.items() if len(spec.nodes) > 1), default=0)
    why = ""
    if len(segments) <= 2:
        why = "its graph has no period that covers half of it"
    elif groups.total() < len(segments):
        why = "its layers are not groups: they have an input without elements"
    elif most < 2:
        why = "no two of its layers are the same"
    return Folded(len(graph.nodes), len(segments), len(groups), most, why)


# --- derived kernels against those that a run requests ---------------------------------------------------------------------

PROMPT, GENERATED = 64, 8
DERIVED_N_TOKENS = (1, 2, GENERATED, PROMPT)
"""The tokens per call: llama-bench warms up with 2, and a context for 8 tokens is reserved for 8."""
EXPLAINED = {"deepseek4 (MoE)": "llama.cpp reserves memory for one more compressed row than a call has"}
"""For each model whose runs request kernels that are not derived, the reason."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a model.

    Attributes:
        nodes: the nodes of the graph of one token with flash attention.
        entries: the entries of the manifest.
        derived: the number of derived kernels.
        recorded: the number of kernels that the runs requested.
        missing: of these, the kernels that were not derived.
        refused: why nodes have no kernel.
        failure: what is wrong; empty if nothing is.
    """

    nodes: int = 0
    entries: int = 0
    derived: int = 0
    recorded: int = 0
    missing: tuple[str, ...] = ()
    refused: str = ""
    failure: str = ""

    @property
    def cells(self) -> tuple[object, ...]:
        numbers = (self.nodes, self.entries, self.derived, len(self.missing))
        return (*(numbers if not self.failure else [""] * 4), self.failure.partition("\n")[0] or self.refused)


def compare_derived(programs: Programs, name: str) -> dict[str, Comparison]:
    """Derives the manifests of an architecture's models, runs the models, and compares the kernels, by model.

    llama-bench runs them with flash attention and without, and records the ops that it requests.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for file in save(programs, name, Path(folder)):
            kind = " (MoE)" if file.stem.endswith("-moe") else ""
            try:
                results[name + kind] = _compare(programs, name + kind, file)
            except RuntimeError as error:
                results[name + kind] = Comparison(failure=str(error))
        return results


def _compare(programs: Programs, name: str, file: Path) -> Comparison:
    output = file.with_suffix(".yaml")
    words: list[object] = [file, "--n-ctx", N_CTX, "--n-ubatch", PROMPT, "--flash-attn", "both"]
    words += ["--fuse", "none", "--weights", "none", "--n-tokens", ",".join(map(str, DERIVED_N_TOKENS))]
    lines = harness.write_manifest(programs, output, *words).splitlines()
    derived, recorded = _specs(output), set[KernelSpec]()
    for flash in ("0", "1"):
        record = file.with_name(f"{file.stem}-recorded-{flash}.graphs")
        bench = ["--model", file, "--n-prompt", PROMPT, "--n-gen", GENERATED, "--ubatch-size", PROMPT]
        bench += ["--n-gpu-layers", 99, "--repetitions", 1, "--flash-attn", flash, "--output", "json"]
        done = programs.run("llama-bench", *bench, environment=programs.environment(record=record))
        if done.returncode or not record.is_file():
            raise RuntimeError(f"llama-bench: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        recorded |= recordings.requested(record)
    missing = tuple(sorted(f"{s.op}: {', '.join(map(str, s.inputs))} -> {s.output}" for s in recorded - derived))
    nodes = [re.match(r"  1 token, 1 output, flash attention \w+: (\d+) nodes", line) for line in lines]
    (first, *_) = (int(match[1]) for match in nodes if match)
    refused = "; ".join(line.removeprefix("no kernel: ") for line in lines if line.startswith("no kernel: "))
    entries = output.read_text().count("\n  - op: ")
    failure = f"not derived: {'; '.join(missing)}" if missing and name not in EXPLAINED else ""
    return Comparison(first, entries, len(derived), len(recorded), missing, refused, failure)


def _specs(file: Path) -> set[KernelSpec]:
    return {kernel.spec for kernel in harness.builder().load(file).kernels}


# --- reports and pages -----------------------------------------------------------------------------------------------------


def line(name: str, result: Result) -> str:
    """Returns the outcome of an architecture as one line."""
    if result.left_out:
        return f"{name}: left out: {result.left_out}"
    worst = max((row.nmse for row in result.rows), default=float("nan"))
    how = f"FAILED: {result.failure}" if result.failure else "passed"
    lacking = (
        f", {result.lacking} of {result.ops} nodes on the CPU: {_joined(result.reasons)}" if result.lacking else ""
    )
    return (
        f"{name}: {how}, {len(result.rows)} rows, NMSE {worst:.1e}, {result.device.total()} of "
        f"{result.device.total() + result.cpu.total()} graph ops on the device, {result.kernels} kernels, "
        f"{result.ran.grouped} of {result.ran.device.total()} ops in groups{lacking}"
    )


def _joined(reasons: Iterable[str]) -> str:
    ops: dict[str, list[str]] = {}
    for reason in sorted(reasons):
        name, _, text = reason.rpartition(": ")
        ops.setdefault(text, []).append(name)
    return "; ".join(", ".join(names) + ": " * any(names) + text for text, names in ops.items())


def default_page(results: Mapping[str, Result]) -> Iterator[str]:
    """Yields the part of default-kernels.md that a run writes."""
    there = [result for result in results.values() if not result.left_out]
    yield (
        f"Of {len(there)} architectures {sum(r.passed for r in there)} pass, with the test's limits. "
        f"{sum(r.passed and not r.lacking for r in there)} of these run wholly on the device, except for the embedding of the "
        "input tokens, which llama.cpp keeps in host memory."
    )
    yield from ("", "| architecture | passes | kernels | launches | on the CPU | why |", "|---|---|--:|--:|--:|---|")
    for name, result in sorted(results.items()):
        if result.left_out:
            yield f"| {name} | | | | | {result.left_out} |"
            continue
        on_cpu = f"{result.lacking} of {result.ops}" if result.lacking else ""
        why = result.failure.partition("\n")[0] or _joined(result.reasons)
        yield harness.row(name, _yes(result), result.kernels, result.ran.padded, on_cpu, why)


def layers_page(results: Mapping[str, Result]) -> Iterator[str]:
    """Yields the part of layers.md that a run writes."""
    there = {name: result for name, result in sorted(results.items()) if not result.left_out}
    outside = sum((result.outside for result in there.values()), Counter[str]())
    grouped = [result.ran.grouped for result in there.values()]
    share = sum(grouped) / max(1, sum(result.ran.device.total() for result in there.values()))
    unfolded: dict[str, list[str]] = {}
    for name, result in there.items():
        for why in dict.fromkeys(fold.why for fold in result.folds if fold.why):
            unfolded.setdefault(why, []).append(name)
    folds = sum(bool(result.folds) and not any(fold.why for fold in result.folds) for result in there.values())
    why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in sorted(unfolded.items()))
    yield (
        f"Of {len(there)} architectures {sum(r.passed for r in there.values())} pass, with the test's limits and at most "
        f"{LIMIT_FUSED:.0e} from the logits without groups. {sum(n > 0 for n in grouped)} have ops in groups, {share:.0%} of all "
        f"ops of the whole test. In {folds} architectures one kernel computes several layers{f'; not in {why}' if why else ''}."
    )
    yield from ("", "Ops that are in no group, over all architectures:", "")
    yield from (f"- {n}: {reason}" for reason, n in outside.most_common())
    yield ""
    yield "| architecture | passes | kernels | ops in groups | ops per launch | error against no groups | folds | other ops |"
    yield "|---|---|--:|--:|--:|--:|---|---|"
    for name, result in there.items():
        ran = result.ran
        in_groups = f"{ran.grouped / ran.device.total():.0%}" if ran.device else ""
        per_launch = f"{ran.grouped / ran.launches:.1f}" if ran.launches else ""
        cut = [(fold.why and "no") or f"{fold.nodes} → {fold.launches} ({fold.kernels})" for fold in result.folds]
        error = "" if result.fused is None else f"{result.fused:.1e}"
        others = result.failure.partition("\n")[0] or "; ".join(
            f"{n} {reason}" for reason, n in result.outside.most_common()
        )
        yield harness.row(name, _yes(result), result.kernels, in_groups, per_launch, error, ", ".join(cut), others)


def split_page(results: Mapping[str, Result]) -> Iterator[str]:
    """Yields the part of split-architectures.md that a run writes."""
    split = {name: result for name, result in sorted(results.items()) if not result.left_out}
    yield (
        f"Of {len(results)} architectures llama.cpp splits {len(split)} ({sum(len(r.split) for r in split.values())} models). "
        f"{sum(r.passed for r in split.values())} of these pass: an error of at most {LIMIT:.0e} against the CPU, on each core alone "
        "and over all cores, and no op that the backend computes on the CPU."
    )
    yield from ("", f"llama.cpp splits no tensors of {', '.join(sorted(results.keys() - split.keys()))}.", "")
    yield "| architecture | model | error | on one core | kernels | ops on cores | sums | on the CPU | left by llama.cpp |"
    yield "|---|---|--:|--:|--:|--:|--:|---|---|"
    for name, result in split.items():
        on_cpu = result.failure.partition("\n")[0] or harness.counts(result.ran.cpu)
        rest = [result.kernels, result.ran.device.total(), result.ran.reductions, on_cpu, harness.counts(result.cpu)]
        if not result.split:
            yield harness.row(name, "", "", "", *rest)
        for row in result.split:
            alone = max(other.nmse for other in result.rows if other.config == row.config and other is not row)
            yield harness.row(name, row.config, f"{row.nmse:.1e}", f"{alone:.1e}", *rest)
            rest = [""] * 5


def _yes(result: Result) -> str:
    return "yes" if result.passed else "no"


PAGES: dict[str, Callable[[Mapping[str, Result]], Iterator[str]]] = {
    "default-kernels.md": default_page,
    "layers.md": layers_page,
    "split-architectures.md": split_page,
}


def known(page: str) -> dict[str, bool]:
    """Returns the architectures in the text of default-kernels.md, and for each whether the page lists nodes on the CPU."""
    rows = re.findall(r"^\| ([^|]+) \| (?:yes|no) \| \d+ \| \d+ \| ([^|]*) \|", page, re.MULTILINE)
    return {name: bool(on_cpu) for name, on_cpu in rows}


def is_worse(name: str, result: Result) -> bool:
    """Whether an architecture failed, or has nodes on the CPU that default-kernels.md does not list."""
    page = (harness.DOCS / "results" / "default-kernels.md").read_text(encoding="utf-8")
    return bool(result.failure) or (bool(result.lacking) and not known(page).get(name, False))


def report(results: Mapping[str, Result]) -> None:
    """Prints the totals, and the ops that remain on the CPU."""
    ran = [result for result in results.values() if not result.left_out]
    worst = max((row.nmse for result in ran for row in result.rows), default=float("nan"))
    device, cpu = (sum((getattr(r, side) for r in ran), Counter[str]()) for side in ("device", "cpu"))
    print(
        f"{len(ran)} of {len(results)} architectures ran, {sum(r.passed for r in ran)} passed; worst NMSE {worst:.1e}; "
        f"{device.total() / max(1, (device + cpu).total()):.1%} of the graphs' ops on the device, at least "
        f"{min((result.share for result in ran), default=0):.1%}; on the CPU: {harness.counts(cpu)}"
    )


def write_table(path: Path, results: Mapping[str, Result]) -> None:
    """Writes the architectures that need each op, in the format that `kernelgen list --ops` reads."""
    ops = sorted({op for result in results.values() for op in result.needs})
    needs = {op: sorted(name for name, result in results.items() if op in result.needs) for op in ops}
    path.write_text("{\n" + ",\n".join(f" {json.dumps(op)}: {json.dumps(needs[op])}" for op in ops) + "\n}\n")


def all_names(programs: Programs) -> list[str]:
    """Returns the architectures that test-llama-archs runs."""
    with tempfile.TemporaryDirectory() as folder:
        environment = programs.environment(kernels=harness.odd_kernel(Path(folder, "odd-kernel")))
        words = ("-a", ".*", "-b", harness.DEVICE, "-s", "1")
        done = programs.run("test-llama-archs", *words, environment=environment, preload=True, timeout=TIMEOUT)
    names = list(read_rows(done.stdout))
    if done.returncode or not names:
        raise RuntimeError(f"test-llama-archs ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return names


def main(survey: Survey, programs: Programs, args: argparse.Namespace) -> bool:
    """Runs a survey; returns whether nothing failed."""
    names = args.only.split(",") if args.only else all_names(programs)
    if survey.cores > 1:
        survey = replace(survey, fuse=args.fuse or survey.fuse, cores=args.cores or survey.cores)
    do = partial(run_architecture, programs, survey)
    results = harness.survey(names, do, line, work=args.work, jobs=args.jobs)
    report(results)
    if args.write_page and survey.page:
        harness.write_page(survey.page, PAGES[survey.page](results))
    elif args.write_page:
        write_table(harness.DOCS.parent / "tools/kernelgen/ggml/architectures.json", results)
    recorded = survey.options is None
    failed = [name for name, r in results.items() if r.failure or (not recorded and is_worse(name, r))]
    if failed:
        print(
            f"failed, or with nodes on the CPU that docs/results/default-kernels.md does not list: {', '.join(failed)}"
        )
    return bool(results) and not failed


def derived_main(programs: Programs, args: argparse.Namespace) -> bool:
    """Compares derived kernels with those that runs request; returns whether none is missing."""
    names = args.only.split(",") if args.only else all_names(programs)

    def describe(name: str, results: Mapping[str, Comparison]) -> str:
        return "; ".join(f"{model}: {result}" for model, result in results.items()) or f"{name}: no file"

    found = harness.survey(names, partial(compare_derived, programs), describe, work=args.work, jobs=args.jobs)
    results = {model: result for of_name in found.values() for model, result in sorted(of_name.items())}
    if args.write_page:
        harness.write_page("model-support.md", derived_page(results))
    print(
        f"{len(results)} models, {sum(not r.failure for r in results.values())} with all kernels that their runs request"
    )
    return bool(results) and not any(result.failure for result in results.values())


def derived_page(results: Mapping[str, Comparison]) -> Iterator[str]:
    """Yields the part of model-support.md that a run writes."""
    yield "| architecture | nodes for one token | entries | kernels | missing | without a kernel |"
    yield "|---|--:|--:|--:|--:|---|"
    yield from (harness.row(name, *result.cells) for name, result in sorted(results.items()))
    notes = [f"- {name}: {why}." for name, why in EXPLAINED.items() if name in results and results[name].missing]
    yield from ["", *notes] if notes else []
