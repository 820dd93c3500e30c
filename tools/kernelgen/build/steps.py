"""A build as a list of steps: `kernelgen.build.ninja` writes `build.ninja` from it, and `kernelgen.render.cmake` CMake's calls.

    steps/<kernel>.emit    -> hlo/<kernel>.hlo.pb                 one step for each kernel
    hlo/<kernel>.hlo.pb    -> neff/<kernel>.<config>.neff         one for each compile
    neff/*, steps/*.bundle -> <bundle>.kernels.gguf, <bundle>/    one for each bundle
    <bundle>.kernels.gguf  -> <bundle>.{S,c,h}

All paths are relative to the build's folder, in which the steps run. Files (`steps/…`) hold a step's arguments, one
`--name=value` per line as `kernelgen.steps.worker` reads them. A file holds exactly the inputs of its step's result: a step runs
again when its file changes.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kernelgen.bundle.contents import pack_name
from kernelgen.cache import CacheSettings
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.library import BUILTIN, Library
from kernelgen.plan import Bundle, Kernel, Neff, Plan
from kernelgen.spec.filenames import entries_file, hlo_file, native_file, neff_file, notes_file

_PACKAGES = ("gguf", "jaxlib", "ml_dtypes", "neuronx-cc", "nki", "numpy", "protobuf")
"""Packages beside JAX that an emitter may use."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a build.

    Attributes:
        kind: `emit`, `compile`, `bundle` or `embed`, a step of `kernelgen.steps.worker`; or `report`, a command of kernelgen.
        name: the id of the kernel, NEFF or bundle.
        arguments: its arguments; `@FILE` stands for the lines of a file.
        inputs: the files that its outputs depend on.
        outputs: the files that it writes.
        depfile: the file in which it lists further inputs; empty for none.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    depfile: str = ""


