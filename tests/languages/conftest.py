"""Makes the helpers and the double of NKI's own compiler importable by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data" / "native_kernels"))
