"""Finds the architectures that fold: one graph kernel computes several of a model's layers.

The small models of test-llama-archs have about two layers, and the last differs: it gathers the rows of the outputs. So
this module writes the header of such a file again with several times as many layers, and cuts llama.cpp's graph of it
as `kernelgen model` does.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kernelgen.errors import KernelgenError
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import layers
from kernelgen.model.sizes import DecodeCall, Settings

TIMES = (4, 12)
"""The factors for the number of layers; the larger one is for models whose kinds of layers repeat with a long period."""

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_PER_LAYER_NOT = ("sections", "tokenizer.")
"""Parts of the names of arrays that are not per layer, whatever their length."""


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


def write(source: Path, output: Path, first: int, times: int) -> None:
    """Writes `source`'s header with the layers from `first` on repeated `times` times, and a hole as tensor data."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    count = f"{architecture}.block_count"
    n_layer = int(reader.fields[count].contents())
    writer = gguf.GGUFWriter(output, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value: Any = field.contents()
        kind = field.types[0]
        if name == count:
            value = first + (n_layer - first) * times
        elif kind == gguf.GGUFValueType.ARRAY:
            if len(value) == n_layer and not any(word in name for word in _PER_LAYER_NOT):
                value = list(value[:first]) + list(value[first:]) * times
            if value:  # GGUFWriter can't write empty arrays
                writer.add_key_value(name, value, kind, sub_type=field.types[-1])
            continue
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        match = _LAYER.fullmatch(tensor.name)
        names = [tensor.name]
        if match and int(match[1]) >= first:
            names = [f"blk.{int(match[1]) + k * (n_layer - first)}.{match[2]}" for k in range(times)]
        shape = [int(n) for n in reversed(tensor.shape)]
        dtype = np.dtype(np.float16 if tensor.tensor_type == gguf.GGMLQuantizationType.F16 else np.float32)
        for name in names:
            writer.add_tensor_info(name, shape, dtype, int(tensor.n_bytes), raw_dtype=tensor.tensor_type)
    size = sum(gguf.GGUFWriter.ggml_pad(info.nbytes, writer.data_alignment) for info in writer.tensors[0].values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with output.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(gguf.GGUFWriter.ggml_pad(file.tell(), gguf.GGUF_DEFAULT_ALIGNMENT) + size)


def folded(source: Path, folder: Path, exporter: Exporter, n_ctx: int) -> Folded:
    """Returns how the graph of one token is cut for a model with more layers of the same kinds as in `source`."""
    file = folder / f"{source.stem}-more-layers.gguf"
    settings = Settings((n_ctx,), n_ctx, 1, (1,), (1,), (n_ctx,), "f16", "f16", (True,), False, False)
    found = Folded(why="llama.cpp does not load it with more layers")
    starts = range(layers_of(source))  # the first layers may be of other kinds than all later ones
    for times, first in itertools.product(TIMES, starts):
        try:
            write(source, file, first, times)
            ((_, _, graph),) = exporter.graphs(file, settings, [DecodeCall(n_ctx, 1, 1, 1, n_ctx)])
        except KernelgenError:
            continue
        finally:
            file.unlink(missing_ok=True)
        found = cut(graph)
        if not found.why:
            break
    return found


def layers_of(file: Path) -> int:
    """Returns the number of layers in a model's header."""
    fields = gguf.GGUFReader(file).fields
    return int(fields[f"{fields['general.architecture'].contents()}.block_count"].contents())


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
