"""What the tests of the interpreter share: the survey of NKIBench as a module."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
