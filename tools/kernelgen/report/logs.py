"""The logs of compiles: what neuronx-cc printed while it compiled a bundle's kernels, where a build kept it.

A log is beside its NEFF (`kernelgen.neff.provenance.log_beside`): `kernelgen build` names it after the NEFF's key, CMake and Bazel
after the kernel and the settings. A NEFF that came from kernelgen's cache has none, or with Bazel an empty one, because each output
of an action has to be there. One that the simulator made has none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from kernelgen.bundle.reader import Stored
from kernelgen.compilers.settings import CompileConfig
from kernelgen.neff import provenance
from kernelgen.neff.identity import Key
from kernelgen.spec.filenames import STATE, keyed_neff_file, neff_file

MAX_BYTES = 1 << 20
"""A log that is larger is not one that a build keeps."""

_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def find(bundles: Sequence[Stored], folders: Sequence[Path]) -> dict[str, str]:
    """Returns the logs by kernel, without control characters.

    Args:
        bundles: whose kernels are asked for. The folder that a bundle is in is looked at first.
        folders: output folders of `kernelgen build`, or folders that hold logs.
    """
    found: dict[str, str] = {}
    for bundle in bundles:
        places = [place for folder in (bundle.path.parent, *folders) for place in (folder / STATE / "neff", folder)]
        for kernel in bundle.kernels:
            flags = bundle.origin.flags if kernel.flags is None else kernel.flags
            names = [keyed_neff_file(Key(kernel.hlo_sha256, bundle.origin.compiler, flags).name)]
            with contextlib.suppress(ValueError):  # flags that no build of kernelgen gave
                names.append(neff_file(kernel.id, CompileConfig.from_flags(flags).key))
            for neff in (place / name for place in places for name in names):
                text = _read(provenance.log_beside(neff))
                if text:
                    found[kernel.id] = text
                    break
    return found


def _read(path: Path) -> str | None:
    """Returns the text of a log, None when there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    if len(data) > MAX_BYTES:
        return None
    return _CONTROL.sub("", data.decode(errors="replace").replace("\r\n", "\n"))
