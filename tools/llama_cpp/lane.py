"""Builds and runs groups of cases, one after another: `backend_ops.py` starts as many of these as there are CPUs.

A group has a folder: `kernels/` with its pack, `result.json`, and in it what both depend on. A pack is taken as it is when no entry,
emitter or part of kernelgen changed since, and a result when the pack, the programs, the simulator and the cases are the same: equal
digests, whatever the files' times say.

Kernels are not compiled when they are built, as `kernelgen build` does to find what XLA refuses: the run compiles the same HLO when
it loads them, and a kernel that does not load fails its case. The simulator keeps what it compiled, so that another run of the same
kernels with another plug-in need not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import cases
import harness

import kernelgen
from kernelgen import fileio, lowering
from kernelgen.bundle import build as bundles
from kernelgen.bundle.contents import pack_name
from kernelgen.compilers.base import refuse_unsupported
from kernelgen.compilers.settings import CompileConfig
from kernelgen.compilers.simulator import Simulator
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.dependencies import dependencies
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.errors import KernelgenError
from kernelgen.lowering import emission
from kernelgen.manifest import document, kernels, schema, settings
from kernelgen.neff import container
from kernelgen.plan import Bundle, Kernel
from kernelgen.spec.graph_kernel import GraphSpec
from kernelgen.spec.op_kernel import KernelSpec

FORMAT = 1
"""Raised when results of before are not what this would write."""

TIMEOUT = 3600.0
"""Seconds for the cases of a group."""

COMPILED = "xla"
"""The folder beside the work folder in which the simulator keeps what XLA compiled."""

MOST_CRASHES = 8
"""How often a group is begun again after a case that ended the program."""

# Parts of kernelgen that neither a kernel's bytes nor its execution depend on.
_APART = {"building", "cache", "cli", "render"}

_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy")

Progress = Callable[[str, int], None]


@dataclass
class Built:
    """What became of a group's nodes.

    Attributes:
        sizes: bytes of each kernel's HLO, by kernel.
        refused: why an entry has no kernel: an emitter, or the lint, does not take it.
        failed: what went wrong in a kernel that should have been built, by kernel.
        seconds: how long emitting took.
        reused: whether the pack is an earlier one.
        languages: how many kernels each language computes.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    reused: bool = False
    languages: dict[str, int] = field(default_factory=dict)


@dataclass
class Done:
    """What became of a group.

    Attributes:
        built: of its nodes.
        outcome: of its cases.
        seconds: how long both took.
        reused: whether the outcome is an earlier one.
    """

    built: Built
    outcome: cases.Outcome
    seconds: float
    reused: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Done:
        outcome = value["outcome"]
        results = [cases.Result(**result) for result in outcome["results"]]
        return Done(
            Built(**value["built"]),
            cases.Outcome(results, outcome["failures"], outcome["ran"]),
            value["seconds"],
            value["reused"],
        )


# --- what results depend on ------------------------------------------------------------------------------------------------


