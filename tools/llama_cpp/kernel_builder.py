"""Builds packs of the kernels that llama.cpp's programs request.

Unlike `kernelgen build`, this does not compile kernels to find those that XLA refuses: the run compiles the same HLO
when it loads the kernels, and a kernel that does not load fails its case. The simulator caches the compiled kernels, so
another run of the same kernels with another plug-in does not compile them again.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
import work_folder

from kernelgen import fileio, lowering
from kernelgen.bundle import build as bundles
from kernelgen.bundle.contents import pack_name
from kernelgen.compilers.base import refuse_unsupported
from kernelgen.compilers.choice import Simulator
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library, dependencies
from kernelgen.emitters.loading import load_function
from kernelgen.errors import KernelgenError
from kernelgen.lowering import emission
from kernelgen.manifest import document, kernels, schema, settings
from kernelgen.neff import container
from kernelgen.plan import BundleEntries, Entry, Kernel
from kernelgen.spec.kernel import GraphSpec, KernelSpec


@dataclass
class BuiltGroup:
    """The outcome of a group's nodes.

    Attributes:
        sizes: the bytes of each kernel's HLO, by kernel.
        refused: why an entry has no kernel: an emitter, or the lint, does not support it.
        failed: the error of each kernel that should have been built and was not.
        seconds: the duration of emitting.
        reused: whether the pack is from an earlier run.
        languages: the number of kernels in each language.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    reused: bool = False
    languages: dict[str, int] = field(default_factory=dict)


