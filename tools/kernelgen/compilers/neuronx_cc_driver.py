"""Runs neuronx-cc, AWS's compiler, as an untrusted program.

    python3 neuronx_cc_driver.py --compiler=PROGRAM --hlo=FILE --output=FILE [options] -- FLAGS...

This file is an input of every compile in Bazel: a change other than to comments recompiles every kernel. So it needs only Python
3.8 or later, takes the flags as text, and leaves lint, reports and planning to other modules.

neuronx-cc runs in a scratch folder that is removed afterwards, because it leaves files in its working folder. It has a fixed
environment, so that no variable of the caller (`NEURON_CC_FLAGS`, `PYTHONPATH`, …) affects a NEFF. It leads its own session. The
driver kills the whole session when the time or memory limit is reached, when the compiler ends, and when the driver itself dies for
any reason. The driver checks exit status *and* output: public reports show an error status beside a good file.

This code has never run with a real neuronx-cc; the tests use a test double that behaves as AWS documents the program.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "neuronx-cc"

INPUT = "hlo_module.pb"
OUTPUT = "kernel.neff"
LOG = "log.txt"
OWN_LOG = "log-neuron-cc.txt"
"""The default name of neuronx-cc's own log."""

CACHE = "neff-cache"
"""A program beside the compiler's launcher that looks up a NEFF in kernelgen's cache, if one is configured."""

NO_CACHE = 75
"""The exit status of that program if the cache is unusable (`EX_TEMPFAIL`)."""

TAIL_LINES = 20
TAIL_BYTES = 64 * 1024
VERSION_TIMEOUT = 120.0
"""Time limit of `--version` in seconds; the program is slow to start from a cold disk."""

POLL_SECONDS = 0.5
"""Seconds between two memory checks."""

_BANNER = re.compile(r"NeuronX Compiler version (\S+)")

# A shell starts the compiler and first leaves a watchman in the session: it waits on a pipe whose other end only this process
# holds, and kills the session's process group when that end closes. `exec` keeps the process id and the exit status.
_START = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -KILL 0) & exec 3<&-; exec "$@"'


class CompileFailure(Exception):
    """A failed compile, or a failed `--version`.

    Args:
        message: the problem.
        hint: the remedy, and where to read more; several lines.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def command(executable: Path, flags: Sequence[str]) -> list[str]:
    """Returns the command line, to run in a folder that holds the HLO as `hlo_module.pb`."""
    return [str(executable), "compile", INPUT, *flags, "--output", OUTPUT, "--logfile", OWN_LOG]


def compile_hlo(
    hlo: bytes,
    executable: Path,
    flags: Sequence[str],
    *,
    neff: str,
    log_dir: Path,
    timeout: float | None = None,
    memory_mb: int | None = None,
    log: Path | None = None,
) -> bytes:
    """Compiles HLO and returns the NEFF.

    After a failure, the HLO and the log stay in `<log_dir>/<neff>.failed`; the error names them and the command to repeat the
    compile. The memory limit applies to the sum over the session's processes, checked twice a second, so it can miss a short peak.

    Args:
        hlo: a serialized HloModuleProto.
        executable: absolute path of neuronx-cc.
        flags: its arguments, except those for files.
        neff: the NEFF's name, `<kernel>.<settings>`.
        log_dir: folder for the files kept after a failure.
        timeout: seconds; None for no limit.
        memory_mb: MiB that the compiler may use; None for no limit.
        log: output file for the log of a successful compile; None for none. It is not part of the NEFF, and differs from run to
            run:
            the compiler may print times. It does not contain the paths of the compiler and the scratch folder.

    Raises:
        CompileFailure: the compiler failed, or a limit was reached.
    """
    words = command(executable, flags)
    kept = Path(log_dir).absolute() / f"{neff}.failed"
    # A log of an earlier failure must not pass for one of this run.
    shutil.rmtree(kept, ignore_errors=True)
    with _scratch() as scratch:
        (scratch / INPUT).write_bytes(hlo)
        printed = scratch / LOG
        environment = _environment(executable, scratch)
        with printed.open("wb") as file:
            file.write(f"$ {shlex.join(words)}\n".encode())
            file.flush()
            end = _run(words, scratch, environment, file.fileno(), timeout, memory_mb)
        output = scratch / OUTPUT
        problem, advice = _judge(end, output, _tail(printed), timeout, memory_mb)
        if problem is None:
            if log is not None:
                text = printed.read_bytes()
                for path, name in ((str(scratch), "."), (shlex.quote(words[0]), NAME), (words[0], NAME)):
                    text = text.replace(path.encode(), name.encode())
                log.write_bytes(text)
            return output.read_bytes()
        _keep(scratch, kept)
    raise CompileFailure(f"{NAME} {problem}", _explanation(advice, words, kept))


def version(executable: Path) -> str:
    """Returns the version from the first line that `--version` prints; later lines have no fixed format.

    Raises:
        CompileFailure: it can't be run, or does not print a version of the NeuronX Compiler.
    """
    if not os.access(executable, os.X_OK) or not executable.is_file():
        raise CompileFailure(f"{executable} is not a program that can be run")
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
            raise CompileFailure(f"{executable} --version did not end in {VERSION_TIMEOUT:g} s")
        out.seek(0)
        first = out.read(4096).decode(errors="replace").partition("\n")[0].strip()
        last = next(iter(_tail(scratch / "err")[-1:]), "")
    match = _BANNER.match(first)
    if end.status or not match:
        raise CompileFailure(
            f"{executable} --version ended with status {end.status} and the first line {first[:200]!r}"
            + (f" ({last})" if last else ""),
            "expected 'NeuronX Compiler version …': is this neuronx-cc?",
        )
    return match[1]


def machine_memory_mb() -> int:
    """Returns the memory that all compiles may use together, in MiB: four fifths of the machine's or the container's."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min(limits) * 4 // 5 // 2**20


