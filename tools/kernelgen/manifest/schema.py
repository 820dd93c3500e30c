"""Checks a document against the published JSON Schema, and reports mistakes in plain words with their lines.

The schema file is the only description of a manifest's form. This module interprets the part of JSON Schema (draft 7) that the file
uses: general validators do not support line numbers, report one mistake several times, and take longer to import than a plan takes.
A test compares it with a general validator.

Intended differences: for `anyOf`, reports only the branch that matches the value's type; skips values that an enclosing mistake
makes meaningless.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelgen.errors import Diagnostic, did_you_mean, nearest
from kernelgen.manifest.document import YamlNode, short

PATH = Path(__file__).with_name("manifest.schema.json")
"""The published schema."""

_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$defs", "title", "description", "default", "examples", "patternErrorMessage"}
)


class Report:
    """The results of a check.

    Attributes:
        diagnostics: the mistakes.
        wrong: `id()` of every node that is wrong itself or in a part.
        broken: `id()` of every node that already counts as unreadable; these get no further messages.
    """

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.diagnostics: list[Diagnostic] = []
        self.wrong: set[int] = set(broken)
        self.broken = broken

    def fail(self, node: YamlNode, message: str, hint: str | None = None) -> bool:
        """Reports a mistake at `node`; returns False."""
        self.wrong.add(id(node))
        if id(node) not in self.broken:
            self.diagnostics.append(Diagnostic(message, node.location, hint))
        return False


Check = Callable[[YamlNode, str, Report], bool]
"""A function of a node, its name in messages, and a report for mistakes; returns whether the node is right."""


@functools.cache
def load() -> dict[str, Any]:
    """Returns the schema."""
    value: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return value


def check(root: YamlNode, broken: frozenset[int] = frozenset()) -> Report:
    """Returns the mistakes of a document; `broken` are nodes that replace unreadable parts (`Document.broken`)."""
    report = Report(broken)
    _compiled().root(root, "the manifest", report)
    return report


@functools.cache
def _compiled() -> _Compiler:
    return _Compiler(load())


def _kind(node: YamlNode) -> str:
    """The JSON type of a node."""
    if node.kind == "map":
        return "object"
    if node.kind == "seq":
        return "array"
    value = node.value
    if value is None:
        return "null"
    if value is True or value is False:
        return "boolean"
    if isinstance(value, int):
        return "integer"
    return "number" if isinstance(value, float) else "string"


_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "null": "null",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "text",
}


def describe(node: YamlNode) -> str:
    """Returns a description of a node, for "not …" in a message."""
    if node.kind == "map":
        return "a mapping"
    if node.kind == "seq":
        return "a list"
    if node.value is None:
        return "nothing" if node.text in ("", "~") else "null"
    return f"'{short(node.text)}'"


class _Compiler:
    """Compiles schemas to functions once, so that checking ten thousand kernels is cheap."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.done: dict[str, Check] = {}
        self.root = self.compile(schema, "")

    def compile(self, schema: dict[str, Any], ref: str) -> Check:
        if "$ref" in schema:
            return self.reference(schema["$ref"])
        unknown = schema.keys() - _ANNOTATIONS - _KEYWORDS
        if unknown:
            raise NotImplementedError(f"JSON Schema keywords {sorted(unknown)}")
        checks: list[Check] = []
        branches = schema.get("anyOf")
        if branches and schema.get("type") != "object":
            checks.append(self.branches(branches, schema.get("patternErrorMessage")))
        kind = schema.get("type")
        if kind:
            checks.append(self.of_type(kind, schema))
        if "enum" in schema:
            checks.append(self.one_of(schema["enum"], ref))
        if kind in ("integer", "number"):
            checks.append(self.bounds(schema))
        if "pattern" in schema:
            checks.append(self.pattern(schema))
        if kind == "object":
            checks.append(self.object(schema))
        if kind == "array":
            checks.append(self.array(schema))
        if len(checks) == 1:
            return checks[0]

        def all_of(node: YamlNode, label: str, report: Report) -> bool:
            return all(step(node, label, report) for step in checks)

        return all_of

    def reference(self, ref: str) -> Check:
        if ref not in self.done:
            self.done[ref] = self.compile(self.definition(ref), ref)
        return self.done[ref]

    def definition(self, ref: str) -> dict[str, Any]:
        found = self.schema
        for part in ref.removeprefix("#/").split("/"):
            found = found[part]
        return found

    def of_type(self, kind: str, schema: dict[str, Any]) -> Check:
        accepted = {kind, "integer"} if kind == "number" else {kind}
        name = schema.get("patternErrorMessage") or _NAMES[kind]
        if "enum" in schema:
            name = _choices(schema["enum"])

        def check(node: YamlNode, label: str, report: Report) -> bool:
            if _kind(node) in accepted:
                return True
            hint = None
            if kind == "string" and node.kind == "scalar" and node.value is not None and "enum" not in schema:
                hint = f"write it in quotes: '{short(node.text)}'" if "pattern" not in schema else None
            return report.fail(node, f"{label}: expected {name}, not {describe(node)}", hint)

        return check

    def one_of(self, values: list[Any], ref: str) -> Check:
        known = set(values)
        names = [v for v in values if isinstance(v, str)]
        noun = ref.rpartition("/")[2] or "value"

        def check(node: YamlNode, label: str, report: Report) -> bool:
            if node.kind == "scalar" and node.value in known and not isinstance(node.value, bool):
                return True
            if names and isinstance(node.value, str):
                near = did_you_mean(node.text, names)
                message = f"{label}: unknown {noun} '{short(node.text)}'{near}"
                return report.fail(node, message, None if near and len(values) > 8 else f"expected {_choices(values)}")
            return report.fail(node, f"{label}: expected {_choices(values)}, not {describe(node)}")

        return check

    def bounds(self, schema: dict[str, Any]) -> Check:
        low, high = schema.get("minimum"), schema.get("maximum")

        def check(node: YamlNode, label: str, report: Report) -> bool:
            value = node.value
            if value != value:
                return report.fail(node, f"{label}: expected a number, not '{node.text}'")
            if low is not None and value < low:
                return report.fail(node, f"{label}: expected at least {low}, not {node.text}")
            if high is not None and value > high:
                return report.fail(node, f"{label}: expected at most {high}, not {node.text}")
            return True

        return check

    def pattern(self, schema: dict[str, Any]) -> Check:
        search = re.compile(schema["pattern"]).search
        expected = schema["patternErrorMessage"]

        def check(node: YamlNode, label: str, report: Report) -> bool:
            if search(node.text):
                return True
            return report.fail(node, f"{label}: expected {expected}, not '{short(node.text)}'")

        return check

    def branches(self, schemas: list[dict[str, Any]], expected: str | None) -> Check:
        full = [self.definition(s["$ref"]) if "$ref" in s else s for s in schemas]
        compiled = [self.compile(s, "") for s in schemas]
        table: dict[str, Check] = {}
        for schema, check_branch in zip(full, compiled, strict=True):
            for kind in (schema["type"], "integer") if schema["type"] == "number" else (schema["type"],):
                table.setdefault(kind, check_branch)
        expected = expected or " or ".join(s.get("patternErrorMessage") or _NAMES[s["type"]] for s in full)

        def check(node: YamlNode, label: str, report: Report) -> bool:
            branch = table.get(_kind(node))
            if branch is None:
                return report.fail(node, f"{label}: expected {expected}, not {describe(node)}")
            return branch(node, label, report)

        return check

    def object(self, schema: dict[str, Any]) -> Check:
        properties = {key: self.compile(value, "") for key, value in schema.get("properties", {}).items()}
        others = schema.get("additionalProperties", {})
        other: Check | None = None if others is False else self.compile(others, "") if others else _accept
        required = tuple(schema.get("required", ()))
        # An object needs only one of the keys in `anyOf`; messages request the first.
        one_of = [branch["required"][0] for branch in schema.get("anyOf", ())]
        minimum = schema.get("minProperties", 0)
        names = schema.get("propertyNames")
        key_check = self.pattern(names) if names else None

        def check(node: YamlNode, label: str, report: Report) -> bool:
            good = True
            entries = node.value
            unknown = []
            for key, entry in entries.items():
                step = properties.get(key, other)
                if step is None:
                    unknown.append(key)
                    continue
                if key_check is not None:
                    good &= key_check(entry.key, label, report)
                good &= step(entry.node, key if key in properties else short(key), report)
            missing = [key for key in required if key not in entries]
            if one_of and not any(key in entries for key in one_of):
                missing.append(one_of[0])
            for key in unknown:
                # A misspelt key replaces the one that would otherwise be reported as missing.
                near = nearest(key, properties)
                if near in entries:
                    near = None
                if near in missing:
                    missing.remove(near)
                meant = f": did you mean '{near}'?" if near else ""
                good = report.fail(
                    entries[key].key, f"unknown key '{short(key)}'{meant}", f"keys here are {', '.join(properties)}"
                )
            for key in missing:
                good = report.fail(node, f"{label}: key '{key}' is missing", _about(schema, key))
            if len(entries) < minimum:
                good = report.fail(node, f"{label}: expected at least {minimum} entries, not {len(entries)}")
            if not good:
                report.wrong.add(id(node))
            return good

        return check

    def array(self, schema: dict[str, Any]) -> Check:
        item_check = self.compile(schema["items"], "")
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        unique = schema.get("uniqueItems", False)

        def check(node: YamlNode, label: str, report: Report) -> bool:
            good = True
            items = node.value
            for i, item in enumerate(items):
                good &= item_check(item, f"{label}[{i}]", report)
            if len(items) < low:
                good = report.fail(node, f"{label}: expected at least {low} {'entry' if low == 1 else 'entries'}")
            if high is not None and len(items) > high:
                good = report.fail(node, f"{label}: expected at most {high} entries, not {len(items)}")
            if unique:
                seen: set[Any] = set()
                for i, item in enumerate(items):
                    if id(item) in report.wrong:
                        continue
                    value = _hashable(item)
                    if value in seen:
                        what = f"'{short(item.text)}'" if item.kind == "scalar" else _NAMES[_kind(item)]
                        good = report.fail(item, f"{label}[{i}]: {what} is already in the list")
                    seen.add(value)
            if not good:
                report.wrong.add(id(node))
            return good

        return check


def _accept(node: YamlNode, label: str, report: Report) -> bool:
    return True


def _hashable(node: YamlNode) -> Any:
    """Returns a value that is equal for equal nodes."""
    if node.kind == "map":
        return frozenset((key, _hashable(item.node)) for key, item in node.value.items())
    return tuple(map(_hashable, node.value)) if node.kind == "seq" else node.value


def _choices(values: Any) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _about(schema: dict[str, Any], key: str) -> str | None:
    text = schema["properties"][key].get("description")
    return f"{key}: {text}" if text else None


_KEYWORDS = frozenset(
    """
    $ref type enum anyOf pattern minimum maximum properties additionalProperties required
    propertyNames minProperties items minItems maxItems uniqueItems
    """.split()
)
