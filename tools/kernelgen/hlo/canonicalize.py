"""The canonical form of an HLO module: equal meaning, equal bytes.

A compile's key has the HLO's bytes, so the bytes must contain nothing that does not change the kernel: no ids or names from a
counter, no source locations, no order from the emitter's text. Also, neuronx-cc reads instruction ids as 32-bit integers, while
XLA packs the computation's id into their upper half.

The form:

* calls are inlined, so that an emitter's helper functions leave no trace; instructions that no result needs are dropped;
* a computation lists its parameters by number, then the other instructions in depth-first order of operands from the root;
* computations come callee before caller, numbered from 1; instructions are numbered from 1 through the whole module;
* channels of collectives are numbered from 1 in that order;
* names are `opcode.id`; metadata, stack frames, shardings and profiles are removed, and so are backend configurations, except
  configurations of custom calls;
* the entry's parameters and results carry the NEFF's tensor names, as the frontend attributes `neff_input_names` and
  `neff_output_names`; an input whose memory holds a result is named `<name>.must_alias_input`, and the pair is recorded in
  `input_output_alias`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelgen.hlo import custom_calls, proto

MODULE_NAME = "kernel"

# Fields of a module that describe how or where it was made, or how devices share it, but not its computation.
_MODULE_NOISE = (
    "schedule",
    "cross_program_prefetches",
    "spmd_output_sharding",
    "profile_info",
    "spmd_parameters_shardings",
    "device_assignment",
    "use_auto_spmd_partitioning",
    "stack_frame_index",
    "buffer_donor",
    "input_output_alias",
)
_INSTRUCTION_NOISE = ("metadata", "sharding", "backend_config", "statistics_viz", "original_value")

# Results that are a parameter's own bytes: the compiler requires an instruction that moves them.
_MOVES_NOTHING = ("parameter", "reshape", "bitcast")


def canonicalize(
    data: bytes,
    inputs: Sequence[str],
    outputs: Sequence[str] | None = None,
    *,
    aliases: Mapping[int, int] | None = None,
) -> bytes:
    """Returns the canonical form of a serialized `HloModuleProto`; a canonical module is returned unchanged.

    Args:
        data: the module. Its root is one array, or a tuple of them.
        inputs: the name of each parameter, by number.
        outputs: the name of each result; `output0` and so on by default.
        aliases: result number → number of the parameter whose memory holds it.

    Raises:
        ValueError: `data` is not such a module, or the numbers of names and of parameters or results differ.
    """
    module = proto.parse(data)
    inline_calls(module)
    entry = proto.entry(module)
    parameters = proto.parameters(entry)
    if len(parameters) != len(inputs):
        raise ValueError(f"the module has {len(parameters)} parameters and {len(inputs)} names were given")
    _copy_unmoved_results(module, entry)
    # Order before ids, and ids before names: each depends only on the one before.
    order = _order_computations(module)
    reordered = [_order_instructions(c) for c in order]
    _renumber(module, order, reordered)
    entry = proto.entry(module)
    _strip(module)
    _name(module, entry, inputs, outputs, dict(aliases or {}))
    return proto.serialize(module)


# --- structure ------------------------------------------------------------------------------------------------------------


def inline_calls(module: Any) -> None:
    """Replaces every `call` by the instructions of the called computation, innermost first."""
    by_id = proto.computations(module)
    # Each call copies the helper, so every copy needs new ids that are unique in the module.
    next_id = 1 + max((i.id for c in module.computations for i in c.instructions), default=0)
    done: set[int] = set()

    def visit(computation: Any) -> None:
        nonlocal next_id
        if computation.id in done:
            return
        done.add(computation.id)
        for i in computation.instructions:
            for callee in i.called_computation_ids:
                visit(by_id[callee])
        if not any(i.opcode == "call" for i in computation.instructions):
            return
        kept: list[Any] = []
        replaced: dict[int, int] = {}
        for i in computation.instructions:
            _substitute(i.operand_ids, replaced)
            _substitute(i.control_predecessor_ids, replaced)
            if i.opcode != "call":
                kept.append(i)
                continue
            callee = by_id[i.called_computation_ids[0]]
            # Two passes: a callee may list a parameter after an instruction that reads it.
            local: dict[int, int] = {}
            for inner in callee.instructions:
                if inner.opcode == "parameter":
                    local[inner.id] = i.operand_ids[inner.parameter_number]
            for inner in callee.instructions:
                if inner.opcode == "parameter":
                    continue
                copy = type(inner)()
                copy.CopyFrom(inner)
                local[inner.id] = copy.id = next_id
                next_id += 1
                _substitute(copy.operand_ids, local)
                _substitute(copy.control_predecessor_ids, local)
                kept.append(copy)
            replaced[i.id] = local[callee.root_id]
        computation.root_id = replaced.get(computation.root_id, computation.root_id)
        _set_instructions(computation, kept)

    for computation in list(module.computations):
        visit(computation)


def _copy_unmoved_results(module: Any, entry: Any) -> None:
    """Puts a `copy` after every result that is a parameter, or a reshape of one."""
    by_id = {i.id: i for i in entry.instructions}
    next_id = 1 + max(i.id for c in module.computations for i in c.instructions)

    def copied(result: int) -> int:
        nonlocal next_id
        source = by_id[result]
        while source.opcode in _MOVES_NOTHING and source.opcode != "parameter":
            source = by_id[source.operand_ids[0]]
        if source.opcode != "parameter":
            return result
        copy = entry.instructions.add(opcode="copy", id=next_id, operand_ids=[result])
        copy.shape.CopyFrom(by_id[result].shape)
        next_id += 1
        return int(copy.id)

    root = by_id[entry.root_id]
    if root.opcode == "tuple":
        for k, operand in enumerate(root.operand_ids):
            root.operand_ids[k] = copied(operand)
    else:
        entry.root_id = copied(root.id)


def _order_computations(module: Any) -> list[Any]:
    """Returns the computations that the entry needs, each after the computations that it calls."""
    by_id = proto.computations(module)
    order: dict[int, Any] = {}

    def visit(computation: Any) -> None:
        if computation.id in order:
            return
        # In the final order, so that the callees' order does not depend on the emitter's.
        for i in _order_instructions(computation):
            for callee in i.called_computation_ids:
                visit(by_id[callee])
        order[computation.id] = computation

    visit(proto.entry(module))
    return list(order.values())


def _order_instructions(computation: Any) -> list[Any]:
    """Returns the parameters by number, then the root's dependencies, operands first, and effects that nothing depends on."""
    by_id = {i.id: i for i in computation.instructions}
    order = {i.id: i for i in proto.parameters(computation)}

    # With an explicit stack: long chains exceed Python's recursion limit.
    def visit(first: int) -> None:
        stack = [first]
        while stack:
            i = by_id[stack[-1]]
            if i.id in order:
                stack.pop()
                continue
            # Revisited after its operands: then none is missing. An operand of two instructions is pushed twice.
            missing = [n for n in (*i.control_predecessor_ids, *i.operand_ids) if n not in order]
            if missing:
                stack.extend(reversed(missing))
            else:
                order[i.id] = i
                stack.pop()

    visit(computation.root_id)
    for i in computation.instructions:
        if i.custom_call_has_side_effect or i.opcode in ("outfeed", "send", "recv", "infeed"):
            visit(i.id)
    return list(order.values())


