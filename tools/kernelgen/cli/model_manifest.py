"""The manifest of `kernelgen model`, and the messages about it."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
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


def write(output: Path, head: writing.ManifestHead, derived: Derived, catalog: Catalog) -> int:
    """Writes a manifest, and returns the number of kernels per target."""
    fileio.check_replaceable(output)
    fileio.write_bytes(output, writing.text(head, derived).encode())
    (request,) = manifest.load([output], catalog)
    return max(len({kernel.spec.id for kernel in request.kernels_for(target)}) for target in head.targets)


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


def layouts_of(weights: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(layout for layout in weights if layout not in WORDS)


def weight_options(weights: tuple[str, ...], default: str) -> list[str]:
    return [word for layout in weights if layout != default for word in ("--weights", layout)]


def made_by(
    settings: Settings,
    path: Path,
    fuse: str,
    weights: tuple[str, ...],
    *,
    lnc: str | None,
    causal: bool,
    shift: bool,
    draft: Path | None,
    projector: Projector | None,
) -> list[str]:
    """The command that writes the manifest again, without paths of files and programs."""
    parts = [
        "kernelgen",
        "model",
        path.name or path.absolute().name,
        "--n-ctx",
        "any" if settings.any_ctx else joined(settings.n_ctx),
        "--n-tokens",
        joined(settings.n_tokens),
    ]
    if settings.n_outputs:
        parts += ["--n-outputs", joined(settings.n_outputs)]
    if settings.n_kv:
        parts += ["--n-kv", joined(settings.n_kv)]
    for option, value, default in (
        ("--n-ubatch", settings.n_ubatch, 512),
        ("--n-seq-max", settings.n_seq_max, 1),
        ("--type-k", settings.type_k, "f16"),
        ("--type-v", settings.type_v, "f16"),
        ("--type-k-draft", settings.type_k_draft, "f16"),
        ("--type-v-draft", settings.type_v_draft, "f16"),
        *((option, value, None) for option, value in settings.llama_options),
    ):
        if value != default:
            parts += [option, str(value)]
    parts += flash_attn_options(settings)
    if settings.ftype is not None:
        parts += ["--ftype", settings.ftype]
    parts += ["--model-draft", draft.name] if draft else []
    if settings.speculation:
        parts += ["--spec-type", settings.speculation]
        parts += ["--spec-draft-n-max", str(settings.draft_n_max)] if settings.draft_n_max != 3 else []
    parts += projector_options(projector) if projector else []
    parts += ["--control-vector"] * settings.control_vector
    parts += ["--encoder"] * settings.encoder
    if settings.n_encoded != few_encoded(settings):
        parts += ["--n-encoded", joined(settings.n_encoded)]
    parts += ["--embeddings"] * settings.embeddings
    parts += ["--pooling", settings.pooling] if settings.pooling else []
    for file, scale in settings.lora:
        parts += ["--lora", file.name + (f":{scale:g}" if scale != 1 else "")]
    if settings.split:
        parts += ["--split-mode", "tensor", "--devices", joined(settings.devices)]
    if settings.samplers != ("",):
        parts += [part for chain in settings.samplers for part in ("--samplers", chain or "none")]
    if fuse != FUSE:
        parts += ["--fuse", fuse]
    parts += ["--causal"] * causal
    parts += weight_options(weights, AUTO)
    parts += ["--lnc", lnc] if lnc else []
    parts += ["--kv-unified"] * settings.kv_unified + ["--swa-full"] * settings.swa_full
    parts += ["--context-shift"] * shift
    return command_lines(parts)


def flash_attn_options(settings: Settings) -> list[str]:
    return ["--flash-attn", "both" if len(settings.flash_attn) > 1 else "on" if settings.flash_attn[0] else "off"]


def command_lines(parts: Sequence[str]) -> list[str]:
    """Returns the first lines of a manifest, with the command that wrote it."""
    # A shell reads the lines as one.
    *lines, last = textwrap.wrap(
        shlex.join(parts),
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


def listed_lines(derived: Derived) -> list[str]:
    if not derived.listed:
        return []
    return [f"{counted(derived.listed, 'kernel')} listed for one size each: no formula was found"]


def group_lines(derived: Derived) -> list[str]:
    """Returns the number of graph kernels, and the number of nodes of each."""
    made = [entry for entry in derived.graphs if entry.reason is None]
    nodes = ", ".join(counted(len(entry.kernel.nodes), "node") for entry in made)
    return [f"{counted(len(made), 'group')} of nodes as one kernel each: {nodes}"] if made else []


def refused_lines(derived: Derived) -> list[str]:
    """Returns the ops without a kernel, with the reasons."""
    refused = Counter(entry.reason for entry in derived.entries if entry.reason is not None)
    return [
        f"no kernel: {reason}{f' ({count} times)' if count > 1 else ''}" for reason, count in sorted(refused.items())
    ]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def projector_options(projector: Projector) -> list[str]:
    parts = ["--mmproj", projector.file.name]
    if projector.images:
        parts += ["--image-size", ",".join(f"{width}x{height}" for width, height in projector.images)]
    parts += projector.limits
    if projector.seconds:
        parts += ["--audio-seconds", joined(projector.seconds)]
    return parts


def refuse_others(context: click.Context, known: Sequence[str], why: str) -> None:
    """Refuses given options that have no effect here."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name not in known:
            raise KernelgenError(f"{parameter.opts[0]} {why}")
