"""`python -m kernelgen.simulator --socket FD`: not for people. The simulator's libnrt starts it and tells it what to do."""

from __future__ import annotations

import argparse
import os
import socket
from typing import NoReturn


def main() -> NoReturn:
    """Serves the client at the other end of an inherited socket."""
    parser = argparse.ArgumentParser(prog="kernelgen.simulator", description="the helper of the simulator's libnrt")
    parser.add_argument("--socket", type=int, required=True, metavar="FD", help="an inherited socket")
    fd = parser.parse_args().socket
    # The client's other descriptors came along; a pipe that is kept open here would keep its reader waiting.
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)

    # Nothing here multiplies matrices with NumPy, whose threads for that spin for a while wherever it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from kernelgen.simulator.server import serve

    serve(control)


if __name__ == "__main__":
    main()
