"""What the tests of the survey share: the program as a module, and folders as compile caches and repositories have them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
