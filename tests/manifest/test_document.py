"""YAML is read by the rules of version 1.2, as in editors, and every value keeps its place."""

from __future__ import annotations

import math

import pytest

from kernelgen.manifest import document
from kernelgen.manifest.document import YamlNode


def root(text: str) -> YamlNode:
    report = document.Report()
    parsed = document.parse(text.encode(), "m.yaml", report)
    assert not report.diagnostics
    assert parsed is not None
    return parsed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("12", 12),
        ("+12", 12),
        ("-0", 0),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("1e-5", 1e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("'12'", "12"),
        ('"true"', "true"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    found = root(f"a: {text}").get("a")
    assert found is not None
    assert found.value == value
    assert type(found.value) is type(value)


def test_lines_and_columns_count_characters_from_one() -> None:
    entry = root('é: 1\nkey:\n  - ünï\n  - [a, "b"]\n').get("key")
    assert entry is not None
    first, second = entry.value
    assert (first.line, first.column) == (3, 5)
    assert [(n.line, n.column) for n in second.value] == [(4, 6), (4, 9)]


def test_merge_keys_fill_in_what_a_map_lacks_wherever_they_stand() -> None:
    text = """
base: &base {a: 1, b: 2}
more: &more {b: 3, c: 4}
one: {b: 9, <<: *base}
two: {<<: [*base, *more], a: 7}
"""
    found = root(text).plain()
    assert found["one"] == {"a": 1, "b": 9}
    assert found["two"] == {"a": 7, "b": 2, "c": 4}


def test_both_parsers_of_pyyaml_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    text = "a: &x [1, 'two', {b: 1e3}]\nc: *x\nd: |\n  text\n"
    fast = root(text)
    monkeypatch.setattr(document, "_LOADER", yaml.Loader)
    slow = root(text)
    assert repr(fast.value) == repr(slow.value)
    assert fast.plain() == slow.plain()
