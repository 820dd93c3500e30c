"""A plan as Bazel packages: `kernels` with a target for every HLO and NEFF, `bundles` with a target for every manifest and target.

`rules/private/repositories/kernels.bzl` writes the files into a separate repository (`@neuron_kernels`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernelgen.emitters.library import Library, dependencies, languages_of
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.languages import DEFAULT
from kernelgen.plan import Kernel, Plan
from kernelgen.render import render
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import entries_file, native_file
from kernelgen.spec.kernel import SourceSpec


@dataclass(frozen=True, slots=True)
class BazelLibrary:
    """A kernel library and the Bazel package that exports its modules.

    Attributes:
        library: the folder of emitters.
        package: the package's label without a target, `@@repository//path`.
        data: labels of the files that its emitters open.
        prefix: path of the library's folder in the package, ending in `/`; empty for the package's own folder.
    """

    library: Library
    package: str
    data: tuple[str, ...] = ()
    prefix: str = ""

    def label(self, file: Path) -> str:
        return f"{self.package}:{self.prefix}{file.relative_to(self.library.root).as_posix()}"


def generate(
    plan: Plan,
    sources: Sequence[BazelLibrary],
    rules: str,
    settings: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    modules: Mapping[str, str] = MappingProxyType({}),
) -> Mapping[str, str]:
    """Returns the repository's files by path.

    Args:
        plan: the plan.
        sources: every kernel library that the plan names, with its package.
        rules: the repository of the rules, as a label prefix: `@@neuron_kernelgen~`.
        settings: attributes of a manifest's bundles, by its name: `compiler`.
        modules: the repositories of other Bazel modules' manifests, by the module's name.
    """
    by_name = {s.library.name: s for s in sources}
    emitters: dict[str, dict[str, Any]] = {}
    for library, name in (emitter for kernel in plan.kernels for emitter in kernel.emitters):
        key = f"{library}/{name}"
        if key not in emitters:
            source = by_name[library]
            files = module, *helpers = dependencies(source.library, name)
            emitters[key] = {
                "jax_alone": languages_of(files) <= {DEFAULT},
                "emitter": _label_of(module, sources),
                "helpers": [_label_of(file, sources) for file in helpers],
            }
    kernels = [_kernel(k, by_name, emitters) for k in plan.kernels]
    values = {
        "rules": rules,
        "emitters": emitters,
        "data": {s.library.name: list(s.data) for s in sources if s.data},
        "flags": {c.key: c.flags() for c in plan.configs},
        "targets": {c.key: c.target for c in plan.configs},
        "kernels": kernels,
        "native": any(kernel["native"] for kernel in kernels),
        "neffs": plan.neffs,
        "bundles": [
            {
                "id": b.id,
                "settings": dict(sorted(settings.get(b.name, {}).items())),
                "entries": entries_file(b.id),
                "neffs": list(b.neffs().values()),
            }
            for b in plan.bundles
        ],
        "manifests": _targets_by_manifest(plan),
        "modules": modules,
    }
    return {
        "BUILD.bazel": render("bazel/root.BUILD.j2", values),
        "defs.bzl": render("bazel/defs.bzl.j2", values),
        "bundles/BUILD.bazel": render("bazel/bundles.BUILD.j2", values),
        **{f"bundles/{entries_file(b.id)}": plan.entries(b).to_json() for b in plan.bundles},
        "kernels/BUILD.bazel": render("bazel/kernels.BUILD.j2", values),
        "plan.json": plan.to_json(),
    }


def _kernel(kernel: Kernel, by_name: Mapping[str, BazelLibrary], emitters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a kernel's `neuron_hlo` and, for NKI's own compiler, of its `neuron_native_kernel`."""
    keys = [f"{library}/{module}" for library, module in kernel.emitters]
    libraries = [library for library, _ in kernel.emitters]
    spec, native = kernel.spec, kernel.spec.own_target(kernel.targets) and not kernel.prebuilt
    return {
        "id": kernel.id,
        "data": [name for name in dict.fromkeys(libraries) if by_name[name].data],
        "emitters": list(zip(keys, libraries, strict=True)),
        "helpers": sorted({label for key in keys for label in emitters[key]["helpers"]}),
        "jax_alone": kernel.language == DEFAULT and all(emitters[key]["jax_alone"] for key in keys),
        "language": "" if kernel.language == DEFAULT else kernel.language,
        "missing": _missing(kernel, by_name) if kernel.prebuilt else "",
        "module": kernel.emitter if by_name[kernel.library].library.package else "",
        "native": _call(spec) if isinstance(spec, SourceSpec) and native else "",
        "prebuilt": by_name[kernel.prebuilt].label(prebuilt_file(kernel, by_name)) if kernel.prebuilt else "",
        "spec": spec.json,
        "targets": list(kernel.targets),
    }


