"""The plan: every distinct kernel, how it is compiled for which target, and which bundle holds it.

A plan is a value. It is made from manifests (`kernelgen.manifest`), read by the renderers and by `kernelgen build`, and written
as JSON whose bytes depend on the manifests' meaning alone. Nothing here imports JAX or reads files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.ggml.types import TYPES
from kernelgen.languages import DEFAULT, built_id
from kernelgen.spec import products
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.graph_kernel import GraphSpec, Spec, spec_from_json
from kernelgen.spec.op_kernel import spec_json
from kernelgen.spec.source_kernel import SourceSpec, own_target
from kernelgen.targets import COMPILE_KB, COMPILE_MB, SIMULATOR_MEMORY_MB, TARGETS, Target

FORMAT = 1
"""Version of the plan's JSON."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A spec and the emitter that computes it, or the emitters of a group's ops.

    What is computed has the spec's id, whatever computes it; HLO and NEFF have this one's.

    Attributes:
        spec: what is computed.
        emitter: the emitter's module inside its library (`rope` for rope.py).
        library: the kernel library's name; `kernelgen` is this project's own.
        more: (library, module) of the other ops of a group. An op is computed by the first of all modules that has it.
        language: what the emitter is written in; a group's are in JAX.
        targets: the targets that it is chosen for, or, in a plan, built for; empty for all, and in a plan for a language whose
            emitters know nothing of targets.
        prebuilt: name of the folder, one of `Catalog.sources`, that has what NKI's own compiler made of it; else empty.
    """

    spec: Spec
    emitter: str
    library: str = "kernelgen"
    more: tuple[tuple[str, str], ...] = ()
    language: str = DEFAULT
    targets: tuple[str, ...] = ()
    prebuilt: str = ""

    @property
    def id(self) -> str:
        return built_id(self.spec.id, self.language, own_target(self.spec, self.targets))

    @property
    def emitters(self) -> tuple[tuple[str, str], ...]:
        """(library, module) of every emitter."""
        return ((self.library, self.emitter), *self.more)

    @property
    def interpreted(self) -> Kernel:
        """The same kernel as a CPU can run it (`SourceSpec.interpreted`)."""
        return replace(self, spec=self.spec.interpreted) if isinstance(self.spec, SourceSpec) else self

    @property
    def noted(self) -> bool:
        """Whether its emit step leaves notes about it (`filenames.notes_file`) beside the HLO."""
        return self.language != DEFAULT


@dataclass(frozen=True, slots=True)
class Neff:
    """One compile: a kernel, its settings, and what the build machine must have free for it.

    Attributes:
        kernel: `Kernel.id`.
        config: the settings' key.
        memory_mb: memory in MiB; the largest that any manifest asks for.
        cpus: CPUs.
    """

    kernel: str
    config: str
    memory_mb: int
    cpus: int

    @property
    def id(self) -> str:
        return f"{self.kernel}.{self.config}"

    def needs(self, compiler: str) -> tuple[int, int]:
        """Returns the memory in MiB and the CPUs that a compile with `neuronx-cc` or the `simulator` is counted for."""
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
        special: (kernel, key of its settings) of those that are compiled with others, sorted.
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
    """What a bundle says of one kernel, except for the files that a build makes of it.

    Attributes:
        kernel: `Kernel.id`, which the HLO and the notes are named after.
        spec: what it computes.
        config: the settings that it is compiled with.
        noted: `Kernel.noted`.
    """

    kernel: str
    spec: Spec
    config: CompileConfig
    noted: bool = False


@dataclass(frozen=True, slots=True)
class BundleEntries:
    """All of a bundle that a plan decides: what the step that writes it is given, whatever builds it.

    Bazel, CMake and `kernelgen build` add the paths of each entry's HLO and NEFF, and nothing else.

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
        """Returns the entries as JSON, one a line, ending in a newline; settings are named where they are not the bundle's."""
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
            ValueError, KeyError: `text` is not such entries.
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
                    spec_from_json(e["spec"]),
                    CompileConfig.from_flags(e["flags"]) if "flags" in e else config,
                    e.get("noted", False),
                )
                for e in value["entries"]
            ),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """What one manifest asks for, before manifests are merged.

    Attributes:
        name: the manifest's name.
        kernels: its kernels, duplicates allowed.
        configs: one per target.
        memory_mb, cpus: what one compile needs; None for the target's own figure.
        checks: what `kernelgen check` compares kernels with (`kernelgen.manifest.sources.Check`).
        special: (`Kernel.id`, its settings, one per target) of kernels that are compiled with settings of their own.
        file: the manifest's file, as it was named.
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
        """Returns the settings of a target's kernels that are not compiled as the others, by `Kernel.id`."""
        return {kernel: config for kernel, several in self.special for config in several if config.target == target}


def _only_equal(what: str, id: str, one: object, other: object) -> None:
    if one != other:
        raise KernelgenError(
            f"two {what} that are not equal have the id {id}: {one} and {other}; change one of them a little"
        )


