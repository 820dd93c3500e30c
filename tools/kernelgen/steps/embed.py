"""The step `embed`: a pack as sources that a program links."""

from __future__ import annotations

from kernelgen.bundle import embed as embedding
from kernelgen.bundle import pack
from kernelgen.steps.common import write_depfile
from kernelgen.steps.protocol import Arguments, maybe, one


def run(arguments: Arguments) -> None:
    """Writes the sources that embed a bundle: `--pack`, and the folder `--output`.

    The assembly uses the pack's path as given, or the path in `--incbin`.
    """
    path = one(arguments, "pack")
    paths = embedding.write(one(arguments, "output"), pack.read(path), incbin=maybe(arguments, "incbin") or path)
    write_depfile(arguments, str(paths[0]))