class KernelBuilder:
    """Builds packs of requested kernels.

    Args:
        languages: the languages that may compute the kernels, the first choice first; JAX if empty.
    """

    def __init__(self, languages: Sequence[str] = ()) -> None:
        self.languages = tuple(languages)
        self.library = builtin_library()
        self.catalog = Catalog([self.library])
        self.source = work_folder.kernelgen_digest()
        self.identity = Simulator().identity

    def key(self, entries: Sequence[str], found: dict[str, Kernel]) -> str:
        """Returns a digest of all that a pack depends on: target, entries, kernelgen, and the emitters with their imports."""
        modules = sorted({kernel.emitter for kernel in found.values()})
        emitters = [work_folder.digest_files(dependencies(self.library, module)) for module in modules]
        return work_folder.digest(self.source, harness.target(), entries, modules, emitters)

    def read(self, entries: Sequence[str]) -> tuple[dict[str, Kernel], CompileConfig, dict[str, str]]:
        """Returns the kernels of manifest entries, the settings to compile them with, and why some entries have no kernel."""
        head = ["format: 1", "name: group", f"targets: [{harness.target()}]"]
        head += [f"languages: [{', '.join(self.languages)}]"] if self.languages else []
        lines = [*head, "kernels:", *(f"  - {e}" for e in entries)]
        parsed = document.parse("\n".join([*lines, ""]).encode(), "group.yaml")
        if parsed.root is None:
            raise KernelgenError(parsed.problems)
        report = schema.check(parsed.root, parsed.broken)
        (config,) = settings.read(parsed.root, report).configs
        found: dict[str, Kernel] = {}
        listed = parsed.root.get("kernels")
        choice = kernels.Choice((harness.target(),), parsed.root.get("languages"))
        for entry, node in zip(entries, listed.value if listed else (), strict=True):
            made, _ = kernels.expand(node, self.catalog, report, choice=choice)
            if made:
                found[entry] = made[0]
        first = len(lines) - len(entries) + 1
        refused: dict[str, str] = {}
        for diagnostic in report.diagnostics:
            if diagnostic.location is None or diagnostic.location.line < first:
                raise KernelgenError([diagnostic])
            refused.setdefault(entries[diagnostic.location.line - first], diagnostic.message)
        return {entry: kernel for entry, kernel in found.items() if entry not in refused}, config, refused

    def emit(self, spec: KernelSpec | GraphSpec) -> bytes:
        """Returns a kernel's HLO.

        Raises:
            KernelgenError: its emitter does not support it.
        """
        if isinstance(spec, GraphSpec):
            return emission.emit(self.catalog.emitters(self.catalog.kernel(spec)), spec).hlo
        chosen = self.catalog.choose(spec, self.languages, harness.target())
        return lowering.emit(spec, load_function(*(chosen or self.catalog.find(spec.op))))

    def build(self, entries: Sequence[str], folder: Path, progress: harness.Progress) -> tuple[BuiltGroup, str]:
        """Builds the pack in `folder/kernels`, and returns the outcome of the entries and the pack's digest.

        If no entry has a kernel, it writes no pack.
        """
        begun = time.monotonic()
        pack = folder / "kernels" / pack_name(f"group_{harness.target()}")
        record = folder / "built.json"
        found, config, refused = self.read(entries) if entries else ({}, None, {})
        key = self.key(entries, found)
        with contextlib.suppress(OSError, ValueError, KeyError):
            before = json.loads(record.read_text())
            if before["key"] == key and before["pack"] == work_folder.sha256(pack):
                return BuiltGroup(**before["built"] | {"reused": True}), before["pack"]
        for old in (record, folder / "result.json", folder / "kernels"):
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
        pack.parent.mkdir(parents=True)
        built = BuiltGroup(refused=dict(refused))
        specs: dict[str, KernelSpec] = {}
        entries_of: dict[str, list[str]] = {}
        for entry, kernel in found.items():
            if kernel.spec.id not in specs:
                built.languages[kernel.language] = built.languages.get(kernel.language, 0) + 1
            specs[kernel.spec.id] = kernel.spec
            entries_of.setdefault(kernel.spec.id, []).append(entry)
        if specs:
            assert config
            for kernel_id, reason in self.pack(specs, config, pack, built, progress).items():
                built.refused.update(dict.fromkeys(entries_of[kernel_id], reason))
        built.seconds = round(time.monotonic() - begun, 2)
        sha256 = work_folder.sha256(pack)
        fileio.write_bytes(record, json.dumps({"key": key, "pack": sha256, "built": asdict(built)}).encode())
        return built, sha256

    def pack(
        self,
        specs: Mapping[str, KernelSpec | GraphSpec],
        config: CompileConfig,
        path: Path,
        built: BuiltGroup,
        progress: harness.Progress,
    ) -> dict[str, str]:
        """Emits kernels and writes their pack, unless there are none; returns why kernels are refused, by kernel.

        Args:
            specs: the kernels, by their names.
            config: the settings to compile them with.
            path: the path of the pack.
            built: receives the sizes and the errors.
            progress: called with the number of emitted kernels.
        """
        refused: dict[str, str] = {}
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            scratch = Path(folder)
            for number, (kernel_id, spec) in enumerate(specs.items()):
                progress("building", number)
                try:
                    module = self.emit(spec)
                    refuse_unsupported(module, config, kernel_id)
                except KernelgenError as error:
                    refused[kernel_id] = str(error)
                    continue
                except Exception:
                    built.failed[kernel_id] = traceback.format_exc()
                    continue
                built.sizes[kernel_id] = len(module)
                (scratch / f"{kernel_id}.hlo.pb").write_bytes(module)
                (scratch / f"{kernel_id}.neff").write_bytes(
                    container.write_simulated(module, config.flags(), self.identity)
                )
            if built.sizes:
                bundles.build(
                    BundleEntries(
                        "group", config, tuple(Entry(kernel, specs[kernel], config) for kernel in sorted(built.sizes))
                    ),
                    {kernel: scratch / f"{kernel}.hlo.pb" for kernel in built.sizes},
                    {kernel: scratch / f"{kernel}.neff" for kernel in built.sizes},
                    compiler=self.identity,
                    jax_version=importlib.metadata.version("jax"),
                    pack_path=path,
                )
        return refused
