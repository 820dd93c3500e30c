"""A manifest's targets and compiler settings, and what contradicts in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelgen.compilers.settings import CompileConfig
from kernelgen.manifest.document import Node, short
from kernelgen.manifest.schema import Report
from kernelgen.targets import TARGETS, Target

_SETTINGS = ("optlevel", "auto_cast", "auto_cast_type", "model_type", "lnc")

# Flags of neuronx-cc that a manifest says in another way, and those that the build sets itself.
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


@dataclass(frozen=True, slots=True)
class ManifestSettings:
    """How a manifest's kernels are compiled.

    Attributes:
        configs: one per target.
        memory_mb, cpus: what one compile is counted for; None for the target's figure.
    """

    configs: tuple[CompileConfig, ...]
    memory_mb: int | None
    cpus: int | None


def read(root: Node, report: Report) -> ManifestSettings:
    """Returns the settings of a manifest that the schema was checked against; mistakes go to `report`."""
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
    )


def _targets(root: Node, report: Report) -> list[Target]:
    node = root.get("targets")
    if node is None or node.kind != "seq":
        return []
    return [TARGETS[item.value] for item in node.value if id(item) not in report.wrong]


def _cast_is_known(compiler: Node, report: Report) -> bool:
    node = compiler.get("auto_cast")
    return node is None or id(node) not in report.wrong


def _check(given: dict[str, Node], targets: list[Target], report: Report, *, cast_is_known: bool) -> None:
    cast_type = given.get("auto_cast_type")
    if cast_type is not None and cast_is_known:
        cast = given.get("auto_cast")
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


def _extra_flags(node: Node | None, report: Report) -> tuple[str, ...]:
    """Returns the flags; each is `--name`, `--name=value`, or a value after the flag it belongs to."""
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
    """Returns the MiB of an amount of memory as manifests have it: `8G`, `6144M`.

    Raises:
        ValueError: it is written otherwise.
    """
    if not re.fullmatch("[1-9][0-9]{0,5}[MG]", text):
        raise ValueError(f"not an amount of memory such as 8G or 6144M: {text}")
    return int(text[:-1]) * (1024 if text[-1] == "G" else 1)
