"""Runs llama.cpp's test-llama-archs with the kernels that `kernelgen model` derives by default, and reports ops left on the CPU.

    ./bazelw run //tools/llama_cpp:default_kernels                       every architecture
    ./bazelw run //tools/llama_cpp:default_kernels -- -a llama,qwen3     only these
    ./bazelw run //tools/llama_cpp:default_kernels -- --write-page       every architecture; writes docs/results/default-kernels.md
    ./bazelw run //tools/llama_cpp:default_kernels -- --fuse layer       with layers as kernels; --write-page writes docs/results/layers.md

test-llama-archs writes small random models of an architecture. `kernelgen model` derives the kernels from the files'
headers, with no option except the context length: kernels for 1, 8, 32, 128 and 256 tokens, and none specially for the
test's own numbers of tokens. The test then runs with these kernels: it makes calls of 64 and 32 tokens (128 for some
architectures), compares the logits with the CPU's, and repeats this after saving and loading. Nothing is recorded.

With `--fuse layer`, llama.cpp's test-fusion runs as well. It reports the difference between the logits with groups and
without. The graph of a model with more layers shows whether one kernel computes several of them (`folded_layers.py`).

Exit status 1 if a model failed, or if an architecture has nodes on the CPU that the page does not list.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import backend_ops
import derived_kernels
import folded_layers
import harness
import kernel_builder
import models
import work_folder
import worker_pool

from kernelgen import cli, fileio, manifest
from kernelgen.bundle.contents import pack_name
from kernelgen.ggml.ops import op
from kernelgen.ggml.tokens import cuts
from kernelgen.model import exporter
from kernelgen.spec.kernel import GraphSpec, KernelSpec

N_CTX = 256
"""The cells of the context that test-llama-archs creates."""

DOCS = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).parents[2])) / "docs"
PAGE = DOCS / "results" / "default-kernels.md"
PAGES = {"none": PAGE, "layer": DOCS / "results" / "layers.md"}

LIMIT_FUSED = 1e-6
"""The largest allowed normalised mean squared error of logits with groups against logits without groups."""

_LACKING = re.compile(
    r"of the (?P<ops>\d+) ops of a graph ran .*?, (?P<lacking>\d+) on the CPU because no kernel computes them"
)
GROUPED = re.compile(r"(?P<ops>\d+) ops ran in groups, in (?P<launches>\d+) launches")
_OUTSIDE = re.compile(r"\d+ ops were in no group: (.*)")
_FUSED = re.compile(r" (?:dense|moe) +\w+ +(?P<label>\S+) +\d+ +\d+ +\d+ +(?P<error>\S+) +\S+ \w+$", re.MULTILINE)
_LAUNCHED = re.compile(r"other numbers of tokens were launched (\d+) times, with (\d+) rows of padding")


@dataclass
class DefaultKernelsResult:
    """The outcome of an architecture.

    Attributes:
        rows: its runs, dense or with experts.
        kernels: the number of derived kernels.
        launches: the launches of kernels made for another number of tokens than the node's.
        ops: the ops of the graph that lacks the most kernels; 0 if no graph lacks any.
        lacking: the ops of that graph that the CPU computed because no kernel does.
        reasons: why kernels are missing, with the number of different nodes.
        failure: errors other than those in the rows.
        seconds: the duration.
        absent: whether test-llama-archs writes no file of it, so that no kernels can be derived.
        ran: the ops that the device ran in the whole test; `grouped` of these ran in groups, in `group_launches` launches.
        outside: the ops that were in no group, by reason.
        fused: the largest error of logits with groups against logits without; None if there were no groups.
        folds: per model, how its graph with more layers is cut.
    """

    rows: list[models.ArchitectureRow] = field(default_factory=list)
    kernels: int = 0
    launches: int = 0
    ops: int = 0
    lacking: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0
    absent: bool = False
    ran: int = 0
    grouped: int = 0
    group_launches: int = 0
    outside: dict[str, int] = field(default_factory=dict)
    fused: float | None = None
    folds: list[folded_layers.Folded] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows) and not self.failure

    @property
    def whole(self) -> bool:
        """Whether the device ran all ops that llama.cpp assigned to it."""
        return self.passed and not self.lacking

    @staticmethod
    def from_json(value: dict[str, Any]) -> DefaultKernelsResult:
        own = {
            "rows": [models.ArchitectureRow(**row) for row in value["rows"]],
            "folds": [folded_layers.Folded(**folded) for folded in value["folds"]],
        }
        return DefaultKernelsResult(**value | own)


# --- why a node has no kernel ---------------------------------------------------------------------------------------------


def why(spec: KernelSpec) -> str:
    """Returns why kernels for other numbers of tokens do not compute a node that has no kernel of its own."""
    name = spec.op.upper()
    if not op(spec.op).tokens:
        return f"{name}: not cut along tokens"
    if not list(cuts(spec.op, spec.inputs, spec.output)):
        return f"{name}: these tensors are not cut along tokens"
    return f"{name}: no kernel for other numbers of tokens"


def reasons(requested: Mapping[str, str | None], builder: kernel_builder.KernelBuilder) -> dict[str, int]:
    """Returns why nodes have no kernel, with their counts; `requested` maps manifest entries to the backend's reason, or None."""
    found: Counter[str] = Counter()
    buildable = sorted(node for node, reason in requested.items() if reason is None)
    read, _, refused = builder.read(buildable) if buildable else ({}, None, {})
    for node, reason in requested.items():
        said = reason or refused.get(node)
        found[harness.generalize(said) if said else why(read[node].spec)] += 1
    return dict(found)


