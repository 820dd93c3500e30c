"""A manifest's targets and compiler settings, and their contradictions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.compilers.settings import CompileConfig
from kernelgen.manifest import sizes
from kernelgen.manifest.document import YamlNode, short
from kernelgen.manifest.schema import Report
from kernelgen.manifest.sizes import SizeCondition
from kernelgen.manifest.template import Value
from kernelgen.targets import TARGETS, Target

_SETTINGS = ("optlevel", "auto_cast", "auto_cast_type", "model_type", "lnc")
# Settings that a kernel may set for itself; `lnc` joins cores for all kernels of a bundle.
_OF_KERNELS = ("optlevel", "auto_cast", "auto_cast_type", "model_type")

# Flags of neuronx-cc that a manifest sets by other keys, and flags that the build sets itself.
_SAID_BY = {
    "--target": "targets",
    "-O": "compiler.optlevel",
    "--optlevel": "compiler.optlevel",
    "--auto-cast": "compiler.auto_cast",
    "--auto-cast-type": "compiler.auto_cast_type",
    "--model-type": "compiler.model_type",
    "--lnc": "compiler.lnc",
    "--logical-nc-config": "compiler.lnc",
}
_SET_BY_BUILD = frozenset({"--framework", "--output", "-o", "--logfile", "--pipeline", "--help", "-h", "--version"})
_OF_WRAPPERS = frozenset({"--cache_dir", "--no_cache", "--retry_failed_compilation"})


Changes = Mapping[str, Any]
"""Fields of a `CompileConfig` that differ for a kernel from its manifest."""


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of kernels with certain sizes.

    Attributes:
        condition: the condition on their sizes.
        changes: the settings.
    """

    condition: SizeCondition
    changes: Changes


@dataclass(frozen=True, slots=True)
class ManifestSettings:
    """The compile settings of a manifest's kernels.

    Attributes:
        configs: one per target.
        memory_mb, cpus: resources that the scheduler reserves per compile; None for the target's figure.
        cases: settings by size; the first case whose condition holds counts.
    """

    configs: tuple[CompileConfig, ...]
    memory_mb: int | None
    cpus: int | None
    cases: tuple[Case, ...] = ()


def read(root: YamlNode, report: Report) -> ManifestSettings:
    """Returns the settings of a manifest that passed the schema check; adds mistakes to `report`."""
    targets = _targets(root, report)
    compiler = root.get("compiler")
    if compiler is None or compiler.kind != "map":
        return ManifestSettings(tuple(CompileConfig.make(t.name) for t in targets), None, None)
    given = {key: entry.node for key, entry in compiler.value.items() if id(entry.node) not in report.wrong}
    _check(given, targets, report, cast_is_known=_cast_is_known(compiler, report))
    flags = _extra_flags(given.get("extra_flags"), report)
    memory, cpus = given.get("memory_per_compile"), given.get("cpus_per_compile")
    if any(id(node) in report.wrong for node in given.values()):
        return ManifestSettings((), None, None)
    settings = {key: given[key].value for key in _SETTINGS if key in given}
    return ManifestSettings(
        tuple(CompileConfig.make(t.name, extra_flags=flags, **settings) for t in targets),
        megabytes(memory.text) if memory else None,
        int(cpus.value) if cpus else None,
        _cases(compiler, targets, report),
    )


def _cases(compiler: YamlNode, targets: list[Target], report: Report) -> tuple[Case, ...]:
    node = compiler.get("cases")
    found = []
    for item in node.value if node is not None and node.kind == "seq" else ():
        if id(item) in report.wrong:
            continue
        condition = sizes.condition(item.get("when"), None, report)
        changes = _changes(item, compiler, targets, report)
        if changes == {} and set(item.value) == {"when"}:
            report.fail(item, "a case without settings", f"it has {', '.join((*_OF_KERNELS, 'extra_flags'))}")
        elif condition is not None and changes is not None:
            found.append(Case(condition, changes))
    return tuple(found)


