"""The plan: every distinct kernel, how it is compiled for which target, and which bundle holds it.

A plan is a value. Manifests (`kernelgen.manifest`) produce it; the renderers and `kernelgen build` read it. It is written as JSON
whose bytes depend only on the manifests' meaning. This module neither imports JAX nor reads files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.ggml.types import TYPES
from kernelgen.languages import DEFAULT, built_id
from kernelgen.spec import products
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.kernel import KernelSpec, Spec
from kernelgen.targets import COMPILE_KB, COMPILE_MB, SIMULATOR_MEMORY_MB, TARGETS, Target

FORMAT = 1
"""Version of the plan's JSON."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A spec with the emitter that computes it, or with the emitters of a group's ops.

    The spec's id names the computation, independent of the emitter. `Kernel.id` names this kernel's HLO and NEFF.

    Attributes:
        spec: the computation.
        emitters: (library, module) of the emitters: the kernel library's name (`kernelgen` is this project's library), and the
            module inside it (`rope` for rope.py). The first module that has an op computes it.
        language: the emitter's language; a group's emitters are in JAX.
        targets: the targets that select this kernel; in a plan, the targets that it is built for. Empty means all targets, and
            in a plan also a language whose emitters do not depend on the target.
        prebuilt: name of the folder, one of `Catalog.sources`, with the output of NKI's compiler for it; else empty.
    """

    spec: Spec
    emitters: tuple[tuple[str, str], ...]
    language: str = DEFAULT
    targets: tuple[str, ...] = ()
    prebuilt: str = ""

    @property
    def id(self) -> str:
        return built_id(self.spec.id, self.language, self.spec.own_target(self.targets))

    @property
    def library(self) -> str:
        """The first emitter's library."""
        return self.emitters[0][0]

    @property
    def emitter(self) -> str:
        """The first emitter's module."""
        return self.emitters[0][1]

    @property
    def interpreted(self) -> Kernel:
        """The same kernel in the form that a CPU can run (`SourceSpec.interpreted`)."""
        return replace(self, spec=self.spec.interpreted)

    @property
    def noted(self) -> bool:
        """Whether its emit step writes a notes file (`filenames.notes_file`) beside the HLO."""
        return self.language != DEFAULT


@dataclass(frozen=True, slots=True)
class Neff:
    """One compile: a kernel, its settings, and the resources that the build machine must have free.

    Attributes:
        kernel: `Kernel.id`.
        config: the settings' key.
        memory_mb: memory in MiB; the maximum over all manifests.
        cpus: number of CPUs.
    """

    kernel: str
    config: str
    memory_mb: int
    cpus: int

    @property
    def id(self) -> str:
        return f"{self.kernel}.{self.config}"

    def needs(self, compiler: str) -> tuple[int, int]:
        """Returns the memory in MiB and the CPUs that the scheduler reserves for a compile with `neuronx-cc` or the `simulator`."""
        if compiler == "simulator":
            return min(self.memory_mb, SIMULATOR_MEMORY_MB), 1
        return self.memory_mb, self.cpus