# --- running --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _End:
    """The outcome of a run.

    Attributes:
        status: exit status, or minus the signal that killed it.
        killed: the limit for which this process killed it: `time`, `memory`, or empty.
        memory_mb: MiB in use when the memory limit was reached.
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
    """Runs a command in its own session until it ends or reaches a limit, and leaves no process of the session behind."""
    lifeline, held = os.pipe()  # other processes that start meanwhile inherit neither
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
        os.close(lifeline)  # the watchman holds it
    deadline = None if timeout is None else time.monotonic() + timeout
    killed, used = "", 0
    try:
        while not killed:
            wait = None if memory_mb is None else POLL_SECONDS
            if deadline is not None:
                left = max(0.0, deadline - time.monotonic())
                wait = left if wait is None else min(wait, left)
            try:
                return _End(process.wait(wait))
            except subprocess.TimeoutExpired:
                used = 0 if memory_mb is None else _memory(process.pid)
                if deadline is not None and time.monotonic() >= deadline:
                    killed = "time"
                elif memory_mb is not None and used > memory_mb:
                    killed = "memory"
    finally:
        # Also kill processes that the compiler left running, and the watchman.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(held)
    return _End(process.returncode, killed, used)


def _memory(session: int) -> int:
    """Returns the memory in MiB that the processes of a session use: proportional sizes, which count shared pages once."""
    used = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = (entry / "stat").read_text().rpartition(")")[2].split()  # the process name may contain anything
            if int(fields[3]) == session:
                pss = re.search(r"^Pss:\s+(\d+) kB", (entry / "smaps_rollup").read_text(), re.MULTILINE)
                used += int(pss[1]) if pss else 0
    return used >> 10


def _judge(
    end: _End, output: Path, tail: list[str], timeout: float | None, memory_mb: int | None
) -> tuple[str | None, str]:
    """Returns the problem, None for none, and its remedy."""
    if end.killed == "time":
        return (
            f"still running after {timeout:g} s, and was stopped",
            "raise the time limit, or compile a smaller kernel",
        )
    more_memory = (
        "raise memory_per_compile in the manifest's `compiler`, compile fewer kernels at a time, or lower optlevel"
    )
    if end.killed == "memory":
        return f"used {end.memory_mb} MiB of memory, more than its {memory_mb} MiB, and was stopped", more_memory
    size = output.stat().st_size if output.is_file() else None
    beside = "" if size is None else f", although it wrote {size} bytes, which are not used"
    text = "\n".join(tail)
    if end.status in (-signal.SIGKILL, 128 + signal.SIGKILL) or "[F137]" in text:
        return f"was killed, most likely because the machine ran out of memory{beside}", more_memory
    if end.status < 0:
        return f"was killed by {_signal_name(-end.status)}{beside}", ""
    if end.status:
        return f"ended with status {end.status}{beside}", ""
    if size is None:
        return "ended with status 0 but wrote no NEFF", ""
    damage = _damage(output)
    if damage:
        return f"ended with status 0 but what it wrote is not a NEFF: {damage}", ""
    return None, ""


def _signal_name(number: int) -> str:
    """Returns a signal's name; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _damage(neff: Path) -> str:
    """Returns the problem with a NEFF's outer structure; empty if its header fits its size. Does not check the payload."""
    size = neff.stat().st_size
    with neff.open("rb") as file:
        head = file.read(1024)
    if len(head) < 1024:
        return f"{size} bytes, less than the header of 1024"
    package, header, payload = struct.unpack_from("<3Q", head)
    if package not in (1, 2) or header != 1024:
        return f"package version {package} and header size {header}, expected 1 or 2 and 1024"
    if header + payload != size:
        return f"its header says {header + payload} bytes, there are {size}"
    if head[40:].startswith(b"kernelgen-simulator"):
        return "it says that it is simulated"
    return ""


