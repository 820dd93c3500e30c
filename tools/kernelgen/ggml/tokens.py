"""Cuts a node along its tokens: gives the tensors of kernels for other numbers of tokens, or longer caches.

The op table has the token axis of each tensor (`kernelgen.ggml.ops.Tokens`). The backend cuts in the same way
(`backend/ggml-neuron/select/tokens.cpp`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from kernelgen.ggml.ops import RECURRENT, Tokens, op
from kernelgen.ggml.tensor import TensorDesc, dense_strides

Tensors = tuple[TensorDesc | None, ...]
"""The inputs and then the result."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut a node.

    Attributes:
        rule: the rule that it follows.
        tensors: the node's tensors.
        axes: the axis along which each tensor is cut; None: each chunk has it whole.
        n: number of the node's tokens.
        n_more: elements along the axes of `rule.more`; None if there are none, or nothing would hide further elements.
    """

    rule: Tokens
    tensors: Tensors
    axes: tuple[int | None, ...]
    n: int
    n_more: int | None

    def chunk(self, n: int, n_more: int | None = None) -> Tensors:
        """Returns the tensors of a kernel for `n` tokens and, unless None, `n_more` elements along the axes of `rule.more`.

        Strides are the node's, except for a mask that grows.
        """
        return tuple(
            t and self._chunk_of(i, t, axis, n, n_more)
            for i, (t, axis) in enumerate(zip(self.tensors, self.axes, strict=True))
        )

    def _chunk_of(self, i: int, t: TensorDesc, axis: int | None, n: int, n_more: int | None) -> TensorDesc:
        ne, nb = list(t.ne), t.nb
        if axis is not None:
            ne[axis] = n
        more = self._more(i)
        if more is not None and None not in (self.n_more, n_more) and n_more != self.n_more:
            assert n_more is not None
            ne[more] = n_more
            if i == self.rule.mask:
                nb = dense_strides((ne[0], ne[1], ne[2], ne[3]), t.dtype)
        return TensorDesc.make(ne, t.dtype, nb, t.layout)

    def _more(self, i: int) -> int | None:
        """Returns the axis, besides the token axis, along which kernels may have another number of elements of a tensor."""
        if i == len(self.tensors) - 1:
            return None if self.rule.written is None else self.rule.more.get(self.rule.written)
        return self.rule.more.get(i)

    @property
    def family(self) -> tuple[Hashable, ...]:
        """A value that is equal for kernels that differ only in these numbers, and for few others."""
        return (
            self.rule.result,
            self.axes,
            *(self._family(i, t) for i, t in enumerate(self.tensors)),
        )

    def _family(self, i: int, t: TensorDesc | None) -> Hashable:
        if t is None:
            return None
        more = self._more(i)
        open_ = {self.axes[i], more}
        strides = (
            0 if d in open_ or t.ne[d] == 1 or (more == 0 and d <= max(self.axes[i] or 0, 0)) else t.nb[d]
            for d in range(4)
        )
        return t.type_text, tuple(0 if d in open_ else t.ne[d] for d in range(4)), tuple(strides)


def cuts(name: str, inputs: Sequence[TensorDesc | None], output: TensorDesc) -> Iterator[Cut]:
    """Yields the ways in which a node of the op `name` can be cut.

    The first is along an axis of several elements. A node with one token does not determine which axis is the tokens', and
    whether a source with one row is whole; then there are several.
    """
    tensors = (*inputs, output)
    for rule in op(name).tokens:
        found = _outermost(rule, tensors) if rule.outermost else _named(rule, tensors)
        yield from (cut for cut in found if all(map(_follow, cut.tensors, cut.axes)))


def one_stream(name: str, inputs: Sequence[TensorDesc | None], output: TensorDesc) -> Tensors | None:
    """Returns the tensors of one stream of a node whose streams are computed one after another, each as a node.

    Returns None if there is one stream, or the streams are not independent. `output` has one stream per element of axis 3.
    """
    rules = op(name).tokens
    n = output.ne[3]
    tensors = (*inputs, output)
    if n == 1 or not rules or not rules[0].streams or any(t is not None and t.ne[3] not in (1, n) for t in tensors):
        return None
    return tuple(t and TensorDesc.make((*t.ne[:3], 1), t.dtype, t.nb, t.layout) for t in tensors)


def why_not(name: str, inputs: Sequence[TensorDesc | None], output: TensorDesc) -> str | None:
    """Returns the reason why a node can't be cut, so that only kernels of its exact shapes compute it; None if it can."""
    rules = op(name).tokens
    if not rules:
        return "what it computes runs along the tokens" if name in RECURRENT else "this op has no dimension of tokens"
    if any(True for _ in cuts(name, inputs, output)):
        return None
    one = one_stream(name, inputs, output)
    if one is not None and one[-1] is not None:
        return why_not(name, one[:-1], one[-1])
    streams = max(t.ne[3] for t in (*inputs, output) if t is not None)
    if streams > 1:
        return f"it has {streams} streams"
    if name in ("rope", "rope_back") and inputs[1] is not None and inputs[1].ne[0] != output.ne[2]:
        return "its positions have several dimensions"
    return "its tokens are not in its outermost dimension"


