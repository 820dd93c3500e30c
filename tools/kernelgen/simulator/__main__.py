"""`python -m kernelgen.simulator --socket FD`: the simulator's libnrt starts it and sends it requests. Users do not call it."""

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
    # Closes the inherited descriptors of the client: a pipe that stays open here would keep its reader waiting.
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)

    # NumPy's threads for matrix products spin for a while after the import, and this process has no such products.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from kernelgen.simulator.server import serve

    serve(control)


if __name__ == "__main__":
    main()
