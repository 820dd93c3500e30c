"""Reads a folder of NEFFs, HLO modules and compile caches, and compares kernelgen's results with the compiler's.

    python3 tools/corpus/survey.py FOLDER [--target T] [--execute N]

The program recognizes every file below FOLDER by its content: NEFFs (also those in an HLO custom call `AwsNeuronNeff`),
serialized HLO modules, and entries of kernelgen's cache. Equal contents count once. A module and a NEFF in the same
folder belong together if the NEFF's name begins like the module's, as in AWS's compile cache (`model.hlo_module.pb`,
`model.neff`), or if the key of a cache's entry names both. A NEFF beside a module that is shorter than a header marks a
failed compile, as does a `model.log` that reports the failure.

* Every NEFF must be readable to its end.
* A NEFF and its module must agree: device, cores, names and sizes of inputs and outputs.
* The lint must have no error for a module that was compiled.
* The canonicaliser must accept every module, and must leave its own output unchanged.
* With `--execute N`, the N smallest modules that XLA can run on this machine's CPU run before and after
  canonicalisation, with the same random inputs: the results must have the same bits.

The program prints a table, and exits with status 1 if any of these rules is broken. `./bazelw run //tools/corpus:survey
-- FOLDER` is the same. It needs kernelgen's packages. docs/results/real-artifacts.md has its figures for public
repositories, and how to get these.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernelgen.cache import entry
from kernelgen.errors import KernelgenError, printable
from kernelgen.hlo import proto
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.hlo.lint import ERROR, WARNING, lint
from kernelgen.neff import container, description
from kernelgen.targets import TARGETS

MAX_BYTES = 1 << 30
"""Larger files are skipped, and counted."""

COMPILED, FAILED, UNKNOWN = "compiled", "failed", "of unknown fate"
"""The outcome of a module's compile."""

CARRIER = "AwsNeuronNeff"
"""The custom call whose configuration is a NEFF."""

_HEAD = tuple(package.to_bytes(8, "little") + container.HEADER_SIZE.to_bytes(8, "little") for package in (1, 2))
_MODULE_ENDS = re.compile(r"(\.hlo_module)?\.(pb|hlo)$|\.hlo\.pb$")
_LOG, _LOGGED = "model.log", b"Failed compilation"


def is_neff(data: bytes) -> bool:
    """Returns whether bytes begin like a NEFF."""
    return data.startswith(_HEAD)


def is_named(name: str) -> bool:
    """Returns whether the program reads a file because of its name."""
    return name == _LOG or bool(_MODULE_ENDS.search(name)) or name.endswith(".neff") or bool(entry.name_of(name))


@dataclass
class Module:
    """An HLO module, and the outcome of its compile.

    Attributes:
        path: the first file that contains it.
        data: the module.
        fate: one of `COMPILED`, `FAILED`, `UNKNOWN`.
        neffs: the path and bytes of each NEFF compiled from it.
    """

    path: Path
    data: bytes
    fate: str = UNKNOWN
    neffs: list[tuple[Path, bytes]] = field(default_factory=list)


@dataclass
class Corpus:
    """The contents of a folder.

    Attributes:
        files: the number of files.
        neffs: NEFFs by digest: path and bytes.
        modules: HLO modules by digest.
        remnants: files in the place of a NEFF that are shorter than a header.
        passed_over: the files that were skipped, with the reason.
    """

    files: int = 0
    neffs: dict[str, tuple[Path, bytes]] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)
    remnants: list[Path] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


