"""The published schema says of every key what it is for, and refuses what kernelgen refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelgen.ggml.ops import OPS
from kernelgen.manifest import document, loader, reading, types

SCHEMA = json.loads((Path(loader.__file__).parent / "manifest.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def _properties(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        for name, item in value.get("properties", {}).items() if isinstance(value.get("properties"), dict) else ():
            yield f"{path}/{name}", item
        for key, item in value.items():
            yield from _properties(item, f"{path}/{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _properties(item, f"{path}/{i}")


def test_every_property_is_described() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert [path for path, item in _properties(SCHEMA) if not item.get("description")] == []


def test_it_names_the_ops_that_exist() -> None:
    assert SCHEMA["$defs"]["OpKernel"]["properties"]["op"]["examples"] == sorted(OPS)


LEAVES = st.sampled_from(
    ["llama", "f16", "f17", "trn1", "trn9", "a", "A", "${n}", "(1,1,1,1)/f32", "8G", "on", "", "-x", "all", "bf16"]
) | st.sampled_from([0, 1, 2, 3, -1, 1.5, 1e-5, 2**31, True, False, None, 4096, 0.0])
KEYS = st.sampled_from([path.rpartition("/")[2] for path, _ in _properties(SCHEMA)] + ["x", "n", "1a"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=6
)
RIGHT: dict[str, Any] = {
    "format": 1,
    "name": "t",
    "targets": ["trn1"],
    "compiler": {
        "optlevel": 3,
        "extra_flags": ["-x"],
        "memory_per_compile": "8G",
        "cpus_per_compile": 1,
        "cases": [{"when": "n > 1", "optlevel": 1}],
    },
    "kernels": [
        {
            "op": "add",
            "inputs": ["(1,1,1,1)/f32", None],
            "output": "(1,1,1,1)/f32",
            "params": {"a": 1, "b": True, "c": "${n}"},
            "batch": {"n": [1, 2]},
            "alias": 0,
        }
    ],
    "sizes": {"m": [1, 2]},
    "where": ["m < 4"],
}  # fmt: skip


def _replace(value: Any, path: list[int], new: Any) -> Any:
    """A copy of `value` in which the part at `path` is `new`."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = keys[path[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = _replace(value[key], path[1:], new)
    return copy


def _integral_floats(value: Any) -> bool:
    """JSON has one kind of number; YAML's `1.0` is not an integer, so the comparison omits these."""
    if isinstance(value, dict | list):
        return any(map(_integral_floats, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and (math.isinf(value) or value.is_integer())


@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(path=st.lists(st.integers(0, 20), min_size=1, max_size=4), new=VALUES)
def test_the_reader_agrees_with_a_general_validator(path: list[int], new: Any) -> None:
    value = _replace(RIGHT, path, new)
    if _integral_floats(value):
        return
    report = document.Report()
    root = document.parse(yaml.safe_dump(value).encode(), "m.yaml", report)
    assert root is not None
    manifest = reading.read(root, types.Manifest, "the manifest", report)
    for entry in manifest.kernels if manifest is not None else ():
        reading.read(entry, types.OpKernel, "the kernel", report)
    errors = list(VALIDATOR.iter_errors(root.plain()))
    assert bool(report.diagnostics) == bool(errors), (report.diagnostics, errors)
