"""Writes every generated file that is checked in and comes from kernelgen's own tables.

    ./bazelw run //tools:regenerate                 writes the stale files, and prints their names
    ./bazelw run //tools:regenerate -- --check      prints the stale files; exit status 1 if there are any

Other commands write the results of running llama.cpp's programs (docs/results/ops.md and similar pages):
docs/reference/llama-cpp-tests.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from regenerate import (
    bundle_keys,
    costs,
    languages,
    lint_rules,
    log_lines,
    manifest_schema,
    targets,
    token_table,
)

FILES: Mapping[str, Callable[[str], str]] = {
    "backend/ggml-neuron/select/costs.inc": lambda _: costs.render(),
    "backend/ggml-neuron/select/token_table.inc": lambda _: token_table.render(),
    "backend/nrt/targets.inc": lambda _: targets.inc(),
    "backend/simulator/src/instances.inc": lambda _: targets.instances(),
    "backend/simulator/src/prices.inc": lambda _: targets.prices(),
    "docs/reference/lint.md": lint_rules.render,
    "docs/reference/log.md": lambda _: log_lines.render(),
    "docs/reference/targets.md": targets.page,
    "rules/private/languages.bzl": lambda _: languages.bzl(),
    "rules/private/targets.bzl": lambda _: targets.bzl(),
    "tests/compilers/fake_neuronx_cc": targets.compiler_double,
    "tests/data/bundle-graph-keys.json": bundle_keys.render,
    "tests/data/bundle-keys.json": bundle_keys.render,
    "tools/kernelgen/compilers/nki_driver.py": targets.native_driver,
    "tools/nki_interpreter/devices.py": lambda _: targets.nki(),
    "tools/kernelgen/manifest/manifest.schema.json": lambda _: manifest_schema.render(),
    "tools/kernelgen/neff/container.py": targets.neff,
}
"""The generated files: each file, and a function from its current text to the right text."""


def stale(root: Path) -> dict[str, str]:
    """Returns the files below `root` that differ from their generated text, with the right text."""
    found = {}
    for name, render in FILES.items():
        path = root / name
        now = path.read_text(encoding="utf-8") if path.exists() else ""
        if (text := render(now)) != now:
            found[name] = text
    return found
