"""Runs build steps for ninja and make in few long-lived processes, which import JAX once.

    python -P -S ondemand.py FOLDER STEP --name=value…

runs one step of `kernelgen.steps.worker` and exits with its status. FOLDER/servers has a number of slots and a version. Among all
processes that share FOLDER, as many run at once as there are slots: each holds the lock of one. (ninja has pools for that; make has
none.)

The slot's server runs the step, in the caller's working folder. The first step that needs a server starts it. A server runs one
step at a time. It ends after some seconds without a step, when FOLDER is removed, and when a module changes that an emitter
imported from outside its library. It ends at once with its client, which ends when the build is interrupted. Its name has the
version, so no step uses a server that started before an edit of kernelgen. On a file system without locks or sockets the step runs
in this process, which is slower.

A client runs for each step, so it imports little: two small C modules. `-S` skips site-packages.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import sys
from collections.abc import Sequence

IDLE_SECONDS = 10.0
"""Seconds that a server waits for its next step."""

_TAIL_BYTES = 4096


def main(argv: Sequence[str]) -> int:
    """Runs one step; see the module."""
    folder, *step = argv
    if not step:
        raise SystemExit("usage: ondemand.py FOLDER STEP --name=value...")
    with open(f"{folder}/servers") as file:
        slots, version = file.read().split()
    slot = _slot(folder, int(slots))
    if slot is not None:
        here = os.getcwd()
        os.chdir(folder)  # a socket's address holds 108 bytes, fewer than many build folders' paths have
        try:
            code, output = _ask(f"{slot}-{version}", [here, *step])
        except OSError:
            os.chdir(here)
        else:
            sys.stderr.write(output)
            return code
    # The lock is inherited and ends with the process.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kernelgen.steps.worker", *step])


def _slot(folder: str, slots: int) -> int | None:
    """Locks a slot until this process ends, after waiting if necessary; returns None where files can't be locked."""
    try:
        files = [os.open(f"{folder}/{slot}.lock", os.O_RDWR | os.O_CREAT, 0o666) for slot in range(slots)]
        held = next((slot for slot, file in enumerate(files) if _lock(file, fcntl.LOCK_NB)), None)
        if held is None:
            held = os.getpid() % slots
            _lock(files[held], 0)
    except OSError:
        return None
    os.set_inheritable(files[held], True)
    return held


def _lock(file: int, flags: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        return False
    return True


# --- asking ---------------------------------------------------------------------------------------------------------------


def _ask(name: str, request: Sequence[str]) -> tuple[int, str]:
    """Returns the exit status and the output of a step that a slot's server ran.

    Args:
        name: the server's name: the slot's number and the version.
        request: the step's working folder, and the step.

    Raises:
        OSError: a server can't run here.
    """
    while True:
        client = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            client.connect(f"{name}.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            _start(name)
            client.connect(f"{name}.sock")
        # The end of this process is the end of the connection, which the server watches.
        client.sendall(("\0".join(request) + "\n").encode())
        answer = b""
        try:
            while data := client.recv(1 << 16):
                answer += data
        except ConnectionError:
            answer = b""
        code, separator, output = answer.partition(b" ")
        if separator:
            return int(code), output.decode()
        if os.path.exists(f"{name}.sock"):
            break
        # The server left before it ran the step.
    with open(f"{name}.log", "rb") as log:
        last = log.read()[-_TAIL_BYTES:].decode(errors="replace")
    return (
        1,
        "error: the process that ran this step died: the step ended it, or the machine ran out of memory (then run fewer "
        f"at once)\n{last}",
    )


def _start(name: str) -> None:
    """Starts a server. This process creates the socket, so that a client can connect at once."""
    import contextlib
    import socket
    import subprocess

    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{name}.sock")
    with socket.socket(socket.AF_UNIX) as listener, open(f"{name}.log", "wb") as log:
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
    import contextlib
    import socket
    from pathlib import Path

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `worker.main`
    here = Path.cwd()
    modules: dict[os.PathLike[str], int] = {}  # the times of the files that emitters imported from elsewhere
    with socket.socket(fileno=descriptor) as listener:
        listener.settimeout(IDLE_SECONDS)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if _leave(here, name):
                    return
                continue
            # The client may have ended; then nothing reads the answer.
            with connection, contextlib.suppress(ConnectionError):
                connection.settimeout(None)
                if any(_time(path) != time for path, time in modules.items()):
                    (here / f"{name}.sock").unlink(missing_ok=True)
                    return
                _answer(connection, modules)


def _answer(connection: _socket.socket, modules: dict[os.PathLike[str], int]) -> None:
    """Runs a connection's step and sends its answer; kills this process, and its children, when the client ends before that."""
    import contextlib
    import signal
    import threading

    from kernelgen.errors import printable
    from kernelgen.steps import common, worker

    request = b""
    while not request.endswith(b"\n"):
        data = connection.recv(1 << 16)
        if not data:
            return
        request += data
    folder, *step = request[:-1].decode().split("\0")
    is_done = False

    def watch() -> None:
        with contextlib.suppress(ConnectionError):
            connection.recv(1)
        if not is_done:
            os.killpg(0, signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    os.chdir(folder)
    code, output = worker.run(step)
    for path in common.imported_elsewhere():
        modules.setdefault(path, _time(path))
    is_done = True
    connection.sendall(f"{code} {printable(output)}".encode())
    connection.shutdown(_socket.SHUT_WR)
    watcher.join()


def _time(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _leave(folder: os.PathLike[str], name: str) -> bool:
    """Removes the socket, unless a step holds the slot and may connect; returns whether it removed the socket."""
    import contextlib

    path = os.path.join(folder, name)
    try:
        lock = os.open(os.path.join(folder, f"{name.partition('-')[0]}.lock"), os.O_RDWR)
    except FileNotFoundError:
        return True  # the folder was removed
    try:
        if not _lock(lock, fcntl.LOCK_NB):
            return False
        for suffix in (".sock", ".log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)
        return True
    finally:
        os.close(lock)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1:]))
