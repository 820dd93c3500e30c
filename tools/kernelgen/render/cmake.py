"""A plan as a CMake file: one call per HLO, NEFF and bundle, of functions that `rules/cmake/NeuronKernels.cmake` defines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernelgen import library as libraries
from kernelgen.library import Library
from kernelgen.plan import Plan, canonical_json, spec_json
from kernelgen.render import render


def generate(plan: Plan, sources: Sequence[Library]) -> Mapping[str, str]:
    """Returns the files by path.

    Args:
        plan: what to build.
        sources: every kernel library that the plan names.
    """
    by_name = {s.name: s for s in sources}
    depends = {
        f"{library}/{emitter}": [str(file) for file in libraries.dependencies(by_name[library], emitter)]
        for library, emitter in sorted({(k.library, k.emitter) for k in plan.kernels})
    }
    values = {
        "depends": depends,
        "configs": {c.key: canonical_json(c.to_json()) for c in plan.configs},
        "kernels": [
            {"id": k.spec.id, "emitter": f"{k.library}/{k.emitter}", "spec": spec_json(k.spec)} for k in plan.kernels
        ],
        "neffs": plan.neffs,
        "bundles": plan.bundles,
    }
    return {"kernels.cmake": render("cmake/kernels.cmake.j2", values), "plan.json": plan.to_json()}
