"""A time limit for an emitter in this process: it may loop forever, and a build must end.

The limit is an alarm, which stops Python code. It can't stop native code that holds the GIL, nor an emitter that catches every
exception: then the whole process ends, and prints the stack of each thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterator

from kernelgen.errors import TimeLimitExpired

EMIT_TIMEOUT = 600.0
"""Default time limit for emitting one kernel, in seconds; it normally takes milliseconds."""

GRACE = 3.0
"""Seconds after the limit until the process ends, if the block does not end."""

HINT = (
    "another limit: --emit-timeout of `kernelgen build`, EMIT_TIMEOUT of add_neuron_kernels(), Bazel's "
    "--@neuron_kernelgen//rules:emit_timeout; in seconds, 0 is none"
)

_AGAIN = 0.5


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Ends a block that exceeds a time limit, or the process if the block does not end. Only for the main thread.

    Args:
        seconds: the time limit, or None.

    Raises:
        TimeLimitExpired: anywhere in the block; also after it if the block caught the exception.
    """
    if seconds is None:
        yield
        return
    deadline = time.monotonic() + seconds

    def stop(number: int, frame: object) -> None:
        if time.monotonic() < deadline:  # an alarm that the block set
            signal.setitimer(signal.ITIMER_REAL, deadline - time.monotonic(), _AGAIN)
            return None
        raise TimeLimitExpired(seconds)

    # A copy of standard error, because an emitter may close the original.
    try:
        errors = os.dup(2)
    except OSError:  # it is closed
        errors = os.open(os.devnull, os.O_WRONLY)
    before = signal.signal(signal.SIGALRM, stop)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=errors)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
        os.close(errors)
    if time.monotonic() >= deadline:
        raise TimeLimitExpired(seconds)
