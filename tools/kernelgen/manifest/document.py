"""YAML as a tree in which every value has its position: the first step of reading a manifest.

It is built from parser events with its own stack, so deep nesting gives a message instead of reaching Python's recursion limit.
Scalars follow YAML 1.2's core schema, as in editors (`on` is text, `1e-5` a number), not PyYAML's 1.1.

It supports anchors, aliases and merge keys (`<<`). An alias shares the anchored node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import yaml

from kernelgen.errors import Diagnostic, Location

MAX_DEPTH = 32
"""Maximum levels of nesting; a manifest needs six."""

_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_MAX_DIGITS = 20
_NOT_YAML = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_LOADER: Any = getattr(yaml, "CLoader", yaml.Loader)  # libyaml is ten times faster; both give the same events


class YamlNode:
    """One value of a document.

    Attributes:
        kind: `map`, `seq` or `scalar`.
        value: a scalar's Python value; a map's values by the text of their keys; a seq's list of nodes.
        keys: the nodes of a map's keys, by their text.
        text: a scalar as written, without quotes.
        file, line, column: its start; lines and columns count from 1.
    """

    __slots__ = ("column", "file", "keys", "kind", "line", "text", "value")

    def __init__(self, kind: Literal["map", "seq", "scalar"], value: Any, text: str, file: str, mark: Any) -> None:
        self.kind = kind
        self.value = value
        self.text = text
        self.file = file
        self.line: int = mark.line + 1
        self.column: int = mark.column + 1
        self.keys: dict[str, YamlNode] = {}

    @property
    def location(self) -> Location:
        return Location(self.file, self.line, self.column)

    def get(self, key: str) -> YamlNode | None:
        """Returns the value of `key` in a map, or None."""
        node: YamlNode | None = self.value.get(key)
        return node

    def at(self, *path: str | int) -> YamlNode:
        """Returns the value at a path of keys and positions, or the innermost one around it if the document leaves it out."""
        node = self
        for step in path:
            inner = node.value[step] if isinstance(step, int) else node.get(step)
            if inner is None:
                break
            node = inner
        return node

    def scalars(self) -> Iterator[YamlNode]:
        """Returns the scalars in it, in their order, without keys."""
        if self.kind == "scalar":
            yield self
            return
        for inner in self.value.values() if self.kind == "map" else self.value:
            yield from inner.scalars()

    def plain(self) -> Any:
        """Returns the value as plain dicts, lists and scalars, the form for a JSON Schema validator."""
        if self.kind == "map":
            return {key: node.plain() for key, node in self.value.items()}
        if self.kind == "seq":
            return [item.plain() for item in self.value]
        return self.value

    def __repr__(self) -> str:
        return f"Node({self.kind}, {self.location}, {self.text!r})"


class Report:
    """The mistakes of a document.

    Attributes:
        diagnostics: the mistakes.
        wrong: `id()` of every node with a mistake.
    """

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []
        self.wrong: set[int] = set()
        self._unreadable: set[int] = set()

    def fail(self, node: YamlNode, message: str, hint: str | None = None) -> None:
        """Reports a mistake, unless the node replaces an unreadable part, whose mistake is reported already."""
        self.wrong.add(id(node))
        if id(node) not in self._unreadable:
            self.diagnostics.append(Diagnostic(message, node.location, hint))

    def set_unreadable(self, node: YamlNode) -> None:
        """Ignores further mistakes of a node."""
        self.wrong.add(id(node))
        self._unreadable.add(id(node))


def parse(data: bytes, file: str, report: Report) -> YamlNode | None:
    """Returns the outermost value of a document; None if the text is not one document.

    Args:
        data: the file's bytes, UTF-8 with or without a byte order mark.
        file: its name in messages.
        report: receives the YAML mistakes.
    """
    start = Location(file, 1, 1)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        where = Location(file, before.count(b"\n") + 1, column)
        message = f"byte 0x{data[error.start]:02x} is not UTF-8: {error.reason}"
        report.diagnostics.append(Diagnostic(message, where, "save the file as UTF-8"))
        return None
    builder = _Builder(file, report)
    try:
        if not all(map(builder.add, yaml.parse(text, Loader=_LOADER))):
            return None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # only without libyaml it raises the last two
        report.diagnostics.append(_syntax_error(error, text, file))
        return None
    if builder.root is None and not report.diagnostics:
        report.diagnostics.append(Diagnostic("the manifest is empty", start, "it begins with 'format: 1'"))
    return builder.root


def _syntax_error(error: Exception, text: str, file: str) -> Diagnostic:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        context = f"{error.context}: " if error.context else ""
        where = Location(file, mark.line + 1, mark.column + 1) if mark else Location(file, 1, 1)
        return Diagnostic(f"not YAML: {context}{error.problem or 'syntax error'}", where)
    # A character that YAML does not allow: search for it, since the parsers count its position in different units.
    found = _NOT_YAML.search(text)
    before = text[: found.start()] if found else ""
    where = Location(file, before.count("\n") + 1, len(before) - before.rfind("\n"))
    return Diagnostic(f"not YAML: {getattr(error, 'reason', None) or 'syntax error'}", where)


def scalar(text: str) -> Any:
    """Returns the value of a plain scalar in YAML 1.2's core schema.

    Raises:
        ValueError: a number has more digits than any number in a manifest.
    """
    first = text[:1]
    if first.isdigit() or first in "+-.":
        if _INT.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                raise ValueError(f"a number of {len(text)} digits")
            return int(text, 0 if text[1:2] in ("x", "o") else 10)
        if _FLOAT.fullmatch(text):
            if len(text) > 4 * _MAX_DIGITS:
                raise ValueError(f"a number of {len(text)} digits")
            value = float(text)
            if math.isinf(value):
                raise ValueError("a number beyond a double's range")
            return value
    return _WORDS.get(text, text)


class _Builder:
    """Builds nodes from events. Open collections are on a stack, with the key that waits for its value."""

    def __init__(self, file: str, report: Report) -> None:
        self.file = file
        self.report = report
        self.root: YamlNode | None = None
        self.documents = 0
        self.stack: list[YamlNode] = []
        self.keys: list[YamlNode | None] = []
        self.anchors: dict[str, YamlNode] = {}
        self.open_anchors: list[str | None] = []
        self.merges: list[list[YamlNode]] = []
        self.no_key = YamlNode("scalar", "", "", file, _Zero)  # replaces an invalid key, which is reported

    def problem(self, mark: Any, message: str, hint: str | None = None) -> None:
        self.report.diagnostics.append(Diagnostic(message, Location(self.file, mark.line + 1, mark.column + 1), hint))

    def add(self, event: Any) -> bool:
        """Adds one event; returns False if the rest of the document is unusable."""
        kind = type(event)
        if kind is yaml.ScalarEvent:
            return self._scalar(event)
        if kind in (yaml.MappingStartEvent, yaml.SequenceStartEvent):
            return self._open(event, is_map=kind is yaml.MappingStartEvent)
        if kind in (yaml.MappingEndEvent, yaml.SequenceEndEvent):
            return self._close()
        if kind is yaml.AliasEvent:
            return self._alias(event)
        if kind is yaml.DocumentStartEvent:
            self.documents += 1
            if self.documents == 2:
                self.problem(
                    event.start_mark, "a second document: a file holds one manifest", "write it to a file of its own"
                )
                return False
        return True

    def _scalar(self, event: Any) -> bool:
        mark = event.start_mark
        text = event.value
        value = text
        readable = True
        if event.implicit[0]:  # plain, without a tag
            try:
                value = scalar(text)
            except ValueError as error:
                self.problem(mark, f"{error} is not a figure of a manifest: '{short(text)}'")
                readable = False
        elif event.tag is not None:
            self._refuse_tag(event)
        node = YamlNode("scalar", value, text, self.file, mark)
        if not readable:
            self.report.set_unreadable(node)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return self._attach(node)

    def _open(self, event: Any, is_map: bool) -> bool:
        if len(self.stack) >= MAX_DEPTH:
            self.problem(event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
            return False
        if event.tag is not None and not event.implicit:
            self._refuse_tag(event)
        self.stack.append(YamlNode("map" if is_map else "seq", {} if is_map else [], "", self.file, event.start_mark))
        self.keys.append(None)
        self.open_anchors.append(event.anchor)
        self.merges.append([])
        return True

    def _close(self) -> bool:
        node = self.stack.pop()
        self.keys.pop()
        for source in self.merges.pop():  # last, since a map's own keys take precedence wherever they stand
            for key, value in source.value.items():
                if key not in node.value:
                    node.value[key], node.keys[key] = value, source.keys[key]
        anchor = self.open_anchors.pop()
        if anchor is not None:
            self.anchors[anchor] = node
        return self._attach(node)

    def _alias(self, event: Any) -> bool:
        known = self.anchors.get(event.anchor)
        if known is None:
            inside = event.anchor in self.open_anchors
            what = "stands inside what it names" if inside else "names no anchor above it"
            self.problem(event.start_mark, f"alias '*{event.anchor}' {what}")
            known = YamlNode("scalar", None, "", self.file, event.start_mark)
            self.report.set_unreadable(known)
        return self._attach(known)

    def _refuse_tag(self, event: Any) -> None:
        self.problem(event.start_mark, f"tags have no meaning in a manifest: '{short(event.tag)}'", "remove the tag")

    def _attach(self, node: YamlNode) -> bool:
        if not self.stack:
            # An empty document is one empty scalar.
            self.root = None if node.kind == "scalar" and node.text == "" else node
            return True
        parent = self.stack[-1]
        if parent.kind == "seq":
            parent.value.append(node)
            return True
        key = self.keys[-1]
        if key is None:
            if node.kind != "scalar":
                self.problem(_Mark(node), f"a key is a word, not a {'mapping' if node.kind == 'map' else 'list'}")
                node = self.no_key
            self.keys[-1] = node
            return True
        self.keys[-1] = None
        if key.text == "<<":
            for source in node.value if node.kind == "seq" else [node]:
                if source.kind == "map":
                    self.merges[-1].append(source)
                else:
                    self.problem(_Mark(key), "'<<' merges mappings", "write <<: *name, where &name marks a mapping")
            return True
        if key is self.no_key:
            return True
        first = parent.keys.setdefault(key.text, key)
        if first is key:
            parent.value[key.text] = node
        else:
            self.problem(_Mark(key), f"key '{short(key.text)}' is already defined, on line {first.line}")
        return True


class _Mark:
    """A node's position in the form of PyYAML's marks, which count from 0."""

    __slots__ = ("column", "line")

    def __init__(self, node: YamlNode) -> None:
        self.line = node.line - 1
        self.column = node.column - 1


class _Zero:
    line = column = -1


def short(text: str, limit: int = 60) -> str:
    """Returns `text` on one line, cut to `limit` characters, for a message."""
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= limit else text[: limit - 1] + "…"
