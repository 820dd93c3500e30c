"""`kernelgen model`: the manifest of a model, from its file, or of kernels that a file lists."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import click
from click.core import ParameterSource

from kernelgen import fileio, manifest
from kernelgen.cli import options, run_options
from kernelgen.cli.kernel_files import chip_of
from kernelgen.cli.units import binary_size
from kernelgen.dispatch.chips import Chip
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.forecast import fusion
from kernelgen.forecast.fusion import Fusion
from kernelgen.forecast.weights import AS_GGML, Choice, Products, choose, said
from kernelgen.ggml import weight_layouts
from kernelgen.ggml.weight_layouts import BF16
from kernelgen.model import checkpoint, exporter, groups, listed, sources, writing
from kernelgen.model.derive import Cuts, Derived, both, derive
from kernelgen.model.graphs import Graph, ModelHeader
from kernelgen.model.projector import DerivedProjector, Projector, beside
from kernelgen.model.projector import derive as derive_projector
from kernelgen.model.sizes import DecodeCall, Settings, few_encoded
from kernelgen.model.sources import Kind, Source
from kernelgen.targets import TARGETS

_FUSE = "layer"
"""What `--fuse` is of a model by default; of lists of kernels it is `none`."""

_AUTO, _NONE = "auto", "none"
_WORDS = {_AUTO: "what the forecast chooses", _NONE: f"weights {AS_GGML}"}
"""What `--weights` may be instead of layouts."""

_SIMPLE, _MTP, _EAGLE3 = _SPEC_TYPES = ("draft-simple", "draft-mtp", "draft-eagle3")

_DRAFT_CHAIN = "top_k=10"
"""What llama.cpp samples with on the device, of a draft that reads hidden states (`--spec-draft-backend-sampling`)."""

_ALL_TARGETS = tuple(t.name for t in TARGETS.values() if not t.experimental)


def _checked_fuse(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuses what cuts no graph, before a program is asked for one."""
    try:
        if value != _AUTO:
            groups.cut_of(value or _FUSE)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
    return value


