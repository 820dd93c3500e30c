"""Finds the parameters of an HLO module on which no result depends: a compiler may omit them from a program.

A parameter that shares memory with a result counts as used, because the two are one tensor.
"""

from __future__ import annotations

from kernelgen.hlo import proto


def unused_parameters(hlo: bytes) -> frozenset[int]:
    """Returns the numbers of the entry computation's parameters on which its root does not depend.

    Args:
        hlo: a serialized `HloModuleProto`.

    Raises:
        ValueError: `hlo` is not a module.
    """
    module = proto.parse(hlo)
    entry = proto.entry(module)
    by_id = {i.id: i for i in entry.instructions}
    needed: set[int] = set()
    waiting = [entry.root_id]
    while waiting:
        number = waiting.pop()
        if number not in needed:
            needed.add(number)
            waiting += [*by_id[number].operand_ids, *by_id[number].control_predecessor_ids]
    shared = {e.parameter_number for e in module.input_output_alias.entries}
    numbers = enumerate(proto.parameters(entry))
    return frozenset(n for n, p in numbers if p.id not in needed and n not in shared)
