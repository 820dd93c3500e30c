"""The logs of compiles: neuronx-cc's output for a bundle's kernels, if a build kept it.

A log is beside its NEFF, named by the kernel and the settings. A NEFF from kernelgen's cache has none (with Bazel an empty one,
because an action must write each output). A simulated NEFF has none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from kernelgen.bundle.reader import StoredBundle
from kernelgen.compilers.settings import CompileConfig
from kernelgen.spec.filenames import STATE, neff_file

_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def find(bundles: Sequence[StoredBundle], folders: Sequence[Path]) -> dict[str, str]:
    """Returns the logs by kernel, without control characters.

    Args:
        bundles: the bundles of the kernels. A bundle's own folder is searched first.
        folders: output folders of `kernelgen build`, or folders that hold logs.
    """
    found: dict[str, str] = {}
    for bundle in bundles:
        places = [place for folder in (bundle.path.parent, *folders) for place in (folder / STATE / "neff", folder)]
        for kernel in bundle.kernels:
            flags = bundle.origin.flags if kernel.flags is None else kernel.flags
            with contextlib.suppress(ValueError):  # flags that no build of kernelgen gave
                log = Path(neff_file(kernel.id, CompileConfig.from_flags(flags).key)).with_suffix(".log")
                text = next(filter(None, (_read(place / log) for place in places)), None)
                if text:
                    found[kernel.id] = text
    return found


def _read(path: Path) -> str | None:
    """Returns the text of a log, or None if there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return _CONTROL.sub("", data.decode(errors="replace").replace("\r\n", "\n"))
