"""The manifest of `kernelgen model`, and the messages about it."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from kernelgen import fileio, manifest
from kernelgen.cli import run_options
from kernelgen.cli.units import binary_size
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.forecast.weights import AS_GGML
from kernelgen.model import writing
from kernelgen.model.derived import Derived, DerivedKernel
from kernelgen.model.graphs import ModelHeader
from kernelgen.model.groups import GraphEntry
from kernelgen.model.projector import Projector
from kernelgen.model.sizes import N_KV_UNIT, Settings, doubled, few_encoded, pad
from kernelgen.targets import TARGETS

FUSE = "layer"
"""The default of `--fuse` for a model; for lists of kernels it is `none`."""

AUTO, NONE, PARTS = "auto", "none", "parts"

WORDS = {AUTO: "what the forecast chooses", NONE: f"weights {AS_GGML}"}
"""Values of `--weights` other than layouts."""

ALL_TARGETS = tuple(t.name for t in TARGETS.values() if not t.experimental)

_HEADER_WIDTH = 150
"""Characters per line of the command at the start of a manifest."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of `kernelgen model` under the names of its parameters; `name` is the manifest's."""

    output: Path
    name: str
    targets: tuple[str, ...]
    lnc: str | None
    settings: Settings
    program: Path | None
    llama_cpp: Path | None
    shift: bool
    draft: Path | None
    spec_type: str | None
    most_drafted: int
    projector: Projector | None
    python: str | None
    fuse: str
    causal: bool
    weights: tuple[str, ...]
    catalog: Catalog

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts that `--weights` names."""
        return tuple(layout for layout in self.weights if layout not in WORDS)


def write(
    options: ModelOptions,
    derived: Derived,
    description: str,
    comment: Sequence[str],
    lines: Iterable[str],
    *,
    weights: Sequence[str] | Mapping[str, Sequence[str]] = (),
    targets: Sequence[str] = (),
    lnc: int = 0,
    notes: Iterable[str] = (),
) -> None:
    """Writes a manifest, and prints its summary.

    Args:
        options: the command's options.
        derived: the kernels.
        description: as in `ManifestHead`.
        comment: as in `ManifestHead`.
        lines: the first lines of the summary; its kernels follow.
        weights: as in `ManifestHead`.
        targets: the targets without `--target`; empty for all.
        lnc: the physical cores per logical core without `--lnc`; 0 for the targets' default.
        notes: the last lines of the summary.
    """
    output = options.output
    head = writing.ManifestHead(
        options.name,
        options.targets or targets or ALL_TARGETS,
        description,
        comment,
        weights,
        int(options.lnc or lnc) or None,
    )
    fileio.check_replaceable(output)
    fileio.write_bytes(output, writing.text(head, derived).encode())
    (request,) = manifest.load([output], options.catalog)
    kernels = max(len({kernel.spec.id for kernel in request.kernels_for(target)}) for target in head.targets)
    click.echo("\n".join([*lines, *_kernel_lines(derived, kernels), *notes, str(output)]))


def _kernel_lines(derived: Derived, kernels: int) -> Iterator[str]:
    """Yields the number of kernels, the number of nodes of each graph kernel, and the ops without a kernel, with the reasons."""
    entries = f" in {sum(e.reason is None for e in derived.entries)} entries" if derived.calls else ""
    yield counted(kernels, "kernel") + entries
    nodes = [counted(len(entry.kernel.nodes), "node") for entry in derived.graphs if entry.reason is None]
    if nodes:
        yield f"{counted(len(nodes), 'group')} of nodes as one kernel each: {', '.join(nodes)}"
    if derived.listed:
        yield f"{counted(derived.listed, 'kernel')} listed for one size each: no formula was found"
    refused = Counter(entry.reason for entry in derived.entries if entry.reason is not None)
    for reason, count in sorted(refused.items()):
        yield f"no kernel: {reason}{f' ({count} times)' if count > 1 else ''}"


def check_any(derived: Derived, message: str) -> None:
    """Refuses a manifest without kernels.

    Raises:
        KernelgenError: no kernel can be built.
    """
    if not any(entry.reason is None for entry in derived.entries):
        raise KernelgenError(message)


def name_of(name: str | None, output: Path) -> str:
    """Returns the manifest's name: `--name`, or the file's name without `.yaml`, with `_` in place of other characters.

    Raises:
        KernelgenError: the name is not one of a manifest.
    """
    stem = output.stem if output.suffix in (".yaml", ".yml") else output.name
    manifest_name = name or re.sub("[^a-z0-9_]", "_", stem.lower())
    if not re.fullmatch("[a-z][a-z0-9_]{0,99}", manifest_name):
        option = f"--name {name}" if name else f"-o {output}"
        hint = "" if name else "give one with --name"
        rule = "a manifest's name has lower-case letters, digits and underscores, begins with a letter, and is at most 100 long"
        raise KernelgenError(Diagnostic(f"{option}: {rule}", hint=hint))
    return manifest_name


def title(model: ModelHeader, path: Path, settings: Settings) -> str:
    name = model.name or path.absolute().name
    devices = " and ".join(map(str, settings.devices))
    over = f", its tensors split over {devices} devices" if settings.split else ""
    return f"{name}: {model.architecture}, {count(model.parameters)} parameters, as llama.cpp runs it{over}"


def fixed_ctx(context: click.Context, settings: Settings) -> Iterator[str]:
    """Yields the settings that a program needs if there is no `--n-ctx` and some kernels are for one length of the cache."""
    given = not settings.any_ctx and context.get_parameter_source("n_ctx") is ParameterSource.COMMANDLINE
    if False in settings.flash_attn and not given:
        yield f"{run_options.FIXED_CTX}: such kernels are for -c {settings.n_ctx[0]} alone (--n-ctx)"


def longer_context(model: ModelHeader, derived: Derived, settings: Settings) -> Iterator[str]:
    """Yields the `--n-kv` for the whole context of a model, if it is longer, and the number of kernels that this adds.

    The number is known if there are formulas of `n_kv`, which need two lengths.
    """
    longest = settings.n_kv[-1] if settings.n_kv else settings.cells(settings.n_ctx[-1])
    cells = min(pad(model.n_ctx_train), run_options.MAX_CTX)
    entries: list[DerivedKernel | GraphEntry] = [*derived.entries, *derived.graphs]
    entries = [entry for entry in entries if entry.reason is None]
    has_cache = any(point["n_kv"] for entry in entries for point in entry.points)
    if not settings.any_ctx or cells <= longest or not has_cache:
        return
    lengths = settings.n_kv or tuple(doubled(N_KV_UNIT, longest))
    longer = tuple(doubled(2 * longest, cells))
    kernels = Counter(
        target
        for entry in entries
        for target in (isinstance(entry, GraphEntry) and entry.targets) or ALL_TARGETS
        for point in entry.values.values()
        if "n_kv" in entry.kernel.names and point["n_kv"] == longest
    )
    cost = f", with {counted(max(kernels.values()) * len(longer), 'more kernel')}" if kernels else ""
    yield (
        f"these kernels serve up to {longest} cells in use, and the model's context has {model.n_ctx_train}: for all of it{cost}, "
        f"--n-kv {joined((*lengths, *longer))}"
    )


def made_by(options: ModelOptions, path: Path) -> list[str]:
    """Returns the command that writes a model's manifest again, without paths of files and programs."""
    settings = options.settings
    types = {
        "--type-k": settings.type_k,
        "--type-v": settings.type_v,
        "--type-k-draft": settings.type_k_draft,
        "--type-v-draft": settings.type_v_draft,
    }
    return command_lines(
        [
            (path.name or path.absolute().name, True),
            ("--n-ctx", "any" if settings.any_ctx else joined(settings.n_ctx)),
            ("--n-tokens", joined(settings.n_tokens)),
            ("--n-outputs", joined(settings.n_outputs or ())),
            ("--n-kv", joined(settings.n_kv or ())),
            ("--n-ubatch", settings.n_ubatch != 512 and str(settings.n_ubatch)),
            ("--n-seq-max", settings.n_seq_max != 1 and str(settings.n_seq_max)),
            *((option, dtype != "f16" and dtype) for option, dtype in types.items()),
            *settings.llama_options,
            flash_attn_option(settings),
            ("--ftype", settings.ftype),
            ("--model-draft", options.draft.name if options.draft else None),
            ("--spec-type", settings.speculation),
            (
                "--spec-draft-n-max",
                bool(settings.speculation) and settings.draft_n_max != 3 and str(settings.draft_n_max),
            ),
            *projector_options(options.projector),
            ("--control-vector", settings.control_vector),
            ("--encoder", settings.encoder),
            ("--n-encoded", settings.n_encoded != few_encoded(settings) and joined(settings.n_encoded)),
            ("--embeddings", settings.embeddings),
            ("--pooling", settings.pooling),
            *(("--lora", file.name + (f":{scale:g}" if scale != 1 else "")) for file, scale in settings.lora),
            ("--split-mode", settings.split and "tensor"),
            ("--devices", settings.split and joined(settings.devices)),
            *(("--samplers", chain or "none") for chain in settings.samplers if settings.samplers != ("",)),
            ("--fuse", options.fuse != FUSE and options.fuse),
            ("--causal", options.causal),
            *(("--weights", word) for word in options.weights if word != AUTO),
            ("--lnc", options.lnc),
            ("--kv-unified", settings.kv_unified),
            ("--swa-full", settings.swa_full),
            ("--context-shift", options.shift),
        ]
    )


