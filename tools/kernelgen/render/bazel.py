"""A plan as Bazel packages: `kernels` with a target for every HLO and NEFF, `bundles` with one for every manifest and target.

The files are written into a repository of their own (`@neuron_kernels`) by `rules/private/repositories/kernels.bzl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.emitters.dependencies import dependencies
from kernelgen.emitters.library import Library
from kernelgen.kernel import param_text
from kernelgen.plan import Plan
from kernelgen.render import render


@dataclass(frozen=True, slots=True)
class BazelLibrary:
    """A kernel library and the Bazel package that exports its modules.

    Attributes:
        library: the folder of emitters.
        package: the package's label without a target, `@@repository//path`.
        data: labels of the files that its emitters open.
    """

    library: Library
    package: str
    data: tuple[str, ...] = ()

    def label(self, file: Path) -> str:
        return f"{self.package}:{file.relative_to(self.library.root).as_posix()}"


def generate(plan: Plan, sources: Sequence[BazelLibrary], rules: str) -> Mapping[str, str]:
    """Returns the repository's files by path.

    Args:
        plan: what to build.
        sources: every kernel library that the plan names, with its package.
        rules: the repository of the rules, as labels begin: `@@neuron_kernelgen~`.
    """
    by_name = {s.library.name: s for s in sources}
    emitters = {}
    for kernel in plan.kernels:
        key = f"{kernel.library}/{kernel.emitter}"
        if key not in emitters:
            source = by_name[kernel.library]
            module, *helpers = dependencies(source.library, kernel.emitter)
            emitters[key] = {
                "emitter": source.label(module),
                "helpers": [_label_of(file, sources) for file in helpers],
            }
    values = {
        "rules": rules,
        "emitters": emitters,
        "data": {s.library.name: list(s.data) for s in sources if s.data},
        "flags": {c.key: c.flags() for c in plan.configs},
        "targets": {c.key: c.target for c in plan.configs},
        "kernels": [
            {
                "id": k.spec.id,
                "emitter": f"{k.library}/{k.emitter}",
                "library": k.library,
                "op": k.spec.op,
                "inputs": ["" if t is None else str(t) for t in k.spec.inputs],
                "output": str(k.spec.output),
                "params": {name: param_text(value) for name, value in k.spec.params},
                "alias": k.spec.alias,
            }
            for k in plan.kernels
        ],
        "neffs": plan.neffs,
        "bundles": plan.bundles,
        "manifests": _targets_by_manifest(plan),
    }
    return {
        "BUILD.bazel": render("bazel/root.BUILD.j2", values),
        "defs.bzl": render("bazel/defs.bzl.j2", values),
        "bundles/BUILD.bazel": render("bazel/bundles.BUILD.j2", values),
        "kernels/BUILD.bazel": render("bazel/kernels.BUILD.j2", values),
        "plan.json": plan.to_json(),
    }


def _label_of(file: Path, sources: Sequence[BazelLibrary]) -> str:
    for source in sources:
        if file.is_relative_to(source.library.root):
            return source.label(file)
    raise ValueError(f"{file} belongs to no kernel library")


def _targets_by_manifest(plan: Plan) -> dict[str, list[str]]:
    targets: dict[str, list[str]] = {}
    for bundle in plan.bundles:
        targets.setdefault(bundle.name, []).append(bundle.target)
    return targets
