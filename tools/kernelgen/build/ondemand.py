"""Runs build steps for Ninja and Make, in short-lived processes, as many in parallel as the machine has memory for.

    python -P -S ondemand.py FOLDER SLOTS warm|fresh STEP --name=value…

runs one step of `kernelgen.steps.worker` and exits with its status. Among all processes that share FOLDER, SLOTS run at once: each
holds the lock of a slot. (Ninja has pools for that; Make has none.)

`warm` sends the step to the slot's server. The first step that needs a server starts it. The server imports JAX once and runs one
step at a time. It ends after some seconds without a step, or when FOLDER is removed. Its name has a digest of kernelgen's sources,
so no step uses a server that started before an edit. Bazel has persistent workers for this; they make a build of many small kernels
fast. `fresh` runs the step in this process. On a file system without locks or sockets, `warm` falls back to the slower `fresh`.

This module imports only the standard library, and `-S` skips site-packages: a small step costs only this start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

IDLE_SECONDS = 10.0
"""Seconds that a server waits for its next step."""

_TAIL_BYTES = 4096
_PACKAGE = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str]) -> int:
    """Runs one step; see the module."""
    folder, slots, mode, *step = argv
    if mode not in ("warm", "fresh") or not step:
        raise SystemExit("usage: ondemand.py FOLDER SLOTS warm|fresh STEP --name=value...")
    with _slot(Path(folder), int(slots)) as slot:
        if mode == "warm" and slot is not None:
            # A socket's address holds 108 bytes, fewer than many build folders' paths have.
            os.chdir(folder)
            with contextlib.suppress(OSError):
                code, output = _ask(slot, step)
                sys.stderr.write(output)
                return code
        # The lock is inherited and ends with the process.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "kernelgen.steps.worker", *step])


@contextlib.contextmanager
def _slot(folder: Path, slots: int) -> Iterator[int | None]:
    """Yields the number of a locked slot, after waiting if necessary; None where files can't be locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [os.open(folder / f"{slot}.lock", os.O_RDWR | os.O_CREAT, 0o666) for slot in range(slots)]
        held = next((slot for slot, file in enumerate(files) if _lock(file, fcntl.LOCK_NB)), None)
        if held is None:
            held = os.getpid() % slots
            _lock(files[held], 0)
    except OSError:
        yield None
        return
    for slot, file in enumerate(files):
        if slot != held:
            os.close(file)
    os.set_inheritable(files[held], True)
    try:
        yield held
    finally:
        os.close(files[held])


def _lock(file: int, flags: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        return False
    return True


# --- asking ---------------------------------------------------------------------------------------------------------------


def _ask(slot: int, step: Sequence[str]) -> tuple[int, str]:
    """Returns the exit status and the output of a step that the slot's server ran.

    Raises:
        OSError: a server can't run here.
    """
    name = f"{slot}-{_state()}"
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(f"{name}.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            _start(name)
            client.connect(f"{name}.sock")
        client.sendall(json.dumps(list(step)).encode())
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as stream, contextlib.suppress(ConnectionError):
            if answer := stream.read():
                code, output = json.loads(answer)
                return int(code), str(output)
    log = Path(f"{name}.log").read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    return (
        1,
        "error: the process that ran this step died: the step ended it, or the machine ran out of memory (then run fewer "
        f"at once)\n{log}",
    )


def _state() -> str:
    """Returns a name for the current state of kernelgen's sources."""
    digest = hashlib.sha256(sys.executable.encode())
    for folder, folders, files in os.walk(_PACKAGE):
        folders.sort()
        for file in sorted(files):
            if file.endswith(".py"):
                status = (Path(folder) / file).stat()
                digest.update(f"{folder}/{file} {status.st_mtime_ns} {status.st_size}\n".encode())
    return digest.hexdigest()[:12]


def _start(name: str) -> None:
    """Starts a server. This process creates the socket, so that a client can connect at once."""
    Path(f"{name}.sock").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, Path(f"{name}.log").open("wb") as log:
        listener.bind(f"{name}.sock")
        listener.listen()
        subprocess.Popen(
            [sys.executable, "-P", "-m", "kernelgen.build.ondemand", "--serve", str(listener.fileno()), name],
            # A build tool waits until all processes that hold its output have closed it.
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


# --- serving --------------------------------------------------------------------------------------------------------------


def serve(descriptor: int, name: str) -> None:
    """Runs steps, one at a time, until none arrives for `IDLE_SECONDS`.

    Args:
        descriptor: the socket to listen on.
        name: the socket's file name in this folder, without `.sock`; it begins with the slot's number.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `worker.main`
    from kernelgen.steps import worker

    with socket.socket(fileno=descriptor) as listener:
        listener.settimeout(IDLE_SECONDS)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if _leave(name):
                    return
                continue
            # The client may have ended; then nothing reads the answer.
            with connection, contextlib.suppress(ConnectionError), connection.makefile("rb") as stream:
                connection.settimeout(None)
                if request := stream.read():
                    connection.sendall(json.dumps(worker.run(json.loads(request))).encode())


def _leave(name: str) -> bool:
    """Removes the socket, unless a step holds the slot and may connect; returns whether it removed the socket."""
    try:
        lock = os.open(f"{name.partition('-')[0]}.lock", os.O_RDWR)
    except FileNotFoundError:
        return True  # the folder was removed
    try:
        if not _lock(lock, fcntl.LOCK_NB):
            return False
        Path(f"{name}.sock").unlink(missing_ok=True)
        Path(f"{name}.log").unlink(missing_ok=True)
        return True
    finally:
        os.close(lock)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1:]))
