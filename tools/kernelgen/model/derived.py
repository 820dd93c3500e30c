"""What a model needs: kernels with formulas where there are some, and the calls that were looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from kernelgen.model.groups import GraphEntry
from kernelgen.model.kernel_formulas import KernelFormula, RequestedKernel
from kernelgen.model.sizes import DecodeCall
from kernelgen.spec.op_kernel import KernelSpec


class DerivedKernel(RequestedKernel[KernelFormula]):
    """A kernel of one op with the calls that ask for it; its name is what llama.cpp calls the first node."""

    def specs(self) -> set[KernelSpec]:
        """The kernels that it stands for; none where a tensor has no elements."""
        found = set()
        for point in self.values.values():
            with contextlib.suppress(ValueError):
                found.add(self.kernel.at(point))
        return found


@dataclass(frozen=True, slots=True)
class DeriveCall:
    """A call that was looked at, for the summary.

    Attributes:
        call: its sizes.
        flash_attn: whether it is with flash attention.
        nodes: how many nodes it computes.
        without: of these, how many have no kernel, by reason.
        devices: over how many devices tensors are split.
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
    """What a model needs.

    Attributes:
        entries: kernels, in the order of the graph, those that can't be built too.
        calls: that were looked at and are asked for.
        listed: how many entries are there for one size each, since no formula was found.
        graphs: graph kernels, in the order of the graph, those that can't be built too.
    """

    entries: list[DerivedKernel]
    calls: list[DeriveCall]
    listed: int = 0
    graphs: list[GraphEntry] = field(default_factory=list)