@click.command(short_help="Write the manifest of a model, from its file.")
@click.argument("paths", metavar="SOURCE...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The manifest to write."
)
@click.option("--name", metavar="NAME", help="The manifest's name; that of its file by default.")
@options.target_option
@click.option("--lnc", type=click.Choice(["1", "2"]), help="Physical cores of a logical one; the targets' by default.")
@run_options.settings_options
@run_options.exporter_options
@click.option(
    "--context-shift",
    "shift",
    is_flag=True,
    help="llama.cpp's --context-shift: kernels that shift the positions of the keys in the cache as well, in pieces.",
)
@click.option(
    "--model-draft",
    "draft",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="llama.cpp's --model-draft: the GGUF file of a second model, whose kernels the manifest has as well.",
)
@run_options.projector_options
@click.option(
    "--spec-type",
    type=click.Choice(_SPEC_TYPES),
    help=f"llama.cpp's --spec-type: {_MTP} for the MTP head of the model, {_EAGLE3} for a --model-draft that reads the model's "
    f"hidden states.  [default: {_SIMPLE} with --model-draft]",
)
@click.option(
    "--spec-draft-n-max",
    "most_drafted",
    type=click.IntRange(1, 64),
    default=3,
    show_default=True,
    help=f"llama.cpp's --spec-draft-n-max, on which the graphs of a recurrent model with {_MTP} or {_EAGLE3} depend.",
)
@click.option(
    "--python",
    metavar="PROGRAM",
    help="A Python that has what llama.cpp's convert_hf_to_gguf.py needs, for Hugging Face models.  [default: python3]",
)
@click.option(
    "--fuse",
    callback=_checked_fuse,
    metavar=f"[{'|'.join((*groups.FUSE, _AUTO))}]",
    help="Which parts of a graph are one kernel each, beside the kernels of its ops: each layer, N layers, all of it, or none; "
    "with --split-mode tensor also parts between two sums over devices, or such a part and the sum before it. "
    f"{_AUTO}: for each target what a token is quickest with, by the forecast, of what can be compiled.  "
    f"[default: {_FUSE}; of files that list kernels none]",
)
@click.option(
    "--causal",
    is_flag=True,
    help="Let attention of graph kernels leave out keys that a causal mask hides. Calls whose masks hide less have other kernels.",
)
@click.option(
    "--weights",
    multiple=True,
    type=click.Choice([*weight_layouts.LAYOUTS, *_WORDS]),
    help="A layout that the kernels want weights in, where their types have it; may be given several times. "
    f"{_AUTO}: for each target and each weight the one that a token is quickest with on one core, by the forecast, of those that "
    f"fit; {_NONE}: {AS_GGML}.  [default: {_AUTO}; of files that list kernels {_NONE}]",
)
@options.kernels_option
@click.pass_context
def command(
    context: click.Context,
    paths: tuple[Path, ...],
    output: Path,
    name: str | None,
    targets: tuple[str, ...],
    lnc: str | None,
    settings: Settings,
    program: Path | None,
    llama_cpp: Path | None,
    shift: bool,
    draft: Path | None,
    spec_type: str | None,
    most_drafted: int,
    projector: Projector | None,
    python: str | None,
    fuse: str | None,
    causal: bool,
    weights: tuple[str, ...],
    catalog: Catalog,
) -> None:
    """Write the manifest of a model, from its GGUF file: which kernels it needs, as formulas of the sizes of a call.

    The weights may be missing: the file's header is enough. Of a split model the first file is named. llama.cpp itself says what it
    computes; the program that asks it is built once (docs/reference/models.md).

    Or from a Hugging Face folder, its config.json or a safetensors file: llama.cpp's converter, of the tree that --llama-cpp
    names, makes the header.

    With --mmproj the projector's kernels are in the manifest, too; without a SOURCE they are all of it.

    Or of the kernels that files list: what test-export-graph-ops or export-graphs writes, what the backend records, and
    configurations of ggml-hsa-gen-kernels. What a file is, its content tells.
    """
    for word, what in _WORDS.items():
        if word in weights and len(weights) > 1:
            raise KernelgenError(f"--weights {word} is {what}: give no other --weights beside it")
    if not paths:
        if projector is None:
            (argument,) = (p for p in context.command.params if p.name == "paths")
            raise click.MissingParameter(ctx=context, param=argument)
        asked = exporter.find(program, llama_cpp)
        _projector(context, asked, projector, output, name, targets, lnc, settings, fuse or _FUSE, catalog)
        return
    found = [sources.recognize(path) for path in paths]
    if any(source.kind in _MODELS for source in found):
        if len(found) > 1:
            raise KernelgenError("a model has a manifest of its own: name one source")
    elif _AUTO in weights or fuse == _AUTO:
        option = "--weights" if _AUTO in weights else "--fuse"
        raise KernelgenError(f"{option} {_AUTO} is for models, and {found[0].path} is {found[0].kind.value}")
    else:
        _list(context, found, output, name, targets, catalog, fuse or "none", weights)
        return
    machines = [chip_of(target, lnc) for target in targets or _ALL_TARGETS]
    fuse, weights = fuse or _FUSE, weights or (_AUTO,)
    settings = replace(settings, grouped=fuse != _NONE)
    if causal and groups.cut_of(fuse) is None:
        raise KernelgenError(f"--causal is for graph kernels, and --fuse {fuse} makes none")
    if settings.split and _layouts(weights):
        hint = "llama.cpp asks no device for other layouts when it splits tensors: leave --weights out"
        raise KernelgenError(Diagnostic(f"--weights {weights[0]} with --split-mode tensor", hint=hint))
    settings, drafts = _with_draft(replace(settings, draft_n_max=most_drafted), draft, spec_type)
    (source,) = found
    chosen = name or _name(output)
    asked = exporter.find(program, llama_cpp)
    seen = _SeenCalls(settings, machines, weights)
    if source.kind is Kind.CHECKPOINT:
        with checkpoint.converted(source, llama_cpp, python) as header:
            try:
                derived, model = _derive(asked, header.file, settings, catalog, fuse, causal, seen, shift)
            except KernelgenError as error:
                raise _of_source(error, header.file, source.path) from None
            notes = header.notes
    elif python is not None:
        raise KernelgenError(f"--python is for Hugging Face models, and {source.path} is {source.kind.value}")
    else:
        derived, model = _derive(asked, source.path, settings, catalog, fuse, causal, seen, shift)
        notes = ()
    if not any(entry.reason is None for entry in derived.entries):
        raise KernelgenError(f"{source.path}: no kernel can be built for {model.architecture}")
    notes = (*notes, *_fixed_ctx(context, settings))
    if settings.split:
        notes = (*notes, f"weights {AS_GGML}: llama.cpp asks no device for other layouts when it splits tensors")
    summary = _summary(model, derived, settings)
    for how in drafts:
        file = draft if how.speculation is None and draft is not None else source.path
        drafted, draft_model = _derive(
            asked,
            file,
            how,
            catalog,
            fuse,
            causal,
            _SeenCalls(how, machines, _layouts(weights)),
            shift and not how.encoder,
        )
        whose = f"{draft or source.path}{', its encoder' * how.encoder}"
        summary += [
            f"{whose}: {line}" if i == 0 else line for i, line in enumerate(_summary(draft_model, drafted, how))
        ]
        derived = both(derived, drafted)
    if projector is not None:
        seer = _derive_projector(asked, projector, settings, catalog, fuse)
        summary += _said_of_projector(projector, seer)
        derived = beside(derived, seer.derived, layouts=bool(seen.layouts or _layouts(weights)))
    head = writing.ManifestHead(
        chosen,
        targets or _ALL_TARGETS,
        _title(model, source.path, settings),
        _made_by(
            settings, source.path, fuse, weights, lnc=lnc, causal=causal, shift=shift, draft=draft, projector=projector
        ),
        {choice.chip.target: choice.layouts for choice in seen.layouts} or _layouts(weights),
        int(lnc) if lnc else None,
    )
    kernels = _write(output, head, derived, catalog)
    summary += [f"{_counted(kernels, 'kernel')} in {sum(e.reason is None for e in derived.entries)} entries"]
    summary += [*_groups(derived), *_listed(derived), *_refused(derived)]
    texts = [(one.chip.target, one.text) for one in seen.layouts] + [(one.target, one.text) for one in seen.fusions]
    click.echo("\n".join([*summary, *said(texts), *notes, str(output)]))