# --- one architecture ------------------------------------------------------------------------------------------------------


class DefaultKernelsRunner:
    """Runs architectures.

    Args:
        programs: the programs to run.
        work: the folder with the architectures' results.
        threads: the number of threads that a program may use.
        fuse: `--fuse` of `kernelgen model`.
    """

    def __init__(self, programs: harness.Programs, work: Path, threads: int, fuse: str = "none") -> None:
        self.programs, self.work, self.threads, self.fuse = programs, work, threads, fuse
        self.builder = models.CachingBuilder()
        self.depends = work_folder.digest(
            models.depends_on(programs),
            work_folder.digest_files([Path(__file__), Path(str(folded_layers.__file__)), derived_kernels.exporter()]),
            fuse,
        )

    def do(self, name: str, progress: harness.Progress) -> DefaultKernelsResult:
        """Returns the outcome of an architecture, from an earlier run if nothing that it depends on has changed."""
        make = partial(self._do, name, progress=progress)
        return work_folder.kept(self.work, name, self.depends, DefaultKernelsResult.from_json, make)

    def _do(self, name: str, folder: Path, progress: harness.Progress) -> DefaultKernelsResult:
        pattern = f"^{re.escape(name)}$"
        specs: dict[str, KernelSpec | GraphSpec] = {}
        files = []
        progress("deriving", 0)
        for number, (_, file) in enumerate(derived_kernels.save(self.programs, pattern, folder)):
            output = folder / f"m{number}.yaml"
            said = io.StringIO()
            where = ("--exporter", derived_kernels.exporter(), "--llama-cpp", self.programs.llama_cpp)
            words = ["model", file, "-o", output, "--n-ctx", N_CTX, "--target", harness.target(), *where]
            words += ["--fuse", self.fuse]
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                if cli.run(list(map(str, words))):
                    return DefaultKernelsResult(failure=said.getvalue().strip())
            (request,) = manifest.load([output], self.builder.catalog)
            specs |= {kernel.spec.id: kernel.spec for kernel in request.kernels}
            config = next(c for c in request.configs if c.target == harness.target())
            files.append(file)
        if not specs:
            return DefaultKernelsResult(absent=True)
        built = kernel_builder.BuiltGroup()
        kernels = folder / "kernels"
        kernels.mkdir()
        path = kernels / pack_name(f"group_{harness.target()}")
        refused = self.builder.pack(specs, config, path, built, progress)
        progress("running", 0)
        environment = self.programs.environment(kernels=kernels, log=2) | {
            "NEURON_SIMULATOR_CACHE": str(self.work.parent / work_folder.COMPILED),
            "NEURON_SIMULATOR_THREADS": str(self.threads),
            "OMP_THREAD_LIMIT": str(self.threads),
        }
        done = models.run(self.programs, environment, pattern)
        output_text = done.stderr + done.stdout
        model = DefaultKernelsResult(rows=models.architecture_rows(done.stdout).get(name, []), kernels=len(built.sizes))
        lacking = [(int(m["lacking"]), int(m["ops"])) for m in _LACKING.finditer(output_text)]
        model.lacking, model.ops = max(lacking, default=(0, 0))
        model.launches = sum(int(count) for count, _ in _LAUNCHED.findall(output_text))
        if model.lacking:
            model.reasons = reasons(models.missing_nodes(output_text), self.builder)
        ran = harness.ran(output_text)
        if built.failed or refused:
            model.failure = f"kernels that should have been built: {dict(list((built.failed | refused).items())[:3])}"
        elif done.returncode and all(row.ok for row in model.rows):
            model.failure = f"exit status {done.returncode}: {output_text[-1500:]}"
        elif ran["cpu"] and not model.lacking:
            model.failure = f"the backend ran ops on the CPU and did not say so: {dict(ran['cpu'])}"
        elif not ran["device"]:
            model.failure = "nothing ran on the device"
        model.ran = ran["device"].total()
        _add_groups(model, output_text)
        if model.grouped:
            self._compare(model, files, environment)
        if self.fuse != "none":
            program = exporter.find(derived_kernels.exporter(), self.programs.llama_cpp)
            model.folds = [folded_layers.folded(file, folder, program, N_CTX) for file in files]
        return model

    def _compare(self, model: DefaultKernelsResult, files: Sequence[Path], environment: dict[str, str]) -> None:
        """Adds the error of the logits with groups against the logits without."""
        model.fused = 0.0
        for file in files:
            words = ("--model", file, "--device", "NEURON0", "--record", file.with_suffix(".csv"))
            done = self.programs.run(
                "test-fusion", *words, environment=environment, preload=True, timeout=models.TIMEOUT
            )
            rows = list(_FUSED.finditer(done.stdout + done.stderr))
            model.fused = max((float(row["error"]) for row in rows), default=model.fused)
            if done.returncode or not rows:
                model.failure = model.failure or f"test-fusion: {(done.stdout + done.stderr)[-1500:]}"
        if not model.fused <= LIMIT_FUSED:
            model.failure = model.failure or f"the error against the same kernels without groups is {model.fused:.1e}"


