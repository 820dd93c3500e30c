"""Runs build steps for Bazel and CMake: arguments from a file, errors as text, one step per process or many in a persistent worker.

    python -m MODULE @ARGUMENTS                one step; ARGUMENTS is a file with one argument per line
    python -m MODULE --persistent_worker       Bazel's JSON worker protocol on standard input and output

A step is a name followed by `--name=value` arguments. Each module defines its steps.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from kernelgen.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, MAX_TEXT, KernelgenError, shortened

MAX_LOG = 1 << 26
"""Maximum bytes that a step may print to the file behind standard error, beside its answer."""
_LOOK_SECONDS = 0.1

Arguments = Mapping[str, list[str]]
Steps = Mapping[str, Callable[[Arguments], None]]


def one(arguments: Arguments, name: str) -> str:
    """Returns the value of an argument that must occur exactly once."""
    values = arguments.get(name, [])
    if len(values) != 1:
        raise KernelgenError(f"expected one --{name}=VALUE, not {len(values)}")
    return values[0]


def maybe(arguments: Arguments, name: str) -> str | None:
    """Returns the value of an optional argument."""
    return one(arguments, name) if arguments.get(name) else None


class _Said(io.StringIO):
    """The output of a step, limited to what a person can read."""

    def __init__(self) -> None:
        super().__init__()
        self._more = 0

    def write(self, text: str) -> int:
        room = max(0, MAX_TEXT - self.tell())
        super().write(text[:room])
        self._more += max(0, len(text) - room)
        return len(text)

    def text(self) -> str:
        """Returns the beginning of the output, and the size of the rest."""
        return f"{self.getvalue()}\n… and {self._more} characters more\n" if self._more else self.getvalue()


@contextlib.contextmanager
def _limited_log() -> Iterator[None]:
    """Ends this process if the block writes too much to the file behind standard error, outside Python: it would fill the disk."""
    try:
        status = os.fstat(2)
    except OSError:  # it is closed
        status = None
    if status is None or not stat.S_ISREG(status.st_mode):
        yield
        return
    done = threading.Event()

    def watch() -> None:
        least = status.st_size
        while not done.wait(_LOOK_SECONDS):
            size = os.fstat(2).st_size
            least = min(least, size)  # its reader may truncate it
            if size - least > MAX_LOG:
                # Code that goes on writing must not write after the reason.
                log = os.dup(2)  # before descriptor 2 is redirected to /dev/null
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                os.ftruncate(log, least + MAX_LOG)
                os.lseek(log, 0, os.SEEK_END)
                os.write(log, f"\nerror: it printed more than {MAX_LOG >> 20} MiB and was stopped\n".encode())
                os._exit(EXIT_FAILED)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def run(steps: Steps, words: Sequence[str]) -> tuple[int, str]:
    """Runs one step and returns its exit status and its output; its prints do not reach standard output."""
    said = _Said()
    try:
        with _limited_log(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            step, *rest = expand(steps, words)
            if step not in steps:
                raise KernelgenError(f"unknown step '{step}': expected one of {', '.join(steps)}")
            arguments: defaultdict[str, list[str]] = defaultdict(list)
            for word in rest:
                name, equals, value = word.partition("=")
                if not name.startswith("--") or not equals:
                    raise KernelgenError(f"expected --name=value, not '{word}'")
                arguments[name[2:]].append(value)
            steps[step](arguments)
        return EXIT_OK, said.text()
    except KernelgenError as error:
        # An emitter may raise its own KernelgenError, with any exit code: a failure must not exit with 0.
        return error.exit_code or EXIT_FAILED, said.text() + shortened(f"{error}\n")
    except OSError as error:
        # A full disk or an unwritable folder is not a bug of kernelgen.
        return EXIT_FAILED, said.text() + f"error: {error}\n"
    except Exception:
        return EXIT_FAILED, said.text() + shortened(traceback.format_exc())


def expand(steps: Steps, words: Sequence[str]) -> list[str]:
    """Returns the arguments with `@FILE` replaced by the file's lines."""
    out: list[str] = []
    for word in words:
        out += Path(word[1:]).read_text().splitlines() if word.startswith("@") else [word]
    if not out:
        raise KernelgenError(f"expected a step: one of {', '.join(steps)}")
    return out


def serve(steps: Steps, requests: TextIO, responses: TextIO) -> None:
    """Answers Bazel's work requests until standard input ends: one JSON object per line for each request and each answer."""
    for line in requests:
        if not line.strip():
            continue
        request: dict[str, Any] = json.loads(line)
        code, output = run(steps, request.get("arguments", []))
        response = {"exitCode": code, "output": output, "requestId": request.get("requestId", 0)}
        responses.write(json.dumps(response) + "\n")
        responses.flush()


def close_in_copies(*descriptors: int) -> None:
    """Closes descriptors in every fork of this process: a fork must neither answer nor keep a reader of the answer waiting."""

    def close() -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    os.register_at_fork(after_in_child=close)


def _private_streams() -> tuple[TextIO, TextIO]:
    """Returns the streams of the protocol, on descriptors that no step has access to.

    A step reads an empty standard input, and output of native code or an emitter to descriptor 1 goes to standard error: neither
    can pass for a request or an answer. A fork of this process has neither stream.
    """
    requests, responses = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    close_in_copies(requests.fileno(), responses.fileno())
    # Descriptors instead of `sys.stdin`: XLA and a kernel's C code use only these.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, responses


def main(steps: Steps, usage: str | None, argv: Sequence[str]) -> int:
    """Runs the command line's step or the worker; returns the exit status."""
    if "--persistent_worker" in argv:
        serve(steps, *_private_streams())
        return EXIT_OK
    if not argv:
        print(usage, file=sys.stderr)
        return EXIT_USAGE
    code, output = run(steps, argv)
    sys.stderr.write(output)
    return code
