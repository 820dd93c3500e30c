"""The modules of nkipy and nkigen that kernels import: functions of `kernelgen.languages.numpy` under their names there."""

from __future__ import annotations

import types
from typing import Any

from kernelgen.languages.numpy import apis
from kernelgen.languages.numpy.knobs import knob
from kernelgen.languages.numpy.loops import fori_loop
from kernelgen.languages.numpy.marking import trace
from nki_interpreter.standing_in import made

PACKAGES = ("nkipy", "nkigen")


class NKIPyKernel:
    """`NKIPyKernel.trace` marks a kernel; the methods that run one on a device are absent."""

    trace = staticmethod(trace)


def names() -> dict[str, dict[str, Any]]:
    """Returns the contents of each module, by its name."""
    return {
        "nkipy": {"knob": knob},
        "nkipy.core.knob": {"knob": knob},
        "nkipy.core.tensor_apis": {name: getattr(apis, name) for name in apis.__all__}
        | {"fori_loop": fori_loop, "knob": knob, "trace": trace},
        "nkipy.core.trace": {"NKIPyKernel": NKIPyKernel},
        "nkigen": {"trace": trace, "knob": knob, "fori_loop": fori_loop},
        "nkigen.apis": {"fori_loop": fori_loop, "knob": knob},
        "nkigen.trace": {"trace": trace},
    }


def modules() -> dict[str, types.ModuleType]:
    """Returns the modules, by name."""
    return made(names())
