"""The lists of names in the manifest's schema, for editors: what else is in it is written by hand."""

from __future__ import annotations

import json

from kernelgen.ggml.ops import OPS
from kernelgen.targets import TARGETS


def render(text: str) -> str:
    """Returns the schema with the ops and targets that there are."""
    schema = json.loads(text)
    definitions = schema["$defs"]
    definitions["kernel"]["properties"]["op"]["examples"] = sorted(OPS)
    definitions["target"]["enum"] = list(TARGETS)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
