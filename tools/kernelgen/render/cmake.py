"""A plan as input of `rules/cmake/NeuronKernels.cmake`: a file of calls to its functions, and the arguments of each step.

Files (`steps/…`) hold a step's arguments, one `--name=value` per line as `kernelgen.steps.worker` reads them, so that CMake handles
only names. A file holds exactly the inputs of its step's result: a step runs again when its file changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache import CacheSettings
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.library import BUILTIN, Library, dependencies
from kernelgen.plan import Bundle, Kernel, Plan
from kernelgen.render import render
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import NEFF, entries_file, hlo_file

BATCH = 32
"""Approximate number of kernels per emit command. Fewer balance the load better; more need fewer processes."""


@dataclass(frozen=True, slots=True)
class Build:
    """The settings of a build.

    Attributes:
        folder: absolute path of the build folder; everything is built there.
        compiler: `neuronx-cc` or `simulator`.
        identity: the compiler's identity.
        executable: the compiler's program, if it is one.
        jax_version: version of the jax that emits the HLO.
        cache: the caches of NEFFs that builds share.
        cpus: CPUs of the build machine.
        memory_mb: MiB of the build machine that compiles may use together.
        data: files and folders that the emitters of users' libraries read.
    """

    folder: Path
    compiler: str
    identity: str
    executable: Path | None
    jax_version: str
    cache: CacheSettings
    cpus: int
    memory_mb: int
    data: tuple[Path, ...] = ()

    def slots(self, plan: Plan) -> int:
        """Returns the number of compiles that may run in parallel."""
        needs = [neff.needs(self.compiler) for neff in plan.neffs]
        memory, cpus = max(memory for memory, _ in needs), max(cpus for _, cpus in needs)
        return max(1, min(self.memory_mb // memory, self.cpus // cpus))


def generate(plan: Plan, sources: Sequence[Library], build: Build) -> Mapping[str, str]:
    """Returns the files by path.

    Args:
        plan: the plan.
        sources: every kernel library that the plan names.
        build: the settings.
    """
    libraries = {s.name: s.resolved() for s in sources}
    batches = _batches(plan.kernels)
    files = {"plan.json": plan.to_json()}
    for batch, kernels in batches.items():
        files[f"steps/{batch}.emit"] = _emit(kernels, libraries, build)
    for config in plan.configs:
        files[f"steps/{config.key}.compile"] = _compile(config, build)
    files["steps/compiler"] = _compiler(plan, build)
    for bundle in plan.bundles:
        files[f"steps/{entries_file(bundle.id)}"] = plan.entries(bundle).to_json()
        files[f"steps/{bundle.id}.bundle"] = _bundle(bundle, build)
    values = {
        "batches": {batch: [k.id for k in kernels] for batch, kernels in batches.items()},
        "bundles": plan.bundles,
        "noted": {k.id for k in plan.kernels if k.noted},
        "compiler": build.compiler,
        "identity": build.identity,
        "neffs": plan.neffs,
        "emit_slots": build.cpus,
        "compile_slots": build.slots(plan),
        "generator": _generator(),
        "watched": [path for s in sources if s.name not in _only_prebuilt(plan) for path in _watched(s, plan)],
    }
    return {**files, "kernels.cmake": render("cmake/kernels.cmake.j2", values)}


def _emit(kernels: Sequence[Kernel], libraries: Mapping[str, Library], build: Build) -> str:
    """Returns the arguments of the step that emits a batch."""
    first = kernels[0]  # common to the batch: see `_batches`
    modules = [(name, libraries[name].file(module)) for name, module in first.emitters]
    return _lines(
        f"--jax={build.jax_version}",
        *(word for name, path in modules for word in (f"--library={name}", f"--emitter={path}")),
        *([f"--module={first.emitter}"] if libraries[first.library].package else []),
        f"--folder={build.folder / 'hlo'}",
        *(f"--target={target}" for target in first.targets),
        *(f"--data={path}" for path in build.data if {name for name, _ in modules} != {BUILTIN}),
        *([f"--prebuilt={libraries[first.prebuilt].root}"] if first.prebuilt else []),
        *(f"--spec={k.spec.json}" for k in kernels),
    )


def _compile(config: CompileConfig, build: Build) -> str:
    """Returns the common arguments of compile steps with the same settings."""
    flags = [f"--flag={word}" for word in config.flags()]
    return _lines(f"--compiler={build.compiler}", *flags, f"--identity={build.identity}")


def _compiler(plan: Plan, build: Build) -> str:
    """Returns the arguments of compile steps that change no NEFF: the compiler's path and its limits.

    Changing them recompiles nothing.
    """
    return _lines(
        f"--log-dir={build.folder / 'logs'}",
        f"--memory-mb={max(neff.memory_mb for neff in plan.neffs)}",
        *([f"--executable={build.executable}"] if build.executable else []),
        *build.cache.arguments(),
        f"--shared-cache-failure={build.folder / 'workers' / 'shared-cache-failure'}",
    )


def _bundle(bundle: Bundle, build: Build) -> str:
    """Returns the arguments of the step that writes a bundle."""
    return _lines(
        f"--jax={build.jax_version}",
        "--lint=yes",
        "--origins=yes",
        # A simulated NEFF records its compiler itself.
        *([f"--compiler={build.identity}"] if build.executable else []),
        f"--entries={build.folder / 'steps' / entries_file(bundle.id)}",
        *(f"--hlo={build.folder / 'hlo' / hlo_file(kernel)}" for kernel in bundle.kernels),
        *(f"--neff={build.folder / 'neff' / f'{neff}{NEFF}'}" for neff in bundle.neffs().values()),
    )


def _batches(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Returns the kernels of each emit command, at most about `BATCH` per command.

    Each batch has one module, the same targets, and the same prebuilt folder.

    Kernels of several modules have separate commands.

    A kernel's batch within a large module depends only on its id, so that a new kernel does not move the others.
    """
    modules: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        name = ".".join((kernel.library, kernel.emitter, *kernel.targets))
        if kernel.prebuilt:
            name = f"{name}.{kernel.prebuilt}"
        if kernel.more:
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
    """Returns the folders that a plan does not depend on: the depfiles of emit commands list their files."""
    return {k.prebuilt for k in plan.kernels} - {library for k in plan.kernels for library, _ in k.emitters}


def _generator() -> list[str]:
    """Returns the files of kernelgen, on which every plan depends."""
    files = (file for file in Path(__file__).parents[1].rglob("*") if file.suffix in (".j2", ".json", ".py"))
    return sorted(file.as_posix() for file in files)


def _watched(source: Library, plan: Plan) -> list[str]:
    """Returns a plan's dependencies in a library: its modules, and the folder, whose time changes when a module is added."""
    root = source.root.resolve()
    if source.package:
        modules = {kernel.emitter for kernel in plan.kernels if kernel.library == source.name}
        files = {file for module in modules for file in dependencies(source.resolved(), module)}
        return sorted(file.as_posix() for file in files)
    return [root.as_posix(), *sorted(file.as_posix() for file in root.glob("*.py"))]


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"
