"""Reads manifests: turns files into requests, or reports every mistake with file, line and column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernelgen import fileio
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.ggml import model_files
from kernelgen.manifest import document, graphs, kernels, schema, settings, sizes, sources
from kernelgen.manifest.document import Document, YamlNode
from kernelgen.manifest.schema import Report
from kernelgen.manifest.weights import WeightLayouts
from kernelgen.plan import Kernel, Request


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
        parsed = _parse(path)
        root = parsed.root
        if root is None:
            problems += parsed.problems
            continue
        report = schema.check(root, parsed.broken)
        request = _request(root, catalog, report)
        if request is not None:
            name = root.value["name"].node
            first = requests.setdefault(request.name, request)
            if first != request:
                message = f"manifest '{request.name}' is already defined, with other content"
                report.fail(name, message, _first_is_at(names[request.name]))
            names.setdefault(request.name, name)
        problems += sorted([*parsed.problems, *report.diagnostics], key=_place)
    if problems:
        # A value that aliases share is checked at every use; report its mistakes once.
        raise KernelgenError(dict.fromkeys(problems))
    return list(requests.values())


def _parse(path: str | Path) -> Document:
    model = model_files.recognize(path, "manifest")
    if model is not None:
        return Document(None, [model])
    try:
        data = fileio.read_input(path, document.MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        return Document(None, [Diagnostic(f"can't read '{path}': {getattr(error, 'strerror', None) or error}")])
    return document.parse(data, str(path))


def _place(problem: Diagnostic) -> tuple[int, int]:
    return (problem.location.line, problem.location.column) if problem.location else (0, 0)


def _first_is_at(node: YamlNode) -> str:
    return f"the first is at {node.location}"


def _request(root: YamlNode, catalog: Catalog, report: Report) -> Request | None:
    """Returns the request of one manifest; None if it has a mistake."""
    if root.kind != "map":
        return None
    config = settings.read(root, report)
    own = settings.KernelSettings(root, config, report)
    name = root.get("name")
    targets = tuple(c.target for c in config.configs)
    weights = WeightLayouts(root.get("weights"), targets, report)
    choice = kernels.Choice(
        targets,
        root.get("languages"),
        manifest="" if name is None else str(name.value),
        settings=own,
        weights=weights,
    )
    found, checks = _entries(root, catalog, report, choice)
    if not report.diagnostics:
        weights.check_used()
    if name is None or report.diagnostics:
        return None
    special = own.special()
    return Request(
        str(name.value),
        tuple(found),
        config.configs,
        config.memory_mb,
        config.cpus,
        checks=tuple(checks),
        special=special,
        file=root.file,
    )


def _items(root: YamlNode, key: str) -> list[YamlNode]:
    node = root.get(key)
    return list(node.value) if node is not None and node.kind == "seq" else []


def _entries(
    root: YamlNode, catalog: Catalog, report: Report, choice: kernels.Choice
) -> tuple[list[Kernel], list[sources.ReferenceCheck]]:
    found: list[Kernel] = []
    checks: list[sources.ReferenceCheck] = []
    programs: dict[str, tuple[str, YamlNode]] = {}
    named: dict[str, kernels.NamedKernel] = {}
    shared = sizes.read(root, report)
    for entry in _items(root, "graphs"):
        found += graphs.expand(entry, catalog, report, shared, choice)
        if len(found) > kernels.MAX_KERNELS:
            report.fail(entry, f"the manifest names more than {kernels.MAX_KERNELS} kernels")
            break
    for entry in _items(root, "kernels"):
        if entry.kind == "map" and entry.get("source") is not None:
            of_source, compared = sources.SourceEntry(entry, catalog, report, shared, choice).expand_source()
            found += of_source
            checks += compared
            _check_names(of_source, entry, programs, report)
            continue
        expanded, names = kernels.expand(entry, catalog, report, shared, choice)
        found += expanded
        if len(found) > kernels.MAX_KERNELS:
            report.fail(entry, f"the manifest names more than {kernels.MAX_KERNELS} kernels")
            break
        for item in names:
            first = named.setdefault(item.name, item)
            if first.spec != item.spec and id(item.node) not in report.wrong:
                report.fail(
                    item.node,
                    f"kernel '{document.short(item.name)}' is already defined, with other content",
                    _first_is_at(first.node),
                )
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
            report.fail(entry.get("name") or entry, f"two kernels are named '{document.short(name)}'", hint)
            return
