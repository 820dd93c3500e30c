"""JAX as kernelgen uses it: on the CPU, whatever devices the machine has, imported when it is first needed."""

from __future__ import annotations

import os
from typing import Any


def import_jax() -> Any:
    """Returns the `jax` module, bound to the CPU."""
    # A TPU or GPU plug-in that happens to be installed would otherwise be started, and may take seconds or fail.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # XLA greets on standard error otherwise
    import jax

    return jax
