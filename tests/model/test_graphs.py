"""The reader of exports follows docs/reference/graphs.md; a wrong export gets a message with its line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernelgen.errors import KernelgenError
from kernelgen.model.graphs import GraphReader, Shape

HEAD: dict[str, Any] = {
    "format": "neuron-kernelgen graphs",
    "version": 1,
    "ggml": "0.25.3",
    "llama_cpp": "0.5.0",
    "model": {
        "architecture": "tiny",
        "name": "",
        "description": "",
        "parameters": 32,
        "bytes": 64,
        "layers": 1,
        "encoder": False,
        "decoder": True,
        "recurrent": False,
    },
}
DENSE = {"ne": [4, 2, 1, 1], "nb": [4, 16, 32, 32], "type": "f32"}
GRAPH: dict[str, Any] = {
    "sizes": {"n_tokens": 2, "n_outputs": 2, "n_seqs": 1, "n_kv": 256},
    "context": {"n_ctx": 256, "flash_attn": True},
    "tensors": [
        {"name": "x", "op": "none", "role": "input", **DENSE},
        {"name": "v", "op": "view", "src": [0], "view": [0, 0], **DENSE},
        {"name": "y", "op": "scale", "src": [1], "view": [0, 0], "params": [1073741824], **DENSE},
        {"name": "z", "op": "add", "src": [2, -1, 0], "skipped": True, **DENSE},
        {"name": "e", "op": "add", "src": [2, 0], **DENSE, "ne": [0, 2, 1, 1]},
        {"name": "c", "op": "cpy", "src": [2, 5], **DENSE},
    ],
}


def read(*lines: Any) -> GraphReader:
    return GraphReader([line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines], "export")


def test_nodes_are_what_is_computed() -> None:
    reader = read(HEAD, GRAPH)
    assert reader.model().architecture == "tiny"
    (graph,) = reader.graphs()
    assert graph.names == ("y", "c")
    scale, copy = graph.nodes
    dense = Shape("f32", (4, 2, 1, 1), (4, 16, 32, 32))
    assert (scale.op, scale.inputs, scale.words[:2], scale.alias) == ("scale", (dense,), (1073741824, 0), 0)
    assert (copy.op, copy.inputs, copy.alias) == ("cpy", (dense, dense), None)  # ggml_cast lists its result as a source


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "export:1:1: error: not a JSON object"),
        ([b"{"], "export:1:1: error: not a JSON object"),
        ([b"\xff"], "export:1:1: error: not a JSON object"),
        ([{"format": "other"}], "export:1:1: error: not an export of a model's graphs"),
        ([HEAD | {"version": 2}], "export:1:1: error: version 2 of the format, and this kernelgen reads 1"),
        ([HEAD | {"model": {}}], "export:1:1: error: the model's description is invalid: KeyError('architecture')"),
        ([HEAD, {}], "export:2:1: error: the graph is invalid: KeyError('tensors')"),
        ([HEAD, GRAPH, b"7"], "export:3:1: error: not a JSON object"),
        (
            [HEAD, GRAPH | {"tensors": [{**GRAPH["tensors"][0], "type": "f99"}]}],
            "export:2:1: error: the graph is invalid: ValueError(",
        ),
        (
            [HEAD, GRAPH | {"tensors": [{"name": "y", "op": "neg", "src": [9], **DENSE}]}],
            "export:2:1: error: the graph is invalid: IndexError(",
        ),
    ],
)
def test_a_wrong_export_has_a_message_with_its_line(lines: list[Any], message: str) -> None:
    with pytest.raises(KernelgenError) as caught:
        reader = read(*lines)
        reader.model()
        list(reader.graphs())
    assert str(caught.value).startswith(message)