def _changes(node: YamlNode, compiler: YamlNode | None, targets: list[Target], report: Report) -> Changes | None:
    """Returns the settings that kernels have for themselves, or None if one is wrong.

    Args:
        node: a mapping with settings.
        compiler: the manifest's settings, which apply where `node` has none.
        targets: the manifest's targets.
        report: receives mistakes.
    """
    own = {key: node.value[key].node for key in (*_OF_KERNELS, "extra_flags") if key in node.value}
    general = {} if compiler is None else {key: entry.node for key, entry in compiler.value.items()}
    checked = {key: value for key, value in {**general, **own}.items() if key in _OF_KERNELS}
    _check(checked, targets, report, cast_is_known=True, own=own)
    flags = _extra_flags(own.get("extra_flags"), report)
    if any(id(value) in report.wrong for value in own.values()):
        return None
    changes: dict[str, Any] = {key: own[key].value for key in _OF_KERNELS if key in own}
    return changes | ({"extra_flags": flags} if "extra_flags" in own else {})


class KernelSettings:
    """The kernels that have their own settings: recorded while the entries of a manifest are read.

    A kernel has one set of settings in a bundle, however many entries and sizes request it: the settings in the entry itself;
    else the manifest's, if some request matches no case; else the first case's.

    Args:
        root: the manifest.
        settings: the manifest's settings.
        report: receives mistakes.
    """

    def __init__(self, root: YamlNode, settings: ManifestSettings, report: Report) -> None:
        compiler = root.get("compiler")
        self._compiler = compiler if compiler is not None and id(compiler) not in report.wrong else None
        self._settings = settings
        self._targets = [TARGETS[c.target] for c in settings.configs]
        self._report = report
        self._found: dict[str, tuple[int, Changes, YamlNode]] = {}
        self._met: set[int] = set()

    def own(self, entry: YamlNode) -> Changes | None:
        """Returns an entry's own settings, or None if it has none or a mistake in them."""
        node = entry.get("compiler")
        if node is None or id(node) in self._report.wrong:
            return None
        return _changes(node, self._compiler, self._targets, self._report)

    def note(self, kernel: str, entry: YamlNode, values: Mapping[str, Value], own: Changes | None) -> None:
        """Records that an entry requests a kernel.

        Args:
            kernel: `Kernel.id`.
            entry: the entry.
            values: values of its variables.
            own: the entry's settings for the kernel.

        Raises:
            TemplateError: a case's condition can't be computed.
        """
        if own is None and not self._settings.cases:
            return
        rank, changes = (-1, own) if own is not None else self._case(values)
        known = self._found.setdefault(kernel, (rank, changes, entry))
        if rank < known[0]:
            self._found[kernel] = (rank, changes, entry)
        elif rank == known[0] and changes != known[1]:
            message = f"the kernel {kernel} has other settings in the entry at {known[2].location}"
            self._report.fail(entry.get("compiler") or entry, message, "a bundle has a kernel once: give both the same")

    def _case(self, values: Mapping[str, Value]) -> tuple[int, Changes]:
        first: tuple[int, Changes] | None = None
        for number, case in enumerate(self._settings.cases, 1):
            if case.condition.names <= values.keys():
                self._met.add(number)
                if case.condition.holds(values) and first is None:
                    first = number, case.changes
        return first or (0, {})

    def special(self) -> tuple[tuple[str, tuple[CompileConfig, ...]], ...]:
        """Returns the kernels whose settings differ from the manifest's, for `Request`; call it after all entries are read."""
        for number, case in enumerate(self._settings.cases, 1):
            if number not in self._met and not self._report.diagnostics:
                names = " and ".join(sorted(case.condition.names)) or "no variable"
                self._report.fail(case.condition.node, f"no entry has {names}", sizes.UNKNOWN_HINT)
        configs = self._settings.configs
        made = {id: tuple(replace(c, **changes) for c in configs) for id, (_, changes, _) in self._found.items()}
        return tuple((id, own) for id, own in sorted(made.items()) if own != configs)


