"""Values as canonical text, for digests."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Returns JSON with sorted keys and no white space; equal values give equal text everywhere."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
