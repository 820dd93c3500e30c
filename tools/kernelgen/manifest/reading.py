"""Reads values of msgspec's types from a document, and reports every mistake, in plain words, with its line.

msgspec itself stops at the first mistake and knows no lines. The types have what a message says: `patternErrorMessage` in
annotations, the title of a list of names, and descriptions of keys in docstrings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from msgspec import inspect

from kernelgen.errors import did_you_mean, nearest
from kernelgen.manifest.document import Report, YamlNode, short
from kernelgen.manifest.types import descriptions

T = TypeVar("T")

WRONG: Final = object()
"""The result of reading a value with a mistake."""


_Reader = Callable[[YamlNode, str, Report], Any]
"""A function of a node, its name in messages, and a report for mistakes; returns the value, or `WRONG`."""


def read(node: YamlNode, type: type[T], label: str, report: Report) -> T | None:
    """Returns a value of a struct type, or None if it has mistakes, which are reported.

    Args:
        node: the value's node.
        type: a `msgspec.Struct`.
        label: its name in messages.
        report: receives the mistakes.
    """
    value = _of_type(cast(Any, type))(node, label, report)
    return None if value is WRONG else cast(T, value)


@functools.cache
def _of_type(type: type) -> _Reader:
    return _reader(inspect.type_info(type))


def describe(node: YamlNode) -> str:
    """Returns a description of a node, for "not …" in a message."""
    if node.kind != "scalar":
        return "a mapping" if node.kind == "map" else "a list"
    if node.value is None:
        return "nothing" if node.text in ("", "~") else "null"
    return f"'{short(node.text)}'"


_KINDS: Mapping[type, tuple[type, str]] = {
    inspect.StructType: (dict, "a mapping"),
    inspect.DictType: (dict, "a mapping"),
    inspect.ListType: (list, "a list"),
    inspect.NoneType: (type(None), "null"),
    inspect.BoolType: (bool, "true or false"),
    inspect.IntType: (int, "an integer"),
    inspect.FloatType: (float, "a number"),
    inspect.StrType: (str, "text"),
}


def _parts(info: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a type without its annotations, and what these add to the schema."""
    extra: dict[str, Any] = {}
    while isinstance(info, inspect.Metadata):
        extra = {**(info.extra_json_schema or {}), **extra}
        info = info.type
    return info, extra


def _reader(annotated: Any) -> _Reader:
    info, extra = _parts(annotated)
    if isinstance(info, inspect.AnyType):
        return lambda node, label, report: node
    if isinstance(info, inspect.UnionType):
        return _union(info, extra)
    if isinstance(info, inspect.LiteralType):
        return _one_of(info.values, extra)
    if "enum" in extra:
        return _one_of(extra["enum"], extra)
    makers: Mapping[Any, Callable[[Any, Mapping[str, Any]], _Reader]] = {
        inspect.StructType: _struct,
        inspect.DictType: _dict,
        inspect.ListType: _list,
        inspect.StrType: _text,
        inspect.IntType: _number,
        inspect.FloatType: _number,
    }
    make = makers.get(type(info))
    inner = (lambda node, label, report: node.value) if make is None else make(info, extra)
    kind, name = _KINDS[type(info)][0], _expected(annotated)
    quoted = kind is str and not info.pattern

    def read(node: YamlNode, label: str, report: Report) -> Any:
        value = node.value
        if type(value) is kind or (kind is float and type(value) is int):
            return inner(node, label, report)
        hint = (
            f"write it in quotes: '{short(node.text)}'"
            if quoted and node.kind == "scalar" and value is not None
            else None
        )
        report.fail(node, f"{label}: expected {name}, not {describe(node)}", hint)
        return WRONG

    return read


def _expected(annotated: Any) -> str:
    info, extra = _parts(annotated)
    if "patternErrorMessage" in extra:
        return str(extra["patternErrorMessage"])
    return _choices(extra["enum"]) if "enum" in extra else _KINDS[type(info)][1]