def _chosen_for(target: str, request: Request) -> tuple[str, ...]:
    """Returns the ids of a request's kernels for a target, sorted.

    Raises:
        KernelgenError: two languages are to compute one of them.
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
    """Returns about how many instructions a group's program has on one physical core, from its products; 0 of another kernel."""
    return sum(
        products.instructions(node.op, weights.tensor.ne, TYPES[weights.tensor.dtype].quantized, node.output.ne)
        for node in (spec.nodes if isinstance(spec, GraphSpec) else ())
        if node.inputs and (weights := node.inputs[0]) is not None
    )


def _memory_mb(spec: Spec, config: CompileConfig, target: Target) -> int:
    """Returns what a compile is counted for where its manifest does not say it, in MiB.

    That is the target's figure, and more where a group has the products of many layers or of many experts.
    """
    kilobytes = COMPILE_KB.get(config.model_type, COMPILE_KB["generic"])
    return max(target.memory_per_compile_mb, COMPILE_MB + instructions(spec) * kilobytes // 1024)


def _built_for(kernel: Kernel, targets: set[str]) -> Kernel:
    return replace(kernel, targets=() if kernel.language == DEFAULT else tuple(sorted(targets)))


def _language_json(kernel: Kernel) -> str:
    if kernel.language == DEFAULT:
        return ""
    prebuilt = f',"prebuilt":{canonical_json(kernel.prebuilt)}' if kernel.prebuilt else ""
    return f',"language":{canonical_json(kernel.language)},"targets":{canonical_json(kernel.targets)}{prebuilt}'


@dataclass(frozen=True, slots=True)
class Plan:
    """Every distinct kernel, compile and bundle of some manifests; each tuple sorted by id."""

    kernels: tuple[Kernel, ...]
    configs: tuple[CompileConfig, ...]
    neffs: tuple[Neff, ...]
    bundles: tuple[Bundle, ...]

    @staticmethod
    def merge(requests: Iterable[Request]) -> Plan:
        """Returns the union of what manifests ask for; equal kernels and equal compiles appear once.

        Raises:
            KernelgenError: two things that are not equal have the same id, which is a digest of a part of them.
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
                # Settings that say what the manifest says are none of the kernel's own: bundles that are equal have equal plans.
                special = tuple((id, own[id].key) for id in order if id in own and own[id] != config)
                bundle = Bundle(request.name, config.target, config.key, order, special)
                bundles[bundle.id] = bundle
                for id, key in bundle.configs().items():
                    built_for.setdefault(id, set()).add(config.target)
                    memory = request.memory_mb or _memory_mb(kernels[id].spec, configs[key], target)
                    neff = Neff(id, key, memory, cpus)
                    known = neffs.get(neff.id)
                    # One compile for all manifests that ask for it, so with the memory of the one that asks for most.
                    if known:
                        neff = replace(neff, memory_mb=max(memory, known.memory_mb), cpus=max(cpus, known.cpus))
                    neffs[neff.id] = neff
        return Plan(
            tuple(_built_for(kernels[k], built_for[k]) for k in sorted(built_for)),
            tuple(configs[k] for k in sorted(configs)),
            tuple(neffs[k] for k in sorted(neffs)),
            tuple(bundles[k] for k in sorted(bundles)),
        )

    def entries(self, bundle: Bundle) -> BundleEntries:
        """Returns what the step that writes one of the plan's bundles is given."""
        kernels = {k.id: k for k in self.kernels}
        configs = {c.key: c for c in self.configs}
        return BundleEntries(
            bundle.name,
            configs[bundle.config],
            tuple(Entry(id, kernels[id].spec, configs[key], kernels[id].noted) for id, key in bundle.configs().items()),
        )

    def to_json(self) -> str:
        """Returns the plan as JSON, one kernel a line, ending in a newline."""
        kernels = [
            f'{{"emitter":{canonical_json(k.emitter)},"id":"{k.spec.id}","library":{canonical_json(k.library)},'
            + (f'"more":{canonical_json(k.more)},' if k.more else "")
            + f'"spec":{spec_json(k.spec)}{_language_json(k)}}}'
            for k in self.kernels
        ]
        configs = {c.key: c.to_json() for c in self.configs}
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
            ValueError: `text` is not a plan of this format.
        """
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"not a plan of format {FORMAT}")
        return Plan(
            tuple(
                Kernel(
                    spec_from_json(k["spec"]),
                    k["emitter"],
                    k["library"],
                    tuple(map(tuple, k.get("more", ()))),
                    k.get("language", DEFAULT),
                    tuple(k.get("targets", ())),
                    k.get("prebuilt", ""),
                )
                for k in value["kernels"]
            ),
            tuple(CompileConfig.from_json(value["configs"][key]) for key in sorted(value["configs"])),
            tuple(Neff(**n) for n in value["neffs"]),
            tuple(
                Bundle(
                    b["name"],
                    b["target"],
                    b["config"],
                    tuple(b["kernels"]),
                    tuple((kernel, config) for kernel, config in b.get("special", ())),
                )
                for b in value["bundles"]
            ),
        )
