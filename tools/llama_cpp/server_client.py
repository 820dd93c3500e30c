"""Runs llama-server in its own process, and a client that sends a question and reads the answer as a stream."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 1800
"""The most seconds for the server to start or to answer."""


@dataclass(frozen=True)
class Answer:
    """The answer that a client received.

    Attributes:
        tokens: all tokens, or those received before the client disconnected.
        pieces: the number of pieces in the stream.
        n_tokens: the server's number of tokens of the whole answer; pieces omit the tokens of incomplete characters.
        drafted, accepted: the number of drafted tokens, and of those accepted into the answer; 0 if the client disconnected.
    """

    tokens: tuple[int, ...]
    pieces: int
    n_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@contextlib.contextmanager
def serving(command: Sequence[object], environment: Mapping[str, str], log: Path) -> Iterator[int]:
    """Runs a server until it is ready; yields its port, and interrupts it afterwards as Ctrl+C does.

    Raises:
        RuntimeError: the server ended by itself, or is not ready after TIMEOUT seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as written, subprocess.Popen(words, env=environment, stdout=written, stderr=written) as server:
        try:
            begun = time.monotonic()
            while not _healthy(port):
                if server.poll() is not None or time.monotonic() - begun > TIMEOUT:
                    raise RuntimeError(f"llama-server does not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield port
        finally:
            server.terminate()
            server.wait(timeout=120)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def ask(port: int, question: str, leave_after: int | None, picture: bytes | None = None, *, longest: int) -> Answer:
    """Requests the likeliest answer and reads its pieces as they arrive.

    Args:
        port: the server's port.
        question: the user's message.
        leave_after: the number of pieces after which the client disconnects; None to read all.
        picture: an image file for the question.
        longest: the most tokens of the answer.
    """
    content: object = question
    encoded = base64.b64encode(picture).decode() if picture else ""
    if picture:
        url = {"type": "image_url", "image_url": {"url": f"data:image/x-portable-pixmap;base64,{encoded}"}}
        content = [url, {"type": "text", "text": question}]
    chat = {"messages": [{"role": "user", "content": content}]}
    prompt = json.loads(_post(port, "/apply-template", chat)[1].read())["prompt"]
    if picture:
        prompt = {"prompt_string": prompt, "multimodal_data": [encoded]}
    body = {
        "prompt": prompt,
        "stream": True,
        "return_tokens": True,
        "n_predict": longest,
        "temperature": 0,
        "seed": 1,
    }
    connection, response = _post(port, "/completion", body)
    tokens: list[int] = []
    pieces = 0
    timings: Mapping[str, int] = {}
    predicted = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "content" not in event:
            raise RuntimeError(f"llama-server: {event}")
        timings = event.get("timings", timings)
        predicted = event.get("tokens_predicted", predicted)
        if not event["stop"]:
            tokens += event["tokens"]
            pieces += 1
        if pieces == leave_after:
            break
    connection.close()
    return Answer(tuple(tokens), pieces, predicted, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


def _post(port: int, path: str, body: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"llama-server: {response.status}: {response.read().decode(errors='replace')[:500]}")
    return connection, response
