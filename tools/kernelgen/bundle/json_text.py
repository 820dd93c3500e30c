"""Reads the JSON of bundles, so that every reader gets the same values."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_DEPTH = 16
"""Maximum nesting depth of arrays and objects in a bundle."""


def read_json(data: bytes | str, depth: int = 0) -> Any:
    """Returns the value of a JSON text.

    Args:
        data: the text.
        depth: nesting depth of the text in its document.

    Raises:
        ValueError: not JSON or not UTF-8, an object has two members of one name, a string has a NUL or a lone surrogate, or arrays
            and objects are nested deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(
            data.decode() if isinstance(data, bytes) else data,
            object_pairs_hook=_members,
            parse_constant=_no_number,
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    waiting = [(value, depth)]
    while waiting:
        inner, level = waiting.pop()
        if level > MAX_DEPTH:
            raise ValueError("nested too deep")
        if isinstance(inner, str):
            _check_text(inner)
        elif isinstance(inner, list):
            waiting += [(item, level + 1) for item in inner]
        elif isinstance(inner, dict):
            for name in inner:
                _check_text(name)
            waiting += [(item, level + 1) for item in inner.values()]
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the second member '{next(name for name in made if names.count(name) > 1)}'")
    return made


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"{text!r} holds a NUL")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{text!r} holds half a character")
