"""The helper's server: a thread answers requests on each lane. The main thread watches the control socket, and ends with it.

Imports of packages that may be missing come late, so that the client gets an error message.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from kernelgen.simulator import protocol
from kernelgen.simulator.protocol import Operation, Status

if TYPE_CHECKING:
    from kernelgen.simulator.requests import RequestServer

THREADS_VARIABLE = "NEURON_SIMULATOR_THREADS"
STRICT_VARIABLE = "NEURON_SIMULATOR_STRICT"

_MOST = 448
"""A size that most requests do not exceed. Python allocates so few bytes from its own pools."""

_LOOKS = 40
"""The number of polls for the next request before a lane sleeps: some 30 µs. A client with small kernels sends the next request
within that time, and an idle processor takes longer to wake up than such a kernel takes."""

MAX_DESCRIPTORS = 253
"""The most descriptors that Linux passes in one message: one per core and one for the host."""


def serve(control: socket.socket) -> NoReturn:
    """Answers requests until the client closes the control socket, then ends the process and all its threads.

    Args:
        control: the control socket.
    """
    try:
        requests = _greet(control)
        while True:
            message, fds, _, _ = socket.recv_fds(control, protocol.MAX_MESSAGE, MAX_DESCRIPTORS)
            if not message:
                break
            threading.Thread(target=_serve_lane, args=(requests, *fds), daemon=True).start()
    except OSError:
        pass  # the client ended during an answer
    # Threads of XLA may still run.
    os._exit(0)


def _greet(control: socket.socket) -> RequestServer:
    """Answers the client's greeting. Returns the object that answers its requests; ends the process on errors."""
    message, fds, _, _ = socket.recv_fds(control, protocol.MAX_MESSAGE, MAX_DESCRIPTORS)
    if not message:
        os._exit(0)
    operation, version, count, _ = protocol.HELLO.unpack_from(message)
    if (operation, version) != (Operation.HELLO, protocol.VERSION):
        _refuse(control, f"libnrt speaks version {version} of its protocol, this kernelgen {protocol.VERSION}")
    _limit_threads()
    try:
        from kernelgen.simulator.device import Arena, SimulatedDevice
        from kernelgen.simulator.requests import RequestServer

        sizes = [size for (size,) in protocol.SIZE.iter_unpack(message[protocol.HELLO.size :])]
        if not len(fds) == len(sizes) == count:
            raise ValueError(f"{count} arenas were announced, and {len(fds)} arrived")
        arenas = [Arena.map(fd, size) for fd, size in zip(fds, sizes, strict=True)]
        requests = RequestServer(SimulatedDevice(arenas, strict=os.environ.get(STRICT_VARIABLE) != "0"))
    except ImportError as error:
        _refuse(
            control,
            f"{sys.executable} lacks packages that kernelgen needs ({error}); NEURON_SIMULATOR_PYTHON names another",
        )
    except (OSError, ValueError) as error:
        _refuse(control, f"{error}")
    for fd in fds:
        os.close(fd)
    # Excludes imported objects from later garbage collections, which would delay requests.
    gc.collect()
    gc.freeze()
    control.send(protocol.DONE)
    return requests


def _refuse(control: socket.socket, reason: str) -> NoReturn:
    control.send(protocol.failed(Status.FAILURE, reason))
    os._exit(1)


def _limit_threads() -> None:
    """Limits XLA's threads to the requested number; by default the number of processors, at most 8, because kernels are small."""
    threads = os.environ.get(THREADS_VARIABLE, "")
    count = int(threads) if threads.isdecimal() else min(8, len(os.sched_getaffinity(0)))
    os.environ["PJRT_NPROC"] = str(max(1, count))


def _framed(message: bytes) -> bytes:
    return protocol.MESSAGE.pack(len(message)) + message


_DONE = _framed(protocol.DONE)


_looking = threading.Lock()
"""The lock of the lane that polls. Several polling lanes would compete for the interpreter."""


def _looker(source: int) -> Callable[[], None]:
    """Returns a function that polls a pipe until it is readable, at most `_LOOKS` times."""
    poller = select.poll()
    poller.register(source, select.POLLIN)
    poll, let_others_run = poller.poll, os.sched_yield

    def look() -> None:
        if _looking.acquire(blocking=False):
            try:
                for _ in range(_LOOKS):
                    if poll(0):
                        break
                    let_others_run()  # the client may need this processor
            finally:
                _looking.release()

    return look


def _serve_lane(requests: RequestServer, source: int, sink: int) -> None:
    """Reads requests from one pipe and writes answers to another, until the client closes them."""
    head = protocol.MESSAGE.size
    read, write, find = os.read, os.write, requests.find
    look = _looker(source)
    try:
        while message := (look(), read(source, _MOST))[1]:
            # The common case: a repeated request is found by its bytes, without parsing.
            launch = find(message[head:])
            if launch is not None:
                try:
                    launch()
                    answer = protocol.DONE
                except Exception as error:  # XLA raises types of its own
                    answer = requests.failed(Operation.EXECUTE, error)
            else:
                while len(message) < head or len(message) < head + protocol.MESSAGE.unpack_from(message)[0]:
                    more = read(source, protocol.MAX_MESSAGE)
                    if not more:
                        return
                    message += more
                answer = requests.answer(message[head:])
            framed = _DONE if answer is protocol.DONE else _framed(answer)
            written = write(sink, framed)
            while written < len(framed):
                written += write(sink, framed[written:])
    except OSError:
        pass  # the client closed it
    finally:
        os.close(source)
        os.close(sink)
