"""Computes the key words and hashes in tests/data/bundle-keys.json and bundle-graph-keys.json, which Python and C++ must agree on.

The files define the format: a change of a key in them changes every bundle, and needs a new format version. A new row needs a
`spec` only.
"""

from __future__ import annotations

import json

from kernelgen.bundle.key import key, key_hash
from kernelgen.spec.kernel import Spec


def render(text: str) -> str:
    """Returns the text of a file, with the ids, keys and hashes of the specs in `text`."""
    rows = []
    for row in json.loads(text):
        spec = Spec.from_json(row["spec"])
        words = key(spec)
        computed = {"key": [f"{word:016x}" for word in words], "hash": f"{key_hash(words):016x}"}
        rows.append(json.dumps(row | {"id": spec.id} | computed))
    return "[\n" + ",\n".join(rows) + "\n]\n"
