"""Derives the kernels of a projector, with which llama.cpp's mtmd makes embeddings of images and sound.

The kernels have no formulas: each node of its graphs gives one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kernelgen.emitters.catalog import Catalog
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.model.derive import as_they_are, graph_kernels
from kernelgen.model.derived import Derived
from kernelgen.model.graphs import Graph, ModelHeader
from kernelgen.model.groups import Cut
from kernelgen.model.reasons import Reasons


@dataclass(frozen=True, slots=True)
class Projector:
    """A projector, and its inputs besides the inputs of llama.cpp's warm-up.

    Attributes:
        file: llama.cpp's `--mmproj`; its header is enough.
        images: widths and heights of images in pixels, before llama.cpp scales and cuts them.
        seconds: lengths of sound.
        tokens: llama.cpp's `--image-min-tokens` and `--image-max-tokens`; None: the file's numbers.
    """

    file: Path
    images: tuple[tuple[int, int], ...] = ()
    seconds: tuple[int, ...] = ()
    tokens: tuple[int | None, int | None] = (None, None)

    @property
    def limits(self) -> tuple[str, ...]:
        """`tokens` as options of llama.cpp."""
        named = zip(("--image-min-tokens", "--image-max-tokens"), self.tokens, strict=True)
        return tuple(part for option, n in named if n is not None for part in (option, str(n)))


@dataclass(frozen=True, slots=True)
class DerivedProjector:
    """The kernels that a projector needs.

    Attributes:
        model: the description from its header.
        derived: its kernels.
        calls: a line of text for each graph: its input, and its numbers of nodes.
    """

    model: ModelHeader
    derived: Derived
    calls: tuple[str, ...]


def derive(model: ModelHeader, graphs: Iterable[Graph], catalog: Catalog, cut: Cut | None) -> DerivedProjector:
    """Returns the kernels that the graphs of a projector need.

    Args:
        model: the description from the projector's header.
        graphs: the projector's graphs.
        catalog: the emitters.
        cut: cuts graphs into graph kernels; None for no graph kernels.
    """
    kept = list(graphs)
    reasons = Reasons(catalog)
    entries = as_they_are(kept, reasons)
    groups = graph_kernels(kept, cut, reasons) if cut is not None else []
    return DerivedProjector(model, Derived(entries, [], graphs=groups), tuple(_calls(kept, reasons)))


def beside(model: Derived, projector: Derived, *, layouts: bool) -> Derived:
    """Returns the kernels of a model and its projector, each kernel once, with the calls of the model.

    llama.cpp keeps the weights of a projector in ggml's layout alone.

    Args:
        model: the model's kernels.
        projector: the projector's kernels.
        layouts: whether the manifest requests layouts of weights. The entries of the projector's kernels then override it.
    """
    known = {spec for entry in model.entries for spec in entry.specs()}
    entries = list(model.entries)
    for entry in projector.entries:
        if layouts and entry.kernel.op in WEIGHTS:
            entries.append(replace(entry, as_ggml=True))
        elif not entry.specs() <= known:
            entries.append(entry)
    graphs = [replace(graph, as_ggml=layouts) for graph in projector.graphs]
    return replace(model, entries=entries, graphs=[*model.graphs, *graphs])


def _calls(graphs: Sequence[Graph], reasons: Reasons) -> Iterator[str]:
    for graph in graphs:
        without = sum(bool(reasons.of_node(node)) for node in graph.nodes)
        flash = "on" if graph.context["flash_attn"] else "off"
        nodes = f"{len(graph.nodes)} node{'s' * (len(graph.nodes) != 1)}"
        yield f"{what(graph.sizes)}, flash attention {flash}: {nodes}, {without or 'none'} without a kernel"


def what(sizes: Mapping[str, int]) -> str:
    """Returns a text about the input of a projector's graph, by its sizes."""
    if "frames" in sizes:
        return f"sound of {sizes['frames']} frames"
    count = "an image" if sizes["n_images"] == 1 else f"{sizes['n_images']} images"
    return f"{count} of {sizes['width']}x{sizes['height']}"