def _with_draft(settings: Settings, draft: Path | None, spec_type: str | None) -> tuple[Settings, list[Settings]]:
    """Returns how the model is run, and how its draft is: none, one, or two where it has an encoder.

    Raises:
        KernelgenError: the options do not go together.
    """
    plain = replace(settings, lora=(), control_vector=False)
    if spec_type in (None, _SIMPLE):
        if spec_type is not None and draft is None:
            raise KernelgenError(f"--spec-type {spec_type}: give the draft's file, --model-draft")
        return settings, [plain] if draft is not None else []
    if spec_type == _EAGLE3 and draft is None:
        raise KernelgenError(f"--spec-type {spec_type}: give the draft's file, --model-draft")
    if spec_type == _MTP and draft is not None:
        hint = "leave --model-draft out: the head is a part of the model's file"
        raise KernelgenError(Diagnostic(f"--spec-type {spec_type} with --model-draft", hint=hint))
    if settings.split or settings.whole:
        with_ = "--split-mode tensor" if settings.split else "--embeddings or --encoder"
        raise KernelgenError(f"--spec-type {spec_type} with {with_}: such a draft has no kernels")
    settings = replace(settings, speculation=spec_type, draft_file=draft)
    reads = replace(plain, speculation=spec_type, draft_file=draft, drafting=True, n_outputs=None)
    drafts = [replace(reads, samplers=("", _DRAFT_CHAIN))]
    if spec_type == _EAGLE3:
        drafts.append(replace(reads, samplers=("",), encoder=True))
    return settings, drafts


