"""`kernelgen model`: writes the manifest of a model, from its file, or of kernels listed in a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import click

from kernelgen.cli import options, run_options
from kernelgen.cli.kernel_files import chip_of
from kernelgen.cli.model_lists import write_list
from kernelgen.cli.model_manifest import (
    ALL_TARGETS,
    AUTO,
    FUSE,
    NONE,
    PARTS,
    WORDS,
    counted,
    fixed_ctx,
    group_lines,
    layouts_of,
    listed_lines,
    longer_context,
    made_by,
    name_of,
    refused_lines,
    summary_of,
    title,
    write,
)
from kernelgen.cli.model_projector import derive_projector, said_of_projector, write_projector
from kernelgen.dispatch.chips import Chip
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.forecast import fusion
from kernelgen.forecast.fusion import Fusion
from kernelgen.forecast.weights import AS_GGML, Choice, Products, choose, said
from kernelgen.ggml import weight_layouts
from kernelgen.ggml.weight_layouts import BF16
from kernelgen.model import checkpoint, exporter, groups, own_attention, sources, writing
from kernelgen.model.derive import Cuts, both, derive
from kernelgen.model.derived import Derived
from kernelgen.model.graphs import Graph, ModelHeader
from kernelgen.model.projector import Projector, beside
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.model.sources import SourceKind
from kernelgen.targets import TARGETS

_SIMPLE, _MTP, _EAGLE3 = _SPEC_TYPES = ("draft-simple", "draft-mtp", "draft-eagle3")

_DRAFT_CHAIN = "top_k=10"
"""llama.cpp's samplers on the device for a draft that reads hidden states (`--spec-draft-backend-sampling`)."""


