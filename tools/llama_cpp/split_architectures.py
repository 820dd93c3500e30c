"""Runs llama.cpp's test-llama-archs over several simulated NeuronCores, with kernels for the slices of each architecture.

    ./bazelw run //tools/llama_cpp:split_architectures                              every architecture, over two cores
    ./bazelw run //tools/llama_cpp:split_architectures -- -a llama,qwen3            only these
    ./bazelw run //tools/llama_cpp:split_architectures -- --cores 4 --fuse step     over four cores, with steps as kernels
    ./bazelw run //tools/llama_cpp:split_architectures -- --write-page              all; writes docs/results/split-architectures.md

test-llama-archs runs each small random model on the CPU, on each core alone, and over all cores with -sm tensor (its
rows "Meta"). It also writes the models as files. `kernelgen model --split-mode tensor` derives the kernels from the
files' headers, for the test's numbers of tokens: both without a split and for the slices. Two architectures have no
file; their kernels are built in rounds, from what their runs request.

Exit status 1 if a row fails, or if the backend computed an op on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import backend_ops
import default_kernels
import derived_kernels
import harness
import kernel_builder
import models
import work_folder
import worker_pool

from kernelgen import cli, fileio, manifest
from kernelgen.bundle.contents import pack_name
from kernelgen.spec.kernel import GraphSpec, KernelSpec

N_TOKENS = (32, 64, 128)
"""The numbers of tokens per call in the test. llama.cpp cuts 128 into two calls of 64, unless the model is an encoder."""

OVER_ALL = "Meta"
"""The name of the device of all cores in test-llama-archs."""

FUSE = ("none", "parts", "parts+sums", "layer", "step")

PAGE = default_kernels.DOCS / "results" / "split-architectures.md"

_REFUSED = "llama.cpp splits no tensors of it"
_NOT_SPLIT = re.compile(r"LLAMA_SPLIT_MODE_TENSOR not implemented for architecture")

# Lines that the backend prints at its end.
_LACKED = re.compile(r"graphs lacked kernels: (.*)")
_BROKEN = re.compile(r"ggml-neuron: (?P<why>.*); computing (?P<op>\w+) on the CPU")
_REDUCED = re.compile(r"(\d+) reductions over NeuronCores went through the host's memory")


@dataclass
class SplitResult:
    """The outcome of an architecture.

    Attributes:
        rows: the rows of the table, except the CPU's.
        refused: why llama.cpp splits no tensors of the architecture; nothing ran then.
        kernels: the number of kernels in the pack.
        asked: of these, the kernels that a run requested and no file's header gave.
        ran: the ops that the cores computed.
        elsewhere: the ops that the backend computed on the CPU.
        reasons: why, with the number of different nodes.
        kept: the ops of the split graphs that llama.cpp gave to its CPU backend; its log cuts names after ten characters.
        launches: the launches of groups.
        reductions: the reductions that went through the host's memory.
        failure: errors other than those in the rows.
        seconds: the duration.
    """

    rows: list[models.ArchitectureRow] = field(default_factory=list)
    refused: str = ""
    kernels: int = 0
    asked: int = 0
    ran: int = 0
    elsewhere: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    reductions: int = 0
    failure: str = ""
    seconds: float = 0.0

    @property
    def split(self) -> list[models.ArchitectureRow]:
        """Returns the rows over all cores."""
        return [row for row in self.rows if row.device == OVER_ALL]

    @property
    def passed(self) -> bool:
        if self.failure:
            return False
        return bool(self.refused) or (bool(self.split) and all(row.ok for row in self.rows) and not self.elsewhere)

    @staticmethod
    def from_json(value: dict[str, Any]) -> SplitResult:
        return SplitResult(**value | {"rows": [models.ArchitectureRow(**row) for row in value["rows"]]})


class SplitRunner:
    """Runs architectures.

    Args:
        programs: the programs to run.
        work: the folder with the architectures' results.
        threads: the number of threads that a program may use.
        cores: the number of cores.
        fuse: `--fuse` of `kernelgen model`.
    """

    def __init__(self, programs: harness.Programs, work: Path, threads: int, cores: int, fuse: str) -> None:
        self.programs, self.work, self.threads, self.cores, self.fuse = programs, work, threads, cores, fuse
        self.builder = models.CachingBuilder()
        own = work_folder.digest_files([Path(__file__), derived_kernels.exporter()])
        self.depends = work_folder.digest(models.depends_on(programs), own, cores, fuse)

    def do(self, name: str, progress: harness.Progress) -> SplitResult:
        """Returns the outcome of an architecture, from an earlier run if nothing that it depends on has changed."""
        make = partial(self._do, name, progress=progress)
        return work_folder.kept(self.work, name, self.depends, SplitResult.from_json, make)

    def _derive(self, file: Path) -> tuple[dict[str, KernelSpec | GraphSpec], str]:
        """Returns the kernels from a file's header, or the error message of `kernelgen model`."""
        output, said = file.with_suffix(".yaml"), io.StringIO()
        words = ["model", file, "-o", output, "--n-ctx", default_kernels.N_CTX, "--target", harness.target()]
        words += ["--n-tokens", ",".join(map(str, N_TOKENS)), "--weights", "none", "--fuse", self.fuse]
        words += ["--split-mode", "tensor", "--devices", f"1,{self.cores}"]
        words += ["--exporter", derived_kernels.exporter(), "--llama-cpp", self.programs.llama_cpp]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if cli.run(list(map(str, words))):
                return {}, said.getvalue().strip()
        (request,) = manifest.load([output], self.builder.catalog)
        return {kernel.spec.id: kernel.spec for kernel in request.kernels}, ""

    def _do(self, name: str, folder: Path, progress: harness.Progress) -> SplitResult:
        # The backend offers no device without kernels.
        odd, config, _ = self.builder.read([harness.ODD_KERNEL])
        assert config
        specs: dict[str, KernelSpec | GraphSpec] = {kernel.spec.id: kernel.spec for kernel in odd.values()}
        progress("deriving", 0)
        files = derived_kernels.save(self.programs, f"^{re.escape(name)}$", folder)
        for _, file in files:
            derived, said = self._derive(file)
            if _NOT_SPLIT.search(said):
                return SplitResult(refused=_REFUSED)
            if said:
                return SplitResult(failure=said)
            specs |= derived
        asked = 0
        for number in range(1 if files else models.ROUNDS):
            built = kernel_builder.BuiltGroup()
            kernels = folder / f"kernels-{number}"
            kernels.mkdir()
            refused = self.builder.pack(specs, config, kernels / pack_name("group"), built, progress)
            progress("running, round", number + 1)
            environment = self.programs.environment(kernels=kernels, buffers="device", log=2) | {
                "GGML_SCHED_DEBUG": "2",
                "NEURON_RT_NUM_CORES": str(self.cores),
                "NEURON_RT_EXEC_TIMEOUT": harness.WAIT,
                "NEURON_SIMULATOR_CACHE": str(self.work.parent / work_folder.COMPILED),
                "NEURON_SIMULATOR_THREADS": str(self.threads),
                "OMP_THREAD_LIMIT": str(self.threads),
            }
            words = ("-a", f"^{re.escape(name)}$", "-s", "1", "-v", "9")
            done = self.programs.run(
                "test-llama-archs", *words, environment=environment, preload=True, timeout=models.TIMEOUT
            )
            output = done.stderr + done.stdout
            rows = models.architecture_rows(done.stdout).get(name, [])
            # The table has the rows of the CPU and of each core, and the row over all cores reads SKIP.
            if not done.returncode and len(rows) > self.cores and not any(row.device == OVER_ALL for row in rows):
                return SplitResult(refused=_REFUSED)
            missing = models.missing_nodes(output)
            buildable = [node for node, why in missing.items() if why is None]
            more, _, _ = self.builder.read(buildable) if buildable and not files else ({}, None, {})
            new = {kernel.spec.id: kernel.spec for kernel in more.values() if kernel.spec.id not in specs}
            if not new:
                break
            specs |= new
            asked += len(new)
        ran = harness.ran(output)
        model = SplitResult(
            rows=rows,
            kernels=len(built.sizes),
            asked=asked,
            ran=ran["device"].total(),
            elsewhere=dict(ran["cpu"]),
            reasons=self._reasons(missing, output) if ran["cpu"] else {},
            kept=dict(models.dispatched(output, "Meta(")["cpu"]),
            launches=sum(int(found["launches"]) for found in default_kernels.GROUPED.finditer(output)),
            reductions=sum(map(int, _REDUCED.findall(output))),
        )
        if built.failed or (refused and files):
            model.failure = f"kernels that should have been built: {dict(list((built.failed | refused).items())[:3])}"
        elif done.returncode and all(row.ok for row in rows):
            model.failure = f"exit status {done.returncode}: {output[-1500:]}"
        elif not model.ran:
            model.failure = "nothing ran on the device"
        return model

    def _reasons(self, missing: Mapping[str, str | None], log: str) -> dict[str, int]:
        """Returns why the CPU computed ops: broken kernels, or kernels missing in graphs that ran."""
        found = Counter(f"{broken['op']}: {harness.generalize(broken['why'])}" for broken in _BROKEN.finditer(log))
        lacked = {op.upper() for graph in _LACKED.findall(log) for op in re.findall(r"(\w+) of \(", graph)}
        for reason, count in default_kernels.reasons(missing, self.builder).items():
            if reason.partition(":")[0] in lacked:
                found[reason] += count
        return dict(found)


