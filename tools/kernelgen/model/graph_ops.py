"""Reads the ops of a model's graphs from the output of llama.cpp's `test-export-graph-ops` or of export-graphs.

`test-export-graph-ops` writes one line per distinct op:

    op type ne[4] n_params params[n_params] n_inputs {type ne[4] nb[4]}* name

Ops and types are ggml's enum values; the name is the rest of the line and may contain blanks.
docs/reference/graphs.md describes the output of export-graphs (backend/exporter).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.ggml.ops import N_WORDS
from kernelgen.spec.kernel import KernelSpec, spec_from_ggml

if TYPE_CHECKING:
    from kernelgen.dispatch.grouping import Groups
from kernelgen.manifest.document import short
from kernelgen.model.graphs import Graph, GraphReader, ModelHeader

_MAX_INPUTS = 10  # GGML_MAX_SRC


@dataclass(frozen=True, slots=True)
class GraphCall:
    """The kernels of one graph.

    Attributes:
        line: its line in the export, from 1; or the graph's number.
        sizes: the call's sizes that the export has, of `n_tokens`, `n_outputs`, `n_seqs`, `n_kv`, `n_kv_swa`; empty if the
            export has the distinct ops of several graphs.
        context: the context's settings, such as `n_ctx` and `flash_attn`; empty if `sizes` is.
        nodes: the number of nodes that each kernel computes.
        groups: the number of nodes in each group, one group for each launch; None if the export has no whole graphs, or no
            graph kernels were given.
        outside: the number of nodes outside groups that each kernel computes, by the reason; empty if `groups` is None.
    """

    line: int
    sizes: Mapping[str, int]
    context: Mapping[str, Any]
    nodes: Mapping[KernelSpec, int]
    groups: tuple[int, ...] | None = None
    outside: Mapping[str, Mapping[KernelSpec, int]] = field(default_factory=dict)

    @property
    def alone(self) -> Mapping[KernelSpec, int]:
        """The number of nodes outside groups that each kernel computes."""
        if self.groups is None:
            return self.nodes
        found: Counter[KernelSpec] = Counter()
        for nodes in self.outside.values():
            found.update(nodes)
        return found


@dataclass(frozen=True, slots=True)
class GraphExport:
    """The kernels of a model's graphs.

    Attributes:
        file: the export's name in messages.
        ops: (kernel, line, node name) of every distinct op at its first place.
        calls: the graphs.
    """

    file: str
    ops: tuple[tuple[KernelSpec, int, str], ...]
    calls: tuple[GraphCall, ...]


class Collector:
    """Makes a `GraphExport` of graphs.

    Args:
        file: the export's name in messages.
        groups: the available graph kernels.
    """

    def __init__(self, file: str, groups: Groups | None = None) -> None:
        self._file = file
        self._groups = groups
        self._specs: dict[int, KernelSpec] = {}
        self._found: dict[KernelSpec, tuple[KernelSpec, int, str]] = {}
        self._calls: list[GraphCall] = []

    def add(self, graph: Graph, line: int) -> None:
        """Adds a graph; nodes without elements need no kernel.

        Raises:
            KernelgenError: no kernel can compute a node.
        """
        nodes: Counter[KernelSpec] = Counter()
        for node, name in zip(graph.nodes, graph.names, strict=True):
            if node.empty:
                continue
            spec = self._specs.get(id(node))  # equal nodes of a reader are one object
            if spec is None:
                try:
                    spec = self._specs[id(node)] = node.spec()
                except (TypeError, ValueError) as error:
                    raise KernelgenError(Diagnostic(f"{short(name)}: {error}", Location(self._file, line, 1))) from None
            self._found.setdefault(spec, (spec, line, name))
            nodes[spec] += 1
        self._calls.append(self._call(graph, line, nodes))

    def _call(self, graph: Graph, line: int, nodes: Counter[KernelSpec]) -> GraphCall:
        call = GraphCall(line, graph.sizes, graph.context, MappingProxyType(nodes))
        if not self._groups:
            return call
        grouping = self._groups.find(graph)
        outside: dict[str, Counter[KernelSpec]] = {}
        for i, why in grouping.outside:
            spec = self._specs.get(id(graph.nodes[i]))
            if spec is not None:
                outside.setdefault(why.words, Counter())[spec] += 1
        return replace(call, groups=grouping.sizes, outside=outside)

    def export(self) -> GraphExport:
        """Returns the export of all added graphs.

        Raises:
            KernelgenError: no graph has an op to compute.
        """
        if not self._found:
            raise KernelgenError(Diagnostic("no op in the graph export", Location(self._file, 1, 1)))
        return GraphExport(self._file, tuple(self._found.values()), tuple(self._calls))


def read(path: str | Path) -> list[tuple[KernelSpec, int, str]]:
    """Returns (kernel, line, node name) of every distinct op, in the file's order.

    Raises:
        KernelgenError: see `read_export`.
    """
    return list(read_export(path).ops)


def read_export(path: str | Path, groups: Groups | None = None) -> GraphExport:
    """Reads an export. A file of test-export-graph-ops gives one call without sizes, with each distinct op once.

    Args:
        path: the file.
        groups: graph kernels to find in whole graphs.

    Raises:
        KernelgenError: the file can't be read, has no op, or has broken lines; the error lists each of these.
    """
    file = str(path)
    data = _read(path)
    if data.startswith(b"{"):
        return _graphs(data, file, groups)
    lines = data.decode("utf-8", "replace").splitlines()
    found: list[tuple[KernelSpec, int, str]] = []
    problems: list[Diagnostic] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            spec, name = _parse(line)
        except _Broken as error:
            problems.append(Diagnostic(str(error), Location(file, number, error.column)))
        else:
            found.append((spec, number, name))
    if problems:
        raise KernelgenError(problems)
    if not found:
        raise KernelgenError(Diagnostic("no op in the graph export", Location(file, 1, 1)))
    return GraphExport(file, tuple(found), (GraphCall(1, {}, {}, Counter(spec for spec, _, _ in found)),))


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise KernelgenError(f"can't read '{path}': {error.strerror or error}") from None


def read_graphs(path: str | Path) -> list[Graph]:
    """Returns the graphs of an export, each once; an empty list for a file of test-export-graph-ops.

    Raises:
        KernelgenError: the file can't be read, or a line is broken.
    """
    exported = read_described(path)
    return [] if exported is None else exported[1]


def read_described(path: str | Path) -> tuple[ModelHeader, list[Graph]] | None:
    """Returns the first line and the graphs of an export, each once; None for a file of test-export-graph-ops.

    Raises:
        KernelgenError: the file can't be read, or a line is broken.
    """
    data = _read(path)
    if not data.startswith(b"{"):
        return None
    reader = GraphReader(data.splitlines(), str(path))
    header = reader.model()
    found: dict[object, Graph] = {}
    for graph in reader.graphs():
        roots = tuple((root.shape, root.node, root.output) for root in graph.roots.values())  # names are for readers
        found.setdefault((graph.nodes, graph.wires, roots, graph.is_probe, graph.is_piece), graph)
    return header, list(found.values())


def _graphs(data: bytes, file: str, groups: Groups | None) -> GraphExport:
    reader = GraphReader(data.splitlines(), file)
    reader.model()
    collector = Collector(file, groups)
    for number, graph in enumerate(reader.graphs(), 2):
        collector.add(graph, number)
    return collector.export()


class _Broken(Exception):
    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


class _Fields:
    """The integers of a line, separated by blanks and read one after another."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.at = 0

    def take(self, what: str, low: int = -(2**63), high: int = 2**63 - 1) -> int:
        """Returns the next field; `what` names it in a message."""
        begin = self.at
        while begin < len(self.line) and self.line[begin] == " ":
            begin += 1
        end = begin
        while end < len(self.line) and self.line[end] != " ":
            end += 1
        text = self.line[begin:end]
        if not text:
            raise _Broken(f"the line ends where {what} is expected", begin + 1)
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 19 or not low <= int(text) <= high:
            raise _Broken(f"expected {what}, not '{short(text, 40)}'", begin + 1)
        self.at = end
        return int(text)

    def rest(self) -> str:
        return self.line[self.at :].strip()


def _parse(line: str) -> tuple[KernelSpec, str]:
    fields = _Fields(line)
    op = fields.take("an op number")
    kind = fields.take("a type number")
    ne = [fields.take(f"ne{i} of the result", 1) for i in range(4)]
    fields.take(f"the count of parameters ({N_WORDS})", N_WORDS, N_WORDS)
    words = [fields.take(f"word {i} of op_params", -(2**31), 2**31 - 1) for i in range(N_WORDS)]
    count = fields.take(f"the count of inputs (at most {_MAX_INPUTS})", 0, _MAX_INPUTS)
    inputs = []
    for i in range(count):
        t = fields.take(f"the type number of input {i}")
        input_ne = [fields.take(f"ne{d} of input {i}", 1) for d in range(4)]
        input_nb = [fields.take(f"nb{d} of input {i}", 0) for d in range(4)]
        inputs.append((t, input_ne, input_nb))
    try:
        return spec_from_ggml(op, words, inputs, (kind, ne)), fields.rest() or "-"
    except ValueError as error:
        raise _Broken(str(error), 1) from None
