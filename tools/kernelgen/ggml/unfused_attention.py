"""Attention without flash attention: gives its nodes' tensors for kernels with other numbers of tokens and longer caches.

The rows of a token are not adjacent in the scores of all heads, so none of the nodes is cut by itself (`kernelgen.ggml.tokens`).
The backend computes them together, from MUL_MAT of the keys to CONT, with intermediate values in scratch memory
(`backend/ggml-neuron/select/unfused_attention.h`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.tokens import Tensors

_ELEMENTWISE = ("scale", "tanh")
_OPS = ("mul_mat", "soft_max", "cont", *_ELEMENTWISE)


@dataclass(frozen=True, slots=True)
class Member:
    """The role of a node in attention without flash attention.

    Attributes:
        tensors: the node's inputs, then its result.
        tokens: the token axis of each tensor that has one, by the tensor's index.
        cells: the cell axis of each tensor that has one.
        computed: tensors that nodes of the attention, including this one, compute: they have no gaps.
        swapped: the input that is a computed tensor with the axes of tokens and heads swapped.
        mask: the input that hides cells.
        n, n_cells: the node's numbers of tokens and, if it has some, cells.
        heads: number of heads of the scores.
    """

    tensors: Tensors
    tokens: Mapping[int, int]
    cells: Mapping[int, int]
    computed: frozenset[int]
    swapped: int | None
    mask: int | None
    n: int
    n_cells: int | None
    heads: int

    def chunk(self, n: int, n_cells: int | None) -> Tensors:
        """Returns the tensors of a kernel for `n` tokens and `n_cells` cells."""
        return tuple(t and self._chunk_of(i, t, n, n_cells) for i, t in enumerate(self.tensors))

    def _chunk_of(self, i: int, t: TensorDesc, n: int, n_cells: int | None) -> TensorDesc:
        ne = list(t.ne)
        if i in self.tokens:
            ne[self.tokens[i]] = n
        if i in self.cells and n_cells is not None:
            ne[self.cells[i]] = n_cells
        if i in self.computed or (i == self.mask and n_cells != self.n_cells):
            return TensorDesc.make(ne, t.dtype)
        if i == self.swapped:
            return swapped(TensorDesc.make((ne[0], ne[2], ne[1], ne[3]), t.dtype))
        return TensorDesc.make(ne, t.dtype, t.nb)


def swapped(t: TensorDesc) -> TensorDesc:
    """Returns a tensor with axes 1 and 2 swapped."""
    (a, b, c, d), (na, nb, nc, nd) = t.ne, t.nb
    return TensorDesc.make((a, c, b, d), t.dtype, (na, nc, nb, nd))


def members(name: str, inputs: Sequence[TensorDesc | None], output: TensorDesc) -> Iterator[Member]:
    """Yields the possible roles of a node of the op `name` in attention without flash attention.

    The node computes the scores of keys or of values, or is between or after these.
    """
    tensors = (*inputs, output)
    first, last = inputs[0] if inputs else None, len(inputs)
    if first is None or output.dtype != "f32" or any(t.ne[3] != 1 for t in tensors if t is not None):
        return
    if name == "cont":
        yield from _end(tensors, first, output)
        return
    heads, n = output.ne[2], output.ne[1]
    if heads == 1 or not output.contiguous:
        return
    if name in _ELEMENTWISE and first == output:
        yield Member(tensors, {0: 1, 1: 1}, {0: 0, 1: 0}, frozenset((0, 1)), None, None, n, output.ne[0], heads)
    mask = inputs[1] if len(inputs) > 1 else None
    if name == "soft_max" and first == output and (mask is None or mask.ne == (output.ne[0], n, 1, 1)):
        masks = {1: 1} if mask is not None else {}
        cells = {0: 0, last: 0} | dict.fromkeys(masks, 0)
        computed = frozenset((0, last))
        yield Member(
            tensors, {0: 1, last: 1} | masks, cells, computed, None, 1 if masks else None, n, output.ne[0], heads
        )
    if name == "mul_mat" and mask is not None and mask.ne[1:3] == (n, heads):
        yield Member(tensors, {1: 1, 2: 1}, {0: 1, 2: 0}, frozenset((2,)), None, None, n, output.ne[0], heads)
        if mask.contiguous and mask.dtype == "f32":
            yield Member(tensors, {1: 1, 2: 1}, {0: 0, 1: 0}, frozenset((1, 2)), None, None, n, mask.ne[0], heads)
            yield Member(tensors, {1: 1, 2: 1}, {}, frozenset((1, 2)), None, None, n, None, heads)
        yield Member(tensors, {1: 1, 2: 1}, {}, frozenset((2,)), None, None, n, None, heads)


def one_stream(name: str, inputs: Sequence[TensorDesc | None], output: TensorDesc) -> tuple[Tensors, int] | None:
    """Returns the tensors of one stream of a node of such attention, and the number of streams, which the backend computes one
    after another. None if there is one stream, or for any other node.
    """
    n = max((t.ne[3] for t in inputs if t is not None), default=1)
    if n == 1 or name not in _OPS or any(t is not None and t.ne[3] not in (1, n) for t in inputs):
        return None
    rows = name == "cont" and output.ne[3] == 1 and output.ne[1] % n == 0
    ne = (output.ne[0], output.ne[1] // n if rows else output.ne[1], output.ne[2], 1)
    if not rows and output.ne[3] != n:
        return None
    parts = (t and TensorDesc.make((*t.ne[:3], 1), t.dtype, t.nb, t.layout) for t in inputs)
    own = TensorDesc.make(ne, output.dtype)
    one = (*parts, own)
    return (one, n) if any(True for _ in members(name, one[:-1], own)) else None


def _end(tensors: Tensors, heads: TensorDesc, output: TensorDesc) -> Iterator[Member]:
    """Yields the node that concatenates a token's heads."""
    d, n_heads, n, _ = heads.ne
    if n_heads > 1 and swapped(heads).contiguous and output.contiguous:
        for axis, ne in ((1, (d * n_heads, n, 1, 1)), (2, (d, n_heads, n, 1))):
            if output.ne == ne:
                yield Member(tensors, {0: 2, 1: axis}, {}, frozenset((1,)), 0, None, n, None, n_heads)
                return
