"""A plan as input of `rules/cmake/NeuronKernels.cmake`: a call for each step of the build, and the files of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernelgen.build.steps import Build, argument_files, generator_files, server_files, steps_of
from kernelgen.emitters.library import Library, dependencies
from kernelgen.plan import Plan
from kernelgen.render import render


def generate(plan: Plan, sources: Sequence[Library], build: Build) -> Mapping[str, str]:
    """Returns the files by path.

    Args:
        plan: the plan.
        sources: every kernel library that the plan names.
        build: the settings.
    """
    values = {
        "bundles": plan.bundles,
        "compiler": build.compiler,
        "compile_slots": build.slots(plan),
        "generator": [file.as_posix() for file in generator_files()],
        "steps": steps_of(plan, build),
        "watched": [path for s in sources if s.name not in _only_prebuilt(plan) for path in _watched(s, plan)],
    }
    return {
        "plan.json": plan.to_json(),
        **argument_files(plan, sources, build),
        **server_files("workers", plan, build, {}),
        "kernels.cmake": render("cmake/kernels.cmake.j2", values),
    }


def _only_prebuilt(plan: Plan) -> set[str]:
    """Returns the folders that a plan does not depend on: the depfiles of emit commands list their files."""
    return {k.prebuilt for k in plan.kernels} - {library for k in plan.kernels for library, _ in k.emitters}


def _watched(source: Library, plan: Plan) -> list[str]:
    """Returns a plan's dependencies in a library: its modules, and the folder, whose time changes when a module is added."""
    root = source.root.resolve()
    if source.package:
        modules = {kernel.emitter for kernel in plan.kernels if kernel.library == source.name}
        files = {file for module in modules for file in dependencies(source.resolved(), module)}
        return sorted(file.as_posix() for file in files)
    return [root.as_posix(), *sorted(file.as_posix() for file in root.glob("*.py"))]
