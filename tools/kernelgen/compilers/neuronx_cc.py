"""neuronx-cc, AWS's compiler, as a program that is not trusted to behave.

It runs in a scratch folder that is removed afterwards, because it leaves files wherever it runs; with an environment of our
own, so that nothing of the caller's (`NEURON_CC_FLAGS`, `PYTHONPATH`, …) is in a NEFF; in a session of its own, which is killed
as a whole when the time or the memory is used up, when the compiler ends, and when this process dies, however it dies. Its exit
status *and* its output are checked: public reports have it exit with an error beside a good file.

Settings are `CompileConfig.flags`, every one explicit. `--native-int64` and `--implicit-integer-downcast` are not among them:
releases that do not know them refuse them, and they change nothing, because the HLO that kernelgen emits holds no 64-bit integers
(I64 tensors arrive as pairs of i32). A manifest whose own emitters need them has `extra_flags`, which are part of the NEFF's key.

Nothing here has been run against a real neuronx-cc; the tests run it against a double that behaves as AWS documents the program.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelgen import neff
from kernelgen.compilers.base import refuse_unsupported
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError

NAME = "neuronx-cc"

INPUT = "hlo_module.pb"
OUTPUT = "kernel.neff"
LOG = "log.txt"
OWN_LOG = "log-neuron-cc.txt"
"""neuronx-cc's own log, by its default name."""

TAIL_LINES = 20
TAIL_BYTES = 64 * 1024
VERSION_TIMEOUT = 120.0
"""Seconds for `--version`; the program is slow to start on a cold disk."""

POLL_SECONDS = 0.1
"""How often memory is looked at; less often where looking takes long, because the machine runs very many processes."""

_BANNER = re.compile(r"NeuronX Compiler version (\S+)")

# The compiler is started through a shell that first leaves a watchman in the session: it waits on a pipe whose other end only this
# process holds, and kills the session's process group when that end closes. `exec` keeps the process id and the exit status.
_START = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -KILL 0) & exec 3<&-; exec "$@"'


@dataclass(frozen=True, slots=True)
class NeuronxCC:
    """A `Compiler`; see there. Made by `open`.

    Attributes:
        executable: the program, absolute.
        version: what it calls itself.
        note: what to tell the user once.
    """

    executable: Path
    version: str
    note: str = ""

    @staticmethod
    def open(executable: str | Path) -> NeuronxCC:
        """Returns the compiler that a program is, after asking for its version.

        Raises:
            KernelgenError: it cannot be run, or does not say which version of the NeuronX Compiler it is.
        """
        path = Path(executable).absolute()  # not resolved: a virtual environment's program may be a link
        return NeuronxCC(path, _version(path))

    @property
    def name(self) -> str:
        return NAME

    @property
    def identity(self) -> str:
        return f"{NAME} {self.version}"

    def command(self, config: CompileConfig) -> list[str]:
        """Returns the command line, to be run in a folder that holds the HLO as `hlo_module.pb`."""
        return [str(self.executable), "compile", INPUT, *config.flags(), "--output", OUTPUT, "--logfile", OWN_LOG]

    def compile(
        self,
        hlo: bytes,
        config: CompileConfig,
        *,
        kernel: str,
        log_dir: Path,
        timeout: float | None = None,
        memory_mb: int | None = None,
    ) -> bytes:
        """Returns the NEFF; see `Compiler.compile`.

        Of a failure, the HLO and the log are kept in `<log_dir>/<kernel>.<config.key>.failed`; the error names them and has the
        command that repeats it. Memory is what the session's processes occupy together, looked at ten times a second: shared
        pages count once (where the kernel tells), and a short peak can be missed. A process that starts a session of its own is
        not counted, and nothing is where there is no /proc.
        """
        refuse_unsupported(hlo, config, kernel)
        command = self.command(config)
        kept = Path(log_dir).absolute() / f"{kernel}.{config.key}.failed"
        # A log of an earlier failure must not be taken for one of this run.
        shutil.rmtree(kept, ignore_errors=True)
        with _scratch() as scratch:
            (scratch / INPUT).write_bytes(hlo)
            log = scratch / LOG
            environment = _environment(self.executable, scratch)
            with log.open("wb") as file:
                file.write(f"$ {shlex.join(command)}\n".encode())
                file.flush()
                end = _run(command, scratch, environment, file.fileno(), timeout, memory_mb)
            output = scratch / OUTPUT
            problem, advice = _judge(end, output, _tail(log), timeout, memory_mb)
            if problem is None:
                return output.read_bytes()
            _keep(scratch, kept)
        raise KernelgenError(_failure(problem, advice, kernel, config, command, kept), exit_code=EXIT_FAILED)


