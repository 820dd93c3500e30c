"""The modules of nkipy and nkigen that kernels import: the functions that `kernelgen.languages.numpy` has, by their names there."""

from __future__ import annotations

import types
from typing import Any

from kernelgen.languages import numpy as kernels
from nki_interpreter.standing_in import made

PACKAGES = ("nkipy", "nkigen")


class NKIPyKernel:
    """`NKIPyKernel.trace` marks a kernel; what runs one on a device is not here."""

    trace = staticmethod(kernels.trace)


def names() -> dict[str, dict[str, Any]]:
    """Returns what each of the modules has, by its name."""
    return {
        "nkipy": {"knob": kernels.knob},
        "nkipy.core.knob": {"knob": kernels.knob},
        "nkipy.core.tensor_apis": {name: getattr(kernels, name) for name in kernels.__all__},
        "nkipy.core.trace": {"NKIPyKernel": NKIPyKernel},
        "nkigen": {"trace": kernels.trace, "knob": kernels.knob, "fori_loop": kernels.fori_loop},
        "nkigen.apis": {"fori_loop": kernels.fori_loop, "knob": kernels.knob},
        "nkigen.trace": {"trace": kernels.trace},
    }


def modules() -> dict[str, types.ModuleType]:
    """Returns the modules, by name."""
    return made(names())
