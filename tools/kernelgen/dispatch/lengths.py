"""Selects kernels for a node without an exact kernel: those for other numbers of tokens, and for longer caches.

The backend does the same at run time (`backend/ggml-neuron/select/kernel_store.cpp`, `tokens.cpp`); this predicts it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kernelgen.dispatch.costs import Costs, builtin
from kernelgen.ggml import unfused_attention
from kernelgen.ggml.tokens import Cut, Tensors, cuts, one_stream
from kernelgen.ggml.unfused_attention import Member, members
from kernelgen.spec.kernel import KernelSpec

MAX_CHUNKS = 16
"""Maximum launches for one node: with more, the CPU is as good."""

MAX_IN_PLACE = 1024
"""The same for a node in place, such as a shift of a cache's keys, whose alternative reads and writes the whole cache."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The computation of a node.

    Attributes:
        kernels: one for each launch, in their order.
        chunks: first token and kernel size of each launch; empty if the only kernel is exact.
        padding: rows that are computed beyond the node's rows, or twice.
        us, exact_us: modelled microseconds of these kernels, and of an exact kernel.
        bytes, exact_bytes: bytes read for any number of tokens: weights, and the cache that attention reads.
    """

    kernels: tuple[KernelSpec, ...]
    chunks: tuple[tuple[int, int], ...]
    padding: int
    us: float
    exact_us: float
    bytes: int
    exact_bytes: int


@dataclass(slots=True)
class LengthIndex:
    """Kernels by their properties other than the number of tokens."""

    costs: Costs = field(default_factory=builtin)
    _exact: dict[tuple[Hashable, ...], KernelSpec] = field(default_factory=dict)
    _sizes: defaultdict[tuple[Hashable, ...], set[tuple[int, int | None]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    _heads: defaultdict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    """Tokens and cells of products of several heads, by number of heads."""

    @staticmethod
    def of(kernels: Iterable[KernelSpec], costs: Costs | None = None) -> LengthIndex:
        """Returns the index of some kernels; `costs` decides between them, by default trn1's."""
        index = LengthIndex(costs or builtin())
        for kernel in kernels:
            index._exact[_key(kernel, (*kernel.inputs, kernel.output))] = kernel
            for cut in cuts(kernel.op, kernel.inputs, kernel.output):
                index._sizes[_family(kernel, cut)].add((cut.n, cut.n_more))
            if kernel.op == "mul_mat" and kernel.output.ne[2] > 1:
                index._heads[kernel.output.ne[2]].add((kernel.output.ne[1], kernel.output.ne[0]))
        return index

    def select(self, node: KernelSpec, room: int | None = None) -> Selection | None:
        """Returns the computation of a node, or None if no kernels compute it.

        The backend computes the nodes of attention without flash attention together, by kernels of equal numbers; this function
        considers each node alone.

        Args:
            node: the spec of its exact kernel.
            room: cells that attention may read beyond the node's; None: as many as kernels have.
        """
        # its own numbers first, then any numbers
        nodes = [node] if node.open is None else [node, node.open]
        ways = list(cuts(node.op, node.inputs, node.output))
        for one in nodes:
            exact = self._exact.get(_key(one, (*one.inputs, one.output)))
            if exact is not None:
                us, read = self._alone(node, ways)
                return Selection((exact,), (), 0, us, us, read, read)
        found = (self._pieces(one, ways, room) for one in nodes)
        return next((selection for selection in found if selection is not None), None)

    def _pieces(self, node: KernelSpec, ways: Sequence[Cut], room: int | None) -> Selection | None:
        """Returns the computation of a node by kernels for other numbers of tokens."""
        # In the order of the rules, and for each rule the shortest sufficient cache first: the backend takes the first, too.
        for cut in ways:
            sizes = self._sizes.get(_family(node, cut), set())
            masked = cut.rule.mask is not None
            for longer in _lengths(cut, sizes):
                if masked and longer is not None and room is not None and longer > max(room, cut.n_more or 0):
                    break
                if (found := self._chunks(node, cut, sizes, longer)) is not None:
                    return found
        for member in members(node.op, node.inputs, node.output):
            if (found := self._unfused(node, member, room)) is not None:
                return found
        return self._streams(node, room)

    def _streams(self, node: KernelSpec, room: int | None) -> Selection | None:
        """Returns the computation of a node of several streams: each stream as a node, one after another."""
        one, n = one_stream(node.op, node.inputs, node.output), node.output.ne[3]
        unfused = unfused_attention.one_stream(node.op, node.inputs, node.output)
        if unfused is not None:
            one, n = unfused
        if one is None or one[-1] is None:
            return None
        found = self.select(KernelSpec(node.op, one[:-1], one[-1], node.params, node.alias), room)
        return found and Selection(
            found.kernels * n,
            found.chunks * n,
            found.padding * n,
            found.us * n,
            found.exact_us * n,
            found.bytes * n,
            found.exact_bytes * n,
        )

    def _unfused(self, node: KernelSpec, member: Member, room: int | None) -> Selection | None:
        """Returns the computation of a node of attention without flash attention."""
        sizes = self._heads[member.heads]
        lengths: Sequence[int | None] = [None]
        if member.n_cells is not None:
            least = member.n_cells
            lengths = sorted({m for _, m in sizes if m >= least and (room is None or m <= max(room, least))})
        for cells in lengths:
            kernels = {}
            for n in sorted({n for n, _ in sizes}):
                kernel = self._exact.get(_key(node, member.chunk(n, cells)))
                if kernel is not None:
                    kernels[n] = kernel
            costs = {n: self._member_us(member, n, cells) for n in kernels}
            chunks = choose(member.n, list(kernels), list(costs.values()), again=True)
            if chunks:
                return Selection(
                    tuple(kernels[n] for _, n in chunks),
                    tuple(chunks),
                    sum(n for _, n in chunks) - member.n,
                    sum(costs[n] for _, n in chunks),
                    self._member_us(member, member.n, member.n_cells),
                    member_traffic(member, 1, cells)[0] * len(chunks),
                    member_traffic(member, 1, member.n_cells)[0],
                )
        return None

    def _member_us(self, member: Member, n: int, cells: int | None) -> float:
        whole, rows = member_traffic(member, n, cells)
        return self.costs.launch(whole, rows / n, n)

    def _chunks(
        self, node: KernelSpec, cut: Cut, sizes: Iterable[tuple[int, int | None]], longer: int | None
    ) -> Selection | None:
        kernels = {}
        for n in sorted(n for n, m in sizes if m == longer):
            kernel = self._exact.get(_key(node, cut.chunk(n, longer)))
            if kernel is not None:
                kernels[n] = kernel
        whole, row = traffic(node, cut, longer)
        costs = {n: self.costs.launch(whole, row, n) for n in kernels}
        # Recomputing a row in place would read its own result; these two ops write the same rows again.
        again = node.alias is None or node.op in ("set_rows", "cpy")
        chunks = choose(cut.n, list(kernels), list(costs.values()), again=again)
        if not chunks:
            return None
        us, read = self._alone(node, [cut])
        return Selection(
            tuple(kernels[n] for _, n in chunks),
            tuple(chunks),
            sum(n for _, n in chunks) - cut.n,
            sum(costs[n] for _, n in chunks),
            us,
            whole * len(chunks),
            read,
        )

    def _alone(self, node: KernelSpec, ways: Sequence[Cut]) -> tuple[float, int]:
        """Returns the modelled microseconds of an exact kernel, and the bytes that it reads for any number of tokens."""
        cut = max(ways, key=lambda cut: cut.n, default=None)
        if cut is None:
            size = sum(t.storage_bytes for t in (*node.inputs, node.output) if t is not None)
            return self.costs.launch(size, 0, 1), size
        whole, row = traffic(node, cut, cut.n_more)
        return self.costs.launch(whole, row, cut.n), whole