@dataclass(frozen=True, slots=True)
class Build:
    """The settings of a build.

    Attributes:
        compiler: `neuronx-cc` or `simulator`.
        identity: the compiler's identity.
        executable: the compiler's program, if it is one.
        jax_version: version of the jax that emits the HLO.
        cache: the caches of NEFFs that builds share.
        cpus: CPUs of the build machine.
        memory_mb: MiB of the build machine that compiles may use together.
        data: files and folders that the emitters of users' libraries read, beside the files in their folders.
        timeout: time limit of one compile in seconds, or None.
        forms: forms of each bundle: some of `pack`, `tree`, `embed` and `report`.
        packs: beginning of each pack's path; the name follows.
        trees: beginning of each tree's path.
        embedded: beginning of the paths of the embedded form's files.
        is_counted: whether bundle steps print where the NEFFs are from.
    """

    compiler: str
    identity: str
    executable: Path | None
    jax_version: str
    cache: CacheSettings
    cpus: int
    memory_mb: int
    data: tuple[Path, ...] = ()
    timeout: float | None = None
    forms: tuple[str, ...] = ("pack",)
    packs: str = ""
    trees: str = "tree/"
    embedded: str = "embed/neuron_kernels/"
    is_counted: bool = False

    def slots(self, plan: Plan) -> int:
        """Returns the number of compiles that may run in parallel."""
        needs = [neff.needs(self.compiler) for neff in plan.neffs]
        memory, cpus = max(memory for memory, _ in needs), max(cpus for _, cpus in needs)
        return max(1, min(self.memory_mb // memory, self.cpus // cpus))


def steps_of(plan: Plan, build: Build) -> list[Step]:
    """Returns the steps of a plan's build, each after the steps that write its inputs."""
    noted = {kernel.id for kernel in plan.kernels if kernel.noted}
    steps = [_emit(kernel) for kernel in plan.kernels]
    steps += [_compile(neff) for neff in plan.neffs]
    for bundle in plan.bundles:
        steps += _bundle(bundle, noted, build)
    return steps


def _emit(kernel: Kernel) -> Step:
    arguments, depfile = f"steps/{kernel.id}.emit", f"hlo/{kernel.id}.d"
    outputs = [hlo_of(kernel.id)] + ([f"hlo/{notes_file(kernel.id)}"] if kernel.noted else [])
    return Step("emit", kernel.id, (f"@{arguments}", f"--depfile={depfile}"), (arguments,), tuple(outputs), depfile)


def _compile(neff: Neff) -> Step:
    """Returns a compile. It depends on its HLO, the compiler's identity and its flags: a change of kernelgen compiles nothing."""
    settings, hlo, output = f"steps/{neff.config}.compile", hlo_of(neff.kernel), neff_of(neff)
    arguments = [f"@{settings}", "@steps/compiler", f"--kernel={neff.kernel}", f"--hlo={hlo}", f"--output={output}"]
    arguments += [f"--log=neff/{neff.id}.log", f"--origin=neff/{neff.id}.origin"]
    return Step("compile", neff.id, tuple(arguments), (hlo, settings), (output,))


def _bundle(bundle: Bundle, noted: set[str], build: Build) -> list[Step]:
    settings, depfile = f"steps/{bundle.id}.bundle", f"neff/{bundle.id}.d"
    pack, tree, index = _outputs(bundle, build)
    arguments = [f"@{settings}", f"--depfile={depfile}"]
    arguments += [f"--counted=neff/{bundle.id}.counted"] if build.is_counted else []
    arguments += [f"--pack={pack}"] if pack else []
    arguments += [f"--tree={tree}"] if tree else []
    inputs = [settings, f"steps/{entries_file(bundle.id)}", *map(hlo_of, bundle.kernels)]
    inputs += [f"hlo/{notes_file(kernel)}" for kernel in bundle.kernels if kernel in noted]
    inputs += [f"neff/{neff}.neff" for neff in bundle.neffs().values()]
    steps = [Step("bundle", bundle.id, tuple(arguments), tuple(inputs), tuple(filter(None, (pack, index))), depfile)]
    if "embed" in build.forms:
        base = f"{build.embedded}{bundle.id}"
        depfile = f"neff/{bundle.id}.embed.d"
        words = [f"--pack={pack}", f"--incbin={pack_name(bundle.id)}", f"--output={build.embedded}"]
        outputs = tuple(f"{base}.{suffix}" for suffix in ("S", "c", "h"))
        steps.append(Step("embed", bundle.id, (*words, f"--depfile={depfile}"), (pack,), outputs, depfile))
    if "report" in build.forms:
        page = f"{bundle.id}.report.html"
        steps.append(Step("report", bundle.id, (tree, "--logs", "neff", "-o", page), (index,), (page,)))
    return steps


def _outputs(bundle: Bundle, build: Build) -> tuple[str, str, str]:
    """Returns the paths of a bundle's pack, tree and tree's index; an empty text for a form that nothing needs."""
    needs_pack, needs_tree = (
        not {"pack", "embed"}.isdisjoint(build.forms),
        not {"tree", "report"}.isdisjoint(build.forms),
    )
    tree = f"{build.trees}{bundle.id}" if needs_tree else ""
    return f"{build.packs}{pack_name(bundle.id)}" if needs_pack else "", tree, f"{tree}/index.json" if tree else ""


def hlo_of(kernel: str) -> str:
    """Returns the path of a kernel's HLO."""
    return f"hlo/{hlo_file(kernel)}"


def neff_of(neff: Neff) -> str:
    """Returns the path of a NEFF."""
    return f"neff/{neff_file(neff.kernel, neff.config)}"


# --- the files of arguments -----------------------------------------------------------------------------------------------


def argument_files(plan: Plan, libraries: Sequence[Library], build: Build) -> dict[str, str]:
    """Returns the files with the steps' arguments, by path.

    Args:
        plan: the plan.
        libraries: every kernel library that the plan names.
        build: the settings.
    """
    by_name = {library.name: library.resolved() for library in libraries}
    packages = ", ".join([f"python {platform.python_version()}", *(f"{name} {_version(name)}" for name in _PACKAGES)])
    files = {f"steps/{kernel.id}.emit": _emit_arguments(kernel, by_name, build, packages) for kernel in plan.kernels}
    files |= {f"steps/{config.key}.compile": _compile_arguments(config, build) for config in plan.configs}
    files["steps/compiler"] = _compiler_arguments(plan, build)
    for bundle in plan.bundles:
        files[f"steps/{entries_file(bundle.id)}"] = plan.entries(bundle).to_json()
        files[f"steps/{bundle.id}.bundle"] = _bundle_arguments(bundle, build)
    return files


def _emit_arguments(kernel: Kernel, libraries: Mapping[str, Library], build: Build, packages: str) -> str:
    modules = [(name, libraries[name].file(module)) for name, module in kernel.emitters]
    return _lines(
        f"--jax={build.jax_version}",
        f"--packages={packages}",
        *(word for name, path in modules for word in (f"--library={name}", f"--emitter={path}")),
        *([f"--module={kernel.emitter}"] if libraries[kernel.library].package else []),
        *(f"--target={target}" for target in kernel.targets),
        *(f"--data={path}" for path in build.data if {name for name, _ in modules} != {BUILTIN}),
        *([f"--prebuilt={libraries[kernel.prebuilt].root / native_file(kernel.id)}"] if kernel.prebuilt else []),
        f"--spec={kernel.spec.json}",
        f"--output={hlo_of(kernel.id)}",
        *([f"--notes=hlo/{notes_file(kernel.id)}"] if kernel.noted else []),
    )


def _compile_arguments(config: CompileConfig, build: Build) -> str:
    """Returns the common arguments of compile steps with the same settings."""
    flags = [f"--flag={word}" for word in config.flags()]
    return _lines(f"--compiler={build.compiler}", *flags, f"--identity={build.identity}")


def _compiler_arguments(plan: Plan, build: Build) -> str:
    """Returns the arguments of compile steps that change no NEFF: the compiler's path and its limits.

    Changing them recompiles nothing.
    """
    return _lines(
        "--log-dir=logs",
        f"--memory-mb={max(neff.memory_mb for neff in plan.neffs)}",
        *([f"--executable={build.executable}"] if build.executable else []),
        *([f"--timeout={build.timeout}"] if build.timeout else []),
        *build.cache.arguments(),
        "--shared-cache-failure=workers/shared-cache-failure",
    )


def _bundle_arguments(bundle: Bundle, build: Build) -> str:
    return _lines(
        f"--jax={build.jax_version}",
        "--lint=yes",
        "--origins=yes",
        # A simulated NEFF records its compiler itself.
        *([f"--compiler={build.identity}"] if build.executable else []),
        f"--entries=steps/{entries_file(bundle.id)}",
        *(f"--hlo={hlo_of(kernel)}" for kernel in bundle.kernels),
        *(f"--neff=neff/{neff}.neff" for neff in bundle.neffs().values()),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


# --- the servers that run steps ---------------------------------------------------------------------------------------------


def generator_files() -> list[Path]:
    """Returns the files of kernelgen, on which every plan depends, sorted."""
    return sorted(f for f in Path(__file__).parents[1].rglob("*") if f.suffix in (".j2", ".json", ".py"))


def server_files(folder: str, plan: Plan, build: Build, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the files from which steps learn about the servers that run them (`kernelgen.build.ondemand`), by path.

    Args:
        folder: the folder of the servers: `emit` in it is for emits, `compile` for the other steps.
        plan: the plan.
        build: the settings.
        environment: the environment of the servers; others have another version.
    """
    digest = hashlib.sha256(f"{sys.executable} {sorted(environment.items())}".encode())
    for file in generator_files():
        digest.update(file.read_bytes())
    version = digest.hexdigest()[:12]
    return {
        f"{folder}/emit/servers": f"{build.cpus} {version}\n",
        f"{folder}/compile/servers": f"{build.slots(plan)} {version}\n",
    }