# --- all of them -----------------------------------------------------------------------------------------------------------


def line(name: str, model: SplitResult) -> str:
    """Returns the outcome of an architecture as one line."""
    if model.refused:
        return f"{name}: left out: {model.refused}"
    errors = ", ".join(f"{row.config} {row.nmse:.1e}" for row in model.split) or "none"
    where = f"on the CPU: {_on_cpu(model)}" if model.elsewhere else "nothing on the CPU"
    return (
        f"{name}: {'passed' if model.passed else 'FAILED'}, NMSE over all cores {errors}; {model.ran} ops on cores, {where}; "
        f"{model.kernels} kernels, {model.seconds:.0f} s" + (f"; {model.failure}" if model.failure else "")
    )


def _counts(ops: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in sorted(ops.items(), key=lambda item: (-item[1], item[0])))


def _on_cpu(model: SplitResult) -> str:
    why = f" ({'; '.join(sorted(model.reasons))})" if model.reasons else ""
    return _counts(model.elsewhere) + why


_INTRO = """\
# Architectures over {cores} cores

This page lists the architectures of llama.cpp's `test-llama-archs` that run over {cores} [simulated](../reference/simulator.md) NeuronCores with [`-sm tensor`](../reference/tensor-parallel.md), on kernels of
their slices. [`kernelgen model --split-mode tensor --devices 1,{cores} --fuse {fuse}`](../reference/models.md) derives the kernels, for the test's own calls of 32, 64 and 128 tokens. This command writes the page:

    ./bazelw run //tools/llama_cpp:split_architectures -- --write-page

Of {all} architectures llama.cpp splits {splits} ({models} models). {passed} of these pass: an error of at most 1e-4 against the CPU, on each core alone and over all cores, and no op that
the backend computes on the CPU.

- *Error* is the normalised mean squared error of the logits over all cores; *on one core* is the largest error of a core alone.
- *On the CPU* names the ops that the backend computed on the CPU, with the reasons.
- *Left by llama.cpp* names the ops that llama.cpp gave to its own CPU backend, because it keeps a weight in host memory. Its log truncates names after ten characters.
- *Sums* went through the host's memory{sums}.

BLOOM, Jais and Refact have [ALiBi, which llama.cpp computes wrongly](../reference/tensor-parallel.md#what-works) with `-sm tensor`.

llama.cpp splits no tensors of {refused}.

| architecture | model | error | on one core | kernels | ops on cores | sums | on the CPU | left by llama.cpp |
|---|---|--:|--:|--:|--:|--:|---|---|
"""