def _renumber(module: Any, order: list[Any], instructions: list[list[Any]]) -> None:
    computation_ids = {c.id: n for n, c in enumerate(order, start=1)}
    entry_id = computation_ids[module.entry_computation_id]
    kept = []
    number = channel = 1
    for computation, listed in zip(order, instructions, strict=True):
        ids = {i.id: number + k for k, i in enumerate(listed)}
        number += len(listed)
        copy = type(computation)()
        copy.CopyFrom(computation)
        _set_instructions(copy, listed)
        for i in copy.instructions:
            i.id = ids[i.id]
            _substitute(i.operand_ids, ids)
            _substitute(i.control_predecessor_ids, ids)
            i.control_predecessor_ids.sort()  # a set, unlike operands
            _substitute(i.called_computation_ids, computation_ids)
            if i.channel_id:
                i.channel_id = channel
                channel += 1
        copy.root_id = ids[computation.root_id]
        copy.id = computation_ids[computation.id]
        kept.append(copy)
    del module.computations[:]
    module.computations.extend(kept)
    module.entry_computation_id = entry_id


def _set_instructions(computation: Any, instructions: list[Any]) -> None:
    # Copy first: the messages belong to the field that is about to be cleared.
    copies = []
    for i in instructions:
        copy = type(i)()
        copy.CopyFrom(i)
        copies.append(copy)
    del computation.instructions[:]
    computation.instructions.extend(copies)


