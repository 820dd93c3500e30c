"""Estimates the memory that a program needs for intermediate values.

On a device neuronx-cc decides that, and writes it into the NEFF (`kernelgen.neff.scratchpad`). Here it is the maximum of the values
of the entry computation that are live at the same time, in its order, without

- elementwise functions of inputs and constants alone, such as the floats of a quantized matrix: they are computed where they are
  read;
- results, which have their own memory;
- views of existing values: slices, transposes, broadcasts, conversions;
- an elementwise result that replaces an operand that no later instruction reads.
"""

from __future__ import annotations

from kernelgen.hlo import proto
from kernelgen.hlo.linted import size

_ALIASES = {"reshape", "bitcast", "get-tuple-element", "tuple", "broadcast", "slice", "transpose", "convert"}
"""Instructions that are views of their operands, so they need no memory."""

_COMPUTED = {
    "dot",
    "convolution",
    "reduce",
    "reduce-window",
    "gather",
    "scatter",
    "sort",
    "while",
    "call",
    "custom-call",
}
"""Opcodes whose results other instructions read from memory; the others are elementwise."""


def scratchpad_bytes(hlo: bytes) -> int:
    """Returns the estimate, in bytes.

    Args:
        hlo: a serialized `HloModuleProto`.

    Raises:
        ValueError: `hlo` is not a module.
    """
    entry = proto.entry(proto.parse(hlo))
    by_id = {i.id: i for i in entry.instructions}
    base: dict[int, set[int]] = {}  # the values that hold an instruction's value
    for i in entry.instructions:
        operands = [b for o in i.operand_ids for b in base[o]]
        if i.opcode in _ALIASES or (i.opcode not in _COMPUTED and not operands):
            base[i.id] = set(operands)
        else:
            base[i.id] = {i.id}
    last: dict[int, int] = {}
    for n, i in enumerate(entry.instructions):
        for b in (b for o in i.operand_ids for b in base[o]):
            last[b] = n
    kept = base[entry.root_id]
    live = most = 0
    for n, i in enumerate(entry.instructions):
        ending = {b for o in i.operand_ids for b in base[o] if last[b] == n} - kept
        gone = sum(size(by_id[b].shape) for b in ending)
        made = size(i.shape) if base[i.id] == {i.id} and i.id not in kept else 0
        if i.opcode in _COMPUTED:  # reads its operands while it writes
            most = max(most, live + made)
        live += made - gone
        most = max(most, live)
    return most