def page(found: Mapping[str, SplitResult], cores: int, fuse: str) -> str:
    """Returns the page's text."""
    split = {name: model for name, model in found.items() if not model.refused}
    intro = _INTRO.format(
        cores=cores,
        fuse=fuse,
        sums=": no kernel computes them" if fuse == "none" else "",
        all=len(found),
        splits=len(split),
        models=sum(len(model.split) for model in split.values()),
        passed=sum(model.passed for model in split.values()),
        refused=", ".join(sorted(found.keys() - split.keys())),
    )
    return intro + "".join(text for name, model in sorted(split.items()) for text in _rows(name, model))


def _rows(name: str, model: SplitResult) -> list[str]:
    if not model.split:
        return [f"| {name} | | | | | | | {model.failure.replace('|', '/').splitlines()[0]} | |\n"]
    on_cpu = "; ".join(filter(None, (_on_cpu(model), *model.failure.splitlines()[:1]))).replace("|", "/")
    found = []
    for row in model.split:
        alone = max(other.nmse for other in model.rows if other.config == row.config and other is not row)
        cells = [name, row.config, f"{row.nmse:.1e}", f"{alone:.1e}", *[""] * 5]
        if row is model.split[0]:
            cells[4:] = [str(model.kernels), str(model.ran), str(model.reductions), on_cpu, _counts(model.kept)]
        found.append("| " + " | ".join(cells) + " |\n")
    return found


