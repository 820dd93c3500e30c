"""`kernelgen model`: writes the manifest of a model, from its file, or of kernels listed in a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

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
    ModelOptions,
    check_any,
    fixed_ctx,
    longer_context,
    made_by,
    name_of,
    summary_of,
    title,
    write,
)
from kernelgen.cli.model_projector import derive_projector, said_of_projector, write_projector
from kernelgen.dispatch.chips import Chip
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.forecast import fusion
from kernelgen.forecast.fusion import Fusion
from kernelgen.forecast.weights import AS_GGML, Choice, Products, choose, said
from kernelgen.ggml import weight_layouts
from kernelgen.ggml.weight_layouts import BF16
from kernelgen.model import checkpoint, exporter, groups, own_attention, sources
from kernelgen.model.derive import Cuts, both, derive
from kernelgen.model.derived import Derived
from kernelgen.model.graphs import Graph, ModelHeader
from kernelgen.model.projector import beside
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.model.sources import Source, SourceKind
from kernelgen.targets import TARGETS

_SIMPLE, _MTP, _EAGLE3 = _SPEC_TYPES = ("draft-simple", "draft-mtp", "draft-eagle3")

_DRAFT_CHAIN = "top_k=10"
"""llama.cpp's samplers on the device for a draft that reads hidden states (`--spec-draft-backend-sampling`)."""