def _targets(root: YamlNode, report: Report) -> list[Target]:
    node = root.get("targets")
    if node is None or node.kind != "seq":
        return []
    return [TARGETS[item.value] for item in node.value if id(item) not in report.wrong]


def _cast_is_known(compiler: YamlNode, report: Report) -> bool:
    node = compiler.get("auto_cast")
    return node is None or id(node) not in report.wrong


def _check(
    given: dict[str, YamlNode],
    targets: list[Target],
    report: Report,
    *,
    cast_is_known: bool,
    own: Mapping[str, YamlNode] | None = None,
) -> None:
    """Reports contradictions; `own` are the settings whose mistakes are reported, or None for all."""
    cast_type, cast = given.get("auto_cast_type"), given.get("auto_cast")
    if own is not None and "auto_cast_type" not in own and cast_type is not None:
        if "auto_cast" in own and cast is not None and cast.value == "none":
            report.fail(cast, f"auto_cast none contradicts auto_cast_type {cast_type.value}, which all kernels have")
    elif cast_type is not None and cast_is_known:
        if cast is None or cast.value == "none":
            said = "none, its default" if cast is None else "none"
            report.fail(
                cast_type,
                f"auto_cast_type {cast_type.value} contradicts auto_cast: {said}",
                "set auto_cast to matmult or all, or remove auto_cast_type",
            )
        elif cast_type.value.startswith("fp8"):
            without = [t.name for t in targets if not t.fp8]
            if without:
                report.fail(
                    cast_type,
                    f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no fp8: {cast_type.value}",
                )
    lnc = given.get("lnc")
    if lnc is not None:
        without = [t.name for t in targets if lnc.value not in t.lnc_choices]
        if without:
            choices = ", ".join(map(str, TARGETS[without[0]].lnc_choices))
            report.fail(
                lnc,
                f"lnc {lnc.value} is not for {', '.join(without)}: expected {choices}",
                "leave lnc out to take each target's own",
            )


def _extra_flags(node: YamlNode | None, report: Report) -> tuple[str, ...]:
    """Returns the flags; each is `--name`, `--name=value`, or a value after its flag."""
    if node is None:
        return ()
    seen: dict[str, str] = {}
    takes_value = False
    for item in node.value:
        text = str(item.value)
        if not text.startswith("-"):
            if not takes_value:
                report.fail(
                    item, f"expected a flag, not '{short(text)}'", "a flag begins with '-'; its value may follow"
                )
            takes_value = False
            continue
        name = text.split("=")[0]
        takes_value = "=" not in text
        if re.fullmatch("-O[0-9]", name):
            name, takes_value = "-O", False
        if name in _SAID_BY:
            report.fail(
                item, f"'{short(text)}' repeats what '{_SAID_BY[name]}' says", f"remove it and set {_SAID_BY[name]}"
            )
        elif name in _SET_BY_BUILD:
            report.fail(item, f"'{short(text)}' is set by the build", "remove it")
        elif name in _OF_WRAPPERS:
            report.fail(item, f"'{short(text)}' is not a flag of neuronx-cc but of programs that wrap it", "remove it")
        elif name in seen:
            report.fail(item, f"'{short(text)}' is given twice, first as '{short(seen[name])}'")
        seen.setdefault(name, text)
    return tuple(str(item.value) for item in node.value)


def megabytes(text: str) -> int:
    """Returns the MiB of an amount of memory in a manifest's form: `8G`, `6144M`.

    Raises:
        ValueError: it has another form.
    """
    if not re.fullmatch("[1-9][0-9]{0,5}[MG]", text):
        raise ValueError(f"not an amount of memory such as 8G or 6144M: {text}")
    return int(text[:-1]) * (1024 if text[-1] == "G" else 1)