def _make(setup: dict[str, Any]) -> Any:
    work, threads, cores, fuse = (setup[name] for name in ("work", "threads", "cores", "fuse"))
    own = SplitRunner(harness.Programs.find(), Path(work), threads, cores, fuse)
    return lambda name, progress: asdict(own.do(name, progress))


def run_all(
    programs: harness.Programs,
    work: Path,
    names: list[str],
    cores: int = 2,
    fuse: str = "none",
    *,
    jobs: int | None = None,
    say: harness.Say = print,
) -> dict[str, SplitResult]:
    """Runs architectures in parallel, and returns the outcome of each.

    Args:
        programs: the programs to run.
        work: the folder for results.
        names: the architectures.
        cores: the number of cores.
        fuse: `--fuse` of `kernelgen model`.
        jobs: how many run at once; one per CPU by default.
        say: called with a line about each architecture.
    """
    setup = {"work": str(work), "cores": cores, "fuse": fuse}
    return worker_pool.answers(Path(__file__), setup, programs, names, jobs, SplitResult.from_json, line, say)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-a", dest="names", metavar="NAMES", help="architectures; all by default")
    parser.add_argument("--cores", type=int, default=2, help="the number of cores")
    parser.add_argument("--fuse", choices=FUSE, default="none", help="--fuse of `kernelgen model`")
    parser.add_argument("--work", type=Path, help="the folder that keeps results between runs")
    parser.add_argument("-j", "--jobs", type=int, help="architectures at once; one per CPU by default")
    parser.add_argument("--write-page", action="store_true", help=f"write docs/results/{PAGE.name}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker_pool.serve(_make)
        return 0
    if args.cores < 2:
        parser.error("--cores: at least 2; //tools/llama_cpp:models runs one core")
    programs = harness.Programs.find()
    work = (args.work or backend_ops.default_work().with_name("split-architectures")).absolute()
    names = models.chosen(parser, args.names, models.architectures(programs, work))
    found = run_all(programs, work, names, args.cores, args.fuse, jobs=args.jobs, say=backend_ops.say)
    split = {name: model for name, model in found.items() if not model.refused}
    print(f"{len(found)} architectures, llama.cpp splits {len(split)}, {sum(m.passed for m in split.values())} passed")
    if args.write_page:
        fileio.write_bytes(PAGE, page(found, args.cores, args.fuse).encode())
    return 0 if found and all(model.passed for model in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
