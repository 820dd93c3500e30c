"""Which calls of llama_decode a context can meet, and at which of them a model's graph is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

N_KV_UNIT = 256
"""llama.cpp pads the KV cache, and the part of it that a graph reads, to multiples of this."""

NAMES = ("n_tokens", "n_kv", "n_kv_swa", "n_ctx", "n_outputs")
"""The sizes that formulas have, the ones to prefer first."""

FEW = (1, 8, 32, 128, 512)
"""Numbers of tokens by which any number is served, in chunks or padded (`kernelgen.dispatch.lengths`).

Up to 128 rows of a product take as long as one (`kernelgen.dispatch.chips`): so 128 is the number for short prompts and the ends
of long ones. 512 takes two and a half times as long, not four, and spares launches. 1 is generation. 8 and 32 halve the rows of
padding of short prompts, which are copied. docs/reference/model-choices.md has the figures.
"""

_AT_ONCE = 128
"""Rows of a product that take as long as one."""

_LONGEST_SHIFT = 1 << 14
"""Cells that one kernel shifts at most: 16 of them are 262,144."""

_PROBES = (22, 37)
"""Numbers of tokens per sequence beside those that are asked for: no model has dimensions that are multiples of both."""


@dataclass(frozen=True, slots=True, order=True)
class DecodeCall:
    """The sizes of one call.

    Attributes:
        n_ctx: of the context, as it is asked for.
        n_seqs: sequences, with equally many tokens each.
        n_tokens: tokens of all of them.
        n_outputs: tokens whose logits are asked for; 0 for a part of a prompt that is longer than a call.
        n_kv: cells of the cache that the graph reads; 0 for the first call, which has just its own tokens in the cache: a recurrent
            model clears its state then.
        samplers: what the device samples each sequence's tokens with, as `Settings.samplers` has it.
    """

    n_ctx: int
    n_seqs: int
    n_tokens: int
    n_outputs: int
    n_kv: int
    samplers: str = ""

    def __str__(self) -> str:
        return f"n_tokens={self.n_tokens},n_outputs={self.n_outputs},n_seqs={self.n_seqs},n_kv={self.n_kv}"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is run; names are those of llama.cpp's options.

    Attributes:
        n_ctx: cells of the KV cache; a context for each.
        n_ubatch: tokens that a call has at most.
        n_seq_max: sequences at once.
        n_tokens: tokens per call to have kernels for.
        n_outputs: outputs per call; None for 1 and all, and for none of the most tokens with a split or `grouped`.
        n_kv: cache lengths; None for as many as serve all.
        type_k, type_v: ggml types of the cache.
        flash_attn: with flash attention, without it, or both.
        kv_unified: whether sequences share one cache.
        swa_full: whether sliding windows have a cache as long as the others.
        ftype: the quantization whose types the weights have, by llama-quantize's name; None for those of the file.
        devices: over how many devices llama.cpp splits the tensors (`-sm tensor`); a run for each. 1 is without a split.
        any_ctx: whether kernels have the cells in use alone (`kernelgen.model.first_cells`) and so serve caches of any length;
            `n_ctx` is then the most cells in use, of all sequences.
        samplers: chains that the device samples with (`--backend-sampling`), as export-graphs takes them; "" for logits.
        control_vector: whether layers add a control vector.
        encoder: whether the calls are those of the encoder of a model that has a decoder, too.
        n_encoded: tokens that the encoder of a model with a decoder computes, and its decoder attends to; graphs are those of the
            first number, and without one of as many as in training.
        embeddings: whether calls want the embeddings of all their tokens, pooled as `pooling` says; None: as the file says.
        lora: the files of LoRA adapters, in llama.cpp's order, each with what it is multiplied by.
        speculation: which kind of draft reads the model's hidden states, as `--spec-type` has it; None: none does.
        draft_file: the file of that draft; None: the model is its own.
        draft_n_max: tokens that it proposes at most: a recurrent model keeps a state for each.
        drafting: whether the calls are those of that draft.
        grouped: whether there are graph kernels.
    """

    n_ctx: tuple[int, ...]
    n_ubatch: int
    n_seq_max: int
    n_tokens: tuple[int, ...]
    n_outputs: tuple[int, ...] | None
    n_kv: tuple[int, ...] | None
    type_k: str
    type_v: str
    flash_attn: tuple[bool, ...]
    kv_unified: bool
    swa_full: bool
    ftype: str | None = None
    devices: tuple[int, ...] = (1,)
    any_ctx: bool = False
    samplers: tuple[str, ...] = ("",)
    control_vector: bool = False
    encoder: bool = False
    n_encoded: tuple[int, ...] = ()
    embeddings: bool = False
    pooling: str | None = None
    lora: tuple[tuple[Path, float], ...] = ()
    speculation: str | None = None
    draft_file: Path | None = None
    draft_n_max: int = 3
    drafting: bool = False
    grouped: bool = False

    @property
    def whole(self) -> bool:
        """Whether each call has results of all its tokens."""
        return self.embeddings or self.encoder

    @property
    def split(self) -> bool:
        """Whether tensors are split over devices."""
        return self.devices != (1,)

    @property
    def most_tokens(self) -> int:
        """Tokens that a call has at most, in the longest context."""
        return min(self.n_ubatch, self.all_cells(self.n_ctx[-1]))

    def cells(self, n_ctx: int) -> int:
        """Returns the cells of the cache of one sequence, or of all when they share it."""
        return pad(n_ctx) if self.kv_unified else pad(pad(n_ctx) // self.n_seq_max)

    def all_cells(self, n_ctx: int) -> int:
        """Returns the cells of all sequences' caches: what llama.cpp makes of `n_ctx`."""
        return self.cells(n_ctx) * (1 if self.kv_unified else self.n_seq_max)

    def in_turn(self, n_seqs: int) -> bool:
        """Returns whether attention of a call of so many sequences is one of each sequence, whose cache is a tensor of its own."""
        return (self.any_ctx or self.grouped) and self.has_streams(n_seqs)

    def one_apart(self, flash_attn: bool) -> bool:
        """Returns whether groups of a call of one sequence have its cache alone, of several: where `kernelgen.model.first_cells`
        does not do so already.
        """
        return self.grouped and self.has_streams(self.n_seq_max) and not (self.any_ctx and flash_attn)

    def tokens_in_turn(self, n_seqs: int) -> tuple[int, ...]:
        """Returns for how many tokens of so many sequences with a cache each there are groups: a token of each; as many of each as
        take no longer, which serve drafts and short prompts; and as many of each as a call has at most. Numbers between these are
        padded.
        """
        fullest = min(self.n_ubatch // n_seqs, self.cells(self.n_ctx[-1]))
        each = {1, min(_AT_ONCE // n_seqs, fullest), fullest}
        return tuple(n * n_seqs for n in sorted(each) if 0 < n <= fullest)

    def has_streams(self, n_seqs: int) -> bool:
        """Returns whether a call of so many sequences reads several caches."""
        return n_seqs > 1 and not self.kv_unified


def few(most: int) -> tuple[int, ...]:
    """Returns numbers of tokens by which every call of 1 to `most` is served: those of `FEW` below, and `most` itself.

    A call of `most` tokens is one chunk then, and rows are gathered from as many.
    """
    return (*(n for n in FEW if n < most), most)


def few_encoded(settings: Settings) -> tuple[int, ...]:
    """Returns numbers of tokens of an encoder by which it and its decoder are served: no call of it generates, which has one."""
    return few(settings.most_tokens)[1:] or (1,)


def pad(n: int) -> int:
    """Returns the smallest multiple of `N_KV_UNIT` that is at least `n`."""
    return -(-n // N_KV_UNIT) * N_KV_UNIT


def asked(settings: Settings, n_seqs: int) -> Iterator[DecodeCall]:
    """Yields every call with so many sequences that kernels are asked for; combinations that can't be are left out."""
    for n_ctx, samplers in itertools.product(settings.n_ctx, settings.samplers):
        for n_tokens in _tokens(settings, n_seqs, samplers):
            lengths = _lengths(settings, n_ctx, n_tokens, n_seqs)
            for n_outputs in _outputs(settings, n_tokens, n_seqs, samplers):
                for n_kv in (*_first(settings, lengths, n_tokens, n_seqs), *lengths):
                    yield DecodeCall(n_ctx, n_seqs, n_tokens, n_outputs, n_kv, samplers)


def looked_at(settings: Settings, n_seqs: int) -> list[DecodeCall]:
    """Returns the calls from which formulas are found and at which they are checked: those asked for, at a few lengths of the
    cache, and others.
    """
    contexts = itertools.product(settings.n_ctx, settings.samplers)
    return [call for context in contexts for call in dict.fromkeys(_looked_at(settings, *context, n_seqs))]


def _looked_at(settings: Settings, n_ctx: int, samplers: str, n_seqs: int) -> Iterator[DecodeCall]:
    for n_tokens in _tokens(settings, n_seqs, samplers):
        lengths = _lengths(settings, n_ctx, n_tokens, n_seqs)
        for n_outputs in _outputs(settings, n_tokens, n_seqs, samplers):
            for n_kv in (*_first(settings, lengths, n_tokens, n_seqs), *_few(lengths)):
                yield DecodeCall(n_ctx, n_seqs, n_tokens, n_outputs, n_kv, samplers)
    if all(n <= n_seqs for n in settings.n_tokens):
        return
    for i, number in enumerate(_PROBES):
        n_tokens = number * n_seqs
        if n_tokens <= min(settings.n_ubatch, settings.cells(n_ctx)):
            lengths = _lengths(settings, n_ctx, n_tokens, n_seqs)
            few = (*_few(lengths), *_first(settings, lengths, n_tokens, n_seqs))
            none = (0,) if 0 in _outputs(settings, settings.most_tokens, n_seqs, samplers) else ()
            outputs = (n_tokens,) if settings.whole else dict.fromkeys((1, 3, n_tokens, *none))
            for n_outputs in _outputs(settings, n_tokens, n_seqs, samplers) if samplers else outputs:
                for n_kv in few[: len(few) if n_outputs in (1, settings.whole * n_tokens) and i == 0 else 1]:
                    yield DecodeCall(n_ctx, n_seqs, n_tokens, n_outputs, n_kv, samplers)


def shifted(settings: Settings) -> Iterator[int]:
    """Yields numbers of cells whose positions one kernel shifts, each four times the one before: up to 16 launches shift a cache.

    Numbers divide each other, for no key may be shifted twice.
    """
    longest = _LONGEST_SHIFT if settings.any_ctx else max(settings.all_cells(n_ctx) for n_ctx in settings.n_ctx)
    return itertools.takewhile(lambda n: n <= longest, (N_KV_UNIT << 2 * i for i in range(4)))


def _tokens(settings: Settings, n_seqs: int, samplers: str) -> Iterable[int]:
    """Returns the numbers of tokens of calls. Where tokens are sampled, also 1 of each sequence: no others sample as many. Where
    sequences have a cache each of any length, also those of groups.
    """
    together = settings.tokens_in_turn(n_seqs) if settings.in_turn(n_seqs) else (n_seqs,) if samplers else ()
    return sorted({*settings.n_tokens, *together})


def _outputs(settings: Settings, n_tokens: int, n_seqs: int, samplers: str) -> list[int]:
    if settings.whole:
        return [n_tokens]
    wanted = settings.n_outputs
    if settings.drafting:
        # it reads what the model was given without a result, and proposes a token for each sequence after another
        wanted = (n_seqs,) if samplers else (0, n_seqs)
    if wanted is None:
        # llama.cpp computes a long prompt in calls of the most tokens, and asks for outputs of the last one alone. The last layer,
        # and so a step, ends sooner in such a call: without a graph kernel of that, each op of it would be a launch.
        together = settings.tokens_in_turn(n_seqs) if settings.in_turn(n_seqs) and not samplers else ()
        most = together[-1] if together else settings.most_tokens
        without = (settings.split or settings.grouped) and n_tokens == most > 1
        # Groups of several tokens of each sequence are padded to all outputs.
        one = () if n_tokens in together[1:] and n_tokens not in settings.n_tokens else (1,)
        wanted = (*one, n_seqs if samplers else n_tokens, *((0,) if without else ()))
    return list(dict.fromkeys(n for n in wanted if n <= n_tokens))


def _lengths(settings: Settings, n_ctx: int, n_tokens: int, n_seqs: int) -> list[int]:
    if n_tokens % n_seqs:
        return []  # a graph takes equally many tokens of each sequence
    least = n_tokens if settings.kv_unified else n_tokens // n_seqs
    wanted = settings.n_kv or _all_lengths(settings, settings.cells(n_ctx), n_seqs)
    return [n for n in wanted if least <= n <= settings.cells(n_ctx)]


def _all_lengths(settings: Settings, cells: int, n_seqs: int) -> Iterable[int]:
    """Returns lengths of the cache that serve all: each twice the one before, for attention reads on in a longer cache.
    Kernels that compute several sequences with a cache each at once do not.
    """
    if settings.has_streams(n_seqs) and not settings.in_turn(n_seqs):
        return range(N_KV_UNIT, cells + 1, N_KV_UNIT)
    doubled = itertools.takewhile(lambda n: n < cells, (N_KV_UNIT << i for i in itertools.count()))
    return (*doubled, cells)


def _first(settings: Settings, lengths: list[int], n_tokens: int, n_seqs: int) -> tuple[int, ...]:
    """The first call, when the length of the cache that it meets is among those asked for."""
    return (0,) if pad(n_tokens if settings.kv_unified else n_tokens // n_seqs) in lengths else ()


def _few(values: list[int]) -> list[int]:
    """Returns the first, the last and two between them."""
    last = len(values) - 1
    return [values[i] for i in sorted({0, min(1, last), (last + 1) // 2, last})] if values else []
