"""Lowering: from emitters to the canonical HLO of a kernel.

`emission` is what build steps call; `kernel` traces a kernel's nodes, `function` a function in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelgen.spec.kernel import Spec


def emit(spec: Spec, function: Callable[..., Any]) -> bytes:
    """Returns the canonical HLO of a kernel that one function in JAX computes."""
    # A lazy import: other steps read HLO, and must not be repeated when lowering changes.
    from kernelgen.lowering.emission import emit_functions

    return emit_functions(spec, {spec.op: function}).hlo
