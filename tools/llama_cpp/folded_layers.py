"""Finds the architectures that fold: one graph kernel computes several of a model's layers.

The small models of test-llama-archs have about two layers, and the last differs: it gathers the rows of the outputs. So
this module writes the header of such a file again with several times as many layers, and cuts llama.cpp's graph of it
as `kernelgen model` does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_llama

from kernelgen.errors import KernelgenError
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import layers
from kernelgen.model.sizes import DecodeCall, Settings

TIMES = (4, 12)
"""The factors for the number of layers; the larger one is for models whose kinds of layers repeat with a long period."""


@dataclass(frozen=True)
class Folded:
    """How a graph of one token with more layers is cut.

    Attributes:
        nodes: the nodes of the graph.
        launches: the launches of kernels, including kernels of single nodes.
        kernels: the number of different kernels.
        most: the launches of the most frequent kernel of several nodes.
        why: why no kernel computes several parts; empty if one does.
    """

    nodes: int = 0
    launches: int = 0
    kernels: int = 0
    most: int = 0
    why: str = ""


def folded(source: Path, folder: Path, exporter: Exporter, n_ctx: int) -> Folded:
    """Returns how the graph of one token is cut for a model with more layers of the same kinds as in `source`."""
    file = folder / f"{source.stem}-more-layers.gguf"
    settings = Settings((n_ctx,), n_ctx, 1, (1,), (1,), (n_ctx,), "f16", "f16", (True,), False, False)
    found = Folded(why="llama.cpp does not load it with more layers")
    starts = range(random_llama.n_layer(source))  # the first layers may be of other kinds than all later ones
    for times, first in itertools.product(TIMES, starts):
        try:
            random_llama.write_longer(file, source, first, times)
            ((_, _, graph),) = exporter.graphs(file, settings, [DecodeCall(n_ctx, 1, 1, 1, n_ctx)])
        except KernelgenError:
            continue
        finally:
            file.unlink(missing_ok=True)
        found = cut(graph)
        if not found.why:
            break
    return found


def cut(graph: Graph) -> Folded:
    """Returns how a graph is cut."""
    segments = layers(graph)
    found: Counter[Any] = Counter()
    for segment in segments:
        with contextlib.suppress(ValueError):  # not a group: its nodes run one by one
            found[segment_spec(graph, segment, apart=True)] += 1
    most = max((n for spec, n in found.items() if len(spec.nodes) > 1), default=0)
    why = ""
    if len(segments) <= 2:
        why = "its graph has no period that covers half of it"
    elif found.total() < len(segments):
        why = "its layers are not groups: they have an input without elements"
    elif most < 2:
        why = "no two of its layers are the same"
    return Folded(len(graph.nodes), len(segments), len(found), most, why)