def _derive(
    asked: exporter.Exporter,
    file: Path,
    settings: Settings,
    catalog: Catalog,
    fuse: str,
    causal: bool,
    seen: _SeenCalls,
    shift: bool,
) -> tuple[Derived, ModelHeader]:
    model: list[ModelHeader] = []

    def export(calls: Sequence[DecodeCall]) -> Iterator[tuple[DecodeCall, Graph]]:
        for described, call, graph in asked.graphs(file, settings, calls):
            model.append(described)
            seen.see(call, graph)
            yield call, graph

    cuts = None if fuse == _NONE else partial(seen.cuts, fuse)
    shifts = list(asked.shifts(file, settings)) if shift else []
    if shift and not shifts:
        raise KernelgenError(f"--context-shift: llama.cpp shifts no cache of {file}: leave the option out")
    beside = [*shifts, *asked.probes(file, settings)]
    derived = derive(settings, catalog, export, cuts, causal=causal, beside=beside)
    if not (model[0].encoder and model[0].decoder) or settings.whole:
        return derived, model[0]
    # the decoder has kernels for each number of tokens that the encoder computes
    others = [replace(settings, n_encoded=(n,)) for n in settings.n_encoded[1:]]
    for other in (*others, replace(settings, encoder=True, n_tokens=settings.n_encoded)):
        graphs = partial(_call_graphs, asked, file, other)
        derived = both(derived, derive(other, catalog, graphs, cuts, causal=causal))
    return derived, model[0]


def _call_graphs(
    asked: exporter.Exporter, file: Path, settings: Settings, calls: Sequence[DecodeCall]
) -> Iterator[tuple[DecodeCall, Graph]]:
    for _, call, graph in asked.graphs(file, settings, calls):
        yield call, graph


def _derive_projector(
    asked: exporter.Exporter, projector: Projector, settings: Settings, catalog: Catalog, fuse: str
) -> DerivedProjector:
    exported = asked.projector(projector, settings.flash_attn)
    cut = groups.cut_of(_FUSE if fuse == _AUTO else fuse)
    return derive_projector(exported.model, exported.graphs(), catalog, cut)


def _said_of_projector(projector: Projector, derived: DerivedProjector) -> list[str]:
    """Returns what a projector is, and how many nodes of what it computes have no kernel."""
    model = derived.model
    return [
        f"{projector.file}: {model.description}, {_count(model.parameters)} parameters, {binary_size(model.size)} of weights, "
        f"{_counted(model.layers, 'layer')}",
        *(f"  {call}" for call in derived.calls),
    ]


_OF_PROJECTORS = (
    "output",
    "name",
    "targets",
    "lnc",
    "flash_attn",
    "fuse",
    "mmproj",
    "images",
    "image_min_tokens",
    "image_max_tokens",
    "seconds",
    "program",
    "llama_cpp",
    "catalog",
)
"""Parameters that mean something for a projector alone."""


def _projector(
    context: click.Context,
    asked: exporter.Exporter,
    projector: Projector,
    output: Path,
    name: str | None,
    targets: tuple[str, ...],
    lnc: str | None,
    settings: Settings,
    fuse: str,
    catalog: Catalog,
) -> None:
    """Writes the manifest of a projector alone."""
    _refuse_others(context, _OF_PROJECTORS, "is for models, and no SOURCE is given beside --mmproj")
    derived = _derive_projector(asked, projector, settings, catalog, fuse)
    if not any(entry.reason is None for entry in derived.derived.entries):
        raise KernelgenError(f"{projector.file}: no kernel can be built for {derived.model.description}")
    parts = ["kernelgen", "model", *_made_of_projector(projector), *_flash_attn(settings)]
    parts += ["--fuse", fuse] if fuse != _FUSE else []
    parts += ["--lnc", lnc] if lnc else []
    named = derived.model.name or projector.file.name
    head = writing.ManifestHead(
        name or _name(output),
        targets or _ALL_TARGETS,
        f"{named}: {derived.model.description}, {_count(derived.model.parameters)} parameters, as llama.cpp's mtmd runs it",
        _command_lines(parts),
        lnc=int(lnc) if lnc else None,
    )
    kernels = _write(output, head, derived.derived, catalog)
    lines = [*_said_of_projector(projector, derived), _counted(kernels, "kernel")]
    click.echo("\n".join([*lines, *_groups(derived.derived), *_refused(derived.derived), str(output)]))


