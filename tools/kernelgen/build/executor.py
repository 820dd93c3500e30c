"""The order of a build: emit every kernel, compile what changed, as many at once as the machine has CPUs and memory for.

Everything between the manifests and the bundles lives in one folder, `<output>/.kernelgen`:

    hlo/<kernel>.hlo.pb     what was emitted last; <kernel>.inputs beside it says from what, so that it is not emitted again
    neff/<key>.neff         key: digest of the HLO's bytes, the compiler's identity and its flags, and of nothing else;
                            <key>.origin beside it has the digest of the NEFF (`kernelgen.neff.provenance`)
    logs/  tmp/             of the workers

So a NEFF that is there with its digest is up to date, whichever kernel, manifest or earlier build it was made for. What is not
there may be in a cache that other builds share (`kernelgen.cache`); a compile step looks there first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from kernelgen import cache
from kernelgen.build import determinism
from kernelgen.build.determinism import Checked
from kernelgen.build.estimates import Forecast, Record, forecast
from kernelgen.build.pool import Answer, Pool
from kernelgen.build.up_to_date import Emits, emit_arguments
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.library import Library
from kernelgen.emitters.limit import EMIT_TIMEOUT
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.hlo.compare import first_difference
from kernelgen.neff import provenance
from kernelgen.plan import Kernel, Neff, Plan
from kernelgen.spec.filenames import NEFF

STATE = ".kernelgen"
"""The folder in the output folder that holds what is between manifests and bundles."""

TIMEOUT_GRACE = 30.0
"""Seconds that a step may take beyond its time limit before its worker is killed: the compiler's driver stops it first."""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How to build.

    Attributes:
        output: the output folder.
        compiler: `neuronx-cc` or `simulator`, as resolved.
        identity: the compiler's identity.
        executable: the compiler's program, when it is one.
        jobs: workers.
        memory_mb: MiB that all compiles may need together.
        timeout: seconds one step may take, or None.
        emit_timeout: seconds emitting one kernel may take, or None.
        cache: the caches that builds share.
    """

    output: Path
    compiler: str
    identity: str
    executable: Path | None
    jobs: int
    memory_mb: int
    timeout: float | None = None
    emit_timeout: float | None = EMIT_TIMEOUT
    cache: cache.CacheSettings = cache.OFF

    @property
    def state(self) -> Path:
        return self.output / STATE


@dataclass(frozen=True, slots=True)
class Step:
    """One compile, with the emit before it, as a user sees it: how it went.

    Attributes:
        neff: which kernel, with which settings.
        failure: why there is no NEFF, or None.
        fresh: whether it was compiled now; else it was up to date, or shares its bytes with one that was.
        cached: whether it came from a cache now.
        seconds: how long the compile took.
    """

    neff: Neff
    failure: str | None = None
    fresh: bool = False
    seconds: float = 0.0
    cached: bool = False


class Reporter(Protocol):
    """Is told about a build while it runs."""

    def step(self, step: Step) -> None:
        """A kernel is done for one target, well or not."""

    def warn(self, text: str) -> None:
        """Something is not as it should be, and no kernel fails for it."""


@dataclass(slots=True)
class Result:
    """What a build did.

    Attributes:
        hlos: path of each kernel's HLO, by kernel id.
        neffs: path of each NEFF, by `Neff.id`.
        steps: how each went, in the order in which they ended.
        emitted: how many kernels were emitted now.
    """

    hlos: dict[str, Path] = field(default_factory=dict)
    neffs: dict[str, Path] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    emitted: int = 0


@contextlib.contextmanager
def locked(settings: BuildSettings) -> Iterator[None]:
    """Holds the output folder against other builds; leftovers of one that was killed are removed.

    Raises:
        KernelgenError: another build is at work there, or what should be kernelgen's own there is a link or no file.
        OSError: the folder can't be written.
    """
    # The whole of it may be a link: who put it there keeps it elsewhere.
    settings.state.mkdir(parents=True, exist_ok=True)
    for folder in (settings.state / name for name in ("hlo", "neff", "logs", "tmp")):
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise KernelgenError(f"{folder} is a link: kernelgen keeps its own files there; remove it")
    with _open_lock(settings.state / "lock") as lock:
        # The system drops the lock when its holder dies, so it can't go stale.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KernelgenError(f"{settings.output}: another build is at work there") from None
        _tidy(settings)
        try:
            yield
        finally:
            _tidy(settings)


def _open_lock(path: Path) -> IO[bytes]:
    """Opens a file of no content; a link is not followed, and a FIFO does not block."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise KernelgenError(f"{path} is a link: kernelgen locks a file of its own there; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise KernelgenError(f"{path} is not a file: kernelgen locks a file of its own there; remove it")
    return os.fdopen(file, "r+b")


