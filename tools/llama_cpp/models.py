"""Runs llama.cpp's test-llama-archs on a simulated NeuronCore, for every architecture that the test supports.

    ./bazelw run //tools/llama_cpp:models                      all of them
    ./bazelw run //tools/llama_cpp:models -- -a llama,qwen3    only these
    ./bazelw run //tools/llama_cpp:models -- --write-table F   also writes the ops of each architecture to F

For each architecture, the program records a small random model, builds its kernels, and runs it again, until it
requests no new kernel. The last run counts: it compares the logits with the CPU's, again after saving and loading, and
lists the ops of the graphs that the device computed. As many architectures run in parallel as there are CPUs. After an
interruption, the next run continues. It repeats an architecture if something that it depends on has changed.

Exit status 1 if an architecture failed or has less than 95 % of its graphs' ops on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import backend_ops
import cases
import harness
import kernel_builder
import work_folder
import worker_pool

from kernelgen import fileio
from kernelgen.spec.kernel import GraphSpec, KernelSpec

LIMIT = 1e-4
"""The largest allowed normalised mean squared error of the logits against the CPU's; test-llama-archs has the same limit."""

SHARE = 0.95
"""The smallest share of the graphs' ops that the device must compute."""

ROUNDS = 6
TIMEOUT = 1800.0

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# A line of the scheduler's log: "node # 12 (   MUL_MAT):  Qcur-0 (  16K) [NEURO         ] use=…"
_NODE = re.compile(r"node #\s*(?P<index>\d+) \(\s*(?P<op>\S+)\s*\):.*?\) \[\s*(?P<backend>\S+)\s")


@dataclass(frozen=True)
class ArchitectureRow:
    """A row of test-llama-archs: its error, its status, the device, and the kind of model."""

    nmse: float
    status: str
    roundtrip: str
    device: str = ""
    config: str = ""

    @property
    def ok(self) -> bool:
        return self.nmse <= LIMIT and self.status == "OK" and self.roundtrip in ("OK", "SKIP")


@dataclass
class ArchitectureResult:
    """The outcome of an architecture.

    Attributes:
        rows: its runs, dense or with experts; none if the program skips it.
        device: the ops of its graphs that the scheduler gave to the device, by op; its log cuts names after ten characters.
        cpu: the same for the CPU.
        ran: the ops that the device computed.
        kernels: the number of kernels in its pack.
        needs: the ops that it requested, by kernelgen's names.
        lacks: the ops without a kernel, with the reason and the number of different nodes.
        failure: errors other than those in the rows.
        seconds: the duration.
        reused: whether the outcome is from an earlier run.
    """

    rows: list[ArchitectureRow] = field(default_factory=list)
    device: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, int] = field(default_factory=dict)
    ran: int = 0
    kernels: int = 0
    needs: list[str] = field(default_factory=list)
    lacks: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0
    reused: bool = False

    @property
    def share(self) -> float:
        total = sum(self.device.values()) + sum(self.cpu.values())
        return sum(self.device.values()) / total if total else 0.0

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows) and not self.failure

    @staticmethod
    def from_json(value: dict[str, Any]) -> ArchitectureResult:
        return ArchitectureResult(**{**value, "rows": [ArchitectureRow(**row) for row in value["rows"]]})


# --- the programs' output -------------------------------------------------------------------------------------------------


def dispatched(log: str, device: str = "NEURO") -> dict[str, Counter[str]]:
    """Returns how many nodes of each op the scheduler gave to the device and to the CPU, from a log with GGML_SCHED_DEBUG=2.

    Args:
        log: the scheduler's log.
        device: the first characters of the backend's name: a core's name, or `Meta(` for tensors that are split over cores.

    The log cuts names of backends after five characters and names of ops after ten. Graphs without a node on the device
    don't count: they are the CPU's reference runs.
    """
    found: dict[str, Counter[str]] = {"device": Counter(), "cpu": Counter()}
    graph: dict[str, Counter[str]] = {"device": Counter(), "cpu": Counter()}
    last = -1

    def end() -> None:
        for where, ops in graph.items():
            if graph["device"]:
                found[where] += ops
        for where in graph:
            graph[where] = Counter()

    for match in _NODE.finditer(log):
        if int(match["index"]) <= last:
            end()
        last = int(match["index"])
        graph["device" if match["backend"].startswith(device) else "cpu"][match["op"]] += 1
    end()
    return found