@dataclass(frozen=True, slots=True)
class Bundle:
    """The kernels of one manifest for one target.

    Attributes:
        name: the manifest's name.
        target: the target.
        config: key of the compile settings.
        kernels: `Kernel.id` of each, sorted.
        special: (kernel, key of its settings) of each kernel that has its own settings, sorted.
    """

    name: str
    target: str
    config: str
    kernels: tuple[str, ...]
    special: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.name}_{self.target}"

    def configs(self) -> dict[str, str]:
        """Returns the key of each kernel's settings, by `Kernel.id`."""
        return dict.fromkeys(self.kernels, self.config) | dict(self.special)

    def neffs(self) -> dict[str, str]:
        """Returns `Neff.id` of each kernel, by `Kernel.id`."""
        return {kernel: f"{kernel}.{config}" for kernel, config in self.configs().items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A bundle's record of one kernel, without the files that a build produces.

    Attributes:
        kernel: `Kernel.id`; it names the HLO and the notes.
        spec: the computation.
        config: the compile settings.
        noted: `Kernel.noted`.
    """

    kernel: str
    spec: Spec
    config: CompileConfig
    noted: bool = False


@dataclass(frozen=True, slots=True)
class BundleEntries:
    """The input of the step that writes a bundle, as the plan decides it; it does not depend on the build tool.

    Bazel, CMake and `kernelgen build` add only the paths of each entry's HLO and NEFF.

    Attributes:
        name: the manifest's name.
        config: the settings that the bundle records.
        entries: its kernels, sorted by `Entry.kernel`.
    """

    name: str
    config: CompileConfig
    entries: tuple[Entry, ...]

    @property
    def id(self) -> str:
        return f"{self.name}_{self.config.target}"

    def to_json(self) -> str:
        """Returns the entries as JSON, one per line, ending in a newline; an entry has flags only where the bundle's differ."""
        entries = [
            canonical_json(
                {"kernel": e.kernel, "spec": e.spec.to_json()}
                | ({"flags": e.config.flags()} if e.config != self.config else {})
                | ({"noted": True} if e.noted else {})
            )
            for e in self.entries
        ]
        head = canonical_json({"flags": self.config.flags(), "format": FORMAT, "name": self.name})
        return head[:-1] + ',"entries":[\n' + ",\n".join(entries) + "\n]}\n"

    @staticmethod
    def from_json(text: str) -> BundleEntries:
        """Returns the entries that `to_json` wrote.

        Raises:
            ValueError, KeyError: `text` does not hold such entries.
        """
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"not the entries of a bundle of format {FORMAT}")
        config = CompileConfig.from_flags(value["flags"])
        return BundleEntries(
            value["name"],
            config,
            tuple(
                Entry(
                    e["kernel"],
                    Spec.from_json(e["spec"]),
                    CompileConfig.from_flags(e["flags"]) if "flags" in e else config,
                    e.get("noted", False),
                )
                for e in value["entries"]
            ),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one manifest, before manifests are merged.

    Attributes:
        name: the manifest's name.
        kernels: its kernels, duplicates allowed.
        configs: one per target.
        memory_mb, cpus: resources of one compile; None for the target's figure.
        checks: the references that `kernelgen check` compares kernels with (`kernelgen.manifest.sources.Check`).
        special: (`Kernel.id`, its settings, one per target) of each kernel that has its own settings.
        file: the manifest's file, as the user named it.
    """

    name: str
    kernels: tuple[Kernel, ...]
    configs: tuple[CompileConfig, ...]
    memory_mb: int | None = None
    cpus: int | None = None
    checks: tuple[Any, ...] = ()
    special: tuple[tuple[str, tuple[CompileConfig, ...]], ...] = ()
    file: str = field(default="", compare=False)

    def kernels_for(self, target: str) -> tuple[Kernel, ...]:
        """Returns a target's kernels."""
        return tuple(kernel for kernel in self.kernels if not kernel.targets or target in kernel.targets)

    def special_for(self, target: str) -> dict[str, CompileConfig]:
        """Returns the settings of a target's kernels that have their own settings, by `Kernel.id`."""
        return {kernel: config for kernel, several in self.special for config in several if config.target == target}


def _only_equal(what: str, id: str, one: object, other: object) -> None:
    if one != other:
        raise KernelgenError(
            f"two {what} that are not equal have the id {id}: {one} and {other}; change one of them a little"
        )


def _chosen_for(target: str, request: Request) -> tuple[str, ...]:
    """Returns the ids of a request's kernels for a target, sorted.

    Raises:
        KernelgenError: the manifest requests one of them in two languages.
    """
    found: dict[str, Kernel] = {}
    for kernel in request.kernels_for(target):
        other = found.setdefault(kernel.spec.id, kernel)
        if other.id != kernel.id:
            raise KernelgenError(
                f"manifest '{request.name}' asks for the kernel {kernel.spec.id} in {other.language} and in "
                f"{kernel.language}: a bundle has one of them; remove an entry, or give both the same `languages`"
            )
    return tuple(sorted(kernel.id for kernel in found.values()))


def instructions(spec: Spec) -> int:
    """Returns the estimated instructions of a group's products on one physical core; 0 for any other kernel."""
    return sum(
        products.instructions(node.op, weights.tensor.ne, TYPES[weights.tensor.dtype].quantized, node.output.ne)
        for node in (() if isinstance(spec, KernelSpec) else spec.nodes)
        if node.inputs and (weights := node.inputs[0]) is not None
    )


def _memory_mb(spec: Spec, config: CompileConfig, target: Target) -> int:
    """Returns the memory that the scheduler reserves for a compile whose manifest sets none, in MiB.

    That is the target's figure, or more for a group with the products of many layers or of many experts.
    """
    kilobytes = COMPILE_KB.get(config.model_type, COMPILE_KB["generic"])
    return max(target.memory_per_compile_mb, COMPILE_MB + instructions(spec) * kilobytes // 1024)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every distinct kernel, compile and bundle of some manifests; each tuple sorted by id."""

    kernels: tuple[Kernel, ...]
    configs: tuple[CompileConfig, ...]
    neffs: tuple[Neff, ...]
    bundles: tuple[Bundle, ...]

    @staticmethod
    def merge(requests: Iterable[Request]) -> Plan:
        """Returns the union of the manifests' requests; equal kernels and equal compiles appear once.

        Raises:
            KernelgenError: two unequal things have the same id, which is a digest of a part of each.
        """
        kernels: dict[str, Kernel] = {}
        configs: dict[str, CompileConfig] = {}
        neffs: dict[str, Neff] = {}
        bundles: dict[str, Bundle] = {}
        built_for: dict[str, set[str]] = {}
        for request in requests:
            for kernel in request.kernels:
                _only_equal("kernel", kernel.id, kernels.setdefault(kernel.id, kernel).spec, kernel.spec)
            for config in request.configs:
                target = TARGETS[config.target]
                cpus = request.cpus or target.cpus_per_compile
                order = _chosen_for(config.target, request)
                own = request.special_for(config.target)
                for settings in (config, *own.values()):
                    _only_equal("settings", settings.key, configs.setdefault(settings.key, settings), settings)
                # Settings equal to the manifest's do not count as the kernel's own: equal bundles must have equal plans.
                special = tuple((id, own[id].key) for id in order if id in own and own[id] != config)
                bundle = Bundle(request.name, config.target, config.key, order, special)
                bundles[bundle.id] = bundle
                for id, key in bundle.configs().items():
                    built_for.setdefault(id, set()).add(config.target)
                    memory = request.memory_mb or _memory_mb(kernels[id].spec, configs[key], target)
                    neff = Neff(id, key, memory, cpus)
                    known = neffs.get(neff.id)
                    # All manifests share this compile, so it reserves the largest memory that any of them requests.
                    if known:
                        neff = replace(neff, memory_mb=max(memory, known.memory_mb), cpus=max(cpus, known.cpus))
                    neffs[neff.id] = neff
        chosen = [kernels[id] for id in sorted(built_for)]
        return Plan(
            tuple(replace(k, targets=() if k.language == DEFAULT else tuple(sorted(built_for[k.id]))) for k in chosen),
            tuple(configs[k] for k in sorted(configs)),
            tuple(neffs[k] for k in sorted(neffs)),
            tuple(bundles[k] for k in sorted(bundles)),
        )

    def entries(self, bundle: Bundle) -> BundleEntries:
        """Returns the input of the step that writes one of the plan's bundles."""
        kernels = {k.id: k for k in self.kernels}
        configs = {c.key: c for c in self.configs}
        return BundleEntries(
            bundle.name,
            configs[bundle.config],
            tuple(Entry(id, kernels[id].spec, configs[key], kernels[id].noted) for id, key in bundle.configs().items()),
        )

    def to_json(self) -> str:
        """Returns the plan as JSON, one kernel per line, ending in a newline."""
        kernels = [
            canonical_json(
                {"emitters": k.emitters, "id": k.spec.id, "spec": k.spec.to_json()}
                | ({"language": k.language, "targets": k.targets} if k.language != DEFAULT else {})
                | ({"prebuilt": k.prebuilt} if k.prebuilt else {})
            )
            for k in self.kernels
        ]
        configs = {c.key: asdict(c) for c in self.configs}
        neffs = [
            canonical_json({"kernel": n.kernel, "config": n.config, "memory_mb": n.memory_mb, "cpus": n.cpus})
            for n in self.neffs
        ]
        bundles = [
            canonical_json(
                {"name": b.name, "target": b.target, "config": b.config, "kernels": b.kernels}
                | ({"special": b.special} if b.special else {})
            )
            for b in self.bundles
        ]
        return (
            f'{{"format":{FORMAT},\n"kernels":[\n'
            + ",\n".join(kernels)
            + '\n],\n"configs":'
            + canonical_json(configs)
            + ',\n"neffs":[\n'
            + ",\n".join(neffs)
            + '\n],\n"bundles":[\n'
            + ",\n".join(bundles)
            + "\n]}\n"
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError, msgspec.ValidationError: `text` is not a plan of this format.
        """
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"not a plan of format {FORMAT}")
        return Plan(
            tuple(
                Kernel(
                    Spec.from_json(k["spec"]),
                    tuple(map(tuple, k["emitters"])),
                    k.get("language", DEFAULT),
                    tuple(k.get("targets", ())),
                    k.get("prebuilt", ""),
                )
                for k in value["kernels"]
            ),
            tuple(msgspec.convert(value["configs"][key], CompileConfig) for key in sorted(value["configs"])),
            msgspec.convert(value["neffs"], tuple[Neff, ...]),
            msgspec.convert(value["bundles"], tuple[Bundle, ...]),
        )
