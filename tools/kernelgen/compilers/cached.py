"""Takes a NEFF from the caches, or makes it: what Bazel's compile actions call where a cache is configured.

    python -m kernelgen.compilers.cached KEY OUTPUT COMMAND...

KEY is the NEFF's key as JSON (`compilers.identity.Key`), OUTPUT the file to write, COMMAND what compiles it to OUTPUT. The
environment says which caches there are (docs/reference/caching.md). The exit status is COMMAND's when it ran and failed, and 75
(`EX_TEMPFAIL`) when the caches can't be used at all: then the caller compiles by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelgen import fileio
from kernelgen.cache import COMPILED, Cache, CacheSettings, Notices
from kernelgen.compilers.neuronx_cc_driver import NO_CACHE
from kernelgen.errors import KernelgenError
from kernelgen.neff.identity import Key


class _Failed(Exception):
    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


def main(argv: Sequence[str]) -> int:
    key, output, command = Key.from_json(json.loads(argv[0])), Path(argv[1]), argv[2:]

    def make() -> bytes:
        status = subprocess.run(command, check=False).returncode
        if status:
            raise _Failed(status)
        return output.read_bytes()

    try:
        cache = Cache(CacheSettings.make(), Notices(lambda text: print(f"warning: {text}", file=sys.stderr)))
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