def architecture_rows(output: str) -> dict[str, list[ArchitectureRow]]:
    """Returns the rows of test-llama-archs' table, by architecture; skipped architectures have none."""
    found: dict[str, list[ArchitectureRow]] = {}
    for line in _COLOUR.sub("", output).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 6 or "(" not in cells[4]:
            continue
        status, _, error = cells[4].partition("(")
        status, error = ("FAIL", error.rpartition("(")[2]) if "toggle" in error else (status, error)
        row = ArchitectureRow(float(error.split(")")[0]), status.strip(), cells[5], cells[2], cells[3])
        found.setdefault(cells[1], []).append(row)
    return found


def architectures(programs: harness.Programs, work: Path) -> list[str]:
    """Returns the architectures that test-llama-archs runs, in its order. Runs the program once and caches its answer."""
    key = depends_on(programs)
    kept = work / "architectures.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(kept.read_text())
        if known["key"] == key:
            return list(known["architectures"])
    done = run(programs, programs.environment(kernels=harness.odd_kernel(work / "no-kernels")), ".*")
    found = list(architecture_rows(done.stdout))
    if done.returncode or not found:
        raise RuntimeError(f"test-llama-archs ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    fileio.write_bytes(kept, json.dumps({"key": key, "architectures": found}).encode())
    return found


def chosen(parser: argparse.ArgumentParser, given: str | None, names: list[str]) -> list[str]:
    """Returns the architectures that `-a` names, of those that test-llama-archs runs; all if `-a` is not given."""
    if not given:
        return names
    if unknown := set(given.split(",")) - set(names):
        parser.error(f"test-llama-archs does not run {', '.join(sorted(unknown))}; it runs {', '.join(names)}")
    return [name for name in names if name in given.split(",")]


def run(
    programs: harness.Programs, environment: dict[str, str], pattern: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs test-llama-archs for the architectures that match."""
    options = ("-a", pattern, "-b", harness.DEVICE, "-s", "1", *arguments)
    return programs.run("test-llama-archs", *options, environment=environment, preload=True, timeout=TIMEOUT)


def depends_on(programs: harness.Programs) -> str:
    """Returns a digest of the programs and modules that a result depends on."""
    libraries = [
        file for file in sorted(programs.llama_cpp.iterdir()) if re.match(r"test-llama-archs|libllama", file.name)
    ]
    own = work_folder.digest_files([*libraries, programs.load_backends, Path(__file__)])
    return work_folder.digest(own, work_folder.programs_digest(programs), work_folder.kernelgen_digest())


# --- one architecture ------------------------------------------------------------------------------------------------------


class CachingBuilder(kernel_builder.KernelBuilder):
    """Builds kernels and keeps the emitted HLO: architectures share most of their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, bytes] = {}

    def emit(self, spec: KernelSpec | GraphSpec) -> bytes:
        if spec.id not in self._kept:
            self._kept[spec.id] = super().emit(spec)
        return self._kept[spec.id]


class ArchitectureRunner:
    """Runs architectures.

    Args:
        programs: the programs to run.
        work: the folder with the architectures' folders.
        threads: the number of threads that a program may use.
    """

    def __init__(self, programs: harness.Programs, work: Path, threads: int) -> None:
        self.programs, self.work, self.threads = programs, work, threads
        self.builder = CachingBuilder()
        self.depends = depends_on(programs)

    def do(self, name: str, progress: harness.Progress) -> ArchitectureResult:
        """Returns the outcome of an architecture, from an earlier run if nothing that it depends on has changed."""
        begun = time.monotonic()
        folder = self.work / name
        with work_folder.locked(folder):
            result = folder / "result.json"
            requested: dict[str, str | None] = {}
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                before = json.loads(result.read_text())
                requested = before["asked"]
                built, pack = self.builder.build(_buildable(requested), folder, progress)
                if before["key"] == work_folder.digest(self.depends, pack, built.refused, built.failed):
                    return ArchitectureResult.from_json(before["model"] | {"reused": True})
            for number in range(ROUNDS):
                built, pack = self.builder.build(_buildable(requested), folder, progress)
                progress("running, round", number + 1)
                # No recording, so a run without kernels requests the kernels for graphs without flash attention.
                kernels = folder / "kernels" if built.sizes else harness.odd_kernel(folder / "no-kernels")
                environment = self.programs.environment(kernels=kernels, log=2) | {
                    "GGML_SCHED_DEBUG": "2",
                    "NEURON_SIMULATOR_CACHE": str(self.work.parent / work_folder.COMPILED),
                    "NEURON_SIMULATOR_THREADS": str(self.threads),
                    "OMP_THREAD_LIMIT": str(self.threads),
                }
                done = run(self.programs, environment, f"^{re.escape(name)}$", "-v", "9")
                output = done.stderr + done.stdout
                new = {node: why for node, why in missing_nodes(output).items() if node not in requested}
                requested |= new
                if number and not _buildable(new):
                    break
                if not _buildable(new) and not _buildable(requested):
                    break
            model = self._judge(name, done, output, built, requested)
            if _buildable(new):
                model.failure = f"after {ROUNDS} rounds it still asks for something new; {model.failure}"
            model.seconds = round(time.monotonic() - begun, 1)
            key = work_folder.digest(self.depends, pack, built.refused, built.failed)
            fileio.write_bytes(result, json.dumps({"key": key, "asked": requested, "model": asdict(model)}).encode())
            return model

    @staticmethod
    def _judge(
        name: str,
        done: subprocess.CompletedProcess[str],
        output: str,
        built: kernel_builder.BuiltGroup,
        requested: dict[str, str | None],
    ) -> ArchitectureResult:
        ops, ran = dispatched(output), harness.ran(output)
        lacks: Counter[str] = Counter()
        for node, reason in requested.items():
            why = reason or built.refused.get(node)
            if why:
                lacks[f"{_op(node).upper()}: {harness.generalize(why)}"] += 1
        model = ArchitectureResult(
            rows=architecture_rows(done.stdout).get(name, []),
            device=dict(ops["device"]),
            cpu=dict(ops["cpu"]),
            ran=ran["device"].total(),
            kernels=len(built.sizes),
            needs=sorted({_op(node) for node in requested}),
            lacks=dict(lacks),
        )
        if built.failed:
            model.failure = f"kernels that should have been built: {dict(list(built.failed.items())[:3])}"
        elif done.returncode and all(row.ok for row in model.rows):
            model.failure = f"exit status {done.returncode}: {output[-1500:]}"
        elif ran["cpu"] and not lacks:
            model.failure = f"the backend ran ops on the CPU: {dict(ran['cpu'])}"
        elif not ran["device"]:
            model.failure = "nothing ran on the device"
        return model


def missing_nodes(output: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for line in output.splitlines():
        # The line may begin with the start of a table row.
        if (missing := cases.MISSING.search(line)) and missing["node"] not in found:
            found[missing["node"]] = missing["reason"]
    return found


def _buildable(requested: dict[str, str | None]) -> list[str]:
    return sorted(node for node, reason in requested.items() if reason is None)


def _op(node: str) -> str:
    match = re.match(r'\{op: "(\w+)"', node)
    return match[1] if match else node


# --- all of them -----------------------------------------------------------------------------------------------------------


def run_all(
    programs: harness.Programs,
    work: Path,
    names: Sequence[str],
    *,
    jobs: int | None = None,
    say: harness.Say = print,
) -> dict[str, ArchitectureResult]:
    """Runs architectures in parallel, and returns the outcome of each.

    Args:
        programs: the programs to run.
        work: the folder for kernels and results.
        names: the architectures.
        jobs: how many run at once; one per CPU by default.
        say: called with a line about each architecture.
    """
    return worker_pool.answers(
        Path(__file__), {"work": str(work)}, programs, names, jobs, ArchitectureResult.from_json, _line, say
    )


def _line(name: str, model: ArchitectureResult) -> str:
    worst = max((row.nmse for row in model.rows), default=float("nan"))
    device, cpu = sum(model.device.values()), sum(model.cpu.values())
    how = "unchanged" if model.reused else f"{model.seconds:.0f} s"
    return (
        f"{name}: {'passed' if model.passed else 'FAILED'}, {len(model.rows)} models, NMSE {worst:.1e}, "
        f"{device} of {device + cpu} graph ops on the device ({model.share:.1%}), {model.kernels} kernels, {how}"
        + (f"; {model.failure}" if model.failure else "")
    )


def report(models: dict[str, ArchitectureResult]) -> None:
    """Prints the ops that remain on the CPU, the reasons, and the totals."""
    left, why = Counter[str](), Counter[str]()
    for model in models.values():
        left.update(model.cpu)
        why.update(dict.fromkeys(model.lacks, 1))
    print("graph ops on the CPU, by op (names are cut after ten characters):")
    for op, count in left.most_common():
        owners = [name for name, model in models.items() if op in model.cpu]
        print(f"{count:7}  {op}  ({', '.join(owners[:6])}{', …' if len(owners) > 6 else ''})")
    print("no kernel, by reason, with the number of architectures:")
    for reason, count in why.most_common():
        print(f"{count:7}  {reason}")
    ran = {name: model for name, model in models.items() if model.rows}
    device = sum(sum(model.device.values()) for model in models.values())
    total = device + left.total()
    worst = max((row.nmse for model in ran.values() for row in model.rows), default=float("nan"))
    print(
        f"{len(ran)} of {len(models)} architectures ran ({sum(len(m.rows) for m in ran.values())} models), "
        f"{sum(m.passed for m in models.values())} passed; worst NMSE {worst:.1e}; "
        f"{device:,} of {total:,} graph ops on the device ({device / max(1, total):.1%})"
    )
    below = [f"{name} {model.share:.1%}" for name, model in models.items() if model.share < SHARE]
    print(f"below {SHARE:.0%}: {', '.join(below) or 'none'}")


def write_csv(path: Path, models: dict[str, ArchitectureResult]) -> None:
    """Writes one row per architecture."""
    with fileio.replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["architecture", "models", "passed", "nmse", "device_ops", "cpu_ops", "on_the_cpu"])
        for name, model in models.items():
            worst = max((row.nmse for row in model.rows), default=float("nan"))
            on_cpu = " ".join(f"{op}:{count}" for op, count in sorted(model.cpu.items()))
            device, cpu = sum(model.device.values()), sum(model.cpu.values())
            writer.writerow([name, len(model.rows), int(model.passed), f"{worst:.2e}", device, cpu, on_cpu])


def write_table(path: Path, models: dict[str, ArchitectureResult]) -> None:
    """Writes the architectures that need each op, in the format that `kernelgen list --ops` reads."""
    needs: dict[str, list[str]] = {}
    for name, model in models.items():
        for op in model.needs:
            needs.setdefault(op, []).append(name)
    lines = [f" {json.dumps(op)}: {json.dumps(sorted(needs[op]))}" for op in sorted(needs)]
    fileio.write_bytes(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _make(setup: dict[str, Any]) -> Any:
    own = ArchitectureRunner(harness.Programs.find(), Path(setup["work"]), setup["threads"])
    return lambda name, progress: asdict(own.do(name, progress))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-a", dest="names", metavar="NAMES", help="architectures; all by default")
    parser.add_argument("--work", type=Path, help="the folder that keeps kernels and results between runs")
    parser.add_argument("-j", "--jobs", type=int, help="architectures at once; one per CPU by default")
    parser.add_argument("--write-table", type=Path, metavar="FILE", help="write the ops that each architecture needs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker_pool.serve(_make)
        return 0
    programs = harness.Programs.find()
    work = (args.work or backend_ops.default_work().with_name("models")).absolute()
    names = chosen(parser, args.names, architectures(programs, work))
    models = run_all(programs, work, names, jobs=args.jobs, say=backend_ops.say)
    report(models)
    write_csv(work / "models.csv", models)
    if args.write_table:
        write_table(args.write_table, models)
    print(work / "models.csv")
    return 0 if all(model.passed and model.share >= SHARE for model in models.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
