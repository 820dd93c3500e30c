"""Reads manifests: turns files into requests, or reports every mistake with file, line and column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.ggml import model_files
from kernelgen.manifest import document, graphs, kernels, reading, sizes, sources
from kernelgen.manifest.document import Report, YamlNode
from kernelgen.manifest.kernels import Context
from kernelgen.manifest.settings import ManifestSettings
from kernelgen.manifest.types import Graph, Manifest, OpKernel, SourceKernel
from kernelgen.manifest.weights import WeightLayouts
from kernelgen.plan import Kernel, Request
from kernelgen.spec.kernel import KernelSpec


def load(paths: Sequence[str | Path], catalog: Catalog) -> list[Request]:
    """Returns the requests of manifests, one per manifest in the order given.

    Args:
        paths: YAML files; messages use these names.
        catalog: the available emitters.

    Raises:
        KernelgenError: lists every mistake of every file.
    """
    problems: list[Diagnostic] = []
    requests: dict[str, Request] = {}
    names: dict[str, YamlNode] = {}
    for path in paths:
        report = Report()
        root = _parse(path, report)
        request = None if root is None else _request(root, catalog, report)
        if report.diagnostics and (model := model_files.recognize(path, "manifest")):
            problems.append(model)
            continue
        if root is not None and request is not None:
            name = root.value["name"]
            first = requests.setdefault(request.name, request)
            if first != request:
                message = f"manifest '{request.name}' is already defined, with other content"
                report.fail(name, message, _first_is_at(names[request.name]))
            names.setdefault(request.name, name)
        problems += sorted(report.diagnostics, key=_place)
    if problems:
        # A value that aliases share is checked at every use; report its mistakes once.
        raise KernelgenError(dict.fromkeys(problems))
    return list(requests.values())


def _parse(path: str | Path, report: Report) -> YamlNode | None:
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        report.diagnostics.append(Diagnostic(f"can't read '{path}': {getattr(error, 'strerror', None) or error}"))
        return None
    return document.parse(data, str(path), report)


def _place(problem: Diagnostic) -> tuple[int, int]:
    return (problem.location.line, problem.location.column) if problem.location else (0, 0)


def _first_is_at(node: YamlNode) -> str:
    return f"the first is at {node.location}"


def _request(root: YamlNode, catalog: Catalog, report: Report) -> Request | None:
    """Returns the request of one manifest; None if it has a mistake."""
    manifest = reading.read(root, Manifest, "the manifest", report)
    if manifest is None:
        # What entries mean depends on the rest, but not their form.
        for key, type in (("graphs", Graph), ("kernels", None)) if root.kind == "map" else ():
            for label, entry in _items(root, key):
                reading.read(entry, type or _kernel_type(entry), label, report)
        return None
    config = ManifestSettings(manifest, root.at("compiler"), report)
    targets = tuple(manifest.targets)
    weights = WeightLayouts(root.get("weights"), targets, report)
    conditions = sizes.conditions(root.get("where"), manifest.sizes, report)
    context = Context(
        catalog, report, targets, manifest.languages, manifest.name, config, weights, manifest.sizes, conditions
    )
    found, checks = _entries(root, context)
    if not report.diagnostics:
        weights.check_used()
    special = config.special()
    if report.diagnostics:
        return None
    return Request(
        manifest.name,
        tuple(found),
        config.configs,
        config.memory_mb,
        config.cpus,
        checks=tuple(checks),
        special=special,
        file=root.file,
    )


def _kernel_type(entry: YamlNode) -> type[OpKernel | SourceKernel]:
    return SourceKernel if entry.kind == "map" and "source" in entry.value else OpKernel


def _items(root: YamlNode, key: str) -> list[tuple[str, YamlNode]]:
    """Returns the entries of a list, each with its name in messages."""
    node = root.get(key)
    return (
        [(f"{key}[{i}]", item) for i, item in enumerate(node.value)] if node is not None and node.kind == "seq" else []
    )


def _entries(root: YamlNode, context: Context) -> tuple[list[Kernel], list[sources.ReferenceCheck]]:
    report = context.report
    found: list[Kernel] = []
    checks: list[sources.ReferenceCheck] = []
    programs: dict[str, tuple[str, YamlNode]] = {}
    named: dict[str, tuple[KernelSpec, YamlNode]] = {}
    for label, entry in (*_items(root, "graphs"), *_items(root, "kernels")):
        if label.startswith("graphs"):
            found += graphs.expand(entry, context, label)
        elif _kernel_type(entry) is SourceKernel:
            of_source, compared = sources.expand(entry, context, label)
            found += of_source
            checks += compared
            _check_names(of_source, entry, programs, report)
        else:
            expanded, names = kernels.expand(entry, context, label)
            found += expanded
            for name, spec, node in names:
                first_spec, first_node = named.setdefault(name, (spec, node))
                if first_spec != spec and id(node) not in report.wrong:
                    message = f"kernel '{document.short(name)}' is already defined, with other content"
                    report.fail(node, message, _first_is_at(first_node))
        if len(found) > kernels.MAX_KERNELS:
            report.fail(entry, f"the manifest names more than {kernels.MAX_KERNELS} kernels")
            break
    return found, checks


def _check_names(
    found: Sequence[Kernel], entry: YamlNode, known: dict[str, tuple[str, YamlNode]], report: Report
) -> None:
    """Reports names that refer to two kernels: a program requests a kernel by its name."""
    for kernel in found:
        name = kernel.spec.op
        id, first = known.setdefault(name, (kernel.spec.id, entry))
        if id != kernel.spec.id:
            hint = f"{_first_is_at(first)}; give each a name" if first is not entry else "use a variable in its name"
            report.fail(entry.at("name"), f"two kernels are named '{document.short(name)}'", hint)
            return