def _ends_before(t: TensorDesc, axis: int) -> bool:
    return all(n == 1 for n in t.ne[axis:])


def _follow(t: TensorDesc | None, axis: int | None) -> bool:
    """Returns whether a tensor's tokens are adjacent in memory: then a range of tokens is a range of its bytes."""
    if t is None or axis is None or t.ne[axis] == 1:
        return True
    ne = list(t.ne)
    ne[axis] = 1
    rest = sum((n - 1) * nb for n, nb in zip(ne[1:], t.nb[1:], strict=True))
    row = TensorDesc.make((ne[0], 1, 1, 1), t.dtype, t.nb).storage_bytes
    return t.nb[axis] >= row + rest


def _outermost(rule: Tokens, tensors: Tensors) -> Iterator[Cut]:
    *sources, result = tensors
    assert result is not None
    for axis in range(next((axis for axis in (3, 2) if result.ne[axis] > 1), 1), 4):
        n = result.ne[axis]
        ways = range(1 << len(sources) if rule.broadcast and n == 1 else 1)
        for whole in ways:
            axes: list[int | None] = []
            for i, t in enumerate(sources):
                if t is None or (rule.broadcast and t.ne[axis] == 1 and (n > 1 or whole >> i & 1)):
                    axes.append(None)
                elif t.ne[axis] == n and _ends_before(t, axis + 1):
                    axes.append(axis)
                else:
                    break
            # the only source of repeat may be the same for all tokens
            cut = any(a is not None for a in axes) or (rule.broadcast and len(axes) == 1)
            if len(axes) == len(sources) and cut:
                yield Cut(rule, tensors, (*axes, axis), n, None)


def _named(rule: Tokens, tensors: Tensors) -> Iterator[Cut]:
    *sources, result = tensors
    assert result is not None
    if rule.result is not None and not _ends_before(result, rule.result + 1):
        return
    axes = tuple(None if t is None else rule.sources.get(i) for i, t in enumerate(sources))
    counts = {t.ne[a] for t, a in zip(sources, axes, strict=True) if t is not None and a is not None}
    if rule.result is None:
        if not all(
            _ends_before(t, a + 1) for t, a in zip(sources, axes, strict=True) if t is not None and a is not None
        ):
            return
    else:
        counts.add(result.ne[rule.result])
    lengths = {t.ne[rule.more[i]] for i, t in enumerate(sources) if t is not None and i in rule.more}
    masked = rule.mask is None or (rule.mask < len(sources) and sources[rule.mask] is not None)
    if len(counts) == 1 and len(lengths) <= 1:
        yield Cut(rule, tensors, (*axes, rule.result), counts.pop(), lengths.pop() if lengths and masked else None)
