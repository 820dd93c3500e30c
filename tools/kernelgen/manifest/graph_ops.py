"""Reads the ops of a model's graphs, as llama.cpp's `test-export-graph-ops` writes them, or export-graphs (backend/exporter).

The former has one line per distinct op:

    op type ne[4] n_params params[n_params] n_inputs {type ne[4] nb[4]}* name

All numbers are ggml's enum values; the name is the rest of the line and may hold blanks. The latter is described in docs/graphs.md.
"""

from __future__ import annotations

from pathlib import Path

from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.ggml.ops import N_WORDS
from kernelgen.kernel import KernelSpec, spec_from_ggml
from kernelgen.manifest.document import short
from kernelgen.model.graphs import Reader

_MAX_INPUTS = 10  # GGML_MAX_SRC


def read(path: str | Path) -> list[tuple[KernelSpec, int, str]]:
    """Returns (kernel, line, node name) of every distinct op, in the file's order.

    Raises:
        KernelgenError: the file can't be read, holds no op, or has broken lines; each is named.
    """
    file = str(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise KernelgenError(f"can't read '{file}': {error.strerror or error}") from None
    if data.startswith(b"{"):
        return _graphs(data, file)
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
    return found


def _graphs(data: bytes, file: str) -> list[tuple[KernelSpec, int, str]]:
    """Returns the distinct nodes of whole graphs, each where it is first; those without elements need no kernel."""
    reader = Reader(data.splitlines(), file)
    reader.model()
    found: dict[KernelSpec, tuple[KernelSpec, int, str]] = {}
    for number, graph in enumerate(reader.graphs(), 2):
        for node, name in zip(graph.nodes, graph.names, strict=True):
            if node.empty:
                continue
            try:
                spec = node.spec()
            except (TypeError, ValueError) as error:
                raise KernelgenError(Diagnostic(f"{short(name)}: {error}", Location(file, number, 1))) from None
            found.setdefault(spec, (spec, number, name))
    if not found:
        raise KernelgenError(Diagnostic("no op in the graph export", Location(file, 1, 1)))
    return list(found.values())


class _Broken(Exception):
    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


class _Fields:
    """The blank-separated integers of a line, taken one after another."""

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