def _checked_fuse(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """Refuses an invalid value before any program is run; returns "" without a value."""
    try:
        if value != AUTO:
            groups.cut_of(value or FUSE)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
    return value or ""


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
def command(context: click.Context, /, paths: tuple[Path, ...], **params: Any) -> None:
    """Write the manifest of a model, from its GGUF file: the kernels that it needs, as formulas of the sizes of a call.

    SOURCE is a GGUF file, the first one of a split model. Its header is enough; the weights may be missing. llama.cpp itself makes
    the graphs, in the program export-graphs, which you build once (docs/reference/models.md).

    SOURCE may also be a Hugging Face folder, its config.json or a safetensors file. Then the converter in the llama.cpp source tree
    that --llama-cpp names makes the header.

    With --mmproj the manifest also has the projector's kernels; without a SOURCE it has only these.

    Or SOURCE is a file that lists kernels: the output of test-export-graph-ops or export-graphs, a recording of the backend, or a
    configuration of ggml-hsa-gen-kernels. kernelgen recognises each kind of file by its content.
    """
    args = ModelOptions(**params | {"name": name_of(params["name"], params["output"])})
    for word, what in WORDS.items():
        if word in args.weights and len(args.weights) > 1:
            raise KernelgenError(f"--weights {word} is {what}: give no other --weights beside it")
    if not paths:
        if args.projector is None:
            (argument,) = (p for p in context.command.params if p.name == "paths")
            raise click.MissingParameter(ctx=context, param=argument)
        write_projector(context, args, args.projector)
        return
    recognized = [sources.recognize(path) for path in paths]
    if any(source.kind in _MODELS for source in recognized):
        if len(recognized) > 1:
            raise KernelgenError("a model has a manifest of its own: name one source")
        _write_model(context, args, recognized[0])
    elif AUTO in args.weights or args.fuse == AUTO:
        option = "--weights" if AUTO in args.weights else "--fuse"
        raise KernelgenError(f"{option} {AUTO} is for models, and {recognized[0].path} is {recognized[0].kind.value}")
    else:
        write_list(context, args, recognized)


def _write_model(context: click.Context, args: ModelOptions, source: Source) -> None:
    """Writes the manifest of a model, with its draft and its projector."""
    args = replace(args, fuse=args.fuse or FUSE, weights=args.weights or (AUTO,))
    if args.fuse not in (NONE, PARTS):
        for target, devices in itertools.product(args.targets or ALL_TARGETS, args.settings.devices):
            if why := TARGETS[target].rank_error(devices):
                hint = f"name other targets (--target), or use --fuse {PARTS}: its sums go through the host's memory"
                raise KernelgenError(Diagnostic(f"--devices {devices} --fuse {args.fuse}: {why}", hint=hint))
    settings = replace(args.settings, grouped=args.fuse != NONE, draft_n_max=args.most_drafted)
    if args.causal and groups.cut_of(args.fuse) is None:
        raise KernelgenError(f"--causal is for graph kernels, and --fuse {args.fuse} makes none")
    if settings.split and args.layouts:
        hint = "llama.cpp asks no device for other layouts when it splits tensors: leave --weights out"
        raise KernelgenError(Diagnostic(f"--weights {args.weights[0]} with --split-mode tensor", hint=hint))
    settings, drafts = _with_draft(settings, args.draft, args.spec_type)
    args = replace(args, settings=settings)
    derivation = _Derivation(args, settings)
    notes: tuple[str, ...] = ()
    if source.kind is SourceKind.CHECKPOINT:
        with checkpoint.converted(source, args.llama_cpp, args.python) as header:
            try:
                derived, model = derivation.derive(header.file, args.shift)
            except KernelgenError as error:
                raise _of_source(error, header.file, source.path) from None
            notes = tuple(header.notes)
    elif args.python is not None:
        raise KernelgenError(f"--python is for Hugging Face models, and {source.path} is {source.kind.value}")
    else:
        derived, model = derivation.derive(source.path, args.shift)
    check_any(derived, f"{source.path}: no kernel can be built for {model.architecture}")
    notes = (*notes, *fixed_ctx(context, settings), *longer_context(model, derived, settings))
    if settings.split:
        notes = (*notes, f"weights {AS_GGML}: llama.cpp asks no device for other layouts when it splits tensors")
    if args.draft is not None and settings.speculation is None:
        notes = (*notes, f"llama.cpp's programs use the draft only with --spec-type {_SIMPLE}")
    summary = summary_of(model, derived, settings)
    for draft_settings in drafts:
        file = args.draft if draft_settings.speculation is None and args.draft is not None else source.path
        drafted, draft_model = _Derivation(replace(args, weights=args.layouts), draft_settings).derive(
            file, args.shift and not draft_settings.encoder
        )
        first, *rest = summary_of(draft_model, drafted, draft_settings)
        summary += [f"{args.draft or source.path}{', its encoder' * draft_settings.encoder}: {first}", *rest]
        derived = both(derived, drafted)
    if args.projector is not None:
        vision = derive_projector(args, args.projector)
        summary += said_of_projector(args.projector, vision)
        derived = beside(derived, vision.derived, layouts=bool(derivation.layouts or args.layouts))
    choices = [(one.chip.target, one.text) for one in derivation.layouts]
    choices += [(one.target, one.text) for one in derivation.fusions]
    write(
        args,
        derived,
        title(model, source.path, settings),
        made_by(args, source.path),
        summary,
        weights={choice.chip.target: choice.layouts for choice in derivation.layouts} or args.layouts,
        notes=(*said(choices), *notes),
    )


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


class _Derivation:
    """Derives the kernels of a model or a draft, and chooses layouts and graph kernels from the graphs of its calls.

    Args:
        args: the command's options.
        settings: how the model is run.
    """

    def __init__(self, args: ModelOptions, settings: Settings) -> None:
        self._args, self._settings = args, settings
        self._exporter = exporter.find(args.program, args.llama_cpp)
        self._chips: Sequence[Chip] = [chip_of(target, args.lnc) for target in args.targets or ALL_TARGETS]
        self._calls: list[tuple[DecodeCall, Graph]] = []
        self.fusions: Sequence[Fusion] = ()
        """The choice of `--fuse auto`."""

    def derive(self, file: Path, shift: bool) -> tuple[Derived, ModelHeader]:
        """Returns the kernels of a file, with those of a context shift if `shift` is true."""
        settings, catalog, causal = self._settings, self._args.catalog, self._args.causal
        model: list[ModelHeader] = []

        def export(of: Settings, calls: Sequence[DecodeCall]) -> Iterator[tuple[DecodeCall, Graph]]:
            for described, call, graph in self._exporter.graphs(file, of, calls):
                model.append(described)
                if of is settings and call.n_tokens in settings.n_tokens:
                    self._calls.append((call, graph))
                yield call, graph

        shifts = list(self._exporter.shifts(file, settings)) if shift else []
        if shift and not shifts:
            raise KernelgenError(f"--context-shift: llama.cpp shifts no cache of {file}: leave the option out")
        beside = [*shifts, *self._exporter.probes(file, settings)]
        derived = derive(settings, catalog, partial(export, settings), self._cuts, causal=causal, beside=beside)
        if not (model[0].encoder and model[0].decoder) or settings.whole:
            return derived, model[0]
        # the decoder has kernels for each number of tokens that the encoder computes
        others = [replace(settings, n_encoded=(n,)) for n in settings.n_encoded[1:]]
        for other in (*others, replace(settings, encoder=True, n_tokens=settings.n_encoded)):
            derived = both(derived, derive(other, catalog, partial(export, other), self._cuts, causal=causal))
        return derived, model[0]

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
        is_auto = self._args.weights == (AUTO,) and not self._settings.split
        return choose(self._shortest, self._chips) if is_auto and self._calls else []

    def _cuts(self) -> Cuts:
        """Returns the cuts of graphs, by targets."""
        fuse = self._args.fuse
        if fuse != AUTO or not self._calls:
            return {(): _cut(FUSE if fuse == AUTO else fuse)}
        widened = {choice.chip.target: choice.chosen.widened for choice in self.layouts}
        if BF16 in self._args.weights:
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