def flash_attn_option(settings: Settings) -> tuple[str, str]:
    return "--flash-attn", "both" if len(settings.flash_attn) > 1 else "on" if settings.flash_attn[0] else "off"


def command_lines(options: Iterable[tuple[str, str | bool | None]]) -> list[str]:
    """Returns the first lines of a manifest, with the command that wrote it.

    Args:
        options: each with its value; True for one without a value, False, None or "" for one that is not there.
    """
    words = ["kernelgen", "model"]
    for option, value in options:
        words += [option] if value is True else [option, value] if value else []
    # A shell reads the lines as one.
    *lines, last = textwrap.wrap(
        shlex.join(words),
        _HEADER_WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return ["Written by", *(f"{line} \\" for line in lines), last]


def joined(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def summary_of(model: ModelHeader, derived: Derived, settings: Settings) -> list[str]:
    """Returns a description of the model, and the number of nodes of its calls without a kernel."""
    lines = [
        f"{model.architecture}: {count(model.parameters)} parameters, {binary_size(model.size)} of weights, {model.layers} layers"
    ]
    for flash in settings.flash_attn:
        seen: set[object] = set()
        for one in derived.calls:
            sizes = (one.call.n_tokens, one.call.n_outputs)
            key = sizes, one.call.samplers, one.devices, one.of
            if one.flash_attn is not flash or one.call.n_seqs > 1 or key in seen:
                continue
            seen.add(key)
            over = f", {one.call.samplers} on the device" if one.call.samplers else ""
            if one.devices > 1:
                whose = f"device{'s' * (len(one.of) > 1)} {', '.join(map(str, one.of))}"
                over = f", {whose} of {one.devices}"
            without = sum(one.without.values())
            lines.append(
                f"  {counted(sizes[0], 'token')}, {counted(sizes[1], 'output')}, flash attention {'on' if flash else 'off'}"
                f"{over}: {counted(one.nodes, 'node')}, {without or 'none'} without a kernel"
            )
    return lines


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def projector_options(projector: Projector | None) -> list[tuple[str, str]]:
    if projector is None:
        return []
    return [
        ("--mmproj", projector.file.name),
        ("--image-size", ",".join(f"{width}x{height}" for width, height in projector.images)),
        *zip(projector.limits[::2], projector.limits[1::2], strict=True),
        ("--audio-seconds", joined(projector.seconds)),
    ]


def refuse_others(context: click.Context, known: Sequence[str], why: str) -> None:
    """Refuses given options that have no effect here."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name not in known:
            raise KernelgenError(f"{parameter.opts[0]} {why}")