def _tidy(settings: BuildSettings) -> None:
    shutil.rmtree(settings.state / "tmp", ignore_errors=True)
    for folder in ("hlo", "neff"):
        for leftover in (settings.state / folder).glob(".*.tmp"):
            leftover.unlink(missing_ok=True)


def run(
    plan: Plan,
    libraries: Sequence[Library],
    settings: BuildSettings,
    reporter: Reporter,
    checked: Checked | None = None,
) -> Result:
    """Emits and compiles everything in a plan; a kernel that fails does not stop the others.

    Call it inside `locked`.

    Args:
        plan: what to build.
        libraries: every kernel library that the plan names.
        settings: how to build.
        reporter: is told how it goes.
        checked: what emitting the kernels twice gave (`check_determinism`); a kernel whose HLO is another fails.
    """
    scratch = settings.state / "tmp"
    for folder in (settings.state / "hlo", settings.state / "neff", scratch):
        folder.mkdir(parents=True, exist_ok=True)
    with Pool(settings.jobs, settings.state / "logs", {"TMPDIR": str(scratch.resolve())}) as pool:
        return _Run(plan, libraries, settings, reporter, pool, checked or Checked({}, {})).run()


def check_determinism(plan: Plan, libraries: Sequence[Library], settings: BuildSettings) -> Checked:
    """Emits every kernel twice, in different processes, and compares. Call it inside `locked`."""
    scratch = settings.state / "tmp" / "determinism"
    return determinism.check(plan.kernels, libraries, scratch, settings.jobs, settings.emit_timeout)


@dataclass(frozen=True, slots=True)
class Preview:
    """What a build would do now.

    Attributes:
        emits: how many kernels it would emit.
        compiles: which NEFFs it would make at most: a kernel that is emitted may have the HLO that it had, and a cache may have its
            NEFF.
        lacking: those of `compiles` that this machine's cache does not have, as far as the HLO is known.
        forecast: how long compiling `lacking` may take.
        exact: whether all of `lacking` are certain to be compiled, if every kernel can be.
    """

    emits: int
    compiles: tuple[Neff, ...]
    lacking: tuple[Neff, ...]
    forecast: Forecast
    exact: bool


def preview(plan: Plan, libraries: Sequence[Library], settings: BuildSettings) -> Preview:
    """Returns what a build would do now. Nothing is emitted, and no shared cache is asked."""
    configs = {config.key: config for config in plan.configs}
    made = Emits(settings.state / "hlo", libraries)
    current = {
        kernel.id: made.hlo(kernel).read_bytes()
        for kernel in plan.kernels
        if made.is_current(kernel, made.inputs(kernel))
    }
    compiles, lacking = [], []
    folder = cache.Folder(settings.cache.folder) if settings.cache.folder else None
    for neff in plan.neffs:
        hlo = current.get(neff.kernel)
        if hlo is not None and _whole(_neff_file(settings, hlo, configs[neff.config])):
            continue
        compiles.append(neff)
        key = None if hlo is None else cache.Key.make(hlo, settings.identity, configs[neff.config].flags())
        if folder is None or key is None or not folder.path(key.name).is_file():
            lacking.append(neff)
    return Preview(
        len(plan.kernels) - len(current),
        tuple(compiles),
        tuple(lacking),
        forecast([neff.kernel for neff in lacking], _records(folder, settings.identity), _at_once(lacking, settings)),
        settings.cache.shared is None and all(neff.kernel in current for neff in lacking),
    )