@dataclass(frozen=True, slots=True)
class _End:
    """How a run ended.

    Attributes:
        status: exit status, or minus the signal that killed it.
        killed: why it was killed by us: `time`, `memory`, or nothing.
        memory_mb: MiB in use when it was killed for it.
    """

    status: int
    killed: str = ""
    memory_mb: int = 0


def _run(
    command: list[str],
    scratch: Path,
    environment: Mapping[str, str],
    output: int,
    timeout: float | None,
    memory_mb: int | None = None,
    errors: int = subprocess.STDOUT,
) -> _End:
    """Runs a command in a session of its own until it ends or a limit is reached, and leaves none of the session behind."""
    lifeline, held = os.pipe()  # neither is inherited by other processes that are started meanwhile
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _START, "sh", *command],
            cwd=scratch,
            env=dict(environment),
            stdin=lifeline,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(lifeline)
    deadline = None if timeout is None else time.monotonic() + timeout
    killed, used, poll = "", 0, POLL_SECONDS
    try:
        while True:
            wait = poll if memory_mb is not None else None
            if deadline is not None:
                left = max(0.0, deadline - time.monotonic())
                wait = left if wait is None else min(wait, left)
            try:
                return _End(process.wait(wait))
            except subprocess.TimeoutExpired:
                if deadline is not None and time.monotonic() >= deadline:
                    killed = "time"
                    break
                if memory_mb is not None:
                    begun = time.monotonic()
                    used = _memory(process.pid, memory_mb)
                    poll = min(1.0, max(POLL_SECONDS, 20 * (time.monotonic() - begun)))
                    if used > memory_mb:
                        killed = "memory"
                        break
    finally:
        # Also what the compiler left running, and the watchman.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(held)
    return _End(process.returncode, killed, used)


def _memory(session: int, budget: int) -> int:
    """Returns the MiB of memory in use by the processes of a session.

    The resident sizes are summed first, which is quick and counts shared pages more than once; only when that is more than the
    budget is the kernel asked for proportional sizes.
    """
    pids, pages = [], 0
    for entry in _processes():
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # ended meanwhile
            continue
        fields = stat.rpartition(")")[2].split()  # the name before may hold anything
        if int(fields[3]) == session:
            pids.append(entry)
            pages += int(fields[21])
    resident = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    if resident <= budget:
        return resident
    proportional = 0
    for entry in pids:
        try:
            text = (entry / "smaps_rollup").read_text()
        except OSError:
            continue
        match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        if not match:
            return resident
        proportional += int(match[1])
    return proportional >> 10


def _processes() -> list[Path]:
    try:
        return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return []