def _lengths(cut: Cut, sizes: Iterable[tuple[int, int | None]]) -> list[int | None]:
    """Returns the lengths of kernels that are long enough, ascending; [None] if no length applies.

    For a written tensor: lengths for which a buffer has memory after it (`neuron_tail_of` of the backend), then shorter ones,
    descending: rows beyond those must not be written.
    """
    if cut.n_more is None:
        return [None]
    known = {m for _, m in sizes if m is not None}
    written = cut.rule.written is not None
    found: list[int | None] = []
    found += sorted(m for m in known if m >= cut.n_more and not (written and m > 2 * cut.n_more))
    if written:
        found += sorted((m for m in known if m < cut.n_more), reverse=True)
    return found


def traffic(node: KernelSpec, cut: Cut, n_more: int | None) -> tuple[int, int]:
    """Returns the bytes that are read for any number of tokens, and the bytes that are read and written per token."""
    whole = row = 0
    for i, (t, axis) in enumerate(zip(cut.chunk(1, n_more), cut.axes, strict=True)):
        if t is None:
            continue
        if axis is not None:
            row += t.storage_bytes
        elif i < len(node.inputs) and i != node.alias and (i not in cut.rule.more or cut.rule.mask is not None):
            whole += t.storage_bytes  # only some rows of a table are read, and of a destination none
    return whole, row


