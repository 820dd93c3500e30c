"""The kernels that a model needs, with formulas where possible, and the exported calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from kernelgen.model.groups import GraphEntry
from kernelgen.model.kernel_formulas import KernelFormula, RequestedKernel
from kernelgen.model.sizes import DecodeCall
from kernelgen.spec.kernel import KernelSpec


class DerivedKernel(RequestedKernel[KernelFormula]):
    """A kernel of one op with the calls that need it. The name is llama.cpp's name of the first node."""

    def specs(self) -> set[KernelSpec]:
        """The kernels at all its sizes, except for sizes at which a tensor has no elements."""
        found = set()
        for point in self.values.values():
            with contextlib.suppress(ValueError):
                found.add(self.kernel.at(point))
        return found


@dataclass(frozen=True, slots=True)
class DeriveCall:
    """An exported call, for the summary.

    Attributes:
        call: its sizes.
        flash_attn: whether it has flash attention.
        nodes: the number of nodes that it computes.
        without: the number of nodes without a kernel, by the reason.
        devices: the number of devices over which tensors are split.
        of: the devices that compute these nodes.
    """

    call: DecodeCall
    flash_attn: bool
    nodes: int
    without: Mapping[str, int]
    devices: int = 1
    of: tuple[int, ...] = (0,)


@dataclass
class Derived:
    """The kernels that a model needs.

    Attributes:
        entries: kernels in the order of the graph, including kernels that can't be built.
        calls: the requested calls that were exported.
        listed: the number of entries for a single size, because no formula was found.
        graphs: graph kernels in the order of the graph, including graph kernels that can't be built.
    """

    entries: list[DerivedKernel]
    calls: list[DeriveCall]
    listed: int = 0
    graphs: list[GraphEntry] = field(default_factory=list)
