"""`nki_cpu_simulator`, `neuron_dtypes` and `nki.collectives` for the tests of AWS's repository nki-library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from nki_interpreter import language
from nki_interpreter.dtypes import dtype_of, is_float
from nki_interpreter.errors import NkiError
from nki_interpreter.kernel import NkiKernel, simulate


class CpuSimulated:
    """`cpu_simulate(kernel)`: a call with arrays runs the kernel on the CPU; `[n]` sets n programs.

    The variable NKI_NC_VERSION, which the tests set, names the generation whose limits are checked.
    """

    def __init__(self, function: Any, cores: int = 1) -> None:
        self.function = function
        self.cores = cores

    def __getitem__(self, cores: int) -> CpuSimulated:
        return CpuSimulated(self.function, cores)

    def __call__(self, **inputs: Any) -> Any:
        function = getattr(self.function, "function", self.function)
        made = NkiKernel(function, older=False, platform_target=os.environ.get("NKI_NC_VERSION", "gen3"))
        return simulate(made[self.cores], **inputs)


class ReplicaGroup:
    """The ranks of a collective."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = groups


def _refused(name: str) -> Callable[..., Any]:
    def collective(*_: Any, **__: Any) -> Any:
        raise NkiError("err_collective", f"{name} is between devices, and here is one")

    return collective


_COLLECTIVES = """
    all_gather all_reduce all_to_all reduce_scatter collective_permute collective_permute_implicit
    collective_permute_implicit_current_processing_rank_id collective_permute_implicit_reduce rank_id
""".split()


def _static_cast(array: Any, dtype: Any) -> Any:
    return np.asarray(array).astype(dtype_of(dtype))


def _size(dtype: Any) -> int:
    return dtype_of(dtype).itemsize


class LockStatus(Enum):
    """The outcome of a lock of a remote machine; here there is none."""

    ACQUIRED = "ACQUIRED"


@dataclass
class LockResult:
    status: LockStatus


class _Frontend:
    """A placeholder for a compiler's front end."""


def mend() -> None:
    """Lets nki-library's tests continue after a kernel ran in simulation.

    Their `Orchestrator` sets `_compiled_kernel` when it compiles. It does not compile in this mode, but reads the
    attribute later.
    """
    module = sys.modules.get("test.utils.test_orchestrator")
    orchestrator = getattr(module, "Orchestrator", None)
    if orchestrator is not None and not hasattr(orchestrator, "_compiled_kernel"):
        orchestrator._compiled_kernel = None


def names() -> dict[str, dict[str, Any]]:
    """Returns the names in each module, by module. The interpreter's modules of `nki` must be in `sys.modules`."""
    nki = vars(sys.modules["nki"])

    inside = {
        f"nki_cpu_simulator.{name}": dict(vars(sys.modules[name]))
        for name in (
            "nki.compiler nki.isa nki.isa.constants nki.language nki.language.dtypes nki.tensor nki.typing".split()
        )
    }
    dtypes = {n: v for n, v in language.names().items() if isinstance(v, type | np.dtype) or n.endswith("_x4")}
    return {
        "nki_cpu_simulator.nki": {**nki, "cpu_simulate": CpuSimulated},
        **inside,
        "nki_cpu_simulator.nki.builtin": {},
        "nki.collectives": {"ReplicaGroup": ReplicaGroup, **{name: _refused(name) for name in _COLLECTIVES}},
        "nki.compiler.frontend": {"NKIFrontend": _Frontend, "ParserFrontend": _Frontend},
        # The tests' conftest imports these from the tests' own folder; they are not published.
        "test.utils.scripts.remote_lock_scripts": {"LockResult": LockResult, "LockStatus": LockStatus},
        "test.utils.perf_analysis_private": {"analyze_trace": _refused("analyze_trace")},
        "neuron_dtypes": {
            **dtypes,
            "static_cast": _static_cast,
            "sizeinbytes": _size,
            "finfo": language.finfo,
            "is_float_type": is_float,
        },
    }