def _choices(values: Iterable[Any]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _one_of(values: Iterable[Any], extra: Mapping[str, Any]) -> _Reader:
    known = list(values)
    names = [v for v in known if isinstance(v, str)]
    noun, choices = extra.get("title", "value"), _choices(known)

    def read(node: YamlNode, label: str, report: Report) -> Any:
        value = node.value
        if node.kind == "scalar" and value in known and not isinstance(value, bool):
            return value
        if names and isinstance(value, str):
            near = did_you_mean(node.text, names)
            hint = None if near and len(known) > 8 else f"expected {choices}"
            report.fail(node, f"{label}: unknown {noun} '{short(node.text)}'{near}", hint)
        else:
            report.fail(node, f"{label}: expected {choices}, not {describe(node)}")
        return WRONG

    return read


def _union(info: inspect.UnionType, extra: Mapping[str, Any]) -> _Reader:
    """Chooses the branch by the kind of the value."""
    table: dict[type, _Reader] = {}
    for branch in info.types:
        kind = _KINDS[type(_parts(branch)[0])][0]
        for each in (float, int) if kind is float else (kind,):
            table.setdefault(each, _reader(branch))
    expected = extra.get("patternErrorMessage") or " or ".join(map(_expected, info.types))

    def read(node: YamlNode, label: str, report: Report) -> Any:
        branch = table.get(type(node.value))
        if branch is not None:
            return branch(node, label, report)
        report.fail(node, f"{label}: expected {expected}, not {describe(node)}")
        return WRONG

    return read


def _text(info: inspect.StrType, extra: Mapping[str, Any]) -> _Reader:
    search = re.compile(info.pattern or "").search

    def read(node: YamlNode, label: str, report: Report) -> Any:
        if search(node.text):
            return node.value
        report.fail(node, f"{label}: expected {extra['patternErrorMessage']}, not '{short(node.text)}'")
        return WRONG

    return read


def _number(info: inspect.IntType | inspect.FloatType, extra: Mapping[str, Any]) -> _Reader:
    low, high = info.ge, info.le

    def read(node: YamlNode, label: str, report: Report) -> Any:
        value = node.value
        if value != value:
            report.fail(node, f"{label}: expected a number, not '{node.text}'")
        elif low is not None and value < low:
            report.fail(node, f"{label}: expected at least {low}, not {node.text}")
        elif high is not None and value > high:
            report.fail(node, f"{label}: expected at most {high}, not {node.text}")
        else:
            return value
        return WRONG

    return read


def _list(info: inspect.ListType, extra: Mapping[str, Any]) -> _Reader:
    item_reader = _reader(info.item_type)
    low, high, unique = info.min_length or 0, info.max_length, extra.get("uniqueItems", False)

    def read(node: YamlNode, label: str, report: Report) -> Any:
        found: list[Any] = []
        right = True
        for i, item in enumerate(node.value):
            value = item_reader(item, f"{label}[{i}]", report)
            if unique and value is not WRONG and value in found:
                shown = f"'{short(item.text)}'" if item.kind == "scalar" else describe(item)
                report.fail(item, f"{label}[{i}]: {shown} is already in the list")
                value = WRONG
            right = right and value is not WRONG
            found.append(value)
        if len(found) < low:
            report.fail(node, f"{label}: expected at least {low} {'entry' if low == 1 else 'entries'}")
        elif high is not None and len(found) > high:
            report.fail(node, f"{label}: expected at most {high} entries, not {len(found)}")
        elif right:
            return found
        return WRONG

    return read


def _dict(info: inspect.DictType, extra: Mapping[str, Any]) -> _Reader:
    key_type, about_key = _parts(info.key_type)
    item_reader, low = _reader(info.value_type), info.min_length or 0
    if "enum" in about_key:
        return _keyed(dict.fromkeys(about_key["enum"], item_reader), (), low, dict)
    key_reader = _text(key_type, about_key)

    def read(node: YamlNode, label: str, report: Report) -> Any:
        right = [key_reader(key, label, report) is not WRONG for key in node.keys.values()]
        found = {key: item_reader(item, short(key), report) for key, item in node.value.items()}
        if len(found) < low:
            report.fail(node, f"{label}: expected at least {low} entries, not {len(found)}")
            return WRONG
        return found if all(right) and not any(value is WRONG for value in found.values()) else WRONG

    return read


def _struct(info: inspect.StructType, extra: Mapping[str, Any]) -> _Reader:
    # A message lists the struct's own keys before those of the struct that it extends.
    fields = sorted(info.fields, key=lambda field: field.name not in info.cls.__annotations__)
    keys = {field.name: _reader(field.type) for field in fields}
    required = tuple(field.name for field in info.fields if field.required)
    return _keyed(keys, required, extra.get("minProperties", 0), info.cls, getattr(info.cls, "one_of", ()))


def _keyed(
    keys: Mapping[str, _Reader],
    required: tuple[str, ...],
    low: int,
    make: Any,
    one_of: tuple[str, ...] = (),
) -> _Reader:
    """Returns the reader of a mapping with known keys.

    Args:
        keys: the reader of each key's value.
        required: keys that it needs.
        low: minimum number of keys.
        make: makes the value of keyword arguments.
        one_of: keys of which it needs one; messages request the first.
    """

    def read(node: YamlNode, label: str, report: Report) -> Any:
        entries = node.value
        found = {key: keys[key](item, key, report) for key, item in entries.items() if key in keys}
        missing = [key for key in required if key not in entries]
        if one_of and not any(key in entries for key in one_of):
            missing.append(one_of[0])
        unknown = [key for key in entries if key not in keys]
        wrong = bool(missing or unknown) or len(entries) < low or any(value is WRONG for value in found.values())
        for key in unknown:
            # A misspelt key replaces the one that would otherwise be reported as missing.
            near = nearest(key, keys)
            near = None if near in entries else near
            if near in missing:
                missing.remove(near)
            meant = f": did you mean '{near}'?" if near else ""
            report.fail(node.keys[key], f"unknown key '{short(key)}'{meant}", f"keys here are {', '.join(keys)}")
        for key in missing:
            report.fail(node, f"{label}: key '{key}' is missing", f"{key}: {descriptions(make)[key]}")
        if len(entries) < low:
            report.fail(node, f"{label}: expected at least {low} entries, not {len(entries)}")
        return WRONG if wrong else make(**found)

    return read
