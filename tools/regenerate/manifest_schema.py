"""Generates the lists of names in the manifest's schema, for editors; the rest of the schema is written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kernelgen.ggml.ops import OPS
from kernelgen.ggml.weight_layouts import LAYOUTS
from kernelgen.languages import LANGUAGES
from kernelgen.targets import TARGETS


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def render(text: str) -> str:
    """Returns the schema with the current ops, languages, targets and layouts."""
    schema = json.loads(text)
    definitions = schema["$defs"]
    definitions["kernel"]["properties"]["op"]["examples"] = sorted(OPS)
    definitions["language"]["enum"] = list(LANGUAGES)
    definitions["target"]["enum"] = list(TARGETS)
    definitions["layout"]["enum"] = list(LAYOUTS)
    definitions["layout_of_some"]["properties"] = {name: {"$ref": "#/$defs/weights_named"} for name in LAYOUTS}
    definitions["weights_by_target"]["properties"] = {name: {"$ref": "#/$defs/layouts"} for name in TARGETS}
    experimental = _listed(name for name, target in TARGETS.items() if target.experimental)
    definitions["target"]["description"] = f"A value of neuronx-cc's --target; experimental: {experimental}."
    defaults = {n: [name for name, target in TARGETS.items() if target.lnc == n] for n in (1, 2)}
    definitions["compiler"]["properties"]["lnc"]["description"] = (
        "--lnc, physical NeuronCores per logical one; the target's default when absent "
        f"({', '.join(f'{n} on {_listed(names)}' for n, names in defaults.items())}). "
        "Must equal the runtime's NEURON_LOGICAL_NC_CONFIG."
    )
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