def gather(folder: Path) -> Corpus:
    """Returns the contents of a folder; does not follow links.

    Raises:
        OSError: the folder can't be read.
    """
    corpus = Corpus()
    beside: dict[Path, list[tuple[str, str]]] = {}
    keys: list[tuple[str, Path, bytes]] = []
    for path in _files(folder):
        corpus.files += 1
        if path.stat().st_size > MAX_BYTES:
            corpus.passed_over.append(f"{path}: larger than {MAX_BYTES} bytes")
            continue
        data = path.read_bytes()
        if is_neff(data) or (path.suffix == ".neff" and len(data) >= container.HEADER_SIZE):
            digest = _add_neff(corpus, path, data)
            beside.setdefault(path.parent, []).append((path.name, digest))
        elif path.suffix == ".neff":
            corpus.remnants.append(path)
            beside.setdefault(path.parent, []).append((path.name, ""))
        elif path.name == _LOG and _LOGGED in data:
            beside.setdefault(path.parent, []).append((path.name, ""))
        elif name := entry.name_of(path.name):
            neff = path.with_suffix(entry.NEFF)
            try:
                keys.append((entry.read_head(data, name).key.hlo_sha256, neff, neff.read_bytes()))
            except (entry.DamagedEntry, OSError) as problem:
                corpus.passed_over.append(f"{path}: {problem}")
        elif _MODULE_ENDS.search(path.name):
            try:
                message = proto.parse(data)
            except ValueError as error:
                corpus.passed_over.append(f"{path}: {error}")
                continue
            corpus.modules.setdefault(_digest(data), Module(path, data))
            for carried in _carried(message):
                _add_neff(corpus, path, carried)
    _match(corpus, beside, keys)
    return corpus


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (
            path for path in (Path(parent, name) for name in sorted(names)) if path.is_file() and not path.is_symlink()
        )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _add_neff(corpus: Corpus, path: Path, data: bytes) -> str:
    digest = _digest(data)
    corpus.neffs.setdefault(digest, (path, data))
    # A simulated NEFF contains its HLO. A damaged NEFF is reported when the NEFFs are judged.
    with contextlib.suppress(KernelgenError):
        if container.read_header(data).simulated:
            hlo = container.read_simulated(data).hlo
            corpus.modules.setdefault(_digest(hlo), Module(path, hlo))
    return digest


def _carried(message: Any) -> Iterator[bytes]:
    for computation in message.computations:
        for i in computation.instructions:
            if i.opcode == "custom-call" and i.custom_call_target == CARRIER and i.backend_config.startswith(_HEAD):
                yield bytes(i.backend_config)


def _match(corpus: Corpus, beside: dict[Path, list[tuple[str, str]]], keys: list[tuple[str, Path, bytes]]) -> None:
    for module in corpus.modules.values():
        stem = _MODULE_ENDS.sub("", module.path.name)
        for name, digest in sorted(beside.get(module.path.parent, [])):
            if name.startswith(f"{stem}."):
                if digest:
                    module.fate = COMPILED
                    module.neffs.append(corpus.neffs[digest])
                elif module.fate == UNKNOWN:
                    module.fate = FAILED
    for hlo, path, data in keys:
        if hlo in corpus.modules:
            corpus.modules[hlo].fate = COMPILED
            corpus.modules[hlo].neffs.append((path, data))


# --- judging --------------------------------------------------------------------------------------------------------------


