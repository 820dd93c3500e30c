"""Build files from a plan. The Jinja2 templates hold the layout; the module of each build system holds its own logic."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2


def _starlark(value: Any) -> str:
    """Returns a string, number, list or dict as a Starlark literal: JSON without null, true and false."""
    return json.dumps(value, ensure_ascii=True)


def _cmake(value: str) -> str:
    """Returns a CMake bracket argument that holds `value` unchanged."""
    level = 0
    while f"]{'=' * level}]" in value or value.endswith("]" + "=" * level):
        level += 1
    return f"[{'=' * level}[{value}]{'=' * level}]"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kernelgen.render", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["starlark"] = _starlark
    environment.filters["cmake"] = _cmake
    return environment


def render(template: str, values: Mapping[str, Any]) -> str:
    """Returns the filled-in template; a missing value is an error."""
    return _environment().get_template(template).render(**values)
