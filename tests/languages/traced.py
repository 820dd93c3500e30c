"""Runs a kernel in NumPy from its canonical HLO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelgen.hlo import execute
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.hlo.lint import errors, lint
from kernelgen.languages import Call
from kernelgen.lowering.function import lower_function
from kernelgen.targets import TARGETS


def run(function: Callable[..., Any], *arrays: np.ndarray[Any, Any], **keywords: Any) -> list[np.ndarray[Any, Any]]:
    """Returns a kernel's results and the new content of changed parameters, from the canonical HLO."""
    call = Call(tuple((a.shape, a.dtype.name) for a in arrays), keywords=keywords)
    lowered = lower_function("numpy", function, call, function.__name__)
    hlo = canonicalize(lowered.hlo, lowered.inputs, lowered.outputs, aliases=lowered.aliases)
    assert not errors(lint(hlo)) + errors(lint(hlo, TARGETS["trn2"]))
    return execute.run(hlo, arrays)
