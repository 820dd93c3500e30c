"""Shared by the tests of the interpreter: makes kernels of both generations of NKI, and the survey of NKIBench, importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "corpus"))