def _made_of_projector(projector: Projector) -> list[str]:
    parts = ["--mmproj", projector.file.name]
    if projector.images:
        parts += ["--image-size", ",".join(f"{width}x{height}" for width, height in projector.images)]
    parts += projector.limits
    if projector.seconds:
        parts += ["--audio-seconds", _joined(projector.seconds)]
    return parts


class _SeenCalls:
    """The graphs of calls, by which layouts and kernels of groups are chosen.

    Args:
        settings: how the model is run.
        chips: of the targets.
        weights: as `--weights` has them.
    """

    def __init__(self, settings: Settings, chips: Sequence[Chip], weights: tuple[str, ...]) -> None:
        self._tokens = settings.n_tokens
        self._chips = chips
        self._auto = weights == (_AUTO,) and not settings.split
        self._all = BF16 in weights
        self._calls: list[tuple[DecodeCall, Graph]] = []
        self.fusions: Sequence[Fusion] = ()
        """What `--fuse auto` chose."""

    def see(self, call: DecodeCall, graph: Graph) -> None:
        """Keeps the graph of a call that is asked for."""
        if call.n_tokens in self._tokens:
            self._calls.append((call, graph))

    @cached_property
    def _shortest(self) -> Graph:
        """The graph of one of the fewest tokens and most cells, over the most devices."""

        def rank(seen: tuple[DecodeCall, Graph]) -> tuple[int, ...]:
            call, graph = seen
            return (
                -graph.devices,
                call.n_seqs,
                call.n_tokens,
                -call.n_ctx,
                not call.n_outputs,
                call.n_outputs,
                call.n_kv,
            )

        return min(self._calls, key=rank)[1]

    @cached_property
    def layouts(self) -> list[Choice]:
        """What `--weights auto` chooses; nothing where layouts are named."""
        return choose(self._shortest, self._chips) if self._auto and self._calls else []

    def cuts(self, fuse: str) -> Cuts:
        """Returns how graphs are cut, by targets."""
        if fuse != _AUTO or not self._calls:
            return {(): groups.cut_of(_FUSE if fuse == _AUTO else fuse)}
        widened = {choice.chip.target: choice.chosen.widened for choice in self.layouts}
        if self._all:
            of_all = frozenset(Products(self._shortest).bytes)
            widened = {chip.target: of_all for chip in self._chips}
        self.fusions = fusion.choose(self._shortest, [graph for _, graph in self._calls], self._chips, widened)
        targets: dict[str, tuple[str, ...]] = {}
        for one in self.fusions:
            targets[one.name] = (*targets.get(one.name, ()), one.target)
        return {of: groups.cut_of(name) for name, of in targets.items()}


def _of_source(error: KernelgenError, file: Path, path: Path) -> KernelgenError:
    """Returns an error of a converted model as one of what it was converted from."""
    return KernelgenError(
        [replace(d, message=d.message.replace(str(file), f"{path}, converted")) for d in error.diagnostics]
    )


_MODELS = (Kind.MODEL, Kind.CHECKPOINT)
_HEADER_WIDTH = 150
"""Characters of a line of the command that a manifest begins with."""

_OF_LISTS = ("paths", "output", "name", "targets", "catalog", "fuse", "weights")
"""Parameters that mean something for kernels that are listed."""