def member_traffic(member: Member, n: int, n_cells: int | None) -> tuple[int, int]:
    """Returns the bytes that are read for any number of tokens, and the bytes that are read and written for `n`."""
    whole = rows = 0
    for i, t in enumerate(member.chunk(n, n_cells)):
        if t is not None and i in member.tokens:
            rows += t.storage_bytes
        elif t is not None:
            whole += t.storage_bytes
    return whole, rows


def choose(n: int, counts: Sequence[int], costs: Sequence[float], *, again: bool) -> list[tuple[int, int]]:
    """Returns the fastest chunks that cover `n` tokens, as pairs of the first token and the number of tokens.

    Returns one chunk for more than `n` tokens if that is faster; empty if the kernels allow no chunks, or too many are needed.

    Args:
        n: number of tokens.
        counts: the kernels' numbers of tokens, ascending.
        costs: the cost of a launch of each.
        again: whether rows may be computed twice with the same result: then the last chunk may start early.
    """
    best = float("inf")
    found: list[tuple[int, int]] = []
    cheapest = _cheapest(costs[: bisect_right(counts, n)])
    for size, cost in zip(counts, costs, strict=True):
        # As many chunks of one size as fit, or one padded chunk, and the rest in equal chunks of another size. Not all mixtures
        # are tried: the backend does this for every node that it plans.
        whole = max(n // size, 1)
        left = n - whole * size
        total, then, times = whole * cost, 0, 0
        if total >= best or whole > MAX_CHUNKS:
            continue
        if left > 0:
            rest, then, times = _last(left, counts, costs, cheapest, again)
            total += rest
        if total < best and whole + times <= MAX_CHUNKS:
            best = total
            found = [(i * size, size) for i in range(whole)]
            found += [(min(whole * size + i * then, n - then), then) for i in range(times)]
    return found if found or again else _descending(n, counts)


def _descending(n: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns chunks of all sizes, largest first, as many of each as fit; empty if that leaves tokens over."""
    found: list[tuple[int, int]] = []
    begin = 0
    for size in reversed(counts):
        times = (n - begin) // size
        found += [(begin + i * size, size) for i in range(min(times, MAX_IN_PLACE + 1))]
        begin += times * size
    return found if begin == n and len(found) <= MAX_IN_PLACE else []


def _cheapest(costs: Sequence[float]) -> list[int]:
    """Returns, for each index, the index of the least cost from there on; the first among equal ones."""
    found: list[int] = []
    for i in reversed(range(len(costs))):
        found.append(i if not found or costs[i] <= costs[found[-1]] else found[-1])
    return found[::-1]


def _last(
    left: int, counts: Sequence[int], costs: Sequence[float], cheapest: Sequence[int], again: bool
) -> tuple[float, int, int]:
    """Returns the cost, size and number of equal chunks for the last tokens.

    The last chunk may start early if rows may be computed twice. For each number of chunks only the cheapest sufficient size is
    considered: a solution with fewer chunks is found with these, too.
    """
    best = (float("inf"), 0, 0)
    for times in range(MAX_CHUNKS, 0, -1):
        i = bisect_left(counts, -(-left // times))
        if i >= len(cheapest) or (not again and counts[i] * times != left):
            continue
        i = cheapest[i] if again else i
        if times * costs[i] < best[0]:
            best = (times * costs[i], counts[i], times)
    return best


def _key(node: KernelSpec, tensors: Tensors) -> tuple[Hashable, ...]:
    return (node.op, node.params, node.alias, *tensors)


def _family(node: KernelSpec, cut: Cut) -> tuple[Hashable, ...]:
    return (node.op, node.params, node.alias, *cut.family)
