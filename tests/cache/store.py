"""An HTTP server that stores PUT bodies, like nginx with WebDAV, and has faults."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


@dataclass
class Store:
    """A store; use it as a context manager.

    Attributes:
        objects: the stored bodies, by path.
        requests: (method, path) of every request.
        status: the status of all answers to a method.
        delay: seconds before every answer.
        cut: the number of bytes that are sent of an answer.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    status: dict[str, int] = field(default_factory=dict)
    delay: float = 0.0
    cut: int | None = None

    def __post_init__(self) -> None:
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status: int, data: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if store.cut is not None:
                    data, self.close_connection = data[: store.cut], True
                self.wfile.write(data)

            def handle_one(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                store.requests.append((self.command, self.path))
                store.stopped.wait(store.delay)
                if self.command in store.status:
                    self.answer(store.status[self.command])
                elif self.command == "PUT":
                    store.objects[self.path] = body
                    self.answer(201)
                elif self.path in store.objects:
                    self.answer(200, store.objects[self.path])
                else:
                    self.answer(404)

            do_GET = do_PUT = handle_one

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: object) -> None:
                """Prints an error of the handler, unless the client closed the connection."""
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(*args)

        self.stopped = threading.Event()
        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/neffs"

    def count(self, method: str) -> int:
        return sum(m == method for m, _ in self.requests)

    def __enter__(self) -> Store:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()
