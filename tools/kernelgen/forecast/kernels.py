"""Forecasts calls with the kernels of a manifest or a bundle; emits and counts each kernel once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping

from kernelgen.dispatch.chips import Chip
from kernelgen.dispatch.grouping import Groups
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError
from kernelgen.forecast.call import CallForecast, forecast
from kernelgen.forecast.time import sbuf_bytes
from kernelgen.forecast.work import Work, of_hlo
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import BF16, F8_TILES
from kernelgen.model.graphs import Graph
from kernelgen.plan import Kernel
from kernelgen.spec.kernel import GraphSpec, KernelSpec, Spec


class Kernels:
    """The available kernels.

    Args:
        specs: their specs.
        catalog: the emitters that make their HLO.
        read_hlo: by kernel id, a function that returns its HLO from a bundle, so that no emitter makes it again.
        sources: by id, manifests' kernels that are named by their source.
    """

    def __init__(
        self,
        specs: Iterable[Spec],
        catalog: Catalog,
        read_hlo: Mapping[str, Callable[[], bytes]] | None = None,
        sources: Mapping[str, Kernel] | None = None,
    ) -> None:
        self._catalog = catalog
        self._read_hlo = read_hlo or {}
        self._sources = sources or {}
        # Graphs have weights in ggml's form; the backend handles kernels' layouts.
        self.by_graph = {spec.without_layouts: spec for spec in specs}
        self._groups = Groups(spec for spec in self.by_graph if isinstance(spec, GraphSpec))
        self._ops = frozenset(spec for spec in self.by_graph if isinstance(spec, KernelSpec))
        self._widened = frozenset().union(*map(_widened, self.by_graph.values()))
        self._hlo: dict[Spec, bytes | None] = {}
        self._work: dict[tuple[Spec, int], Work] = {}
        self.refusals: dict[Spec, str] = {}
        """The reason why a kernel, keyed in the graphs' form, can't be emitted."""

    def hlo(self, spec: Spec) -> bytes | None:
        """Returns the HLO of a kernel in the graphs' form; None if it can't be emitted."""
        if spec not in self._hlo:
            self._hlo[spec] = self._emitted(spec)
        return self._hlo[spec]

    def work(self, spec: Spec, chip: Chip) -> Work | None:
        """Returns the work of a kernel in the graphs' form; None if its HLO can't be emitted."""
        hlo = self.hlo(spec)
        if hlo is None:
            return None
        key = spec, sbuf_bytes(chip)
        if key not in self._work:
            self._work[key] = of_hlo(hlo, key[1])
        return self._work[key]

    def kernel(self, spec: Spec) -> Kernel:
        """Returns a spec with its emitter.

        Raises:
            KernelgenError: no emitter computes it.
        """
        return self._sources.get(spec.id) or self._catalog.kernel(spec)

    def _emitted(self, name: Spec) -> bytes | None:
        spec = self.by_graph[name]
        if spec.id in self._read_hlo:
            return self._read_hlo[spec.id]()
        from kernelgen.lowering import emission

        try:
            with contextlib.redirect_stdout(sys.stderr):  # an emitter's output
                kernel = self.kernel(spec)
                prebuilt = self._catalog.prebuilt_of(kernel)
                return emission.emit(
                    self._catalog.emitters(kernel), spec, targets=kernel.targets, prebuilt=prebuilt
                ).hlo
        except KernelgenError as error:
            self.refusals[name] = str(error)
            return None

    def forecast(
        self, graph: Graph, chip: Chip, *, queued: bool = True, layers: int = 0, cores: int = 1
    ) -> CallForecast:
        """Returns the forecast of a call; see `kernelgen.forecast.call.forecast` for the arguments."""
        return forecast(
            graph,
            self._ops,
            self._groups,
            chip,
            lambda spec: self.work(spec, chip),
            queued=queued,
            layers=layers,
            cores=cores,
            widened=self._widened,
        )


def _widened(spec: Spec) -> frozenset[TensorDesc]:
    """Returns the weights for which a kernel requests a layout of another size; weights in `bf16` are in ggml's form here."""
    tensors = [t for kernel in spec.kernels for t in kernel.inputs if t is not None]
    return frozenset(t if t.layout == F8_TILES else t.in_layout("") for t in tensors if t.layout in (BF16, F8_TILES))
