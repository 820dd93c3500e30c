"""A manifest's targets and compiler settings, and their contradictions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from kernelgen.compilers.settings import CompileConfig
from kernelgen.manifest import sizes
from kernelgen.manifest.document import Report, YamlNode, short
from kernelgen.manifest.sizes import SizeCondition
from kernelgen.manifest.template import Value
from kernelgen.manifest.types import Compiler, Entry, EntrySettings, Manifest
from kernelgen.targets import TARGETS

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


class ManifestSettings:
    """The compile settings of a manifest's kernels, and of those that have their own, which entries note while they are read.

    A kernel has one set of settings in a bundle, however many entries and sizes request it: the settings in the entry itself;
    else the manifest's, if some request matches no case; else the first case's.

    Attributes:
        configs: one per target.
        memory_mb, cpus: resources that the scheduler reserves per compile; None for the target's figure.
    """

    def __init__(self, manifest: Manifest, node: YamlNode, report: Report) -> None:
        """Reads a manifest's settings.

        Args:
            manifest: the manifest.
            node: the place of its settings.
            report: receives mistakes.
        """
        self._compiler = compiler = manifest.compiler
        self._targets = manifest.targets
        self._report = report
        self._found: dict[str, tuple[int, Changes, YamlNode]] = {}
        self._met: set[int] = set()
        self.memory_mb = megabytes(compiler.memory_per_compile) if compiler.memory_per_compile else None
        self.cpus = compiler.cpus_per_compile or None
        changes = self._changes(compiler, node, None)
        self.configs = tuple(CompileConfig.make(target, **changes or {}) for target in manifest.targets)
        self._cases: list[tuple[SizeCondition, Changes]] = []
        for i, case in enumerate(compiler.cases):
            item = node.at("cases", i)
            condition = sizes.condition(item.at("when"), None, report)
            changes = self._changes(case, item, compiler)
            if changes == {}:
                report.fail(item, "a case without settings", f"it has {', '.join(EntrySettings.__struct_fields__)}")
            elif condition is not None and changes is not None:
                self._cases.append((condition, changes))

    def _changes(self, settings: EntrySettings, node: YamlNode, general: Compiler | None) -> Changes | None:
        """Returns the fields of a `CompileConfig` that settings give, or None if one is wrong.

        Args:
            settings: the settings.
            node: their node.
            general: the manifest's settings, which apply where `settings` has none; None if `settings` are these.
        """
        report = self._report
        before = len(report.diagnostics)
        fields = {*EntrySettings.__struct_fields__, "lnc"}
        changes = {field: value for field, value in asdict(settings).items() if field in fields and value is not UNSET}
        _check_cast(settings, node, general, self._targets, report)
        if "lnc" in changes:
            without = [name for name in self._targets if changes["lnc"] not in TARGETS[name].lnc_choices]
            if without:
                choices = ", ".join(map(str, TARGETS[without[0]].lnc_choices))
                report.fail(
                    node.at("lnc"),
                    f"lnc {changes['lnc']} is not for {', '.join(without)}: expected {choices}",
                    "leave lnc out to take each target's own",
                )
        if "extra_flags" in changes:
            _check_flags(node.at("extra_flags"), report)
            changes["extra_flags"] = tuple(changes["extra_flags"])
        return changes if len(report.diagnostics) == before else None

    def own(self, entry: Entry, node: YamlNode) -> Changes | None:
        """Returns an entry's own settings, or None if it has none or a mistake in them."""
        if entry.compiler is UNSET:
            return None
        return self._changes(entry.compiler, node.at("compiler"), self._compiler)

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
        if own is None and not self._cases:
            return
        rank, changes = (-1, own) if own is not None else self._case(values)
        known = self._found.setdefault(kernel, (rank, changes, entry))
        if rank < known[0]:
            self._found[kernel] = (rank, changes, entry)
        elif rank == known[0] and changes != known[1]:
            message = f"the kernel {kernel} has other settings in the entry at {known[2].location}"
            self._report.fail(entry.at("compiler"), message, "a bundle has a kernel once: give both the same")

    def _case(self, values: Mapping[str, Value]) -> tuple[int, Changes]:
        first: tuple[int, Changes] | None = None
        for number, (condition, changes) in enumerate(self._cases, 1):
            if condition.names <= values.keys():
                self._met.add(number)
                if condition.holds(values) and first is None:
                    first = number, changes
        return first or (0, {})

    def special(self) -> tuple[tuple[str, tuple[CompileConfig, ...]], ...]:
        """Returns the kernels whose settings differ from the manifest's, for `Request`; call it after all entries are read."""
        for number, (condition, _) in enumerate(self._cases, 1):
            if number not in self._met and not self._report.diagnostics:
                names = " and ".join(sorted(condition.names)) or "no variable"
                self._report.fail(condition.node, f"no entry has {names}", sizes.UNKNOWN_HINT)
        configs = self.configs
        made = {id: tuple(replace(c, **changes) for c in configs) for id, (_, changes, _) in self._found.items()}
        return tuple((id, own) for id, own in sorted(made.items()) if own != configs)


def _check_cast(
    settings: EntrySettings, node: YamlNode, general: Compiler | None, targets: Sequence[str], report: Report
) -> None:
    """Reports a type to cast to that contradicts what is cast, or that a target lacks; see `_changes` for the arguments."""
    cast = settings.auto_cast or (general.auto_cast if general else UNSET)
    cast_type = settings.auto_cast_type or (general.auto_cast_type if general else UNSET)
    if cast_type is UNSET:
        return
    place = node.at("auto_cast_type")
    if cast in (UNSET, "none"):
        if settings.auto_cast_type is UNSET and settings.auto_cast is not UNSET:
            message = f"auto_cast none contradicts auto_cast_type {cast_type}, which all kernels have"
            report.fail(node.at("auto_cast"), message)
        elif settings.auto_cast_type is not UNSET:
            value = "none, its default" if cast is UNSET else "none"
            hint = "set auto_cast to matmult or all, or remove auto_cast_type"
            report.fail(place, f"auto_cast_type {cast_type} contradicts auto_cast: {value}", hint)
    elif cast_type.startswith("fp8") and settings.auto_cast_type is not UNSET:
        without = [name for name in targets if not TARGETS[name].fp8]
        if without:
            report.fail(place, f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no fp8: {cast_type}")


def _check_flags(node: YamlNode, report: Report) -> None:
    """Reports flags that are not the user's; each is `--name`, `--name=value`, or a value after its flag."""
    seen: dict[str, str] = {}
    takes_value = False
    for item in node.value:
        text = item.text
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


def megabytes(text: str) -> int:
    """Returns the MiB of an amount of memory in a manifest's form: `8G`, `6144M`.

    Raises:
        ValueError: it has another form.
    """
    if not re.fullmatch("[1-9][0-9]{0,5}[MG]", text):
        raise ValueError(f"not an amount of memory such as 8G or 6144M: {text}")
    return int(text[:-1]) * (1024 if text[-1] == "G" else 1)