def _checked_fuse(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuses an invalid value before any program is run."""
    try:
        if value != AUTO:
            groups.cut_of(value or FUSE)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
    return value


@click.command(short_help="Write the manifest of a model: which kernels it needs.")
@click.argument("paths", metavar="SOURCE...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The manifest to write."
)
@click.option("--name", metavar="NAME", help="The manifest's name.  [default: its file's]")
@options.target_option
@click.option(
    "--lnc", type=click.Choice(["1", "2"]), help="Physical cores per logical NeuronCore.  [default: the target's]"
)
@run_options.settings_options
@run_options.exporter_options
@click.option(
    "--context-shift",
    "shift",
    is_flag=True,
    help="llama.cpp's --context-shift: adds the kernels that shift the positions of the keys in the cache.",
)
@click.option(
    "--model-draft",
    "draft",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="llama.cpp's --model-draft: the GGUF file of a second model; its kernels are added to the manifest.",
)
@run_options.projector_options
@click.option(
    "--spec-type",
    type=click.Choice(_SPEC_TYPES),
    help=f"llama.cpp's --spec-type: {_MTP} for the MTP head of the model, or of a --model-draft, {_EAGLE3} for a --model-draft "
    f"that reads the model's hidden states.  [default: {_SIMPLE} with --model-draft]",
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
    help="For Hugging Face models: a Python with the packages that llama.cpp's convert_hf_to_gguf.py needs.  [default: python3]",
)
@click.option(
    "--fuse",
    callback=_checked_fuse,
    metavar=f"[{'|'.join((*groups.FUSE, AUTO))}]",
    help="Which parts of a graph become one kernel each, beside the kernels of its ops: each layer, N layers, the whole graph, "
    "or none; with --split-mode tensor also parts between two sums over devices, or such a part and the sum before it. "
    f"{AUTO}: for each target the choice with the shortest forecast of a token that can be compiled.  "
    f"[default: {FUSE}; of files that list kernels none]",
)
@click.option(
    "--causal",
    is_flag=True,
    help="Attention of graph kernels leaves out the keys that a causal mask hides. Calls whose masks hide less get other kernels.",
)
@click.option(
    "--weights",
    multiple=True,
    type=click.Choice([*weight_layouts.LAYOUTS, *WORDS]),
    help="A layout in which the kernels read weights, where a weight's type has it; may be given several times. "
    f"{AUTO}: for each target and each weight the layout with the shortest forecast of a token on one core, of those that "
    f"fit; {NONE}: {AS_GGML}.  [default: {AUTO}; of files that list kernels {NONE}]",
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
    """Write the manifest of a model, from its GGUF file: the kernels that it needs, as formulas of the sizes of a call.

    SOURCE is a GGUF file, the first one of a split model. Its header is enough; the weights may be missing. llama.cpp itself makes
    the graphs, in the program export-graphs, which you build once (docs/reference/models.md).

    SOURCE may also be a Hugging Face folder, its config.json or a safetensors file. Then the converter in the llama.cpp source tree
    that --llama-cpp names makes the header.

    With --mmproj the manifest also has the projector's kernels; without a SOURCE it has only these.

    Or SOURCE is a file that lists kernels: the output of test-export-graph-ops or export-graphs, a recording of the backend, or a
    configuration of ggml-hsa-gen-kernels. kernelgen recognises each kind of file by its content.
    """
    for word, what in WORDS.items():
        if word in weights and len(weights) > 1:
            raise KernelgenError(f"--weights {word} is {what}: give no other --weights beside it")
    if not paths:
        if projector is None:
            (argument,) = (p for p in context.command.params if p.name == "paths")
            raise click.MissingParameter(ctx=context, param=argument)
        graph_exporter = exporter.find(program, llama_cpp)
        write_projector(context, graph_exporter, projector, output, name, targets, lnc, settings, fuse or FUSE, catalog)
        return
    found = [sources.recognize(path) for path in paths]
    if any(source.kind in _MODELS for source in found):
        if len(found) > 1:
            raise KernelgenError("a model has a manifest of its own: name one source")
    elif AUTO in weights or fuse == AUTO:
        option = "--weights" if AUTO in weights else "--fuse"
        raise KernelgenError(f"{option} {AUTO} is for models, and {found[0].path} is {found[0].kind.value}")
    else:
        write_list(context, found, output, name, targets, catalog, fuse or "none", weights)
        return
    machines = [chip_of(target, lnc) for target in targets or ALL_TARGETS]
    fuse, weights = fuse or FUSE, weights or (AUTO,)
    if fuse not in (NONE, PARTS):
        for target, devices in itertools.product(targets or ALL_TARGETS, settings.devices):
            if why := TARGETS[target].rank_error(devices):
                hint = f"name other targets (--target), or use --fuse {PARTS}: its sums go through the host's memory"
                raise KernelgenError(Diagnostic(f"--devices {devices} --fuse {fuse}: {why}", hint=hint))
    settings = replace(settings, grouped=fuse != NONE)
    if causal and groups.cut_of(fuse) is None:
        raise KernelgenError(f"--causal is for graph kernels, and --fuse {fuse} makes none")
    if settings.split and layouts_of(weights):
        hint = "llama.cpp asks no device for other layouts when it splits tensors: leave --weights out"
        raise KernelgenError(Diagnostic(f"--weights {weights[0]} with --split-mode tensor", hint=hint))
    settings, drafts = _with_draft(replace(settings, draft_n_max=most_drafted), draft, spec_type)
    (source,) = found
    chosen = name_of(name, output)
    graph_exporter = exporter.find(program, llama_cpp)
    seen = _SeenCalls(settings, machines, weights)
    if source.kind is SourceKind.CHECKPOINT:
        with checkpoint.converted(source, llama_cpp, python) as header:
            try:
                derived, model = _derive(graph_exporter, header.file, settings, catalog, fuse, causal, seen, shift)
            except KernelgenError as error:
                raise _of_source(error, header.file, source.path) from None
            notes = header.notes
    elif python is not None:
        raise KernelgenError(f"--python is for Hugging Face models, and {source.path} is {source.kind.value}")
    else:
        derived, model = _derive(graph_exporter, source.path, settings, catalog, fuse, causal, seen, shift)
        notes = ()
    if not any(entry.reason is None for entry in derived.entries):
        raise KernelgenError(f"{source.path}: no kernel can be built for {model.architecture}")
    notes = (*notes, *fixed_ctx(context, settings))
    notes = (*notes, *longer_context(model, derived, settings))
    if settings.split:
        notes = (*notes, f"weights {AS_GGML}: llama.cpp asks no device for other layouts when it splits tensors")
    if draft is not None and settings.speculation is None:
        notes = (*notes, f"llama.cpp's programs use the draft only with --spec-type {_SIMPLE}")
    summary = summary_of(model, derived, settings)
    for how in drafts:
        file = draft if how.speculation is None and draft is not None else source.path
        drafted, draft_model = _derive(
            graph_exporter,
            file,
            how,
            catalog,
            fuse,
            causal,
            _SeenCalls(how, machines, layouts_of(weights)),
            shift and not how.encoder,
        )
        whose = f"{draft or source.path}{', its encoder' * how.encoder}"
        summary += [
            f"{whose}: {line}" if i == 0 else line for i, line in enumerate(summary_of(draft_model, drafted, how))
        ]
        derived = both(derived, drafted)
    if projector is not None:
        seer = derive_projector(graph_exporter, projector, settings, catalog, fuse)
        summary += said_of_projector(projector, seer)
        derived = beside(derived, seer.derived, layouts=bool(seen.layouts or layouts_of(weights)))
    head = writing.ManifestHead(
        chosen,
        targets or ALL_TARGETS,
        title(model, source.path, settings),
        made_by(
            settings, source.path, fuse, weights, lnc=lnc, causal=causal, shift=shift, draft=draft, projector=projector
        ),
        {choice.chip.target: choice.layouts for choice in seen.layouts} or layouts_of(weights),
        int(lnc) if lnc else None,
    )
    kernels = write(output, head, derived, catalog)
    summary += [f"{counted(kernels, 'kernel')} in {sum(e.reason is None for e in derived.entries)} entries"]
    summary += [*group_lines(derived), *listed_lines(derived), *refused_lines(derived)]
    texts = [(one.chip.target, one.text) for one in seen.layouts] + [(one.target, one.text) for one in seen.fusions]
    click.echo("\n".join([*summary, *said(texts), *notes, str(output)]))


def _with_draft(settings: Settings, draft: Path | None, spec_type: str | None) -> tuple[Settings, list[Settings]]:
    """Returns the settings of the model, and of its draft: none, one, or two if it has an encoder.

    Raises:
        KernelgenError: the options contradict each other.
    """
    plain = replace(settings, lora=(), control_vector=False)
    if spec_type in (None, _SIMPLE):
        if spec_type is not None and draft is None:
            raise KernelgenError(f"--spec-type {spec_type}: give the draft's file, --model-draft")
        simple = replace(plain, type_k=settings.type_k_draft, type_v=settings.type_v_draft)
        return replace(settings, draft_file=draft), [simple] if draft is not None else []
    if spec_type == _EAGLE3 and draft is None:
        raise KernelgenError(f"--spec-type {spec_type}: give the draft's file, --model-draft")
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
    graph_exporter: exporter.Exporter,
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
        for described, call, graph in graph_exporter.graphs(file, settings, calls):
            model.append(described)
            seen.see(call, graph)
            yield call, graph

    cuts = partial(seen.cuts, fuse)
    shifts = list(graph_exporter.shifts(file, settings)) if shift else []
    if shift and not shifts:
        raise KernelgenError(f"--context-shift: llama.cpp shifts no cache of {file}: leave the option out")
    beside = [*shifts, *graph_exporter.probes(file, settings)]
    derived = derive(settings, catalog, export, cuts, causal=causal, beside=beside)
    if not (model[0].encoder and model[0].decoder) or settings.whole:
        return derived, model[0]
    # the decoder has kernels for each number of tokens that the encoder computes
    others = [replace(settings, n_encoded=(n,)) for n in settings.n_encoded[1:]]
    for other in (*others, replace(settings, encoder=True, n_tokens=settings.n_encoded)):
        graphs = partial(_call_graphs, graph_exporter, file, other)
        derived = both(derived, derive(other, catalog, graphs, cuts, causal=causal))
    return derived, model[0]


def _call_graphs(
    graph_exporter: exporter.Exporter, file: Path, settings: Settings, calls: Sequence[DecodeCall]
) -> Iterator[tuple[DecodeCall, Graph]]:
    for _, call, graph in graph_exporter.graphs(file, settings, calls):
        yield call, graph


class _SeenCalls:
    """The graphs of calls from which layouts and graph kernels are chosen.

    Args:
        settings: how the model is run.
        chips: figures of the targets.
        weights: the value of `--weights`.
    """

    def __init__(self, settings: Settings, chips: Sequence[Chip], weights: tuple[str, ...]) -> None:
        self._tokens = settings.n_tokens
        self._chips = chips
        self._auto = weights == (AUTO,) and not settings.split
        self._all = BF16 in weights
        self._calls: list[tuple[DecodeCall, Graph]] = []
        self.fusions: Sequence[Fusion] = ()
        """The choice of `--fuse auto`."""

    def see(self, call: DecodeCall, graph: Graph) -> None:
        """Keeps the graph of a requested call."""
        if call.n_tokens in self._tokens:
            self._calls.append((call, graph))

    @cached_property
    def _shortest(self) -> Graph:
        """The graph with the fewest tokens and most cells, over the most devices."""

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
        """The choice of `--weights auto`; empty if layouts are named."""
        return choose(self._shortest, self._chips) if self._auto and self._calls else []

    def cuts(self, fuse: str) -> Cuts:
        """Returns the cuts of graphs, by targets."""
        if fuse != AUTO or not self._calls:
            return {(): _cut(FUSE if fuse == AUTO else fuse)}
        widened = {choice.chip.target: choice.chosen.widened for choice in self.layouts}
        if self._all:
            of_all = frozenset(Products(self._shortest).bytes)
            widened = {chip.target: of_all for chip in self._chips}
        self.fusions = fusion.choose(self._shortest, [graph for _, graph in self._calls], self._chips, widened)
        targets: dict[str, tuple[str, ...]] = {}
        for one in self.fusions:
            targets[one.name] = (*targets.get(one.name, ()), one.target)
        return {of: _cut(name) for name, of in targets.items()}


def _cut(fuse: str) -> groups.Cut:
    """Returns the function that cuts graphs: without groups, it cuts only attention that needs groups at other token counts."""
    return groups.cut_of(fuse) or own_attention.segments


def _of_source(error: KernelgenError, file: Path, path: Path) -> KernelgenError:
    """Converts an error about a converted model to one about its source."""
    return KernelgenError(
        [replace(d, message=d.message.replace(str(file), f"{path}, converted")) for d in error.diagnostics]
    )


_MODELS = (SourceKind.MODEL, SourceKind.CHECKPOINT)
