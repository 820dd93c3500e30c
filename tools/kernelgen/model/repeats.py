"""Cuts a graph into segments, each for one kernel: a model repeats its layers, and one kernel computes all equal layers.

The repeats are found by ops alone, not by names: they have the period that covers the most nodes. A period begins where the fewest
results cross, which is one between a model's layers. Layers whose weights have different types become different kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kernelgen.model.graphs import Graph


@dataclass(frozen=True, slots=True)
class Segment:
    """The nodes from `start` up to, but not including, `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def layers(graph: Graph, *, at_once: int = 1) -> list[Segment]:
    """Returns a graph's segments: its repeats, and the nodes before and behind them.

    Args:
        graph: the graph.
        at_once: the number of repeats in a segment; the last segment has the rest.
    """
    n = len(graph.nodes)
    found = _period(tuple(node.op for node in graph.nodes))
    if found is None:
        return whole(graph)
    period, first, last, count = found
    cost = crossing(graph)
    # The range that repeats is longer than its whole repeats, so these may begin at any of its first nodes.
    slack = last - first - count * period
    # The first of the places with the fewest results crossing the edges of all repeats.
    start = min(
        range(first, first + slack + 1),
        key=lambda s: (sum(cost[s + k * period] for k in range(count + 1)), s),
    )
    end = start + count * period
    cuts = [*_before(start, period, cost), *range(start, end, at_once * period), end, *_behind(end, n, period, cost)]
    return _segments(graph, {0, *cuts, n})


def whole(graph: Graph) -> list[Segment]:
    """Returns the whole graph as one segment, except for the embedding."""
    return _segments(graph, {0, len(graph.nodes)})


def at(graph: Graph, places: set[int]) -> list[Segment]:
    """Returns the segments between these places, the beginning and the end."""
    return _segments(graph, {0, *places, len(graph.nodes)})


def _segments(graph: Graph, edges: set[int]) -> list[Segment]:
    """Returns the segments between these edges, with another edge behind the embedding unless there is one near it."""
    embedding = _embedding(graph)
    if all(not 0 < edge <= embedding + 1 for edge in edges):
        edges = edges | {embedding}
    return [Segment(a, b) for a, b in itertools.pairwise(sorted(edges))]


def _embedding(graph: Graph) -> int:
    """Returns the number of nodes at the beginning that look up rows of the graph's inputs, such as the tokens' embedding.

    llama.cpp always computes these on the CPU.
    """
    given = [
        node.op == "get_rows" and all(at is None or graph.roots[at.root].node is None for at in wires.inputs)
        for node, wires in zip(graph.nodes, graph.wires, strict=True)
    ]
    return next((i for i, one in enumerate(given) if not one), len(given))


def crossing(graph: Graph) -> list[int]:
    """Returns the number of results that are read across each place between nodes, from before the first to behind the last."""
    last: dict[int, int] = {}
    for i, wires in enumerate(graph.wires):
        for at in wires.inputs:
            if at is not None and graph.roots[at.root].node is not None:
                last[at.root] = i
    found = [0] * (len(graph.nodes) + 1)
    for root, end in last.items():
        node = graph.roots[root].node
        assert node is not None
        for place in range(node + 1, end + 1):
            found[place] += 1
    return found


@functools.lru_cache(maxsize=16)  # a model's graphs of all sizes have the same ops
def _period(tokens: tuple[Hashable, ...]) -> tuple[int, int, int, int] | None:
    """Returns (period, first, end of the range that repeats, whole repeats) with the largest cover; None without repeats."""
    n = len(tokens)
    best: tuple[int, int, int, int] | None = None
    for period in range(1, n // 2 + 1):
        run = 0
        for i in range(n - period + 1):
            if i < n - period and tokens[i] == tokens[i + period]:
                run += 1
                continue
            # `run` ops in a row are equal to those a period later, so `run + period` of them repeat.
            count = (run + period) // period
            # If covers are equal, the shorter period wins, which is found first: a pair of layers is not a layer.
            if count > 1 and (best is None or count * period > best[3] * best[0]):
                best = (period, i - run, i + period, count)
            run = 0
    # Repeats that cover less than half of the nodes are not layers.
    return best if best is not None and 2 * best[3] * best[0] >= n else None


def _before(start: int, period: int, cost: Sequence[int]) -> list[int]:
    """Returns where to cut the nodes before the repeats, which may have a layer of another kind at their end."""
    if start <= period + period // 2:
        return []
    return [_cheapest(max(1, start - period - period // 2), start - period // 2, start - period, cost)]


def _behind(end: int, n: int, period: int, cost: Sequence[int]) -> list[int]:
    """Returns where to cut the nodes behind the repeats, which may have a layer of another kind at their beginning."""
    if n - end <= period // 2:
        return []
    return [_cheapest(end + period // 2, min(n - 1, end + period + period // 2), end + period, cost)]


def _cheapest(low: int, high: int, near: int, cost: Sequence[int]) -> int:
    """Returns the place from `low` to `high` that the fewest results cross; of equal places the nearest to `near`."""
    return min(range(low, high + 1), key=lambda place: (cost[place], abs(place - near), place))
