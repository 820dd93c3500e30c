"""The comments that the backend writes beside each entry of a recorded manifest: how often the op was requested and executed.

    - {op: "add", inputs: […], output: "…"}  # asked for 12 times, executed 8 times

Ops that are only requested come from graphs that are measured but never computed, and from a warm-up. The comment's format is in
backend/ggml-neuron/report/record_ops.cpp, which writes each entry on one line.
"""

from __future__ import annotations

import re

from kernelgen.manifest.document import YamlNode
from kernelgen.manifest.schema import Report

_RAN = re.compile(rb"# asked for \d{1,20} times?, executed (\d{1,20}) times?\s*$")

_HINT = "record it again with GGML_NEURON_RECORD into a new file (docs/guides/record-kernels.md), or leave out --used"


def leave_out_unused(root: YamlNode, text: bytes, report: Report) -> None:
    """Removes entries from a recorded manifest's `kernels:` that were not executed during the recording.

    Args:
        root: the manifest; it is changed.
        text: the bytes of the manifest.
        report: receives mistakes: a manifest, or an entry, without the count of executions.
    """
    kernels = root.get("kernels") if root.kind == "map" else None
    if kernels is None or kernels.kind != "seq":
        report.fail(root, "this manifest was not recorded, so it does not list which kernels ran", "leave out --used")
        return
    lines = dict(enumerate(text.split(b"\n"), 1))
    counts = [_RAN.search(lines.get(entry.line, b"")) for entry in kernels.value]
    silent = [entry for entry, count in zip(kernels.value, counts, strict=True) if count is None]
    if silent:
        others = f", nor {len(silent) - 1} of the others" if len(silent) > 1 else ""
        report.fail(silent[0], f"nothing says how often this kernel ran{others}", _HINT)
        return
    ran = [entry for entry, count in zip(kernels.value, counts, strict=True) if count and int(count[1])]
    if counts and not ran:
        report.fail(kernels, f"none of the {len(counts)} kernels ran while the manifest was recorded", _HINT)
        return
    kernels.value[:] = ran
