"""Takes a NEFF from the caches, or makes it: Bazel's compile actions call this where a cache is configured.

    python -m kernelgen.compilers.cached KEY OUTPUT COMMAND...

KEY is the NEFF's key as JSON (`neff.identity.NeffKey`), OUTPUT the file to write, COMMAND the command that compiles to OUTPUT. The
environment selects the caches (docs/reference/caching.md). The exit status is COMMAND's if it ran and failed, or 75 (`EX_TEMPFAIL`)
if the caches are unusable: then the caller compiles by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelgen import fileio
from kernelgen.cache import COMPILED, Cache, CacheSettings
from kernelgen.compilers.neuronx_cc_driver import NO_CACHE
from kernelgen.errors import KernelgenError
from kernelgen.neff.identity import NeffKey


class _Failed(Exception):
    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


def main(argv: Sequence[str]) -> int:
    key, output, command = NeffKey.from_json(json.loads(argv[0])), Path(argv[1]), argv[2:]

    def make() -> bytes:
        status = subprocess.run(command, check=False).returncode
        if status:
            raise _Failed(status)
        return output.read_bytes()

    try:
        cache = Cache(CacheSettings.make(), lambda text: print(f"warning: {text}", file=sys.stderr))
    except KernelgenError as error:
        print(f"warning: kernelgen's cache is not used: {error}", file=sys.stderr)
        return NO_CACHE
    try:
        neff, source = cache.neff(key, output.name.partition(".")[0], make)
    except _Failed as failure:
        return failure.status if failure.status > 0 else 128 - failure.status
    if source != COMPILED:
        fileio.write_bytes(output, neff)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