def _add_groups(model: DefaultKernelsResult, log: str) -> None:
    """Adds what the backend's log reports about groups."""
    outside: Counter[str] = Counter()
    for match in GROUPED.finditer(log):
        model.grouped += int(match["ops"])
        model.group_launches += int(match["launches"])
    for match in _OUTSIDE.finditer(log):
        for part in match[1].split("; "):
            count, _, reason = part.partition(" because ")
            outside[reason] += int(count)
    model.outside = dict(outside)


# --- all of them -----------------------------------------------------------------------------------------------------------


def run_all(
    programs: harness.Programs,
    work: Path,
    names: Sequence[str],
    fuse: str,
    *,
    jobs: int | None = None,
    say: harness.Say = print,
) -> dict[str, DefaultKernelsResult]:
    """Runs architectures in parallel, and returns the outcome of each; the arguments are those of `models.run_all`."""
    return worker_pool.answers(
        Path(__file__),
        {"work": str(work), "fuse": fuse},
        programs,
        names,
        jobs,
        DefaultKernelsResult.from_json,
        line,
        say,
    )


def line(name: str, model: DefaultKernelsResult) -> str:
    """Returns the outcome of an architecture as one line."""
    if model.absent:
        return f"{name}: left out: {_NO_FILE}"
    how = "passed" if model.passed else "FAILED"
    groups = (
        f", {model.grouped} of {model.ran} ops in groups, {model.fused:.1e} from none"
        if model.fused is not None
        else ""
    )
    where = f"{model.lacking} of {model.ops} nodes on the CPU: {_joined(model.reasons)}" if model.lacking else "wholly"
    return (
        f"{name}: {how}, {where}, {model.kernels} kernels, {model.launches} launches for other numbers of tokens{groups}, "
        f"{model.seconds:.0f} s" + (f"; {model.failure}" if model.failure else "")
    )


_NO_FILE = "test-llama-archs writes no file of it"


def _joined(reasons: Mapping[str, int]) -> str:
    ops: dict[str, list[str]] = {}
    for reason in sorted(reasons):
        name, _, text = reason.rpartition(": ")
        ops.setdefault(text, []).append(name)
    return "; ".join(", ".join(names) + ": " * any(names) + text for text, names in ops.items())


