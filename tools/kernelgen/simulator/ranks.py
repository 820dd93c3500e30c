"""Merges the program of several ranks into one, so that XLA computes it on one device in the same order each time.

Each rank runs the same HLO with inputs of its own. The merged program has the entry computation once for each rank. Plain HLO over
the values of all ranks replaces each collective: an `all-reduce` adds them in the order of the ranks' numbers, so equal inputs give
equal bits. Values that are the same on all ranks are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.hlo import proto
from kernelgen.hlo.lint_checks import MAX_GROUPS
from kernelgen.simulator.writing import Module, Writer, set_shape

_U32 = 8
"""XLA's number of the element type."""

_TUPLE = 13
"""XLA's number of the element type."""

_NUMBERS = ("replica-id", "partition-id")
"""Ops that return the rank's number. A program with one device per rank has either replicas or partitions."""

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-",
    "ragged-all-to-all",
    "reduce-scatter",
    "send",
    "recv",
)
"""Prefixes of the opcodes of collectives."""

_REDUCTIONS = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")


@dataclass(frozen=True, slots=True)
class Collectives:
    """The requirements of a program's collectives.

    Attributes:
        names: the names of the collectives in HLO text.
        groups: the groups of ranks of each collective; empty: all ranks in one group.
        pairs: (source, target) ranks of each `collective-permute`.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    pairs: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks that the program requires; 0 for any number."""
        numbers = [n for groups in self.groups for group in groups for n in group]
        numbers += [n for pairs in self.pairs for pair in pairs for n in pair]
        return max(numbers, default=-1) + 1

    def mistake(self, ranks: int) -> str:
        """Returns why this number of ranks cannot run the program; empty if they can."""
        if self.ranks > ranks:
            return f"its collectives are over {self.ranks} ranks, and {ranks} load it"
        for groups in self.groups:
            if groups and sorted(n for group in groups for n in group) != list(range(ranks)):
                return f"replica groups {_text(groups)} do not have each of {ranks} ranks once"
        for pairs in self.pairs:
            for ends in zip(*pairs, strict=True):
                if len(set(ends)) < len(ends):
                    return f"a collective-permute has a rank twice among its sources or targets: {_text(pairs)}"
        different = len({groups or (tuple(range(ranks)),) for groups in self.groups})
        if different > MAX_GROUPS:
            return f"{different} different replica groups, and a NEFF has {MAX_GROUPS} at most"
        return ""


def collectives_of(hlo: bytes) -> Collectives:
    """Returns the collectives of a serialized `HloModuleProto`.

    Raises:
        ValueError: `hlo` is not a module.
    """
    found = [
        i for c in proto.parse(hlo, Module).computations for i in c.instructions if i.opcode.startswith(_COLLECTIVES)
    ]
    pairs = [tuple((p.source, p.target) for p in i.source_target_pairs) for i in found]
    return Collectives(
        tuple(f"{i.opcode} '{i.name}'" for i in found),
        tuple(_groups(i) for i in found if not i.source_target_pairs),
        tuple(p for p in pairs if p),
    )


def merge(hlo: bytes, ranks: int) -> bytes:
    """Returns a module that computes the results of all ranks.

    It has the parameters of rank 0, then of rank 1, and so on. Its results have the same order, as a tuple.

    Args:
        hlo: a serialized `HloModuleProto` without aliasing of results and parameters.
        ranks: the number of ranks.

    Raises:
        ValueError: `hlo` is not a module, or has an unsupported collective.
    """
    module = proto.parse(hlo, Module)
    entry = proto.entry(module)
    merger = _Merger(module, ranks)
    parameters = proto.parameters(entry)
    arguments: list[list[Any]] = [[] for _ in parameters]
    for rank in range(ranks):
        for i, parameter in enumerate(parameters):
            made = merger.again(parameter)
            made.name = f"{parameter.name}.rank{rank}"
            made.parameter_number = rank * len(parameters) + i
            arguments[i].append(made)
    results = [result for root in merger.emit(entry, arguments) for result in merger.parts(root)]
    made = merger.add(parameters[0] if parameters else results[0], "tuple", (), *results)
    _become_tuple(made.shape, results)
    entry.ClearField("instructions")
    entry.instructions.extend(merger.out)
    entry.root_id = made.id
    flat = [arguments[i][rank] for rank in range(ranks) for i in range(len(parameters))]
    for shape in (entry.program_shape, module.host_program_shape):
        for field in ("parameters", "parameter_names"):
            shape.ClearField(field)
        shape.parameters.extend(a.shape for a in flat)
        shape.parameter_names.extend(a.name for a in flat)
        shape.result.CopyFrom(made.shape)
    # Removes shardings over several devices: the merged program runs on one.
    for field in ("spmd_output_sharding", "spmd_parameters_shardings"):
        module.ClearField(field)
    return proto.serialize(module)


