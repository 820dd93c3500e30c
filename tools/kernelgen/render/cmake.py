"""A plan as what `rules/cmake/NeuronKernels.cmake` builds from: a file of calls of its functions, and the arguments of each step.

What a step does is in files (`steps/…`), a `--name=value` a line as `kernelgen.steps.worker` takes them, so that CMake sees names
alone. A file holds what its step's result depends on and nothing else: a step runs again when its file changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache import CacheSettings
from kernelgen.emitters.dependencies import dependencies
from kernelgen.emitters.library import Library
from kernelgen.emitters.limit import EMIT_TIMEOUT
from kernelgen.plan import Kernel, Plan
from kernelgen.render import render
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import NEFF, entries_file, hlo_file
from kernelgen.spec.graph_kernel import GraphSpec
from kernelgen.spec.op_kernel import spec_json

BATCH = 32
"""About how many kernels are emitted by one command. Fewer share the work better, more make fewer processes."""


@dataclass(frozen=True, slots=True)
class Build:
    """How and where a plan is built.

    Attributes:
        folder: the folder that the files are for, absolute; everything is built there.
        compiler: `neuronx-cc` or `simulator`.
        identity: the compiler's identity.
        executable: the compiler's program, when it is one.
        jax_version: version of the jax that emits the HLO.
        cache: the caches of NEFFs that builds share.
        cpus: CPUs of the build machine.
        memory_mb: MiB of the build machine that compiles may use together.
        emit_timeout: seconds that emitting one kernel may take, or None.
    """

    folder: Path
    compiler: str
    identity: str
    executable: Path | None
    jax_version: str
    cache: CacheSettings
    cpus: int
    memory_mb: int
    emit_timeout: float | None = EMIT_TIMEOUT

    def slots(self, plan: Plan) -> int:
        """Returns how many compiles may run at once."""
        needs = [neff.needs(self.compiler) for neff in plan.neffs]
        memory, cpus = max(memory for memory, _ in needs), max(cpus for _, cpus in needs)
        return max(1, min(self.memory_mb // memory, self.cpus // cpus))


def generate(plan: Plan, sources: Sequence[Library], build: Build) -> Mapping[str, str]:
    """Returns the files by path.

    Args:
        plan: what to build.
        sources: every kernel library that the plan names.
        build: how and where.
    """
    by_name = {s.name: s for s in sources}
    specs = {k.id: spec_json(k.spec) for k in plan.kernels}
    flags = {c.key: [f"--flag={word}" for word in c.flags()] for c in plan.configs}
    jax = f"--jax={build.jax_version}"
    # A simulated NEFF says itself what made it.
    made_by = [f"--compiler={build.identity}"] if build.executable else []
    files: dict[str, str] = {"plan.json": plan.to_json()}

    batches = _batches(plan.kernels)
    for batch, kernels in batches.items():
        modules = [(name, by_name[name].resolved().file(module)) for name, module in kernels[0].emitters]
        files[f"steps/{batch}.emit"] = _lines(
            jax,
            *(word for name, path in modules for word in (f"--library={name}", f"--emitter={path}")),
            *([f"--module={kernels[0].emitter}"] if by_name[kernels[0].library].package else []),
            f"--folder={build.folder / 'hlo'}",
            *(f"--target={target}" for target in kernels[0].targets),
            *([f"--prebuilt={by_name[kernels[0].prebuilt].root.resolve()}"] if kernels[0].prebuilt else []),
            *(f"--spec={specs[k.id]}" for k in kernels),
        )
    for key, words in flags.items():
        files[f"steps/{key}.compile"] = _lines(
            f"--compiler={build.compiler}",
            *words,
            f"--identity={build.identity}",
        )
    # How long an emitter may run changes no HLO.
    files["steps/limits"] = _lines(f"--timeout={build.emit_timeout or 0:g}")
    # Where the compiler is and what it may use change no NEFF: nothing is compiled again when this file changes.
    files["steps/compiler"] = _lines(
        f"--log-dir={build.folder / 'logs'}",
        f"--memory-mb={max(neff.memory_mb for neff in plan.neffs)}",
        *([f"--executable={build.executable}"] if build.executable else []),
        *build.cache.arguments(),
        f"--notices={build.folder / 'workers' / 'notices'}",
    )
    for bundle in plan.bundles:
        entries = f"steps/{entries_file(bundle.id)}"
        files[entries] = plan.entries(bundle).to_json()
        files[f"steps/{bundle.id}.bundle"] = _lines(
            jax,
            "--lint=yes",
            "--origins=yes",
            *made_by,
            f"--entries={build.folder / entries}",
            *(f"--hlo={build.folder / 'hlo' / hlo_file(kernel)}" for kernel in bundle.kernels),
            *(f"--neff={build.folder / 'neff' / f'{neff}{NEFF}'}" for neff in bundle.neffs().values()),
        )
    values = {
        "batches": {batch: [k.id for k in kernels] for batch, kernels in batches.items()},
        "bundles": plan.bundles,
        "noted": {k.id for k in plan.kernels if k.noted},
        "compiler": build.compiler,
        "identity": build.identity,
        "neffs": plan.neffs,
        "emit_slots": build.cpus,
        "compile_slots": build.slots(plan),
        "watched": [path for s in sources if s.name not in _only_prebuilt(plan) for path in _watched(s, plan)],
    }
    return {**files, "kernels.cmake": render("cmake/kernels.cmake.j2", values)}


def _batches(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Returns the kernels of each command that emits, not more than about `BATCH`.

    They are of one module, for the same targets, and prebuilt in the same folder.

    Graph kernels are emitted by commands of their own, which have all modules that they need together.

    Which of a large module's batches a kernel is in depends on its id alone, so that a new one does not move the others.
    """
    modules: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        name = ".".join((kernel.library, kernel.emitter, *kernel.targets))
        if kernel.prebuilt:
            name = f"{name}.{kernel.prebuilt}"
        if isinstance(kernel.spec, GraphSpec):
            name = f"graph.{hashlib.sha256(canonical_json(kernel.emitters).encode()).hexdigest()[:12]}"
        modules.setdefault(name, []).append(kernel)
    batches: dict[str, list[Kernel]] = {}
    for name, members in sorted(modules.items()):
        parts = 1 << ((len(members) - 1) // BATCH).bit_length()
        for kernel in members:
            part = int(hashlib.sha256(kernel.id.encode()).hexdigest(), 16) % parts
            batches.setdefault(name if parts == 1 else f"{name}.{part}", []).append(kernel)
    return dict(sorted(batches.items()))


def _only_prebuilt(plan: Plan) -> set[str]:
    """Returns the folders that a plan does not depend on: the depfiles of the commands that emit name what is in them."""
    return {k.prebuilt for k in plan.kernels} - {library for k in plan.kernels for library, _ in k.emitters}


def _watched(source: Library, plan: Plan) -> list[str]:
    """Returns what a plan depends on in a library: its modules, and the folder, whose time changes when one is added."""
    root = source.root.resolve()
    if source.package:
        modules = {kernel.emitter for kernel in plan.kernels if kernel.library == source.name}
        files = {file for module in modules for file in dependencies(source.resolved(), module)}
        return sorted(file.as_posix() for file in files)
    return [root.as_posix(), *sorted(file.as_posix() for file in root.glob("*.py"))]


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"
