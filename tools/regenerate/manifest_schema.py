"""Generates the JSON Schema of a manifest, for editors, from its types."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kernelgen.ggml.ops import OPS
from kernelgen.manifest import types
from kernelgen.manifest.types import Graph, Manifest, OpKernel, SourceKernel


def render() -> str:
    """Returns the schema."""
    entries = (OpKernel, SourceKernel, Graph)
    _, definitions = msgspec.json.schema_components([Manifest, *entries], ref_template="#/$defs/{name}")
    for definition in definitions.values():
        _describe(definition)
    root = definitions.pop("Manifest")
    op, source, graph = ({"$ref": f"#/$defs/{type.__name__}"} for type in entries)
    root["properties"]["kernels"]["items"] = {"anyOf": [op, source]}
    root["properties"]["graphs"]["items"] = graph
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "manifest.schema.json"}
    one_of = [{"required": [key]} for key in Manifest.one_of]
    more = {"title": "neuron-kernelgen manifest", "anyOf": one_of, "$defs": definitions}
    return json.dumps({**head, **root, **more}, indent=2, ensure_ascii=False) + "\n"


def _describe(definition: dict[str, Any]) -> None:
    """Adds the descriptions of a struct's keys, and removes defaults that only mean that a key is absent."""
    struct = getattr(types, definition["title"])
    definition["description"] = (struct.__doc__ or "").partition("\n")[0]
    for name, text in types.descriptions(struct).items():
        key = definition["properties"][name]
        key["description"] = text
        if key.get("default") in ("", [], {}):
            del key["default"]
        if name == "op":
            key["examples"] = sorted(OPS)