_INTRO = """\
# Architectures with the default kernels

This page lists the architectures of llama.cpp's `test-llama-archs` that run wholly on the device with the default kernels of [`kernelgen model`](../reference/models.md), for
1, 8, 32, 128 and 256 tokens per call. The context has {n_ctx} cells. The run records nothing. The calls of the test have 64, 32 or 128 tokens: kernels for
[other numbers of tokens](../reference/kernel-selection.md) compute them. This command writes the page:

    ./bazelw run //tools/llama_cpp:default_kernels -- --write-page

Of {all} architectures {passed} pass, with the test's limits. {whole} of these run wholly on the device, except for the embedding of the input tokens, which
llama.cpp keeps in host memory.

- *Launches* counts the launches of kernels for other numbers of tokens in the whole test.
- *On the CPU* counts the nodes without a kernel, and all nodes, in the graph with the most nodes without a kernel.
- *Not cut along tokens* are ops that run along the tokens, as in recurrent models, and ops without a rule for cutting them.
- *These tensors* are several matrices or streams, or positions of several dimensions.
- *No kernel for other numbers*: the tokens are not the outermost axis.

A model with nodes on the CPU runs wholly on the device with kernels for the numbers of tokens of its calls (`--n-tokens`).

| architecture | passes | kernels | launches | on the CPU | why |
|---|---|--:|--:|--:|---|
"""


_LAYERS = """\
# Architectures with layers as kernels

This page lists the architectures of llama.cpp's `test-llama-archs` that compute the same with [layers as kernels](../reference/graph-kernels.md). The kernels are the default ones of [`kernelgen model`](../reference/models.md),
for 1, 8, 32, 128 and 256 tokens per call and {n_ctx} cells. The calls of the test have 64, 32 or 128 tokens. This command writes the page:

    ./bazelw run //tools/llama_cpp:default_kernels -- --fuse layer --write-page

Of {all} architectures {passed} pass, with the test's limits and at most {limit:.0e} from the logits without groups (normalised mean squared error, by llama.cpp's `test-fusion`). {grouped}
have ops in groups, {share:.0%} of all ops of the whole test. *Other ops* are in no group, or the backend computes their group node by node. These are the reasons, counted over all architectures:

{others}

The test's models have about two layers. The last layer is different: it gathers the rows of the outputs. So *folds* describes the graph of one token of a model with four
or twelve times as many layers of the same kinds: `270 → 10 (4)` means that its 270 nodes are 10 launches of 4 different kernels. In {folds} architectures one kernel computes several layers{unfolded}.

| architecture | passes | kernels | ops in groups | ops per launch | error against no groups | folds | other ops |
|---|---|--:|--:|--:|--:|---|---|
"""


def layers_page(found: Mapping[str, DefaultKernelsResult]) -> str:
    """Returns the text of the page about layers."""
    there = {name: model for name, model in found.items() if not model.absent}
    ran = sum(model.ran for model in there.values())
    others: Counter[str] = Counter()
    unfolded: dict[str, list[str]] = {}
    for name, model in sorted(there.items()):
        others.update(model.outside)
        for why in dict.fromkeys(folded.why for folded in model.folds if folded.why):
            unfolded.setdefault(why, []).append(name)
    why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in sorted(unfolded.items()))
    intro = _LAYERS.format(
        n_ctx=N_CTX,
        limit=LIMIT_FUSED,
        all=len(there),
        passed=sum(model.passed for model in there.values()),
        grouped=sum(model.grouped > 0 for model in there.values()),
        share=sum(model.grouped for model in there.values()) / max(1, ran),
        others="\n".join(f"- {count}: {reason}" for reason, count in others.most_common()),
        folds=sum(_folds(model) for model in there.values()),
        unfolded=f"; not in {why}" if why else "",
    )
    return intro + "".join(f"| {' | '.join(_layers_row(name, model))} |\n" for name, model in sorted(there.items()))


def _folds(model: DefaultKernelsResult) -> bool:
    return bool(model.folds) and not any(folded.why for folded in model.folds)


def _layers_row(name: str, model: DefaultKernelsResult) -> tuple[str, ...]:
    """Returns the cells of an architecture's row in the page about layers."""
    share = f"{model.grouped / model.ran:.0%}" if model.ran else ""
    per_launch = f"{model.grouped / model.group_launches:.1f}" if model.group_launches else ""
    folds = ", ".join(
        (folded.why and "no") or f"{folded.nodes} → {folded.launches} ({folded.kernels})" for folded in model.folds
    )
    reasons = sorted(model.outside.items(), key=lambda item: (-item[1], item[0]))
    others = "; ".join(f"{count} {reason}" for reason, count in reasons)
    said = model.failure.splitlines()[0].replace("|", "/") if model.failure else others
    error = "" if model.fused is None else f"{model.fused:.1e}"
    return name, "yes" if model.passed else "no", str(model.kernels), share, per_launch, error, folds, said


