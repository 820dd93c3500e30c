"""Values as text whose bytes follow from the value alone: what digests are taken of."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Returns JSON with sorted keys and no white space; the same value gives the same text everywhere."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