def _substitute(ids: Any, mapping: Mapping[int, int]) -> None:
    for k, value in enumerate(ids):
        if value in mapping:
            ids[k] = mapping[value]


# --- names ----------------------------------------------------------------------------------------------------------------


def _strip(module: Any) -> None:
    for name in _MODULE_NOISE:
        module.ClearField(name)
    module.id = 0
    module.ClearField("frontend_attributes")
    for computation in module.computations:
        computation.ClearField("execution_thread")
        for i in computation.instructions:
            for name in _INSTRUCTION_NOISE:
                # A custom call's configuration is an argument of the call.
                if name != "backend_config" or i.opcode != "custom-call":
                    i.ClearField(name)
            kept = [a for a in i.frontend_attributes.map if i.custom_call_target == custom_calls.TARGET]
            attributes = {a.key: a.value for a in kept if a.key in custom_calls.ATTRIBUTES}
            i.ClearField("frontend_attributes")
            for key, value in sorted(attributes.items()):
                i.frontend_attributes.map.add(key=key, value=value)
            # XLA also writes the message when it is empty.
            if i.result_accuracy.mode == 0 and not i.result_accuracy.ByteSize():
                i.ClearField("result_accuracy")


def _name(
    module: Any, entry: Any, inputs: Sequence[str], outputs: Sequence[str] | None, aliases: dict[int, int]
) -> None:
    module.name = module.entry_computation_name = MODULE_NAME
    names = [name + proto.MUST_ALIAS_SUFFIX if n in aliases.values() else name for n, name in enumerate(inputs)]
    for computation in module.computations:
        computation.name = MODULE_NAME if computation.id == entry.id else f"computation.{computation.id}"
        for i in computation.instructions:
            i.name = f"{i.opcode}.{i.id}"
        local = [i.name for i in proto.parameters(computation)]
        if computation.id == entry.id:
            for i, name in zip(proto.parameters(computation), names, strict=True):
                i.name = name
                i.frontend_attributes.map.add(key=proto.INPUT_NAMES, value=name)
            local = names
        del computation.program_shape.parameter_names[:]
        computation.program_shape.parameter_names.extend(local)
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    results = len(root.operand_ids) if root.opcode == "tuple" else 1
    outputs = [f"output{k}" for k in range(results)] if outputs is None else outputs
    if len(outputs) != results:
        raise ValueError(f"the module has {results} results and {len(outputs)} names were given")
    root.frontend_attributes.map.add(key=proto.OUTPUT_NAMES, value=",".join(outputs))
    module.host_program_shape.CopyFrom(entry.program_shape)
    for result, parameter in sorted(aliases.items()):
        module.input_output_alias.entries.add(
            output_shape_index=[result] if root.opcode == "tuple" else [],
            parameter_number=parameter,
            kind=proto.MUST_ALIAS,
        )
