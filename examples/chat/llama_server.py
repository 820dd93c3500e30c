"""Runs llama-server as a process, and holds a conversation with it."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kernelgen.errors import KernelgenError, printable

HOST = "127.0.0.1"
_STOP_SECONDS = 10
"""Seconds that a server may take to end before it is killed."""
_TOO_LONG = "exceed_context_size_error"
"""llama-server's error type for a conversation with more tokens than its context."""


class Server:
    """A running llama-server: a context manager that stops it, and the processes that it started, at the end.

    Args:
        command: the program and its arguments.
        environment: its environment variables.
        log: the file for its output.

    Attributes:
        port: the port on which it listens, after `wait_until_ready`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.port, self.log = 0, log
        with log.open("wb") as output:
            # In a separate session, Ctrl-C in the terminal reaches only this program, which then stops the server.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                self._process.pid, signal.SIGKILL
            )  # remaining processes of the server and of the simulator's helpers
        self._process.wait()

    def wait_until_ready(self) -> None:
        """Waits until the model is loaded: then the server prints the address to which it is bound.

        Raises:
            KernelgenError: the server ended earlier.
        """
        while not self.port:
            self.check()
            address = re.search(rf"listening on http://{re.escape(HOST)}:(\d+)\n", self.log.read_text(errors="replace"))
            self.port = int(address[1]) if address else 0
            time.sleep(0 if address else 0.1)

    def check(self) -> None:
        """Raises a KernelgenError with the end of the server's log if the server has ended."""
        status = self._process.poll()
        if status is not None:
            tail = "\n    ".join(self.log.read_text(errors="replace").strip().splitlines()[-8:])
            raise KernelgenError(
                f"llama-server ended with exit status {status}:\n    {tail}\n    all of it is in {self.log}"
            )

    def events(self, request: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Yields the server's events for a chat completion as they arrive.

        Raises:
            KernelgenError: the server ended, or refuses the request.
        """
        try:
            connection = http.client.HTTPConnection(HOST, self.port)
            body = json.dumps({**request, "stream": True})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise _refusal(response.read())
            for line in response:
                data = line.decode(errors="replace").strip().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise KernelgenError(f"llama-server does not answer: {error}; its log is {self.log}") from None

    def where(self) -> str:
        """Returns the numbers of nodes that ran on the device and on the CPU, which the backend prints when the server ends."""
        found = re.findall(r"(\d+) ops ran on (NeuronCores|the CPU)", self.log.read_text(errors="replace"))
        counts = {where: sum(int(count) for count, at in found if at == where) for where in ("NeuronCores", "the CPU")}
        return "; ".join(f"{count} nodes ran on {where}" for where, count in counts.items())


class ContextExceeded(KernelgenError):
    """A conversation has more tokens than the server's context."""


def _refusal(body: bytes) -> KernelgenError:
    try:
        error = json.loads(body)["error"]
        message, kind = str(error["message"]), error.get("type")
    except (ValueError, KeyError, TypeError):
        message, kind = body.decode(errors="replace")[:500], None
    return (ContextExceeded if kind == _TOO_LONG else KernelgenError)(f"llama-server: {message}")


class Conversation:
    """The turns of a chat. Sampling is greedy: equal conversations get equal answers.

    Args:
        server: the server that answers.
        max_tokens: the most tokens of an answer.

    Attributes:
        first_word: seconds from the first question to the first word of its answer.
    """

    def __init__(self, server: Server, max_tokens: int) -> None:
        self._server, self._max_tokens = server, max_tokens
        self._turns: list[dict[str, str]] = []
        self.first_word: float | None = None

    def answer(self, text: str) -> None:
        """Prints the answer as it arrives. If the conversation is too long, it drops the oldest turns.

        Raises:
            KernelgenError: the server ended, or the text alone is too long.
        """
        self._turns.append({"role": "user", "content": text})
        while True:
            try:
                words = self._stream()
            except ContextExceeded:
                if len(self._turns) == 1:
                    self._turns.clear()
                    raise
                del self._turns[:2]
                print("(the context is full: the oldest question and its answer were dropped)", file=sys.stderr)
            else:
                self._turns.append({"role": "assistant", "content": words})
                return

    def _stream(self) -> str:
        begun = time.monotonic()
        words = []
        request = {"messages": self._turns, "max_tokens": self._max_tokens, "temperature": 0}
        for event in self._server.events(request):
            if "error" in event:
                raise _refusal(json.dumps(event).encode())
            word = (event.get("choices") or [{}])[0].get("delta", {}).get("content")
            if word:
                if self.first_word is None:
                    self.first_word = time.monotonic() - begun
                words.append(word)
                print(printable(word), end="", flush=True)
        print(flush=True)
        return "".join(words)


def converse(conversation: Conversation) -> None:
    """Reads questions from the terminal and prints the answers, until `/exit` or the end of the input."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() line editing with the arrow keys
    print("Type a question and press Enter; /exit ends the chat.", file=sys.stderr)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text:
            try:
                conversation.answer(text)
            except ContextExceeded as error:
                print("\n".join(error.report()), file=sys.stderr)