def page(found: Mapping[str, DefaultKernelsResult]) -> str:
    """Returns the page's text."""
    intro = _INTRO.format(
        n_ctx=N_CTX,
        all=sum(not model.absent for model in found.values()),
        passed=sum(model.passed for model in found.values()),
        whole=sum(model.whole for model in found.values()),
    )
    return intro + "".join(f"{row(name, model)}\n" for name, model in sorted(found.items()))


def row(name: str, model: DefaultKernelsResult) -> str:
    """Returns an architecture's row in the page."""
    if model.absent:
        return f"| {name} | | | | | {_NO_FILE} |"
    on_cpu = f"{model.lacking} of {model.ops}" if model.lacking else ""
    reason = model.failure.splitlines()[0] if model.failure else _joined(model.reasons)
    cells = (name, "yes" if model.passed else "no", model.kernels, model.launches, on_cpu, reason.replace("|", "/"))
    return "| " + " | ".join(map(str, cells)) + " |"


def known(text: str) -> dict[str, bool]:
    """Returns the architectures in a page, and for each whether the page lists nodes on the CPU."""
    rows = re.findall(r"^\| ([^|]+) \| (?:yes|no) \| \d+ \| \d+ \| ([^|]*) \|", text, re.MULTILINE)
    return {name: bool(on_cpu) for name, on_cpu in rows}


def worse(found: Mapping[str, DefaultKernelsResult], text: str) -> list[str]:
    """Returns the architectures that failed, or that have nodes on the CPU that the page does not list."""
    told = known(text)
    return [
        name
        for name, model in found.items()
        if not model.absent and (not model.passed or (model.lacking and not told.get(name, False)))
    ]


def summary(found: Mapping[str, DefaultKernelsResult]) -> Iterable[str]:
    """Yields the ops left on the CPU, by reason, and the totals."""
    causes: dict[str, list[str]] = {}
    for name, model in found.items():
        for reason in model.reasons:
            causes.setdefault(reason, []).append(name)
    for reason, names in sorted(causes.items(), key=lambda item: -len(item[1])):
        yield f"{len(names):4}  {reason}  ({', '.join(names[:6])}{', …' if len(names) > 6 else ''})"
    yield (
        f"{sum(not model.absent for model in found.values())} architectures, {sum(model.passed for model in found.values())} passed, "
        f"{sum(model.whole for model in found.values())} wholly on the device"
    )


def _make(setup: dict[str, Any]) -> Any:
    own = DefaultKernelsRunner(harness.Programs.find(), Path(setup["work"]), setup["threads"], setup["fuse"])
    return lambda name, progress: asdict(own.do(name, progress))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-a", dest="names", metavar="NAMES", help="architectures; all by default")
    parser.add_argument("--work", type=Path, help="the folder that keeps results between runs")
    parser.add_argument("-j", "--jobs", type=int, help="architectures at once; one per CPU by default")
    parser.add_argument("--fuse", choices=sorted(PAGES), default="none", help="--fuse of `kernelgen model`")
    parser.add_argument(
        "--write-page", action="store_true", help="write docs/results/default-kernels.md or docs/results/layers.md"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker_pool.serve(_make)
        return 0
    programs = harness.Programs.find()
    work = (args.work or backend_ops.default_work().with_name(PAGES[args.fuse].stem)).absolute()
    names = models.chosen(parser, args.names, models.architectures(programs, work))
    found = run_all(programs, work, names, args.fuse, jobs=args.jobs, say=backend_ops.say)
    for text in summary(found):
        print(text)
    if args.write_page:
        text = page(found) if args.fuse == "none" else layers_page(found)
        fileio.write_bytes(PAGES[args.fuse], text.encode())
    missed = worse(found, PAGE.read_text(encoding="utf-8") if PAGE.is_file() else "")
    if missed:
        print(
            f"failed, or with nodes on the CPU that docs/results/default-kernels.md does not list: {', '.join(missed)}"
        )
    return 1 if missed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
