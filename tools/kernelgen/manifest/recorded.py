"""What the backend writes into a manifest that it records: beside each entry how often it was asked for, and how often executed.

    - {op: "add", inputs: […], output: "…"}  # asked for 12 times, executed 8 times

What is only asked for comes from graphs that are measured and never computed, and from a warm-up. The comment is
backend/ggml-neuron/report/record_ops.cpp's, which keeps each entry on a line of its own; earlier versions of
it wrote no `executed`.
"""

from __future__ import annotations

import re

from kernelgen.manifest.document import YamlNode
from kernelgen.manifest.schema import Report

_RAN = re.compile(rb"# asked for \d{1,20} times?, executed (\d{1,20}) times?\s*$")

_HINT = "record it again with GGML_NEURON_RECORD into a new file (docs/guides/record-kernels.md), or leave out --used"


def leave_out_unused(root: YamlNode, text: bytes, report: Report) -> None:
    """Removes the entries that did not run while a manifest was recorded from its `kernels:`.

    Args:
        root: the manifest, which is changed.
        text: the bytes that it was read from.
        report: where mistakes are noted: a manifest, or an entry, that does not say how often it was executed.
    """
    kernels = root.get("kernels") if root.kind == "map" else None
    if kernels is None or kernels.kind != "seq":
        where = root.get("model") if root.kind == "map" else None
        report.fail(
            where or root, "this manifest was not recorded, so it does not list which kernels ran", "leave out --used"
        )
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