def _records(folder: cache.Folder | None, identity: str) -> list[Record]:
    """Returns the compiles that a cache has a record of: of this version of the compiler, or where it has none, of all of it."""
    found: dict[str, list[Record]] = {}
    with contextlib.suppress(OSError):
        for stored in folder.entries() if folder else ():
            with contextlib.suppress(OSError, cache.Damaged):
                head = folder.head(stored.name) if folder else None
                if head is not None and head.seconds is not None:
                    found.setdefault(head.key.compiler, []).append(Record(head.kernel, head.seconds))
    name = identity.partition(" ")[0]
    others = [r for compiler, records in found.items() if compiler.partition(" ")[0] == name for r in records]
    return found.get(identity) or others


def _at_once(neffs: Sequence[Neff], settings: BuildSettings) -> int:
    """Returns how many compiles run at once, as `_Run` starts them."""
    needs = [neff.needs(settings.compiler) for neff in neffs]
    memory, cpus = (max((need[i] for need in needs), default=1) for i in (0, 1))
    return max(1, min(settings.memory_mb // memory, settings.jobs // cpus))


@dataclass(frozen=True, slots=True)
class _Emit:
    kernel: Kernel
    inputs: str | None


@dataclass(frozen=True, slots=True)
class _Compile:
    neff: Neff
    path: Path


class _Run:
    def __init__(
        self,
        plan: Plan,
        libraries: Sequence[Library],
        settings: BuildSettings,
        reporter: Reporter,
        pool: Pool,
        checked: Checked,
    ) -> None:
        self.checked = checked
        self.settings = settings
        self.reporter = reporter
        self.pool = pool
        self.result = Result()
        self.configs: Mapping[str, CompileConfig] = {config.key: config for config in plan.configs}
        self.neffs_of: dict[str, list[Neff]] = {kernel.id: [] for kernel in plan.kernels}
        for neff in plan.neffs:
            self.neffs_of[neff.kernel].append(neff)
        self.emits = deque(plan.kernels)
        self.made = Emits(settings.state / "hlo", libraries)
        self.compiles: deque[_Compile] = deque()
        self.waiting: dict[Path, list[Neff]] = {}  # by the NEFF's file: who else needs what is being compiled
        self.ended: dict[Path, str | None] = {}  # why a NEFF was not made, or None where it was
        self.warned: set[str] = set()
        self.memory = 0
        self.cpus = 0
        self.running = 0

    def run(self) -> Result:
        while True:
            while self.pool.idle and self._start_one():
                pass
            answers = self.pool.wait()
            if not answers:
                return self.result
            for answer in answers:
                self.running -= 1
                if isinstance(answer.task, _Emit):
                    self._emitted(answer.task, answer)
                else:
                    self._compiled(answer.task, answer)

    def _start_one(self) -> bool:
        """Starts a compile that there is memory for, else an emit; False when nothing can start now."""
        for compile_ in self.compiles:
            memory, cpus = compile_.neff.needs(self.settings.compiler)
            fits = self.memory + memory <= self.settings.memory_mb and self.cpus + cpus <= self.settings.jobs
            if fits or not self.running:  # what is too large for the machine runs alone
                self.compiles.remove(compile_)
                self.memory += memory
                self.cpus += cpus
                self.running += 1
                # It may first have to wait for another build that compiles the same.
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
                self.running += 1
                self.made.forget(kernel)
                limits = [s for s in (self._limit(), self.settings.emit_timeout) if s is not None]
                self.pool.start(emit, self._emit_arguments(kernel), min(limits, default=None))
            return True
        return False

    def _limit(self, steps: int = 1) -> float | None:
        return None if self.settings.timeout is None else steps * self.settings.timeout + TIMEOUT_GRACE

    def _emit_arguments(self, kernel: Kernel) -> list[str]:
        return [
            *emit_arguments(kernel, self.made.libraries, self.made.hlo(kernel).absolute()),
            f"--reads={self._reads(kernel).absolute()}",
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
            f"--origin={provenance.beside(compile_.path).absolute()}",
            *s.cache.arguments(),
            f"--notices={(s.state / 'tmp' / 'notices').absolute()}",
        ]
        if s.executable:
            arguments += [f"--executable={s.executable}", f"--identity={s.identity}"]
            arguments += [f"--memory-mb={compile_.neff.memory_mb}"]
        if s.timeout is not None:
            arguments.append(f"--timeout={s.timeout}")
        return arguments

    def _reads(self, kernel: Kernel) -> Path:
        return self.settings.state / "tmp" / f"{kernel.id}.reads"

    def _emitted(self, emit: _Emit, answer: Answer) -> None:
        kernel = emit.kernel
        if answer.exit_code:
            self._not_emitted(kernel, answer.output or f"emit failed with exit status {answer.exit_code}")
            return
        if not self.made.hlo(kernel).is_file():
            self._not_emitted(kernel, f"error: emit left no {self.made.hlo(kernel)}\n{answer.output}".rstrip())
            return
        self.result.emitted += 1
        # An emitter may be edited while it runs: this HLO may be of either.
        if emit.inputs is not None and self.made.inputs(kernel) == emit.inputs:
            self.made.note(kernel, emit.inputs, self._reads(kernel))
        self._ready(kernel, linted=False)

    def _not_emitted(self, kernel: Kernel, failure: str) -> None:
        for neff in self.neffs_of[kernel.id]:
            self._report(Step(neff, failure))

    def _ready(self, kernel: Kernel, linted: bool) -> None:
        """Goes on with the compiles of a kernel whose HLO is there.

        Args:
            kernel: the kernel.
            linted: whether this version of kernelgen has checked the HLO before. Compile steps check it, too.
        """
        path = self.made.hlo(kernel)
        hlo = path.read_bytes()
        other = self.checked.hlos.get(kernel.id)
        if other is not None and hlo != other.read_bytes():
            # Whatever the emitter depends on, it is not among what kernelgen looks at.
            self.made.forget(kernel)
            message = f"kernel {kernel.id}: emitting it again gives another HLO than there is"
            message += f": {first_difference(hlo, other.read_bytes())}"
            where = determinism.place(kernel, self.made.libraries)
            self._not_emitted(kernel, str(Diagnostic(message, where, determinism.HINT)))
            return
        self.result.hlos[kernel.id] = path
        for neff in self.neffs_of[kernel.id]:
            target = _neff_file(self.settings, hlo, self.configs[neff.config])
            if target in self.waiting:
                self.waiting[target].append(neff)
            elif target in self.ended:
                self._report(Step(neff, self.ended[target]), target)
            elif _whole(target):
                refusal = None if linted else self._refusal(hlo, self.configs[neff.config].target, neff.kernel)
                self._report(Step(neff, refusal), target)
            else:
                self.waiting[target] = []
                self.compiles.append(_Compile(neff, target))

    def _compiled(self, compile_: _Compile, answer: Answer) -> None:
        memory, cpus = compile_.neff.needs(self.settings.compiler)
        self.memory -= memory
        self.cpus -= cpus
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
                    self._warn(line)
        fresh = failure is None and not cached
        self._report(Step(compile_.neff, failure, fresh, answer.seconds, cached), compile_.path)
        for neff in others:
            self._report(Step(neff, failure), compile_.path)

    def _refusal(self, hlo: bytes, target: str, kernel: str) -> str | None:
        """Returns what the lint refuses in a kernel whose NEFF is there, or None; warnings are reported."""
        from kernelgen.compilers.base import refuse_unsupported

        try:
            for text in refuse_unsupported(hlo, target, kernel):
                self._warn(f"warning: {text}")
        except KernelgenError as error:
            return str(error)
        return None

    def _warn(self, line: str) -> None:
        # The lint says the same of one kernel for several settings.
        if line not in self.warned:
            self.warned.add(line)
            self.reporter.warn(line)

    def _report(self, step: Step, path: Path | None = None) -> None:
        self.result.steps.append(step)
        if path is not None and step.failure is None:
            self.result.neffs[step.neff.id] = path
        self.reporter.step(step)


def _neff_file(settings: BuildSettings, hlo: bytes, config: CompileConfig) -> Path:
    key = cache.Key.make(hlo, settings.identity, config.flags())
    return settings.state / "neff" / f"{key.name[:40]}{NEFF}"


def _whole(path: Path) -> bool:
    """Returns whether a NEFF is there as it was made; another one is made again."""
    return provenance.is_as_made(path, provenance.read(provenance.beside(path)))
