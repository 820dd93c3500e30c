"""llama.cpp's programs on a simulated NeuronCore: record what they ask for, build it, run them again.

Used by the tests of this folder and by `backend_ops.py`. Programs, the plug-in and the simulator are found beside this file, where
Bazel puts them; LLAMA_CPP_PROGRAMS, GGML_NEURON_PLUGIN and GGML_NEURON_LIBNRT name others.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import kernelgen
from kernelgen import bundle as bundles
from kernelgen import compilers, manifest
from kernelgen.building import job
from kernelgen.errors import KernelgenError
from kernelgen.library import builtin_library
from kernelgen.plan import Plan, Request

ROOT = Path(__file__).parents[2]
DEVICE = "NEURON0"
TARGET = "trn1"

Say = Callable[[str], None]


# --- programs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Programs:
    """What was built from C and C++.

    Attributes:
        llama_cpp: the folder with llama.cpp's programs and libraries.
        plugin: the dynamically loaded backend.
        libnrt: the simulator.
        load_backends: the library that, preloaded, makes a program load backends that would not by itself.
    """

    llama_cpp: Path
    plugin: Path
    libnrt: Path
    load_backends: Path

    @staticmethod
    def find() -> Programs:
        """Returns the programs that Bazel built or that the environment names.

        Raises:
            FileNotFoundError: one is not there.
        """
        here = Path(__file__).parent
        found = Programs(
            llama_cpp=Path(os.environ.get("LLAMA_CPP_PROGRAMS", here / "llama_cpp")).absolute(),
            plugin=Path(
                os.environ.get("GGML_NEURON_PLUGIN", ROOT / "backend/ggml-neuron/plugin/libggml-neuron.so")
            ).absolute(),
            libnrt=Path(os.environ.get("GGML_NEURON_LIBNRT", ROOT / "backend/simulator/libnrt.so.1")).absolute(),
            load_backends=Path(os.environ.get("LLAMA_LOAD_BACKENDS", here / "libload_backends.so")).absolute(),
        )
        for path in (found.llama_cpp / "test-backend-ops", found.plugin, found.libnrt, found.load_backends):
            if not path.exists():
                raise FileNotFoundError(f"{path} is not there; run this through Bazel")
        return found

    def environment(
        self, *, kernels: Path | None = None, record: Path | None = None, buffers: str | None = None, log: bool = False
    ) -> dict[str, str]:
        """Returns the environment in which a program has the device.

        Args:
            kernels: a folder with packs; none by default.
            record: where the ops that have no kernel are written as a manifest.
            buffers: `device` or `host`: where tensors live; chosen by the backend by default.
            log: whether the backend prints what it does to stderr.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "NEURON_"))}
        environment |= {
            "GGML_BACKEND_PATH": str(self.plugin),
            "GGML_NEURON_LIBNRT": str(self.libnrt),
            "NEURON_SIMULATOR_PYTHON": sys.executable,
            "NEURON_SIMULATOR_PATH": str(Path(kernelgen.__file__).parents[1]),
            "NEURON_RT_NUM_CORES": "1",
        }
        if kernels:
            environment["GGML_NEURON_KERNEL_DIR"] = str(kernels)
        if record:
            environment["GGML_NEURON_RECORD"] = str(record)
        if buffers:
            environment["GGML_NEURON_BUFFERS"] = buffers
        if log:
            environment["GGML_NEURON_LOG"] = "1"
        return environment

    def run(
        self,
        program: str,
        *arguments: object,
        environment: dict[str, str],
        preload: bool = False,
        timeout: float = 3600,
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of llama.cpp's programs and returns how it ended; stdout and stderr are kept apart.

        Args:
            program: its name.
            *arguments: its arguments.
            environment: see `environment`.
            preload: whether it must be made to load backends; test-llama-archs loads none by itself.
            timeout: seconds.
        """
        if preload:
            environment = {**environment, "LD_PRELOAD": str(self.load_backends)}
        return subprocess.run(
            [self.llama_cpp / program, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
        )


# --- record and build ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """What became of a recorded manifest.

    Attributes:
        kernels: how many kernels the pack has.
        compiled: how many of them were compiled now.
        refused: why an op has no kernel, with the number of ops: no emitter, or an emitter that does not take these types.
        failed: what went wrong in a kernel that should have been built, by kernel.
        seconds: how long it took.
    """

    kernels: int
    compiled: int
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class _Reporter:
    def __init__(self, total: int, say: Say) -> None:
        self.total, self.say, self.done, self.last = total, say, 0, time.monotonic()

    def step(self, step: job.Step) -> None:
        self.done += 1
        if time.monotonic() - self.last > 15:
            self.last = time.monotonic()
            self.say(f"  {self.done} of {self.total} kernels")


def build(recorded: Path, output: Path, *, jobs: int | None = None, say: Say = print) -> Built:
    """Builds what can be built of a recorded manifest into a pack in `output`; what is there from an earlier build is kept.

    A recorded manifest names every op that was asked for, also those that no emitter knows. Those are left out here.

    Args:
        recorded: the manifest.
        output: the folder for the pack, and for what is between.
        jobs: workers; one per CPU by default.
        say: is told how far it is.
    """
    output.mkdir(parents=True, exist_ok=True)
    refused: dict[str, int] = {}
    chosen = output / "chosen.yaml"
    _choose(recorded, chosen, refused)
    (request,) = manifest.load([chosen], libraries=(builtin_library(),))
    built = build_request(request, output, jobs=jobs, say=say)
    for reason, count in built.refused.items():
        refused[reason] = refused.get(reason, 0) + count
    return replace(built, refused=refused)


def build_request(request: Request, output: Path, *, jobs: int | None = None, say: Say = print) -> Built:
    """Builds the kernels of a request that their emitters take into a pack for `TARGET`; the arguments are `build`'s."""
    begun = time.monotonic()
    libraries = (builtin_library(),)
    request = replace(request, configs=tuple(c for c in request.configs if c.target == TARGET))
    plan = Plan.merge([request])
    compiler = compilers.resolve("simulator")
    settings = job.Settings(
        output=output,
        compiler=compiler.name,
        identity=compiler.identity,
        executable=None,
        jobs=jobs or len(os.sched_getaffinity(0)),
        memory_mb=job.machine_memory_mb(),
    )
    refused: dict[str, int] = {}
    failed: dict[str, str] = {}
    with job.locked(settings):
        result = job.run(plan, libraries, settings, _Reporter(len(plan.neffs), say))
        for step in result.steps:
            if step.failure is None:
                continue
            if step.neff.kernel in result.hlos or not _is_refusal(step.failure):
                failed[step.neff.kernel] = step.failure
            else:
                reason = _generalize(step.neff.kernel.partition("-")[0] + ": " + step.failure)
                refused[reason] = refused.get(reason, 0) + 1
        (whole,) = plan.bundles
        neffs = {kernel: result.neffs.get(f"{kernel}.{whole.config}") for kernel in whole.kernels}
        there = {kernel: path for kernel, path in neffs.items() if path is not None}
        bundles.build(
            replace(whole, kernels=tuple(sorted(there))),
            {k.spec.id: k.spec for k in plan.kernels if k.spec.id in there},
            {kernel: path for kernel, path in result.hlos.items() if kernel in there},
            there,
            plan.configs[0],
            compiler=settings.identity,
            jax_version=importlib.metadata.version("jax"),
            tree_path=None,
            pack_path=output / bundles.pack_name(whole.id),
            embed_folder=None,
        )
    compiled = sum(step.fresh for step in result.steps)
    return Built(len(there), compiled, refused, failed, time.monotonic() - begun)


def build_what_runs(
    programs: Programs, run: Callable[[dict[str, str]], object], folder: Path, *, rounds: int = 4, say: Say = print
) -> tuple[Path, Built]:
    """Runs something with a record and builds what it asked for, until a run asks for nothing new.

    One round is not enough: what llama.cpp asks for depends on what it finds. It uses flash attention when there is a kernel for it,
    and only then asks for the other shapes that it needs.

    Args:
        programs: what runs.
        run: runs it, given an environment.
        folder: where record and kernels are put.
        rounds: how many rounds there may be.
        say: is told how far it is.

    Returns:
        The folder with the pack, and what was built in the last round.

    Raises:
        RuntimeError: the last round asked for something new still.
    """
    recorded, kernels = folder / "recorded.yaml", folder / "kernels"
    kernels.mkdir(parents=True)
    known: frozenset[str] = frozenset()
    built = Built(0, 0)
    for _ in range(rounds):
        run(programs.environment(kernels=kernels, record=recorded))
        asked = frozenset(
            _entry(line) for line in recorded.read_text().splitlines() if line.lstrip("# ").startswith("- ")
        )
        if asked == known:
            return kernels, built
        built = build(recorded, kernels, say=say)
        known = asked
    raise RuntimeError(f"after {rounds} rounds {recorded} still changes")


def _entry(line: str) -> str:
    """Returns a line of a recorded manifest without its count."""
    return line.rpartition("  # ")[0] or line


def _is_refusal(failure: str) -> bool:
    """Whether an emitter, or the lint after it, said what it does not take; anything else is a bug."""
    return "Traceback" not in failure and "error: " in failure


def _generalize(reason: str) -> str:
    """Returns a reason without the parts that differ between kernels, so that equal reasons count as one."""
    line = next((line for line in reason.splitlines() if line.strip()), reason)
    line = re.sub(r"^(\w+: )?.*?error: ", r"\1", line)
    line = re.sub(r"kernel [a-z_0-9]+-[0-9x]+-\w+-[0-9a-f]{12}: ", "", line)
    return re.sub(r"(?<!\w)\d+(?:\.\d+)?(?!\w)", "n", line)[:160]


def _choose(recorded: Path, chosen: Path, refused: dict[str, int]) -> None:
    """Writes the manifest with those entries that are valid, and counts the others by what is wrong with them."""
    libraries = (builtin_library(),)
    text = recorded.read_text()
    for _ in range(2):
        chosen.write_text(text)
        try:
            manifest.load([chosen], libraries=libraries)
        except KernelgenError as error:
            lines = text.splitlines(keepends=True)
            starts = [number for number, line in enumerate(lines) if re.match(r"\s*- ", line)]
            dropped: set[int] = set()
            for diagnostic in error.diagnostics:
                if diagnostic.location is None or diagnostic.location.line <= (starts[0] if starts else 0):
                    raise
                entry = max(start for start in starts if start < diagnostic.location.line)
                if entry not in dropped:
                    dropped.add(entry)
                    reason = _generalize(diagnostic.message)
                    refused[reason] = refused.get(reason, 0) + 1
            keep = True
            kept = []
            for number, line in enumerate(lines):
                if number in starts:
                    keep = number not in dropped
                elif not line.startswith((" ", "-")):
                    keep = True
                if keep:
                    kept.append(line)
            text = "".join(kept)
        else:
            return
    raise RuntimeError(f"{recorded}: entries could not be told apart")


# --- test-backend-ops ------------------------------------------------------------------------------------------------------

# A row of its CSV; what a failed comparison has to say stands before it on the same line.
_ROW = re.compile(r'^(?P<note>[^"]*)(?P<row>"[^"]*",".*)$')


@dataclass
class Count:
    """Cases of one op: how many there are, and what became of them.

    Attributes:
        cases: in the mode `support`.
        supported: by the device, in the mode `support`.
        uncompared: of these, what the mode `test` leaves out because the CPU can't compute it.
        passed: in the mode `test`, which also has some cases of several nodes that `support` has not.
        failed: likewise.
    """

    cases: int = 0
    supported: int = 0
    uncompared: int = 0
    passed: int = 0
    failed: int = 0

    def __iadd__(self, other: Count) -> Count:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self


@dataclass
class Outcome:
    """What test-backend-ops found.

    Attributes:
        counts: by op.
        passed: each passed case.
        failures: each failed case and why.
        ran: how many nodes ran on the device. A case without elements passes and runs none.
    """

    counts: dict[str, Count] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    ran: int = 0

    @property
    def ok(self) -> bool:
        """Whether something ran and nothing failed."""
        return bool(self.passed) and not self.failures

    def add(self, other: Outcome) -> None:
        """Takes in another's cases."""
        self.passed += other.passed
        self.failures += other.failures
        self.ran += other.ran
        for op, count in other.counts.items():
            self.counts[op] = self.counts.get(op, Count())
            self.counts[op] += count

    def table(self) -> list[str]:
        """Returns the counts as lines of text."""
        total = Count()
        for count in self.counts.values():
            total += count
        lines = [f"{'op':<20}{'cases':>8}{'supported':>11}{'uncompared':>12}{'passed':>8}{'failed':>8}"]
        for op, c in [*sorted(self.counts.items()), ("all", total)]:
            lines.append(f"{op:<20}{c.cases:>8}{c.supported:>11}{c.uncompared:>12}{c.passed:>8}{c.failed:>8}")
        return [*lines, f"{self.ran} nodes ran on the device"]


def emitted_ops() -> list[str]:
    """Returns the ops that have an emitter, named as test-backend-ops names them."""
    return sorted(op.upper() for op in builtin_library().scan())


def rows(output: str) -> list[dict[str, str]]:
    """Returns the rows of CSV in the program's output; `note` is what stood before one on its line."""
    found: list[dict[str, str]] = []
    header: list[str] | None = None
    for line in output.splitlines():
        match = _ROW.match(line)
        if not match:
            continue
        values = next(csv.reader([match["row"]]))
        if header is None:
            header = values
        elif len(values) == len(header):
            found.append({**dict(zip(header, values, strict=True)), "note": match["note"].strip()})
    return found


def run_ops(
    programs: Programs, mode: str, cases: Sequence[str], environment: dict[str, str], params: str | None = None
) -> tuple[list[dict[str, str]], subprocess.CompletedProcess[str]]:
    """Runs test-backend-ops in `mode` for ops or whole cases, and returns its rows and how it ended.

    Raises:
        RuntimeError: the device was not there, or no such case; the program itself reports success then.
    """
    arguments = [mode, "-b", DEVICE, "-o", ",".join(cases), "--output", "csv"]
    if params:
        arguments += ["-p", params]
    done = programs.run("test-backend-ops", *arguments, environment=environment)
    found = rows(done.stdout)
    if not any(DEVICE in row["backend_name"] for row in found):
        tail = (done.stdout[-2000:] + done.stderr[-4000:]).strip()
        raise RuntimeError(f"test-backend-ops had no device {DEVICE}, or no case of {','.join(cases)[:200]}:\n{tail}")
    return found, done


def record_ops(programs: Programs, cases: Sequence[str], record: Path, params: str | None = None) -> None:
    """Writes what test-backend-ops asks the device for into a manifest; no kernel is there, so that nothing runs."""
    record.unlink(missing_ok=True)
    empty = record.parent / "no-kernels"
    empty.mkdir(parents=True, exist_ok=True)
    _, done = run_ops(programs, "test", cases, programs.environment(kernels=empty, record=record), params)
    if not record.exists():
        raise RuntimeError(f"nothing was recorded:\n{done.stderr[-4000:]}")


def test_ops(programs: Programs, cases: Sequence[str], kernels: Path, params: str | None = None) -> Outcome:
    """Asks for support and runs what is supported."""
    environment = programs.environment(kernels=kernels, log=True)
    outcome = Outcome()
    supported, _ = run_ops(programs, "support", cases, environment, params)
    tested, done = run_ops(programs, "test", cases, environment, params)
    refused_by = {f"{row['op_name']}({row['op_params']})": row["backend_name"] for row in tested if not _yes(row)}
    for row in supported:
        count = outcome.counts.setdefault(row["op_name"], Count())
        count.cases += 1
        count.supported += _yes(row)
        count.uncompared += _yes(row) and refused_by.get(f"{row['op_name']}({row['op_params']})") == "CPU"
    for row in tested:
        if not _yes(row):
            continue
        count = outcome.counts.setdefault(row["op_name"], Count())
        case = f"{row['op_name']}({row['op_params']})"
        if row["error_message"]:
            count.failed += 1
            outcome.failures.append((case, row["note"] or row["error_message"]))
        else:
            count.passed += 1
            outcome.passed.append(case)
    nodes = ran(done.stderr)
    outcome.ran = nodes["device"].total()
    if fallen_back := nodes["cpu"]:
        outcome.failures.append(("the whole run", f"the backend ran ops on the CPU: {dict(fallen_back)}"))
    if done.returncode and not outcome.failures:
        tail = "\n".join((done.stdout[-1000:] + done.stderr[-3000:]).splitlines()[-30:])
        last = f"{tested[-1]['op_name']}({tested[-1]['op_params']})" if tested else "the first case"
        outcome.failures.append((f"after {last}", f"exit status {done.returncode}: {tail}"))
    return outcome


def _yes(row: dict[str, str]) -> bool:
    return row["supported"] == "1"


def ran(log: str) -> dict[str, Counter[str]]:
    """Returns how many nodes of each op ran on the device, and on the CPU in its stead, as the backend's log says at its end."""
    found: dict[str, Counter[str]] = {"device": Counter(), "cpu": Counter()}
    for total, where, ops in re.findall(r"(\d+) ops ran on (NeuronCores|the CPU)[^:\n]*(?::([^\n]*))?", log):
        counts = Counter({op: int(count) for count, op in re.findall(r"(\d+) (\w+)", ops)})
        assert counts.total() == int(total)
        found["device" if where == "NeuronCores" else "cpu"] += counts
    return found


def by_op(cases: Iterable[str]) -> dict[str, list[str]]:
    """Returns ops or whole cases grouped by op."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        groups.setdefault(case.partition("(")[0], []).append(case)
    return groups


def split_cases(text: str) -> list[str]:
    """Splits a comma-separated list of ops and whole cases, which have commas of their own between parentheses."""
    return [part for part in re.split(r",(?![^()]*\))", text) if part]