def _refuse_others(context: click.Context, known: Sequence[str], why: str) -> None:
    """Refuses options that are given and mean nothing here."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name not in known:
            raise KernelgenError(f"{parameter.opts[0]} {why}")


def _list(
    context: click.Context,
    found: Sequence[Source],
    output: Path,
    name: str | None,
    targets: tuple[str, ...],
    catalog: Catalog,
    fuse: str,
    weights: tuple[str, ...],
) -> None:
    """Writes the manifest of the kernels that sources list."""
    _refuse_others(context, _OF_LISTS, f"is for models, and {found[0].path} is {found[0].kind.value}")
    chosen = name or _name(output)
    cut = groups.cut_of(fuse)
    lists = [listed.read(source, catalog, cut is not None) for source in found]
    if cut is not None and not any(one.graphs for one in lists):
        names = ", ".join(str(source.path) for source in found)
        hint = "graphs are in what export-graphs writes, and in what the backend writes to GGML_NEURON_RECORD_GRAPHS"
        raise KernelgenError(Diagnostic(f"--fuse {fuse}: there is no graph in {names}", hint=hint))
    merged = listed.merge(lists, catalog, cut)
    files = [source.path.name for source in found]
    if not any(entry.reason is None for entry in merged.entries):
        raise KernelgenError(f"{', '.join(files)}: no kernel can be built for what is listed")
    made = ["--fuse", fuse] if cut else []
    head = writing.ManifestHead(
        chosen,
        targets or listed.targets(lists) or _ALL_TARGETS,
        f"Kernels that {', '.join(files)} list{'s' * (len(files) == 1)}",
        ["Written by", f"  {shlex.join(['kernelgen', 'model', *files, *made, *_weights(weights, _NONE)])}"],
        _layouts(weights),
    )
    kernels = _write(output, head, merged, catalog)
    lines = [
        f"{source.path}: {source.kind.value}, {_counted(len(one.items), 'op')}"
        for source, one in zip(found, lists, strict=True)
    ]
    lines += [note for one in lists for note in one.notes]
    click.echo("\n".join([*lines, _counted(kernels, "kernel"), *_groups(merged), *_refused(merged), str(output)]))


def _write(output: Path, head: writing.ManifestHead, derived: Derived, catalog: Catalog) -> int:
    """Writes a manifest, and returns how many kernels a target has."""
    fileio.check_replaceable(output)
    fileio.write_bytes(output, writing.text(head, derived).encode())
    (request,) = manifest.load([output], catalog)
    return max(len({kernel.spec.id for kernel in request.kernels_for(target)}) for target in head.targets)


def _name(output: Path) -> str:
    name = re.sub("[^a-z0-9_]", "_", output.name.partition(".")[0].lower())[:40]
    if not re.match("[a-z]", name):
        raise KernelgenError(f"-o {output}: a manifest's name begins with a letter; give one with --name")
    return name


def _title(model: ModelHeader, path: Path, settings: Settings) -> str:
    name = model.name or path.absolute().name
    devices = " and ".join(map(str, settings.devices))
    over = f", its tensors split over {devices} devices" if settings.split else ""
    return f"{name}: {model.architecture}, {_count(model.parameters)} parameters, as llama.cpp runs it{over}"


def _fixed_ctx(context: click.Context, settings: Settings) -> Iterator[str]:
    """Yields what a program has to be run with, where no `--n-ctx` is given and some kernels are for one length of the cache."""
    given = not settings.any_ctx and context.get_parameter_source("n_ctx") is ParameterSource.COMMANDLINE
    if False in settings.flash_attn and not given:
        yield f"{run_options.FIXED_CTX}: such kernels are for -c {settings.n_ctx[0]} alone (--n-ctx)"


def _layouts(weights: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(layout for layout in weights if layout not in _WORDS)


def _weights(weights: tuple[str, ...], default: str) -> list[str]:
    return [word for layout in weights if layout != default for word in ("--weights", layout)]


def _made_by(
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
    """The command that writes the manifest again, except for where files and programs are."""
    parts = [
        "kernelgen",
        "model",
        path.name or path.absolute().name,
        "--n-ctx",
        "any" if settings.any_ctx else _joined(settings.n_ctx),
        "--n-tokens",
        _joined(settings.n_tokens),
    ]
    if settings.n_outputs:
        parts += ["--n-outputs", _joined(settings.n_outputs)]
    if settings.n_kv:
        parts += ["--n-kv", _joined(settings.n_kv)]
    for option, value, default in (
        ("--n-ubatch", settings.n_ubatch, 512),
        ("--n-seq-max", settings.n_seq_max, 1),
        ("--type-k", settings.type_k, "f16"),
        ("--type-v", settings.type_v, "f16"),
    ):
        if value != default:
            parts += [option, str(value)]
    parts += _flash_attn(settings)
    if settings.ftype is not None:
        parts += ["--ftype", settings.ftype]
    parts += ["--model-draft", draft.name] if draft else []
    if settings.speculation:
        parts += ["--spec-type", settings.speculation]
        parts += ["--spec-draft-n-max", str(settings.draft_n_max)] if settings.draft_n_max != 3 else []
    parts += _made_of_projector(projector) if projector else []
    parts += ["--control-vector"] * settings.control_vector
    parts += ["--encoder"] * settings.encoder
    if settings.n_encoded != few_encoded(settings):
        parts += ["--n-encoded", _joined(settings.n_encoded)]
    parts += ["--embeddings"] * settings.embeddings
    parts += ["--pooling", settings.pooling] if settings.pooling else []
    for file, scale in settings.lora:
        parts += ["--lora", file.name + (f":{scale:g}" if scale != 1 else "")]
    if settings.split:
        parts += ["--split-mode", "tensor", "--devices", _joined(settings.devices)]
    if settings.samplers != ("",):
        parts += [part for chain in settings.samplers for part in ("--samplers", chain or "none")]
    if fuse != _FUSE:
        parts += ["--fuse", fuse]
    parts += ["--causal"] * causal
    parts += _weights(weights, _AUTO)
    parts += ["--lnc", lnc] if lnc else []
    parts += ["--kv-unified"] * settings.kv_unified + ["--swa-full"] * settings.swa_full
    parts += ["--context-shift"] * shift
    return _command_lines(parts)


def _flash_attn(settings: Settings) -> list[str]:
    return ["--flash-attn", "both" if len(settings.flash_attn) > 1 else "on" if settings.flash_attn[0] else "off"]


def _command_lines(parts: Sequence[str]) -> list[str]:
    """Returns the lines that a manifest begins with, which say what command wrote it."""
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


def _joined(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _summary(model: ModelHeader, derived: Derived, settings: Settings) -> list[str]:
    """Returns what a model is, and how many nodes of its calls have no kernel."""
    lines = [
        f"{model.architecture}: {_count(model.parameters)} parameters, {binary_size(model.size)} of weights, {model.layers} layers"
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
                f"  {_counted(sizes[0], 'token')}, {_counted(sizes[1], 'output')}, flash attention {'on' if flash else 'off'}"
                f"{over}: {_counted(one.nodes, 'node')}, {without or 'none'} without a kernel"
            )
    return lines


def _listed(derived: Derived) -> list[str]:
    if not derived.listed:
        return []
    return [f"{_counted(derived.listed, 'kernel')} listed for one size each: no formula was found"]


def _groups(derived: Derived) -> list[str]:
    """Returns how many graph kernels there are, and of how many nodes each."""
    made = [entry for entry in derived.graphs if entry.reason is None]
    nodes = ", ".join(_counted(len(entry.kernel.nodes), "node") for entry in made)
    return [f"{_counted(len(made), 'group')} of nodes as one kernel each: {nodes}"] if made else []


def _refused(derived: Derived) -> list[str]:
    """Returns what has no kernel, and why."""
    refused = Counter(entry.reason for entry in derived.entries if entry.reason is not None)
    return [
        f"no kernel: {reason}{f' ({count} times)' if count > 1 else ''}" for reason, count in sorted(refused.items())
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
