"""Bazel's protocol for a worker that takes many requests at once (a multiplex worker): JSON, a message a line.

Each request is run by a process of its own among a few that stay: emitting holds Python's interpreter lock, and a process that XLA
aborts takes no other request with it. Bazel looks only every 10 ms for the answer of a worker that takes one request at a time;
those of a multiplex worker it reads as they come, and a kernel takes but some 10 ms.

Source of the protocol: https://bazel.build/remote/creating and https://bazel.build/remote/multiplex.
"""

from __future__ import annotations

import json
import os
import select
from collections import deque
from typing import IO, Any

from kernelgen.building.pool import Pool

_CHUNK = 1 << 16


def serve(requests: IO[bytes], responses: IO[bytes], size: int | None = None) -> None:
    """Answers work requests, in the order in which they are done, until `requests` ends and all are answered.

    Args:
        requests: a pipe. A request's `sandboxDir`, if it has one, is the folder that its paths are relative to.
        responses: where the answers go.
        size: how many requests run at a time, the others wait; None: as many as the machine has cores.
    """
    waiting: deque[dict[str, Any]] = deque()
    rest, more = b"", True
    with Pool(size or os.cpu_count() or 1) as pool:
        running = 0
        while more or running:
            for answer in pool.wait(requests if more else None):
                running -= 1
                response = {"exitCode": answer.exit_code, "output": answer.output, "requestId": answer.task}
                responses.write(json.dumps(response).encode() + b"\n")
                responses.flush()
            if more and select.select([requests], [], [], 0)[0]:
                chunk = os.read(requests.fileno(), _CHUNK)
                more = bool(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                waiting.extend(json.loads(line) for line in lines if line.strip())
            while waiting and pool.idle:
                request = waiting.popleft()
                number, folder = request.get("requestId", 0), request.get("sandboxDir")
                pool.start(number, request.get("arguments", []), folder=folder)
                running += 1
