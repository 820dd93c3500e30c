"""How much memory a program needs for what it computes on the way to its results: an estimate.

On a device neuronx-cc decides that, and writes it into the NEFF (`kernelgen.neff.scratchpad`). Here it is the most that lives at
the same time of what the entry computation makes, in its order, without

- what is made element by element of inputs and constants alone, such as floats of a quantized matrix: it is made where it is
  read;
- results, which have memory of their own;
- other looks at what is there: slices, transposed, repeated, of another type;
- an element by element result in the place of an operand that no later instruction reads.
"""

from __future__ import annotations

import math
from typing import Any

from kernelgen.hlo import proto
from kernelgen.neff.container import ELEMENT_SIZES

_ALIASES = {"reshape", "bitcast", "get-tuple-element", "tuple", "broadcast", "slice", "transpose", "convert"}
"""Instructions that only show their operands in another way, so they take no memory."""

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
"""What makes something that other instructions read from memory; the rest is made element by element."""


def scratchpad_bytes(hlo: bytes) -> int:
    """Returns the estimate, in bytes.

    Args:
        hlo: a serialized `HloModuleProto`.

    Raises:
        ValueError: `hlo` is not a module.
    """
    entry = proto.entry(proto.parse(hlo))
    by_id = {i.id: i for i in entry.instructions}
    base: dict[int, set[int]] = {}  # what an instruction's value lies in
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
        gone = sum(_size(by_id[b].shape) for b in ending)
        made = _size(i.shape) if base[i.id] == {i.id} and i.id not in kept else 0
        if i.opcode in _COMPUTED:  # reads its operands while it writes
            most = max(most, live + made)
        live += made - gone
        most = max(most, live)
    return most


def _size(shape: Any) -> int:
    if shape.tuple_shapes:
        return sum(map(_size, shape.tuple_shapes))
    element = ELEMENT_SIZES.get(proto.ELEMENT_TYPES.get(shape.element_type, ""), 4)
    return element * math.prod(int(n) for n in shape.dimensions)