@dataclass
class SurveyReport:
    """The rows of the table, and the broken rules.

    Attributes:
        rows: (what, how many, more).
        wrong: one line per broken rule.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def row(self, what: str, count: object, more: str = "") -> None:
        self.rows.append((what, str(count), more))

    def __str__(self) -> str:
        widths = [max(len(row[n]) for row in self.rows) for n in (0, 1)]
        lines = [f"{what:{widths[0]}}  {count:>{widths[1]}}  {more}".rstrip() for what, count, more in self.rows]
        return printable("\n".join(lines))


def survey(
    corpus: Corpus, target: str | None, execute: int, say: Callable[[str], None] = lambda text: None
) -> SurveyReport:
    """Returns the table of a corpus.

    Args:
        corpus: the contents of a folder.
        target: the target of modules without a NEFF; None if unknown.
        execute: the number of modules to run.
        say: called with progress messages.
    """
    report = SurveyReport()
    report.row("files", corpus.files)
    for text in corpus.passed_over:
        report.row("passed over", 1, text)
    say(f"{len(corpus.neffs)} NEFFs")
    said = _neffs(corpus, report)
    say(f"{len(corpus.modules)} modules")
    _pairs(corpus, said, report)
    _lints(corpus, said, target, report)
    canonical = _canonicals(corpus, report)
    if execute:
        _executions(canonical, execute, report, say)
    report.row("wrong", len(report.wrong))
    return report


def _neffs(corpus: Corpus, report: SurveyReport) -> dict[str, description.NeffDescription]:
    said: dict[str, description.NeffDescription] = {}
    for digest, (path, data) in corpus.neffs.items():
        try:
            said[digest] = description.describe(data, source=str(path))
        except KernelgenError as error:
            report.wrong.append(error.diagnostics[0].message)
    report.row("NEFFs", len(corpus.neffs))
    groups: dict[tuple[str, ...], list[description.NeffDescription]] = {}
    for digest, one in said.items():
        hashed = container.payload_digest(corpus.neffs[digest][1], one.header) or "unknown"
        key = (one.identity, f"{one.device} ({', '.join(one.targets)})", f"hash: {hashed}")
        groups.setdefault(key, []).append(one)
    for key, group in sorted(groups.items()):
        report.row("  " + key[0], len(group), ", ".join([*key[1:], _range("cores", [len(d.cores) for d in group])]))
    tensors = sum(len(one.tensors) for one in said.values())
    report.row("  inputs and outputs", tensors)
    report.row(
        "  remnants of failed compiles",
        len(corpus.remnants),
        _range("bytes", [p.stat().st_size for p in corpus.remnants]),
    )
    return said


def _range(what: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return f"{what} {min(numbers)}" if len(set(numbers)) == 1 else f"{what} {min(numbers)} to {max(numbers)}"


def _pairs(corpus: Corpus, said: dict[str, description.NeffDescription], report: SurveyReport) -> None:
    fates = Counter(module.fate for module in corpus.modules.values())
    report.row("HLO modules", len(corpus.modules), ", ".join(f"{n} {fate}" for fate, n in sorted(fates.items())))
    agree = dropped = retyped = 0
    for module in corpus.modules.values():
        for path, data in module.neffs:
            one = said.get(_digest(data))
            if one is None:
                continue
            lnc = TARGETS[one.targets[0]].lnc if one.targets else 0
            if one.header.simulated:
                lnc = one.header.lnc_size
            try:
                expected = container.tensors_of(module.data, source=str(module.path))
                description.check(one, expected, next(iter(one.targets), "?"), lnc, source=str(path))
            except KernelgenError as error:
                report.wrong += [d.message for d in error.diagnostics]
                continue
            agree += 1
            there = {(tensor.name, tensor.usage): tensor for tensor in one.tensors}
            dropped += any((t.name, t.usage) not in there for t in expected)
            found = [there.get((t.name, t.usage), t) for t in expected]
            retyped += any((a.dtype, a.shape) != (b.dtype, b.shape) for a, b in zip(expected, found, strict=True))
    report.row(
        "  agree with their NEFF",
        agree,
        f"{dropped} have inputs that the compiler dropped, {retyped} other types of equal size",
    )


def _lints(
    corpus: Corpus, said: dict[str, description.NeffDescription], target: str | None, report: SurveyReport
) -> None:
    counts: dict[str, Counter[str]] = {}
    for module in corpus.modules.values():
        targets = [t for _, data in module.neffs if _digest(data) in said for t in said[_digest(data)].targets] or [
            target
        ]
        rules: dict[str, set[str]] = {ERROR: set(), WARNING: set()}
        for finding in lint(module.data, TARGETS[targets[0]] if targets[0] else None):
            rules[finding.severity].add(finding.rule)
            if finding.severity == ERROR and module.fate == COMPILED:
                report.wrong.append(f"{module.path}: it was compiled, and the lint says: {finding}")
        count = counts.setdefault(module.fate, Counter())
        count.update(f"{severity} {rule}" for severity, names in rules.items() for rule in names)
        count["with errors"] += bool(rules[ERROR])
        count["with warnings"] += bool(rules[WARNING])
    for fate, count in sorted(counts.items()):
        totals = [f"{count.pop('with errors')} with errors", f"{count.pop('with warnings')} with warnings"]
        report.row(
            f"  lint, {fate}", totals[0], "; ".join([totals[1], *(f"{name}: {n}" for name, n in sorted(count.items()))])
        )


def _canonicals(corpus: Corpus, report: SurveyReport) -> list[tuple[Module, bytes]]:
    made: list[tuple[Module, bytes]] = []
    for module in corpus.modules.values():
        try:
            first = _canonical(module.data)
            if _canonical(first) != first:
                report.wrong.append(f"{module.path}: the canonical form of the canonical form differs")
        except (ValueError, KeyError, IndexError, StopIteration) as error:
            report.wrong.append(f"{module.path}: the canonicaliser does not take it: {type(error).__name__}: {error}")
            continue
        made.append((module, first))
    distinct = len({data for _, data in made})
    report.row("  canonicalised", len(made), f"{distinct} distinct")
    return made


def _canonical(data: bytes) -> bytes:
    message = proto.parse(data)
    names = [f"input{n}" for n in range(len(proto.parameters(proto.entry(message))))]
    aliases = {
        pair.output_shape_index[0] if pair.output_shape_index else 0: pair.parameter_number
        for pair in message.input_output_alias.entries
    }
    return canonicalize(data, names, aliases=aliases)


def _executions(made: list[tuple[Module, bytes]], limit: int, report: SurveyReport, say: Callable[[str], None]) -> None:
    from kernelgen.hlo.execute import compile_for_cpu

    ran = equal = refused = 0
    for module, canonical in sorted(made, key=lambda pair: (len(pair[1]), pair[1])):
        if ran == limit:
            break
        message = proto.parse(canonical)
        if any(i.opcode == "custom-call" for c in message.computations for i in c.instructions):
            continue
        try:
            before, after = compile_for_cpu(module.data), compile_for_cpu(canonical)
            arrays = _arrays(before.parameters, module.data)
            results = [executable.run(arrays) for executable in (before, after)]
        except (ValueError, KeyError, MemoryError):
            refused += 1
            continue
        ran += 1
        say(f"{ran} of {limit} run")
        same = [a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True)]
        if all(same):
            equal += 1
        else:
            report.wrong.append(f"{module.path}: result {same.index(False)} of its canonical form has other bits")
    report.row(
        "  run on the CPU before and after", ran, f"{equal} with equal bits; {refused} more that XLA does not run"
    )


def _arrays(parameters: Sequence[tuple[str, str, tuple[int, ...]]], seed: bytes) -> list[object]:
    """Returns random arrays, always the same for a module. Integers are small, because they may be indices."""
    import ml_dtypes
    import numpy as np

    chance = np.random.default_rng(int.from_bytes(hashlib.sha256(seed).digest()[:8], "little"))
    arrays: list[object] = []
    for _, name, shape in parameters:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        small = dtype.kind in "biu"
        arrays.append((chance.integers(0, 2, shape) if small else chance.standard_normal(shape)).astype(dtype))
    return arrays


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", choices=list(TARGETS), help="the target of modules without a NEFF")
    parser.add_argument("--execute", type=int, default=0, metavar="N", help="run this many modules on the CPU")
    arguments = parser.parse_args(argv)
    # Bazel runs programs in another working directory.
    folder = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), arguments.folder)
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder")
    report = survey(gather(folder), arguments.target, arguments.execute, lambda text: print(text, file=sys.stderr))
    print(report)
    for text in report.wrong:
        print(f"wrong: {printable(text)}", file=sys.stderr)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