def _call(spec: SourceSpec) -> str:
    """Returns a function's call as JSON, for the program that runs NKI's own compiler."""
    return canonical_json(
        {
            "arrays": [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in (a.numpy for a in spec.inputs)],
            "env": dict(spec.env),
            "function": spec.function,
            "grid": spec.grid,
            "keywords": dict(spec.params),
        }
    )


def _missing(kernel: Kernel, by_name: Mapping[str, BazelLibrary]) -> str:
    """Returns the reason why a kernel's output of NKI's compiler is unusable, or "": only that kernel fails."""
    from kernelgen.languages.nki import prebuilt

    try:
        prebuilt.read(prebuilt_file(kernel, by_name))
    except KernelgenError as error:
        return str(error)
    return ""


def prebuilt_file(kernel: Kernel, by_name: Mapping[str, BazelLibrary]) -> Path:
    """Returns the path of the output of NKI's compiler for a kernel, whether or not it exists."""
    return by_name[kernel.prebuilt].library.root / native_file(kernel.id)


def absolute(path: Path) -> Path:
    """Returns an absolute path without `..`; does not follow links, since packages have the links' names."""
    return Path(os.path.normpath(path.absolute()))


def package_of(library: Library, workspaces: Mapping[Path, str], prebuilt: bool = False) -> BazelLibrary:
    """Returns a folder of sources with the package that contains it.

    Args:
        library: the folder.
        workspaces: the repository of each repository root folder, as a label prefix: `@@`.
        prebuilt: whether it holds the output of NKI's compiler instead of sources.

    Raises:
        KernelgenError: no package contains it.
    """
    folder = absolute(library.root)
    for package in (folder, *folder.parents):
        root = next((root for root in package.parents if root in workspaces), package)
        if root not in workspaces:
            break
        if any((package / name).is_file() for name in ("BUILD.bazel", "BUILD")):
            label = "" if package == root else package.relative_to(root).as_posix()
            prefix = "" if package == folder else f"{folder.relative_to(package).as_posix()}/"
            return BazelLibrary(replace(library, root=folder), f"{workspaces[root]}//{label}", prefix=prefix)
    hint = (
        'add a BUILD.bazel to it: exports_files(glob(["*.json"]))'
        if prebuilt
        else 'add a BUILD.bazel to it: exports_files(glob(["*.py"]))'
    )
    raise KernelgenError(
        Diagnostic(
            f"{library.root}: a manifest names kernels by files in it, and it is in no Bazel package",
            hint=hint,
        )
    )


def inner_packages(plan: Plan, libraries: Sequence[Library], workspaces: Mapping[Path, str]) -> list[BazelLibrary]:
    """Returns further folders of Python packages that a plan's kernels use: Bazel may have separate packages there.

    Args:
        plan: the plan.
        libraries: folders of sources.
        workspaces: see `package_of`.

    Raises:
        KernelgenError: no Bazel package contains one of them.
    """
    by_name = {library.name: library for library in libraries if library.package}
    folders: dict[Path, None] = {}
    for kernel in plan.kernels:
        if kernel.library in by_name:
            library = by_name[kernel.library]
            files = (absolute(file) for file in dependencies(library, kernel.emitter))
            folders |= {file.parent: None for file in files if file.is_relative_to(absolute(library.root))}
    return [package_of(Library(folder.as_posix(), folder), workspaces) for folder in sorted(folders)]


def build_files(source: BazelLibrary) -> list[Path]:
    """Returns the BUILD files that determine a folder's package, including missing ones."""
    folder = source.library.root
    above = [folder, *folder.parents][: len(Path(source.prefix).parts) + 1]
    return [package / name for package in above for name in ("BUILD.bazel", "BUILD")]


def _label_of(file: Path, sources: Sequence[BazelLibrary]) -> str:
    holding = [source for source in sources if file.is_relative_to(source.library.root)]
    if holding:
        return max(holding, key=lambda source: len(source.library.root.parts)).label(file)
    raise ValueError(f"{file} belongs to no kernel library")


def _targets_by_manifest(plan: Plan) -> dict[str, list[str]]:
    targets: dict[str, list[str]] = {}
    for bundle in plan.bundles:
        targets.setdefault(bundle.name, []).append(bundle.target)
    return targets
