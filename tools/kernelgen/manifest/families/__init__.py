"""Architecture families: from a model's hyperparameters to the kernels that llama.cpp's graph builder asks for.

A family is a module with `expand(model, report)`, an entry in `FAMILIES`, and a definition in manifest.schema.json that the
schema's `model` refers to. Nothing else knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kernelgen.kernel import KernelSpec
from kernelgen.manifest.document import Node
from kernelgen.manifest.families import llama
from kernelgen.manifest.schema import Report

Family = Callable[[Node, Report], list[KernelSpec]]
"""Takes a manifest's `model:` node, which the schema was checked against, and where to note mistakes; returns every kernel, in any
order, duplicates allowed. Nodes in `report.wrong` hold nothing usable. With a mistake it returns an empty list."""

FAMILIES: Mapping[str, Family] = MappingProxyType({"llama": llama.expand})
"""Every family by the value of `family:`."""
