"""The program that `kernelgen doctor --device` runs in separate processes: LIBNRT BUNDLE. Prints `measured.fingerprint` as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kernelgen.device import measured
from kernelgen.device.bench import DeviceBench
from kernelgen.device.libnrt import Libnrt, StatusError


def main(libnrt: Path, bundle: Path) -> None:
    """Waits until the previous process has released its cores, and prints the result."""
    bench = DeviceBench(libnrt, bundle)
    until = time.monotonic() + measured.CORES_BUSY
    while True:
        bench.nrt = Libnrt(libnrt)
        try:
            bench.nrt.init()
            break
        except StatusError:
            if time.monotonic() > until:
                raise
            time.sleep(1)
    for kernel in measured.again(bench):
        bench.models[kernel.name] = bench.nrt.load(kernel.neff)
    print(json.dumps(measured.fingerprint(bench)))
    bench.nrt.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