def _explanation(advice: str, words: Sequence[str], kept: Path) -> str:
    """Returns the explanation of a failure for the user, with the command to repeat it."""
    lines = [advice] if advice else []
    tail = _tail(kept / LOG)
    if len(tail) > 1:  # the first line is the command
        lines += ["the log's last lines:", *(f"  | {line}" for line in tail)]
    lines.append(f"the whole log: {kept / LOG}")
    if (kept / OWN_LOG).exists():
        lines.append(f"the compiler's own log: {kept / OWN_LOG}")
    lines.append(f"to run it again: cd {shlex.quote(str(kept))} && {shlex.join(words)}")
    return "\n".join(lines)


def _tail(log: Path) -> list[str]:
    """Returns the last lines of a log of any size, each cut to a readable width."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    # Strip control characters (colours, a terminal's title): they must not reach the user's terminal.
    return [re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]", "", line)[:400] for line in lines[-TAIL_LINES:]]


def _keep(scratch: Path, kept: Path) -> None:
    """Moves the files that explain a failure out of the scratch folder."""
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for name in (INPUT, LOG, OWN_LOG):
            if (scratch / name).is_file():
                shutil.move(scratch / name, kept / name)
    except OSError as error:
        raise CompileFailure(f"{NAME} failed, and its log cannot be kept in {kept}: {error.strerror}") from None


def _environment(executable: Path, scratch: Path) -> Mapping[str, str]:
    """Returns the whole environment of a compile: equal on every machine except for the folders."""
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


# --- as a program ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Runs one compile; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=NAME, description="Compiles the HLO of one kernel to a NEFF.", allow_abbrev=False
    )
    parser.add_argument("--compiler", type=Path, required=True, help="neuronx-cc, or a program that runs it")
    parser.add_argument("--identity", required=True, help="what the compiler must be: neuronx-cc and its version")
    parser.add_argument("--hlo", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the NEFF, <kernel>.<settings>.neff")
    parser.add_argument("--log", type=Path, help="what the compiler prints; empty for a NEFF from a cache")
    parser.add_argument(
        "--no-cache", action="store_true", help=f"compile even if there is a {CACHE} beside the compiler"
    )
    parser.add_argument("flags", nargs="+", help="neuronx-cc's arguments, all of them but those for files")
    args = parser.parse_args(argv)
    try:
        if not args.no_cache:
            if args.log:
                args.log.write_bytes(b"")  # a build that declares the log needs the file, even if nothing is compiled
            status = _from_cache(args, argv)
            if status is not None:
                return status
        _compile_file(args)
    except CompileFailure as failure:
        hint = "".join(f"\n    {line}" for line in failure.hint.splitlines())
        print(f"error: {failure.message}{hint}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _compile_file(args: argparse.Namespace) -> None:
    """Compiles one file to another; the output appears by rename."""
    # Not resolved: a virtual environment's program may be a link.
    executable = args.compiler.absolute()
    found = f"{NAME} {version(executable)}"
    if found != args.identity:
        # Otherwise the NEFF would be stored under the name of another compiler.
        raise CompileFailure(f"the build is for {args.identity}, and this machine has {found} ({executable})")
    name = args.output.name[: -len(".neff")] if args.output.name.endswith(".neff") else args.output.name
    try:
        made = compile_hlo(
            args.hlo.read_bytes(),
            executable,
            args.flags,
            neff=name,
            log_dir=args.output.parent,
            memory_mb=machine_memory_mb(),
            log=args.log,
        )
    except CompileFailure as failure:
        raise CompileFailure(f"{name}: {failure.message}", failure.hint) from None
    temporary = args.output.with_name(f".{args.output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(made)
        temporary.replace(args.output)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _from_cache(args: argparse.Namespace, argv: Sequence[str]) -> int | None:
    """Runs kernelgen's cache program, which returns a cached NEFF or calls this program to compile; returns the exit status.

    Returns None if there is no cache, or it is unusable. The cache program is found beside the launcher's real file, so it is not
    an input of a compile: a cached NEFF equals a compiled one.
    """
    cache = Path(os.path.realpath(args.compiler)).with_name(CACHE)
    if not os.access(cache, os.X_OK):
        return None
    key = {
        "compiler": args.identity,
        "flags": args.flags,
        "hlo_sha256": hashlib.sha256(args.hlo.read_bytes()).hexdigest(),
    }
    compile_it = [sys.executable, "-I", str(Path(__file__).absolute()), "--no-cache", *argv]
    status = subprocess.run([str(cache), json.dumps(key), str(args.output), *compile_it], check=False).returncode
    return None if status == NO_CACHE else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
