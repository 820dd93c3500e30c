"""The order of a build: emits every kernel, then compiles changed ones, as many in parallel as the CPUs and memory allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kernelgen import cache
from kernelgen.build import determinism
from kernelgen.build.determinism import DeterminismResult
from kernelgen.build.folder import BuildSettings, is_whole, neff_file
from kernelgen.build.pool import Answer, Pool
from kernelgen.build.up_to_date import HloFiles, emit_arguments
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.library import Library
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.hlo.compare import first_difference
from kernelgen.neff import provenance
from kernelgen.plan import Kernel, Neff, Plan

TIMEOUT_GRACE = 30.0
"""Seconds beyond a step's time limit before its worker is killed; normally the compiler's driver stops the step first."""


@dataclass(frozen=True, slots=True)
class BuildStep:
    """The outcome of one compile and the emit before it, for reports to the user.

    Attributes:
        neff: the kernel and its settings.
        failure: the reason why there is no NEFF, or None.
        fresh: whether this build compiled it.
        cached: whether this build took it from a cache.
        shared: whether it is the NEFF of a kernel before it in this build, which has the same HLO and settings.
        seconds: duration of the compile.
    """

    neff: Neff
    failure: str | None = None
    fresh: bool = False
    seconds: float = 0.0
    cached: bool = False
    shared: bool = False


class Reporter(Protocol):
    """Receives the events of a build while it runs."""

    def step(self, step: BuildStep) -> None:
        """A kernel is done for one target: built, or failed."""

    def warn(self, text: str) -> None:
        """Reports a problem that fails no kernel."""


@dataclass(slots=True)
class BuildResult:
    """The results of a build.

    Attributes:
        hlos: path of each kernel's HLO, by kernel id.
        neffs: path of each NEFF, by `Neff.id`.
        steps: the outcome of each, in the order in which they ended.
        emitted: number of kernels that this build emitted.
    """

    hlos: dict[str, Path] = field(default_factory=dict)
    neffs: dict[str, Path] = field(default_factory=dict)
    steps: list[BuildStep] = field(default_factory=list)
    emitted: int = 0


def run(
    plan: Plan,
    libraries: Sequence[Library],
    settings: BuildSettings,
    reporter: Reporter,
    checked: DeterminismResult | None = None,
) -> BuildResult:
    """Emits and compiles everything in a plan; a failed kernel does not stop the others.

    Call it inside `locked`.

    Args:
        plan: the plan.
        libraries: every kernel library that the plan names.
        settings: settings of the build.
        reporter: receives the events.
        checked: result of emitting the kernels twice (`check_determinism`); a kernel whose HLO differs from it fails.
    """
    scratch = settings.state / "tmp"
    for folder in (settings.state / "hlo", settings.state / "neff", scratch):
        folder.mkdir(parents=True, exist_ok=True)
    with Pool(settings.jobs, settings.state / "logs", {"TMPDIR": str(scratch.resolve())}) as pool:
        return Executor(plan, libraries, settings, reporter, pool, checked or DeterminismResult({}, {})).run()


def check_determinism(plan: Plan, libraries: Sequence[Library], settings: BuildSettings) -> DeterminismResult:
    """Emits every kernel twice, in different processes, and compares. Call it inside `locked`."""
    scratch = settings.state / "tmp" / "determinism"
    return determinism.check(plan.kernels, libraries, scratch, settings.jobs)


@dataclass(frozen=True, slots=True)
class _Emit:
    kernel: Kernel
    inputs: str | None


@dataclass(frozen=True, slots=True)
class _Compile:
    neff: Neff
    path: Path


class _Capacity:
    """Memory and CPUs of the machine that running compiles occupy."""

    def __init__(self, settings: BuildSettings) -> None:
        self._settings = settings
        self._memory_mb = 0
        self._cpus = 0

    def take(self, neff: Neff, alone: bool) -> bool:
        """Reserves a compile's resources; returns whether they were free. A compile that exceeds the machine may run alone."""
        memory_mb, cpus = neff.needs(self._settings.compiler)
        fits = self._memory_mb + memory_mb <= self._settings.memory_mb and self._cpus + cpus <= self._settings.jobs
        if not fits and not alone:
            return False
        self._memory_mb += memory_mb
        self._cpus += cpus
        return True

    def give_back(self, neff: Neff) -> None:
        memory_mb, cpus = neff.needs(self._settings.compiler)
        self._memory_mb -= memory_mb
        self._cpus -= cpus