def digest(*parts: object) -> str:
    """Returns the SHA-256 of some values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def digest_files(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of some files' names and contents."""
    return digest(*[(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])


def kernelgen_digest() -> str:
    """Returns a digest of kernelgen, of what it imports, and of this folder's own modules."""
    package = Path(kernelgen.__file__).parent
    files = [
        file
        for file in sorted(package.rglob("*"))
        if file.suffix in (".py", ".json") and not _APART & set(file.relative_to(package).parts)
    ]
    files += [Path(module.__file__) for module in (cases, harness) if module.__file__] + [Path(__file__)]
    versions = [importlib.metadata.version(package) for package in _PACKAGES]
    return digest(FORMAT, digest_files(files), [str(f.relative_to(package)) for f in files[:-3]], versions, sys.version)


def programs_digest(programs: harness.Programs) -> str:
    """Returns a digest of the programs and of what they run on."""
    files = [file for file in sorted(programs.llama_cpp.iterdir()) if re.match(r"test-backend-ops|libggml", file.name)]
    environment = {k: v for k, v in os.environ.items() if re.match(r"(XLA|JAX|TF|PJRT|OMP)_", k)}
    return digest(digest_files([*files, programs.plugin, programs.libnrt]), environment, platform.machine(), _cpu())


def _cpu() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()


# --- build -----------------------------------------------------------------------------------------------------------------


class Builder:
    """Makes packs of what is asked for.

    Args:
        languages: which may compute the kernels, the first choice first; JAX without them.
    """

    def __init__(self, languages: Sequence[str] = ()) -> None:
        self.languages = tuple(languages)
        self.library = builtin_library()
        self.catalog = Catalog([self.library])
        self.source = kernelgen_digest()
        self.identity = Simulator().identity

    def key(self, entries: Sequence[str], found: dict[str, Kernel]) -> str:
        """Returns what a pack depends on: its target, its entries, kernelgen, and the emitters with what they import."""
        modules = sorted({kernel.emitter for kernel in found.values()})
        emitters = [digest_files(dependencies(self.library, module)) for module in modules]
        return digest(self.source, harness.target(), entries, modules, emitters)

    def read(self, entries: Sequence[str]) -> tuple[dict[str, Kernel], CompileConfig, dict[str, str]]:
        """Returns the kernels of entries, the settings to compile them with, and why some have none; entries are of a manifest."""
        head = ["format: 1", "name: group", f"targets: [{harness.target()}]"]
        head += [f"languages: [{', '.join(self.languages)}]"] if self.languages else []
        lines = [*head, "kernels:", *(f"  - {e}" for e in entries)]
        parsed = document.parse("\n".join([*lines, ""]).encode(), "group.yaml")
        if parsed.root is None:
            raise KernelgenError(parsed.problems)
        report = schema.check(parsed.root, parsed.broken)
        (config,) = settings.read(parsed.root, report).configs
        found: dict[str, Kernel] = {}
        listed = parsed.root.get("kernels")
        choice = kernels.Choice((harness.target(),), parsed.root.get("languages"))
        for entry, node in zip(entries, listed.value if listed else (), strict=True):
            made, _ = kernels.expand(node, self.catalog, report, choice=choice)
            if made:
                found[entry] = made[0]
        first = len(lines) - len(entries) + 1
        refused: dict[str, str] = {}
        for diagnostic in report.diagnostics:
            if diagnostic.location is None or diagnostic.location.line < first:
                raise KernelgenError([diagnostic])
            refused.setdefault(entries[diagnostic.location.line - first], diagnostic.message)
        return {entry: kernel for entry, kernel in found.items() if entry not in refused}, config, refused

    def emit(self, spec: KernelSpec | GraphSpec) -> bytes:
        """Returns a kernel's HLO.

        Raises:
            KernelgenError: its emitter does not take it.
        """
        if isinstance(spec, GraphSpec):
            return emission.emit(self.catalog.emitters(self.catalog.kernel(spec)), spec).hlo
        chosen = self.catalog.choose(spec, self.languages, harness.target())
        return lowering.emit(spec, load_function(*(chosen or self.catalog.find(spec.op))))

    def build(self, entries: Sequence[str], folder: Path, progress: Progress) -> tuple[Built, str]:
        """Makes the pack of `folder/kernels`, and returns what became of the entries and the pack's digest.

        There is no pack when no entry has a kernel.
        """
        begun = time.monotonic()
        pack = folder / "kernels" / pack_name(f"group_{harness.target()}")
        record = folder / "built.json"
        found, config, refused = self.read(entries) if entries else ({}, None, {})
        key = self.key(entries, found)
        with contextlib.suppress(OSError, ValueError, KeyError):
            before = json.loads(record.read_text())
            if before["key"] == key and before["pack"] == _sha256(pack):
                return Built(**before["built"] | {"reused": True}), before["pack"]
        for old in (record, folder / "result.json", folder / "kernels"):
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
        pack.parent.mkdir(parents=True)
        built = Built(refused=dict(refused))
        specs: dict[str, KernelSpec] = {}
        entries_of: dict[str, list[str]] = {}
        for entry, kernel in found.items():
            if kernel.spec.id not in specs:
                built.languages[kernel.language] = built.languages.get(kernel.language, 0) + 1
            specs[kernel.spec.id] = kernel.spec
            entries_of.setdefault(kernel.spec.id, []).append(entry)
        if specs:
            assert config
            for kernel_id, reason in self.pack(specs, config, pack, built, progress).items():
                built.refused.update(dict.fromkeys(entries_of[kernel_id], reason))
        built.seconds = round(time.monotonic() - begun, 2)
        sha256 = _sha256(pack)
        fileio.write_bytes(record, json.dumps({"key": key, "pack": sha256, "built": asdict(built)}).encode())
        return built, sha256

    def pack(
        self,
        specs: Mapping[str, KernelSpec | GraphSpec],
        config: CompileConfig,
        path: Path,
        built: Built,
        progress: Progress,
    ) -> dict[str, str]:
        """Emits kernels and writes their pack, unless there are none; returns why kernels are refused, by kernel.

        Args:
            specs: the kernels, by their names.
            config: the settings to compile them with.
            path: of the pack.
            built: gets the sizes, and what went wrong.
            progress: is told how many were emitted.
        """
        refused: dict[str, str] = {}
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            scratch = Path(folder)
            for number, (kernel_id, spec) in enumerate(specs.items()):
                progress("building", number)
                try:
                    module = self.emit(spec)
                    refuse_unsupported(module, config.target, kernel_id)
                except KernelgenError as error:
                    refused[kernel_id] = str(error)
                    continue
                except Exception:
                    built.failed[kernel_id] = traceback.format_exc()
                    continue
                built.sizes[kernel_id] = len(module)
                (scratch / f"{kernel_id}.hlo.pb").write_bytes(module)
                (scratch / f"{kernel_id}.neff").write_bytes(
                    container.write_simulated(module, config.flags(), self.identity)
                )
            if built.sizes:
                bundles.build(
                    Bundle("group", harness.target(), config.key, tuple(sorted(built.sizes))),
                    specs,
                    {kernel: scratch / f"{kernel}.hlo.pb" for kernel in built.sizes},
                    {kernel: scratch / f"{kernel}.neff" for kernel in built.sizes},
                    config,
                    compiler=self.identity,
                    jax_version=importlib.metadata.version("jax"),
                    pack_path=path,
                )
        return refused


def _sha256(path: Path) -> str:
    """Returns a file's digest; empty when there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


# --- run -------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a group's folder; waits while a lane of a run that was killed is still at it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Lane:
    """Builds and runs groups.

    Args:
        programs: what runs them.
        work: the folder with the groups' folders.
        threads: that a program may use.
        languages: which may compute the kernels, as of `Builder`.
    """

    def __init__(self, programs: harness.Programs, work: Path, threads: int, languages: Sequence[str] = ()) -> None:
        self.programs = programs
        self.work = work
        self.threads = threads
        self.builder = Builder(languages)
        self.depends = programs_digest(programs)

    def do(self, group: cases.Group, progress: Progress) -> Done:
        """Returns what became of a group, from an earlier run when nothing that it depends on has changed."""
        begun = time.monotonic()
        folder = self.work / group.name
        with locked(folder):
            entries = sorted({node for node, reason in group.nodes if reason is None})
            built, pack = self.builder.build(entries, folder, progress)
            key = digest(self.builder.source, self.depends, pack, built.refused, built.failed, group.to_json())
            result = folder / "result.json"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                before = json.loads(result.read_text())
                if before["key"] == key:
                    done = Done.from_json(before["done"])
                    done.reused = True
                    return done
            outcome = self.run(group, folder / "kernels", progress)
            self._explain(group, built, outcome)
            done = Done(built, outcome, round(time.monotonic() - begun, 1))
            fileio.write_bytes(result, json.dumps({"key": key, "done": done.to_json()}).encode())
            return done

    def run(self, group: cases.Group, kernels: Path, progress: Progress) -> cases.Outcome:
        """Runs the cases; after one that ends the program it goes on with the next."""
        if not list(kernels.glob("*.gguf")):
            kernels = harness.odd_kernel(self.work / "no-kernels")
        environment = self.programs.environment(kernels=kernels, log=True) | {
            "NEURON_SIMULATOR_CACHE": str(self.work.parent / COMPILED),
            "NEURON_SIMULATOR_THREADS": str(self.threads),
            "OMP_THREAD_LIMIT": str(self.threads),
        }
        outcome = cases.Outcome()
        waiting = dict(group.cases)
        for _ in range(MOST_CRASHES):
            done = group.size - sum(waiting.values())
            ended = cases.run(
                self.programs,
                "test",
                environment,
                chosen=list(waiting),
                timeout=TIMEOUT,
                each=lambda count, before=done: progress("running", before + count),  # type: ignore[misc]
            )
            for row in ended.rows:
                if not waiting.get(row.case):
                    continue  # the program has it more than once, and it was there before the end
                waiting[row.case] -= 1
                if not waiting[row.case]:
                    del waiting[row.case]
                note = (row.note or row.error) if row.supported else ""
                outcome.results.append(cases.Result(row.case, row.status, row.seconds, note))
            nodes = harness.ran(ended.log)
            outcome.ran += nodes["device"].total()
            if fallen_back := nodes["cpu"]:
                said = [line for line in ended.log.splitlines() if "nrt_" in line]
                outcome.failures.append(
                    f"{group.name}: the backend ran ops on the CPU: {dict(fallen_back)}; {'; '.join(said[:5])}"
                )
            if not waiting:
                if ended.status not in (0, 1):
                    outcome.failures.append(f"{group.name}: exit status {ended.status} at the end: {_tail(ended)}")
                elif ended.status == 1 and not outcome.of(cases.FAILED):
                    outcome.failures.append(f"{group.name}: exit status 1 with no failed case: {_tail(ended)}")
                return outcome
            # The program goes through the cases in its own order, which is the groups'.
            culprit = next(case for case in group.cases if case in waiting)
            how = "took too long" if ended.status is None else f"ended the program, exit status {ended.status}"
            for _ in range(waiting.pop(culprit)):
                outcome.results.append(cases.Result(culprit, cases.FAILED, 0.0, f"{how}: {_tail(ended)}"))
            if not waiting:
                return outcome
        for case, count in waiting.items():
            outcome.results += [
                cases.Result(case, cases.FAILED, 0.0, "not run: too many others ended the program")
            ] * count
        return outcome

    @staticmethod
    def _explain(group: cases.Group, built: Built, outcome: cases.Outcome) -> None:
        """Notes at each case without support which of its nodes has no kernel, and why."""
        for result in outcome.of(cases.UNSUPPORTED):
            reasons: dict[str, None] = {}
            for number in group.asks[result.case]:
                node, reason = group.nodes[number]
                op = re.match(r'\{op: "(\w+)"', node)
                reason = reason or built.refused.get(node)
                if reason:
                    reasons[f"{op[1].upper() if op else node}: {harness.generalize(reason)}"] = None
            result.note = "; ".join(reasons) or "a kernel was not built"


def _tail(ended: cases.Ended) -> str:
    return "\n".join(ended.log.splitlines()[-12:])[-2000:]


def serve(make: Callable[[dict[str, Any]], Callable[[Any, Progress], Any]]) -> None:
    """Answers requests, a line each, until standard input ends; the first line is for `make`, which returns what answers the others.

    Messages and answers go to standard output, JSON: `{"stage": …, "count": …}`, and then `{"done": …}` or `{"error": …}`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print goes to the log
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os.killpg(0, signal.SIGKILL)  # with the program that runs: no process is left to tell

    setup = json.loads(sys.stdin.readline())
    threading.Thread(target=read, daemon=True).start()
    do = make(setup)
    said = 0.0

    def progress(stage: str, count: int) -> None:
        nonlocal said
        if time.monotonic() - said > 0.5:
            said = time.monotonic()
            answer({"stage": stage, "count": count})

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    while True:
        try:
            answer({"done": do(json.loads(requests.get()), progress)})
        except Exception:
            answer({"error": traceback.format_exc()})


class Worker:
    """A process that serves.

    Args:
        script: what calls `serve`, given `--lane`.
        setup: the first line.
        programs: that it uses.
    """

    def __init__(self, script: Path, setup: dict[str, Any], programs: harness.Programs) -> None:
        environment = os.environ | {
            "LLAMA_CPP_PROGRAMS": str(programs.llama_cpp),
            "GGML_NEURON_PLUGIN": str(programs.plugin),
            "GGML_NEURON_LIBNRT": str(programs.libnrt),
            "LLAMA_LOAD_BACKENDS": str(programs.load_backends),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), "--lane"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._say(setup)

    def _say(self, value: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def do(self, request: object, progress: Progress) -> Any:
        """Returns the answer to a request.

        Raises:
            RuntimeError: there is none.
        """
        self._say(request)
        assert self.process.stdout
        for line in self.process.stdout:
            said = json.loads(line)
            if "done" in said:
                return said["done"]
            if "error" in said:
                raise RuntimeError(said["error"])
            progress(said["stage"], said["count"])
        raise RuntimeError(f"its process ended with status {self.process.wait()}")

    def stop(self) -> None:
        """Ends it with what it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Answer = TypeVar("Answer")


def answers(
    script: Path,
    setup: dict[str, Any],
    programs: harness.Programs,
    names: Sequence[str],
    jobs: int | None,
    read: Callable[[dict[str, Any]], Answer],
    line: Callable[[str, Answer], str],
    say: harness.Say,
) -> dict[str, Answer]:
    """Returns what `share_out` answers to each name, in their order, and says a line for each as it comes.

    Args:
        script: as of `share_out`, like the next two.
        setup: what the script's processes are told.
        programs: llama.cpp's, and the backend.
        names: the requests.
        jobs: processes; None for one per CPU.
        read: makes an answer of its JSON.
        line: describes it.
        say: is told the line.

    Raises:
        RuntimeError: a request has no answer.
    """
    found: dict[str, Answer] = {}

    def done(name: str, answer: dict[str, Any]) -> None:
        found[name] = read(answer)
        say(f"{len(found)}/{len(names)} {line(name, found[name])}")

    share_out(
        script,
        setup,
        programs,
        names,
        jobs or len(os.sched_getaffinity(0)),
        stage=lambda name, stage, count: None,
        done=done,
    )
    return {name: found[name] for name in names}


def share_out(
    script: Path,
    setup: dict[str, Any],
    programs: harness.Programs,
    requests: Sequence[Any],
    jobs: int,
    *,
    stage: Callable[[Any, str, int], None],
    done: Callable[[Any, Any], None],
) -> None:
    """Has requests answered by as many processes as there are jobs, in this order; whatever happens, no process is left.

    Args:
        script: see `Worker`.
        setup: likewise; `threads`, that each may use, is added.
        programs: likewise.
        requests: what `serve`'s callable is given.
        jobs: processes.
        stage: is told how far a request is.
        done: is given a request and its answer; never called by two threads at once.

    Raises:
        RuntimeError: a request has no answer.
    """
    setup = {**setup, "threads": max(1, len(os.sched_getaffinity(0)) // max(1, jobs))}
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def take(worker: Worker) -> None:
        try:
            while not errors:
                try:
                    request = waiting.get_nowait()
                except queue.Empty:
                    return
                answer = worker.do(request, lambda what, count, request=request: stage(request, what, count))
                with lock:
                    done(request, answer)
        except BaseException as error:
            errors.append(error)

    workers = [Worker(script, setup, programs) for _ in range(min(jobs, len(requests)))]
    threads = [threading.Thread(target=take, args=(worker,)) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.stop()
    if errors:
        raise errors[0]


def _ops(setup: dict[str, Any]) -> Callable[[Any, Progress], Any]:
    lane = Lane(harness.Programs.find(), Path(setup["work"]), setup["threads"], setup["languages"])
    return lambda request, progress: lane.do(cases.Group.from_json(request), progress).to_json()


if __name__ == "__main__":
    serve(_ops)