class _Merger(Writer):
    """Appends the computation of each rank.

    Args:
        module: the program, a `Module`.
        ranks: the number of ranks.
    """

    def __init__(self, module: Any, ranks: int) -> None:
        super().__init__(module)
        self._ranks = ranks
        self._computations = proto.computations(module)
        self._meeting = _meeting(module)

    def emit(self, computation: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the root of a computation on each rank.

        Args:
            computation: the computation.
            arguments: for each of its parameters, the instruction on each rank.
        """
        values: dict[int, list[Any]] = {}
        for i in computation.instructions:
            operands = [values[o] for o in i.operand_ids]
            if i.opcode == "parameter":
                values[i.id] = list(arguments[i.parameter_number])
            elif i.opcode.startswith(_COLLECTIVES):
                values[i.id] = self._collective(i, operands)
            elif i.opcode in _NUMBERS:
                values[i.id] = [self._rank(i, rank) for rank in range(self._ranks)]
            elif not self._meeting.isdisjoint(i.called_computation_ids):
                if i.opcode != "call":
                    raise ValueError(
                        f"a collective is in what '{i.name}' ({i.opcode}) calls; the simulator executes those of the "
                        "entry computation"
                    )
                values[i.id] = self.emit(self._computations[i.called_computation_ids[0]], operands)
            else:
                values[i.id] = self._each(i, operands)
        return values[computation.root_id]

    def parts(self, x: Any) -> list[Any]:
        """Returns the parts of a tuple; an array is its own only part."""
        shapes = list(x.shape.tuple_shapes)
        if not shapes:
            return [x]
        made = []
        for n, shape in enumerate(shapes):
            if shape.tuple_shapes:
                raise ValueError("a result is a tuple in a tuple")
            part = self.add(x, "get-tuple-element", (), x)
            part.shape.CopyFrom(shape)
            part.tuple_index = n
            made.append(part)
        return made

    def _each(self, i: Any, operands: list[list[Any]]) -> list[Any]:
        """Returns an instruction on each rank; one shared by all ranks if its operands are shared."""
        made: dict[tuple[int, ...], Any] = {}
        out = []
        for rank in range(self._ranks):
            own = tuple(o[rank].id for o in operands)
            if own not in made:
                made[own] = self.again(i)
                for field in ("operand_ids", "control_predecessor_ids", "sharding"):
                    made[own].ClearField(field)
                made[own].operand_ids.extend(own)
                made[own].name = f"{i.name}.rank{rank}.{made[own].id}"
            out.append(made[own])
        return out

    def _rank(self, like: Any, rank: int) -> Any:
        made = self.add(like, "constant", (), element_type=_U32)
        set_shape(made.literal.shape, (), _U32)
        made.literal.u32s.append(rank)
        return made

    def _collective(self, i: Any, operands: list[list[Any]]) -> list[Any]:
        if i.opcode == "collective-permute":
            return self._permute(i, operands[0])
        function = {
            "all-reduce": self._all_reduce,
            "all-gather": self._all_gather,
            "reduce-scatter": self._reduce_scatter,
        }
        if i.opcode not in function:
            known = ", ".join([*function, "collective-permute"])
            raise ValueError(
                f"'{i.name}' ({i.opcode}) is a collective that the simulator does not execute; it executes {known}"
            )
        out: list[Any] = [None] * self._ranks
        for group in _groups(i) or (tuple(range(self._ranks)),):
            parts = [function[i.opcode](i, group, [o[rank] for rank in group]) for o in operands]
            for place, rank in enumerate(group):
                own = [part[place] for part in parts]
                out[rank] = own[0] if not i.shape.tuple_shapes else self._tuple(own)
        return out

    def _tuple(self, parts: list[Any]) -> Any:
        made = self.add(parts[0], "tuple", (), *parts)
        _become_tuple(made.shape, parts)
        return made

    def _all_reduce(self, i: Any, group: tuple[int, ...], values: list[Any]) -> list[Any]:
        return [self._reduced(i, group, values)] * len(values)

    def _reduced(self, i: Any, group: tuple[int, ...], values: list[Any]) -> Any:
        opcode = self._reduction(i)
        # In the order of the ranks' numbers, whatever the group's order.
        first, *others = [value for _, value in sorted(zip(group, values, strict=True), key=lambda pair: pair[0])]
        for other in others:
            first = self._like(opcode, first, first, other)
        return first

    def _reduction(self, i: Any) -> str:
        """Returns the opcode with which a collective reduces."""
        computation = self._computations[i.called_computation_ids[0]]
        by_id = {own.id: own for own in computation.instructions}
        root = by_id[computation.root_id]
        operands = [by_id[n].opcode for n in root.operand_ids]
        if root.opcode not in _REDUCTIONS or operands != ["parameter"] * 2:
            raise ValueError(
                f"'{i.name}' reduces with {root.opcode} of {', '.join(operands)}; expected one of {', '.join(_REDUCTIONS)}"
            )
        return str(root.opcode)

    def _like(self, opcode: str, x: Any, *operands: Any) -> Any:
        """Returns an instruction with the shape of `x`."""
        return self.add(x, opcode, tuple(x.shape.dimensions), *operands, element_type=x.shape.element_type)

    def _all_gather(self, i: Any, _: tuple[int, ...], values: list[Any]) -> list[Any]:
        axis = i.dimensions[0]
        shape = list(values[0].shape.dimensions)
        shape[axis] *= len(values)
        made = self.add(values[0], "concatenate", tuple(shape), *values, element_type=values[0].shape.element_type)
        made.dimensions.append(axis)
        return [made] * len(values)

    def _reduce_scatter(self, i: Any, group: tuple[int, ...], values: list[Any]) -> list[Any]:
        whole, axis = self._reduced(i, group, values), i.dimensions[0]
        shape = tuple(whole.shape.dimensions)
        own = shape[axis] // len(values)
        out = []
        for place in range(len(values)):
            part = (*shape[:axis], own, *shape[axis + 1 :])
            made = self.add(whole, "slice", part, whole, element_type=whole.shape.element_type)
            for d, n in enumerate(shape):
                start, limit = (place * own, (place + 1) * own) if d == axis else (0, n)
                made.slice_dimensions.add(start=start, limit=limit, stride=1)
            out.append(made)
        return out

    def _permute(self, i: Any, values: list[Any]) -> list[Any]:
        """Returns what each rank receives; zeros for a rank without a source."""
        sources = {p.target: p.source for p in i.source_target_pairs}
        return [values[sources[rank]] if rank in sources else self._zeros(values[0]) for rank in range(self._ranks)]

    def _zeros(self, x: Any) -> Any:
        """Returns zeros of the shape and type of `x`."""
        zero = self.add(x, "constant", (), element_type=_U32)
        set_shape(zero.literal.shape, (), _U32)
        zero.literal.u32s.append(0)
        typed = self.add(x, "convert", (), zero, element_type=x.shape.element_type)
        return self._like("broadcast", x, typed)


def _meeting(module: Any) -> set[int]:
    """Returns the ids of the computations with collectives or rank numbers, directly or in computations that they call."""
    # A computation comes after the computations that it calls.
    found: set[int] = set()
    for computation in module.computations:
        for i in computation.instructions:
            if (
                i.opcode.startswith(_COLLECTIVES)
                or i.opcode in _NUMBERS
                or not found.isdisjoint(i.called_computation_ids)
            ):
                found.add(computation.id)
    return found


def _groups(i: Any) -> tuple[tuple[int, ...], ...]:
    groups = i.device_list.groups or i.replica_groups
    return tuple(tuple(group.ids) for group in groups)


def _text(groups: Sequence[Sequence[int]]) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def _become_tuple(shape: Any, parts: Sequence[Any]) -> None:
    shape.Clear()
    shape.element_type = _TUPLE
    shape.tuple_shapes.extend(p.shape for p in parts)