class _Warnings:
    """Reports each warning once: lint gives the same warning for a kernel under several settings."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._told: set[str] = set()

    def tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._reporter.warn(line)


class Executor:
    """Runs a plan's steps in a pool of workers: emits each kernel, then compiles it, in the order that capacity allows.

    Args:
        plan: the plan.
        libraries: every kernel library that the plan names.
        settings: settings of the build.
        reporter: receives the events.
        pool: the workers.
        checked: see `run`.
    """

    def __init__(
        self,
        plan: Plan,
        libraries: Sequence[Library],
        settings: BuildSettings,
        reporter: Reporter,
        pool: Pool,
        checked: DeterminismResult,
    ) -> None:
        self.checked = checked
        self.settings = settings
        self.reporter = reporter
        self.pool = pool
        self.result = BuildResult()
        self.configs: Mapping[str, CompileConfig] = {config.key: config for config in plan.configs}
        self.neffs_of: dict[str, list[Neff]] = {kernel.id: [] for kernel in plan.kernels}
        for neff in plan.neffs:
            self.neffs_of[neff.kernel].append(neff)
        self.emits = deque(plan.kernels)
        self.made = HloFiles(settings.state / "hlo", libraries)
        self.compiles: deque[_Compile] = deque()
        self.waiting: dict[Path, list[Neff]] = {}  # by the NEFF's file: other compiles that need the NEFF in progress
        self.ended: dict[Path, str | None] = {}  # the reason why a NEFF was not made, or None for one that was
        self.capacity = _Capacity(settings)
        self.warnings = _Warnings(reporter)

    def run(self) -> BuildResult:
        while True:
            # Start every step that can start before waiting for any.
            while self.pool.idle and self._start_one():
                pass
            answers = self.pool.wait()
            if not answers:
                return self.result
            for answer in answers:
                if isinstance(answer.task, _Emit):
                    self._emitted(answer.task, answer)
                else:
                    self._compiled(answer.task, answer)

    def _start_one(self) -> bool:
        """Starts a compile for which memory is free, else an emit; returns False if nothing can start now."""
        # Compiles go before emits, since they take longest. The first that fits starts, so that a large one does not block small
        # ones; one that never fits starts when nothing else runs.
        for compile_ in self.compiles:
            if self.capacity.take(compile_.neff, alone=self.pool.idle == self.settings.jobs):
                self.compiles.remove(compile_)
                # The compile may first have to wait for another build that compiles the same.
                limit = self._limit(1 if self.settings.cache == cache.OFF else 2)
                self.pool.start(compile_, self._compile_arguments(compile_), limit)
                return True
        if self.emits:
            kernel = self.emits.popleft()
            if kernel.id in self.checked.differences:
                self._not_emitted(kernel, str(self.checked.differences[kernel.id]))
                return True
            emit = _Emit(kernel, self.made.inputs(kernel))
            if self.made.is_current(kernel, emit.inputs):
                self._ready(kernel, linted=True)
            else:
                # If this emit is killed, an earlier HLO must not pass for its result.
                self.made.forget(kernel)
                self.pool.start(emit, self._emit_arguments(kernel), self._limit())
            return True
        return False

    def _limit(self, steps: int = 1) -> float | None:
        return None if self.settings.timeout is None else steps * self.settings.timeout + TIMEOUT_GRACE

    def _emit_arguments(self, kernel: Kernel) -> list[str]:
        return [
            *emit_arguments(kernel, self.made.libraries, self.made.hlo(kernel).absolute()),
            *([f"--notes={self.made.notes(kernel).absolute()}"] if kernel.noted else []),
        ]

    def _compile_arguments(self, compile_: _Compile) -> list[str]:
        s = self.settings
        arguments = [
            "compile",
            f"--compiler={s.compiler}",
            *(f"--flag={word}" for word in self.configs[compile_.neff.config].flags()),
            f"--kernel={compile_.neff.kernel}",
            f"--hlo={self.result.hlos[compile_.neff.kernel].absolute()}",
            f"--output={compile_.path.absolute()}",
            f"--log-dir={(s.state / 'logs').absolute()}",
            f"--log={provenance.log_beside(compile_.path).absolute()}",
            f"--origin={provenance.beside(compile_.path).absolute()}",
            *s.cache.arguments(),
            f"--shared-cache-failure={(s.state / 'tmp' / 'shared-cache-failure').absolute()}",
        ]
        if s.executable:
            arguments += [f"--executable={s.executable}", f"--identity={s.identity}"]
            arguments += [f"--memory-mb={compile_.neff.memory_mb}"]
        if s.timeout is not None:
            arguments.append(f"--timeout={s.timeout}")
        return arguments

    def _emitted(self, emit: _Emit, answer: Answer) -> None:
        kernel = emit.kernel
        if answer.exit_code:
            self._not_emitted(kernel, answer.output or f"emit failed with exit status {answer.exit_code}")
            return
        if not self.made.hlo(kernel).is_file():
            self._not_emitted(kernel, f"error: emit left no {self.made.hlo(kernel)}\n{answer.output}".rstrip())
            return
        self.result.emitted += 1
        # A user may edit an emitter while it runs: then this HLO may come from either version.
        if emit.inputs is not None and self.made.inputs(kernel) == emit.inputs:
            self.made.note(kernel, emit.inputs)
        self._ready(kernel, linted=False)

    def _not_emitted(self, kernel: Kernel, failure: str) -> None:
        for neff in self.neffs_of[kernel.id]:
            self._report(BuildStep(neff, failure))

    def _ready(self, kernel: Kernel, linted: bool) -> None:
        """Starts the compiles of a kernel whose HLO exists.

        Args:
            kernel: the kernel.
            linted: whether this version of kernelgen already checked the HLO. Compile steps check it, too.
        """
        path = self.made.hlo(kernel)
        hlo = path.read_bytes()
        other = self.checked.hlos.get(kernel.id)
        if other is not None and hlo != other.read_bytes():
            # The emitter depends on something that kernelgen does not track.
            self.made.forget(kernel)
            message = f"kernel {kernel.id}: emitting it again gives another HLO than there is"
            message += f": {first_difference(hlo, other.read_bytes())}"
            where = determinism.place(kernel, self.made.libraries)
            self._not_emitted(kernel, str(Diagnostic(message, where, determinism.HINT)))
            return
        self.result.hlos[kernel.id] = path
        for neff in self.neffs_of[kernel.id]:
            target = neff_file(self.settings, hlo, self.configs[neff.config])
            # Kernels with different names may share an HLO, and so a NEFF: one compile serves all of them.
            if target in self.waiting:
                self.waiting[target].append(neff)
            elif target in self.ended:
                self._report(BuildStep(neff, self.ended[target], shared=True), target)
            elif is_whole(target):
                refusal = None if linted else self._refusal(hlo, self.configs[neff.config], neff.kernel)
                self._report(BuildStep(neff, refusal), target)
            else:
                self.waiting[target] = []
                self.compiles.append(_Compile(neff, target))

    def _compiled(self, compile_: _Compile, answer: Answer) -> None:
        self.capacity.give_back(compile_.neff)
        others = self.waiting.pop(compile_.path)
        failure = None
        if answer.exit_code:
            failure = answer.output or f"compile failed with exit status {answer.exit_code}"
        elif not compile_.path.is_file():
            failure = f"error: the compile left no {compile_.path}\n{answer.output}".rstrip()
        self.ended[compile_.path] = failure
        origin = provenance.read(provenance.beside(compile_.path))
        cached = failure is None and origin is not None and origin.source != cache.COMPILED
        if failure is None:
            for line in answer.output.splitlines():
                if line.startswith("warning: "):
                    self.warnings.tell(line)
        fresh = failure is None and not cached
        self._report(BuildStep(compile_.neff, failure, fresh, answer.seconds, cached), compile_.path)
        for neff in others:
            self._report(BuildStep(neff, failure, shared=True), compile_.path)

    def _refusal(self, hlo: bytes, config: CompileConfig, kernel: str) -> str | None:
        """Returns the lint's error for a kernel whose NEFF exists, or None; reports warnings."""
        # A lazy import: most builds lint nothing in this process.
        from kernelgen.compilers.base import refuse_unsupported

        try:
            for text in refuse_unsupported(hlo, config, kernel):
                self.warnings.tell(f"warning: {text}")
        except KernelgenError as error:
            return str(error)
        return None

    def _report(self, step: BuildStep, path: Path | None = None) -> None:
        self.result.steps.append(step)
        if path is not None and step.failure is None:
            self.result.neffs[step.neff.id] = path
        self.reporter.step(step)