def _judge(
    end: _End, output: Path, tail: list[str], timeout: float | None, memory_mb: int | None
) -> tuple[str | None, str]:
    """Returns what went wrong, None for nothing, and what to do about it."""
    if end.killed == "time":
        return (
            f"still running after {timeout:g} s, and was stopped",
            "raise the time limit, or compile a smaller kernel",
        )
    more_memory = "raise the manifest's memory_mb, compile fewer kernels at a time, or lower optlevel"
    if end.killed == "memory":
        return f"used {end.memory_mb} MiB of memory, more than its {memory_mb} MiB, and was stopped", more_memory
    size = output.stat().st_size if output.is_file() else None
    beside = "" if size is None else f", although it wrote a NEFF of {size} bytes, which is not used"
    text = "\n".join(tail)
    if end.status in (-signal.SIGKILL, 128 + signal.SIGKILL) or "[F137]" in text:
        return f"was killed, most likely because the machine ran out of memory{beside}", more_memory
    if end.status < 0:
        return f"was killed by {signal.Signals(-end.status).name}{beside}", ""
    if end.status:
        return f"ended with status {end.status}{beside}", ""
    if size is None:
        return "ended with status 0 but wrote no NEFF", ""
    try:
        header = neff.read_header_of(output)
    except KernelgenError as error:
        return f"ended with status 0 but what it wrote is no NEFF: {error.diagnostics[0].message}", ""
    if header.simulated:
        return "wrote a NEFF that says it is simulated", "neuronx-cc is not the program that it should be"
    return None, ""


def _failure(
    problem: str, advice: str, kernel: str, config: CompileConfig, command: list[str], kept: Path
) -> Diagnostic:
    lines = [advice] if advice else []
    tail = _tail(kept / LOG)
    if len(tail) > 1:  # the first line is the command
        lines += ["the log's last lines:", *(f"  | {line}" for line in tail)]
    lines.append(f"the whole log: {kept / LOG}")
    if (kept / OWN_LOG).exists():
        lines.append(f"the compiler's own log: {kept / OWN_LOG}")
    lines.append(f"to run it again: cd {shlex.quote(str(kept))} && {shlex.join(command)}")
    return Diagnostic(f"kernel {kernel} for {config.target}: {NAME} {problem}", hint="\n    ".join(lines))


def _tail(log: Path) -> list[str]:
    """Returns the last lines of a log of any size, each cut to a width that can be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    # Control characters (colours, a terminal's title) are the compiler's, not the user's.
    return [re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]", "", line)[:400] for line in lines[-TAIL_LINES:]]


def _keep(scratch: Path, kept: Path) -> None:
    """Moves what explains a failure from the scratch folder to where it stays."""
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for name in (INPUT, LOG, OWN_LOG):
            if (scratch / name).is_file():
                shutil.move(scratch / name, kept / name)
    except OSError as error:
        raise KernelgenError(
            f"{NAME} failed, and its log cannot be kept in {kept}: {error.strerror}", exit_code=EXIT_FAILED
        ) from None


def _environment(executable: Path, scratch: Path) -> dict[str, str]:
    """Returns the whole environment of a compile: the same on every machine but for the folders."""
    return {
        "PATH": f"{executable.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch / "home"),
        "TMPDIR": str(scratch / "tmp"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kernelgen-"))
    try:
        (folder / "home").mkdir()
        (folder / "tmp").mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _version(executable: Path) -> str:
    """Returns the version from the first line that `--version` prints; later lines are not for machines."""
    if not os.access(executable, os.X_OK) or not executable.is_file():
        raise KernelgenError(f"{executable} is not a program that can be run")
    with _scratch() as scratch, (scratch / "out").open("w+b") as out, (scratch / "err").open("w+b") as err:
        end = _run(
            [str(executable), "--version"],
            scratch,
            _environment(executable, scratch),
            out.fileno(),
            VERSION_TIMEOUT,
            errors=err.fileno(),
        )
        if end.killed:
            raise KernelgenError(f"{executable} --version did not end in {VERSION_TIMEOUT:g} s")
        out.seek(0)
        first = out.read(4096).decode(errors="replace").partition("\n")[0].strip()
        last = next(iter(_tail(scratch / "err")[-1:]), "")
    match = _BANNER.match(first)
    if end.status or not match:
        raise KernelgenError(
            Diagnostic(
                f"{executable} --version ended with status {end.status} and the first line {first[:200]!r}"
                + (f" ({last})" if last else ""),
                hint="expected 'NeuronX Compiler version …': is this neuronx-cc?",
            )
        )
    return match[1]
