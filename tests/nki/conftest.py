"""What the tests of the interpreter share: kernels of both generations of NKI, and the survey of NKIBench, as modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "corpus"))
