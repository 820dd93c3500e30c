"""The calls of llama_decode in a context, and the calls for which a model's graphs are exported."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

N_KV_UNIT = 256
"""llama.cpp pads the KV cache, and the part of it that a graph reads, to multiples of this."""

NAMES = ("n_tokens", "n_kv", "n_kv_swa", "n_ctx", "n_outputs")
"""The sizes in formulas, preferred ones first."""

FEW = (1, 8, 32, 128, 512)
"""Numbers of tokens whose kernels compute calls of any number, in chunks or padded (`kernelgen.dispatch.lengths`).

1 is generation. A product of up to 128 rows takes as long as one of 1 row (`kernelgen.dispatch.chips`), so short prompts and the
ends of long ones use 128. 512 takes two and a half times as long, not four times, and saves launches. 8 and 32 halve short
prompts' rows of padding, which are copied. docs/reference/model-choices.md has the figures.
"""

_AT_ONCE = 128
"""The number of rows of a product that take as long as one row."""

_LONGEST_SHIFT = 1 << 14
"""The most cells that one kernel shifts; 16 launches shift 262,144."""

_PROBES = (22, 37)
"""Further numbers of tokens per sequence for fitting formulas: no model has dimensions that are multiples of both."""


@dataclass(frozen=True, slots=True, order=True)
class DecodeCall:
    """The sizes of one call.

    Attributes:
        n_ctx: the requested size of the context.
        n_seqs: sequences, with equally many tokens each.
        n_tokens: tokens of all sequences.
        n_outputs: tokens with logits; 0 for a part of a prompt that is longer than a call.
        n_kv: cells of the cache that the graph reads; 0 for the first call, which has only its own tokens in the cache: a recurrent
            model clears its state then.
        samplers: the chain of samplers on the device, as in `Settings.samplers`.
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
        n_ctx: sizes of contexts, in cells of the KV cache.
        n_ubatch: the most tokens of a call.
        n_seq_max: the most sequences.
        n_tokens: numbers of tokens per call to make kernels for.
        n_outputs: numbers of outputs per call; None: 1 and all, and with a split or `grouped` also 0 for calls of the most tokens.
        n_kv: lengths of the cache; None: as many as are necessary for all lengths.
        type_k, type_v: ggml types of the cache.
        flash_attn: with flash attention, without it, or both.
        kv_unified: whether sequences share one cache.
        swa_full: whether caches of sliding windows have the full length.
        ftype: the quantization of the weights, by llama-quantize's name; None: the file's types.
        devices: numbers of devices over which llama.cpp splits the tensors (`-sm tensor`); 1: no split.
        any_ctx: whether kernels depend on the used cells alone (`kernelgen.model.first_cells`) and so fit caches of any length;
            `n_ctx` is then the most used cells of all sequences.
        samplers: chains of samplers on the device (`--backend-sampling`), in the form of export-graphs; "": logits.
        control_vector: whether layers add a control vector.
        encoder: whether the calls are calls of the encoder in a model that also has a decoder.
        n_encoded: numbers of tokens of the encoder, to which the decoder attends. Graphs have the first number; by default the
            number in training.
        embeddings: whether calls return the embeddings of all their tokens.
        pooling: how embeddings are pooled; None: the file's pooling.
        lora: the files of LoRA adapters in llama.cpp's order, each with its scale.
        speculation: the kind of draft that reads the model's hidden states, as in `--spec-type`; None: no such draft.
        draft_file: the file of that draft, None: the model's own layers; without `speculation`, the file of a simple draft.
        draft_n_max: the most tokens that it proposes: a recurrent model keeps a state for each.
        drafting: whether the calls are calls of that draft.
        type_k_draft, type_v_draft: ggml types of the draft's cache.
        llama_options: further options of llama.cpp that change graphs, with their values (`--rope-…`, `--override-kv`).
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
    type_k_draft: str = "f16"
    type_v_draft: str = "f16"
    llama_options: tuple[tuple[str, str], ...] = ()
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
        """The most tokens of a call, in the longest context."""
        return min(self.n_ubatch, self.all_cells(self.n_ctx[-1]))

    def cells(self, n_ctx: int) -> int:
        """Returns the cells of one sequence's cache; of the shared cache if it is unified."""
        return pad(n_ctx) if self.kv_unified else pad(pad(n_ctx) // self.n_seq_max)

    def all_cells(self, n_ctx: int) -> int:
        """Returns the cells of all sequences' caches, which llama.cpp computes from `n_ctx`."""
        return self.cells(n_ctx) * (1 if self.kv_unified else self.n_seq_max)

    def in_turn(self, n_seqs: int) -> bool:
        """Returns whether attention of a call of this many sequences is split by sequence, with a tensor for each cache."""
        return (self.any_ctx or self.grouped) and self.has_streams(n_seqs)

    def one_apart(self, flash_attn: bool) -> bool:
        """Returns whether groups of a call of one sequence have only its cache as a slot, not the caches of all sequences.

        It is not necessary where `kernelgen.model.first_cells` already does so.
        """
        return self.grouped and self.has_streams(self.n_seq_max) and not (self.any_ctx and flash_attn)

    def tokens_in_turn(self, n_seqs: int) -> tuple[int, ...]:
        """Returns the numbers of tokens for which calls of several sequences with separate caches have groups.

        These are one token of each sequence, the most tokens that take no longer (for drafts and short prompts), and the most
        tokens of a call. Numbers between these are padded.
        """
        fullest = min(self.n_ubatch // n_seqs, self.cells(self.n_ctx[-1]))
        each = {1, min(_AT_ONCE // n_seqs, fullest), fullest}
        return tuple(n * n_seqs for n in sorted(each) if 0 < n <= fullest)

    def has_streams(self, n_seqs: int) -> bool:
        """Returns whether a call of this many sequences reads several caches."""
        return n_seqs > 1 and not self.kv_unified


def few(most: int) -> tuple[int, ...]:
    """Returns numbers of tokens whose kernels compute every call of 1 to `most` tokens: those in `FEW` below `most`, and `most`.

    A call of `most` tokens is then one chunk, and GET_ROWS has a kernel for `most` rows.
    """
    return (*(n for n in FEW if n < most), most)


def few_encoded(settings: Settings) -> tuple[int, ...]:
    """Returns numbers of tokens for an encoder and its decoder, without 1: an encoder has no generation."""
    return few(settings.most_tokens)[1:] or (1,)


def pad(n: int) -> int:
    """Returns the smallest multiple of `N_KV_UNIT` that is at least `n`."""
    return -(-n // N_KV_UNIT) * N_KV_UNIT


def doubled(first: int, last: int) -> Iterator[int]:
    """Yields lengths of the cache from `first` on, each twice the previous one, and then `last`."""
    yield from itertools.takewhile(lambda n: n < last, (first << i for i in itertools.count()))
    yield last


def requested_calls(settings: Settings, n_seqs: int) -> Iterator[DecodeCall]:
    """Yields every call with this many sequences that needs kernels, without impossible combinations."""
    for n_ctx, samplers in itertools.product(settings.n_ctx, settings.samplers):
        for n_tokens in _tokens(settings, n_seqs, samplers):
            lengths = _lengths(settings, n_ctx, n_tokens, n_seqs)
            for n_outputs in _outputs(settings, n_tokens, n_seqs, samplers):
                for n_kv in (*_first(settings, lengths, n_tokens, n_seqs), *lengths):
                    yield DecodeCall(n_ctx, n_seqs, n_tokens, n_outputs, n_kv, samplers)


def looked_at(settings: Settings, n_seqs: int) -> list[DecodeCall]:
    """Returns the calls to which formulas are fitted: the requested calls at a few lengths of the cache, and further calls."""
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
    """Yields numbers of cells that one kernel shifts, each four times the previous one, so that up to 16 launches shift a cache.

    Each number divides the next one, because no key may be shifted twice.
    """
    longest = _LONGEST_SHIFT if settings.any_ctx else max(settings.all_cells(n_ctx) for n_ctx in settings.n_ctx)
    return itertools.takewhile(lambda n: n <= longest, (N_KV_UNIT << 2 * i for i in range(4)))


def _tokens(settings: Settings, n_seqs: int, samplers: str) -> Iterable[int]:
    """Returns the numbers of tokens of calls.

    With samplers they include one token of each sequence, because no other call samples as many tokens. With separate caches they
    include the numbers of groups.
    """
    together = settings.tokens_in_turn(n_seqs) if settings.in_turn(n_seqs) else (n_seqs,) if samplers else ()
    return sorted({*settings.n_tokens, *together})


def _outputs(settings: Settings, n_tokens: int, n_seqs: int, samplers: str) -> list[int]:
    if settings.whole:
        return [n_tokens]
    wanted = settings.n_outputs
    if settings.drafting:
        # The draft processes the model's calls without outputs, and proposes tokens one by one with an output per sequence.
        wanted = (n_seqs,) if samplers else (0, n_seqs)
    if wanted is None:
        # llama.cpp computes a long prompt in calls of the most tokens, and only the last call has outputs. The last layer ends
        # earlier in a call without outputs. Without a graph kernel for it, each of its ops would be a launch.
        together = settings.tokens_in_turn(n_seqs) if settings.in_turn(n_seqs) and not samplers else ()
        most = together[-1] if together else settings.most_tokens
        without = (settings.split or settings.grouped) and n_tokens == most > 1
        # Groups of several tokens of each sequence are padded to all outputs.
        one = () if n_tokens in together[1:] and n_tokens not in settings.n_tokens else (1,)
        wanted = (*one, n_seqs if samplers else n_tokens, *((0,) if without else ()))
    return list(dict.fromkeys(n for n in wanted if n <= n_tokens))


def _lengths(settings: Settings, n_ctx: int, n_tokens: int, n_seqs: int) -> list[int]:
    if n_tokens % n_seqs:
        return []  # a graph has equally many tokens of each sequence
    least = n_tokens if settings.kv_unified else n_tokens // n_seqs
    wanted = settings.n_kv or _all_lengths(settings, settings.cells(n_ctx), n_seqs)
    return [n for n in wanted if least <= n <= settings.cells(n_ctx)]


def _all_lengths(settings: Settings, cells: int, n_seqs: int) -> Iterable[int]:
    """Returns lengths of the cache that cover all lengths.

    Each is twice the previous one, because attention can read beyond the used cells. Kernels for several sequences with separate
    caches cannot, so these have every length.
    """
    if settings.has_streams(n_seqs) and not settings.in_turn(n_seqs):
        return range(N_KV_UNIT, cells + 1, N_KV_UNIT)
    return doubled(N_KV_UNIT, cells)


def _first(settings: Settings, lengths: list[int], n_tokens: int, n_seqs: int) -> tuple[int, ...]:
    """Returns the `n_kv` of the first call, (0,), if its length of the cache is requested."""
    return (0,) if pad(n_tokens if settings.kv_unified else n_tokens // n_seqs) in lengths else ()


def _few(values: list[int]) -> list[int]:
    """Returns the first, the last and two between them."""
    last = len(values) - 1
    return [values[i] for i in sorted({0, min(1, last), (last + 1) // 2, last})] if values else []
