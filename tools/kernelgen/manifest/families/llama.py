"""The llama architecture: which kernels llama.cpp asks for, from the hyperparameters that a GGUF file holds.

Follows llama.cpp's graph builder node by node (models/llama.cpp, llama-graph.cpp, llama-kv-cache.cpp, llama-context.cpp of the
tree that `kernelgen.ggml.ops` names); `kernelgen coverage` compares the outcome with what llama.cpp itself exports. View ops
(reshape, permute, transpose, view) cost nothing there and make no kernels; they show in the strides of other ops' inputs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.kernel import KernelSpec
from kernelgen.manifest.document import Node
from kernelgen.manifest.schema import Report

N_KV_UNIT = 256
"""llama.cpp pads the KV cache, and the part of it that a graph reads, to multiples of this."""

MAX_LENGTHS = 20_000
"""Combinations of lengths that attention is expanded for; llama3.yaml has 64."""

_PREC_F32 = 10  # GGML_PREC_F32
_HINT_HADAMARD = 1  # GGML_HINT_SRC0_IS_HADAMARD

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # what -ctk and -ctv take


def expand(model: Node, report: Report) -> list[KernelSpec]:
    """Returns the kernels of a llama model; see `kernelgen.manifest.families.Family`."""
    hyper = _read(model, report)
    if hyper is None:
        return []
    try:
        return list(dict.fromkeys(kernels(hyper)))
    except ValueError as error:  # sizes that are right one by one and too large together
        report.fail(model, f"there can't be such a model: {error}")
        return []


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """A llama model and how it is run; sizes in elements.

    Attributes:
        n_embd, n_head, n_head_kv, n_ff, n_vocab: as llama.cpp calls them.
        head: size of one head, for queries, keys and values.
        eps: of the RMS norms.
        rope: parameters of the ROPE op.
        freq_factors: whether ROPE gets the tensor rope_freqs.weight.
        weights: the types that occur, by tensor name without `blk.N.` and `.weight`.
        biases: tensors that have a bias.
        fused_qkv: whether Q, K and V come from one weight.
        n_ctx: cells of the KV cache, for each sequence.
        n_seq: sequences that have a cache each.
        n_tokens: tokens per graph.
        n_outputs: outputs per graph; None for 1 and all.
        n_kv: lengths of the cache that graphs read.
        type_k, type_v: of the cache.
        flash_attn: the settings to build for.
    """

    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    head: int
    eps: float
    rope: Mapping[str, ParamValue]
    freq_factors: bool
    weights: Mapping[str, tuple[str, ...]]
    biases: frozenset[str]
    fused_qkv: bool
    n_ctx: int
    n_seq: int
    n_tokens: tuple[int, ...]
    n_outputs: tuple[int, ...] | None
    n_kv: tuple[int, ...]
    type_k: str
    type_v: str
    flash_attn: tuple[bool, ...]

    @property
    def n_embd_kv(self) -> int:
        return self.head * self.n_head_kv

    @property
    def n_embd_q(self) -> int:
        return self.head * self.n_head


def pad(n: int, unit: int = N_KV_UNIT) -> int:
    """Returns the smallest multiple of `unit` that is at least `n`."""
    return -(-n // unit) * unit


# --- the graph ------------------------------------------------------------------------------------------------------------


def kernels(h: Hyperparameters) -> Iterator[KernelSpec]:
    """Yields every kernel, some more than once."""
    for n in h.n_tokens:
        yield from _input(h, n)
        yield from _projections(h, n)
        for flash in h.flash_attn:
            yield from _cache(h, n, flash)
            for n_kv in h.n_kv:
                for seqs in range(1, h.n_seq + 1):
                    # A graph takes equally many tokens of each sequence, and the cache holds at least these.
                    if n % seqs == 0 and pad(n // seqs) <= n_kv:
                        yield from _attention(h, n // seqs, n_kv, seqs, flash)
        yield from _attention_output(h, n)
        yield from _feed_forward(h, n)
        for m in (1, n) if h.n_outputs is None else (m for m in h.n_outputs if m <= n):
            # After the last layer's attention only the rows whose logits are asked for go on.
            rows = _vector("i32", m)
            yield KernelSpec.make("get_rows", [_f32(h.n_embd, n), rows], _f32(h.n_embd, m))
            yield from _feed_forward(h, m)
            yield from _linear(h, "output", h.n_embd, h.n_vocab, m)


def _f32(*ne: int) -> TensorDesc:
    return TensorDesc.make((*ne, 1, 1, 1)[:4], "f32")


def _vector(dtype: str, n: int) -> TensorDesc:
    return TensorDesc.make((n, 1, 1, 1), dtype)


def _input(h: Hyperparameters, n: int) -> Iterator[KernelSpec]:
    for dtype in h.weights["token_embd"]:
        table = TensorDesc.make((h.n_embd, h.n_vocab, 1, 1), dtype)
        yield KernelSpec.make("get_rows", [table, _vector("i32", n)], _f32(h.n_embd, n))


def _linear(h: Hyperparameters, name: str, n_in: int, n_out: int, n: int) -> Iterator[KernelSpec]:
    out = _f32(n_out, n)
    for dtype in h.weights[name]:
        yield KernelSpec.make("mul_mat", [TensorDesc.make((n_in, n_out, 1, 1), dtype), _f32(n_in, n)], out)
    if name in h.biases:
        yield KernelSpec.make("add", [out, _f32(n_out)], out)


def _norm(h: Hyperparameters, n: int) -> Iterator[KernelSpec]:
    x = _f32(h.n_embd, n)
    yield KernelSpec.make("rms_norm", [x], x, {"eps": h.eps})
    yield KernelSpec.make("mul", [x, _f32(h.n_embd)], x)


def _projections(h: Hyperparameters, n: int) -> Iterator[KernelSpec]:
    """The norm before attention, Q, K and V, and their rotation."""
    yield from _norm(h, n)
    if h.fused_qkv:
        yield from _linear(h, "attn_qkv", h.n_embd, h.n_embd_q + 2 * h.n_embd_kv, n)
    else:
        yield from _linear(h, "attn_q", h.n_embd, h.n_embd_q, n)
        yield from _linear(h, "attn_k", h.n_embd, h.n_embd_kv, n)
        yield from _linear(h, "attn_v", h.n_embd, h.n_embd_kv, n)
    row = 4 * (h.n_embd_q + 2 * h.n_embd_kv) if h.fused_qkv else 0
    for heads in (h.n_head, h.n_head_kv):
        out = _f32(h.head, heads, n)
        x = TensorDesc.make(out.ne, "f32", (4, 4 * h.head, row, row * n)) if row else out
        factors = [_f32(h.head // 2)] if h.freq_factors else []
        yield KernelSpec.make("rope", [x, _vector("i32", n), *factors], out, h.rope)


def _rotation(h: Hyperparameters) -> tuple[int | None, int | None]:
    """Sizes of the Hadamard matrices by which llama.cpp rotates what goes into a quantized cache: for K (and Q), and for V."""
    if h.head % 64:
        return None, None
    size = 128
    while h.head % size == 0:
        size *= 2
    return (
        size // 2 if TYPES[h.type_k].quantized else None,
        64 if TYPES[h.type_v].quantized else None,
    )


def _hadamard(size: int, elements: int) -> KernelSpec:
    x = _f32(size, elements // size)
    return KernelSpec.make("mul_mat", [_f32(size, size), x], x, {"hint": _HINT_HADAMARD})


def _cache(h: Hyperparameters, n: int, flash: bool) -> Iterator[KernelSpec]:
    """What writes K and V of `n` tokens into the cache."""
    size_k, size_v = _rotation(h)
    if size_k:
        yield _hadamard(size_k, h.n_embd_q * n)
        yield _hadamard(size_k, h.n_embd_kv * n)
    if size_v:
        yield _hadamard(size_v, h.n_embd_kv * n)
        yield _hadamard(size_v, h.n_embd_q * n)
    # A fused weight leaves V as a strided view; rotating it makes it dense.
    row = 4 * (h.n_embd_q + 2 * h.n_embd_kv if h.fused_qkv else h.n_embd_kv)
    heads = TensorDesc.make((h.head, h.n_head_kv, n, 1), "f32", (4, 4 * h.head, row, row * n))
    strided = TensorDesc.make((h.n_embd_kv, n, 1, 1), "f32", (4, row, row * n, row * n))
    dense = _f32(h.n_embd_kv, n)
    cells = h.n_ctx * h.n_seq
    k = TensorDesc.make((h.n_embd_kv, cells, 1, 1), h.type_k)
    yield KernelSpec.make("set_rows", [dense, _vector("i64", n), k], k)
    if size_v and not heads.contiguous:
        yield KernelSpec.make("cont", [heads], _f32(size_v, h.n_embd_kv * n // size_v))
    if flash:
        v = TensorDesc.make((h.n_embd_kv, cells, 1, 1), h.type_v)
        yield KernelSpec.make("set_rows", [dense if size_v else strided, _vector("i64", n), v], v)
        return
    # Without flash attention V is kept transposed, and every element is a row of its own.
    if h.fused_qkv:
        yield KernelSpec.make("cont", [heads], dense)
    count = h.n_embd_kv * n
    v = TensorDesc.make((1, h.n_embd_kv * cells, 1, 1), h.type_v)
    yield KernelSpec.make("set_rows", [_f32(1, count), _vector("i64", count), v], v)


def _attention(h: Hyperparameters, n: int, n_kv: int, seqs: int, flash: bool) -> Iterator[KernelSpec]:
    """Attention of `n` tokens in each of `seqs` sequences over the first `n_kv` cells of their caches."""
    head = 4 * h.head
    token = head * h.n_head
    q = TensorDesc.make((h.head, n, h.n_head, seqs), "f32", (4, token, head, token * n))
    k = _cache_view(h, h.type_k, n_kv, seqs)
    scale = _f32_round(1.0 / _f32_round(math.sqrt(h.head)))
    if flash:
        v = _cache_view(h, h.type_v, n_kv, seqs)
        for view in dict.fromkeys((k, v)):
            if view.dtype == "f32":
                half = TensorDesc.make(view.ne, "f16")
                yield KernelSpec.make("cpy", [view, half], half)
        inputs = [q, *(TensorDesc.make(t.ne, "f16") if t.dtype == "f32" else t for t in (k, v))]
        mask = TensorDesc.make((n_kv, n, 1, seqs), "f16")
        out = _f32(h.head, h.n_head, n, seqs)
        yield KernelSpec.make("flash_attn_ext", [*inputs, mask], out, {"scale": scale, "prec": _PREC_F32})
        return
    weights = _f32(n_kv, n, h.n_head, seqs)
    yield KernelSpec.make("mul_mat", [k, q], weights, {"prec": _PREC_F32})
    yield KernelSpec.make("soft_max", [weights, _f32(n_kv, n, 1, seqs)], weights, {"scale": scale})
    size = TYPES[h.type_v].size
    cell = size * h.n_ctx
    v = TensorDesc.make((n_kv, h.head, h.n_head_kv, seqs), h.type_v, (size, cell, cell * h.head, cell * h.n_embd_kv))
    out = _f32(h.head, n, h.n_head, seqs)
    yield KernelSpec.make("mul_mat", [v, weights], out)
    merged = TensorDesc.make((h.head, h.n_head, n, seqs), "f32", (4, head * n, head, token * n))
    yield KernelSpec.make("cont", [merged], _f32(h.n_embd_q, n * seqs))


def _cache_view(h: Hyperparameters, dtype: str, n_kv: int, seqs: int) -> TensorDesc:
    """The first `n_kv` cells of a cache, heads moved outward: (head, n_kv, n_head_kv, seqs)."""
    t = TYPES[dtype]
    head = h.head // t.block * t.size
    cell = head * h.n_head_kv
    return TensorDesc.make((h.head, n_kv, h.n_head_kv, seqs), dtype, (t.size, cell, head, cell * h.n_ctx))


def _attention_output(h: Hyperparameters, n: int) -> Iterator[KernelSpec]:
    yield from _linear(h, "attn_output", h.n_embd_q, h.n_embd, n)


def _feed_forward(h: Hyperparameters, n: int) -> Iterator[KernelSpec]:
    """The residual sums, the norm and the gated layer; the next layer's norm has the same shape."""
    x = _f32(h.n_embd, n)
    yield KernelSpec.make("add", [x, x], x)
    yield from _norm(h, n)
    yield from _linear(h, "ffn_up", h.n_embd, h.n_ff, n)
    yield from _linear(h, "ffn_gate", h.n_embd, h.n_ff, n)
    inner = _f32(h.n_ff, n)
    yield KernelSpec.make("swiglu", [inner, inner], inner)
    yield from _linear(h, "ffn_down", h.n_ff, h.n_embd, n)


# --- reading the hyperparameters ------------------------------------------------------------------------------------------


def _f32_round(value: float) -> float:
    """Returns `value` rounded to binary32: llama.cpp computes its scales in float, step by step."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


_WEIGHTS = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")


class _Reader:
    """Values of a map by key; a wrong value is as good as absent, since it is reported already."""

    def __init__(self, model: Node, report: Report) -> None:
        self.model = model
        self.report = report

    def node(self, *path: str) -> Node | None:
        node: Node | None = self.model
        for key in path:
            node = node.get(key) if node is not None and node.kind == "map" else None
        return node if node is not None and id(node) not in self.report.wrong else None

    def value(self, *path: str, default: Any = None) -> Any:
        node = self.node(*path)
        return default if node is None else node.value

    def nodes(self, *path: str) -> list[Node]:
        """The items of a list, or the one value in its place."""
        node = self.node(*path)
        if node is None:
            return []
        return list(node.value) if node.kind == "seq" else [node]

    def fail(self, node: Node | None, message: str, hint: str | None = None) -> None:
        self.report.fail(node or self.model, message, hint)


def _read(model: Node, report: Report) -> Hyperparameters | None:
    before = len(report.diagnostics)
    r = _Reader(model, report)
    n_embd, n_head, n_ff = r.value("embedding_length"), r.value("head_count"), r.value("feed_forward_length")
    n_head_kv = r.value("head_count_kv", default=n_head)
    head = _head_size(r, n_embd, n_head)
    heads_are_right = r.node("head_count") is not None and id(r.node("head_count")) not in report.wrong
    if heads_are_right and n_head_kv and n_head % n_head_kv:
        r.fail(r.node("head_count_kv"), f"head_count_kv divides head_count, and {n_head_kv} does not divide {n_head}")
    if head:
        if head % 2:
            r.fail(r.node("key_length") or r.node("head_count"), f"a head that is rotated has an even size, not {head}")
        rotated = r.value("rope", "dimension_count", default=head)
        if rotated != head:
            r.fail(
                r.node("rope", "dimension_count"),
                f"llama.cpp runs the llama architecture only with all of a head rotated: {head}, not {rotated}",
            )
    weights = _weights(r, n_embd, n_ff, head and n_head and head * n_head)
    flash = {"on": (True,), "off": (False,), "both": (True, False)}[r.value("flash_attn", default="both")]
    _check_cache(r, flash, head, n_head_kv)
    rope = _rope(r, head)
    n_ctx = r.value("n_ctx")
    n_seq = r.value("n_seq_max", default=1)
    cells = n_ctx and pad(pad(n_ctx) // n_seq)
    n_tokens, n_outputs, n_kv = _lengths(r, cells, n_seq)
    biases = frozenset(str(item.value) for item in r.nodes("biases"))
    fused = bool(r.value("fused_qkv", default=False))
    if fused:
        weights["attn_qkv"] = weights.pop("attn_q")
        of_qkv = biases & {"attn_q", "attn_k", "attn_v"}
        if of_qkv and len(of_qkv) < 3:
            r.fail(r.node("biases"), "with fused_qkv, attn_q, attn_k and attn_v have one bias: name all three or none")
        elif of_qkv:
            biases = biases - of_qkv | {"attn_qkv"}
    lengths = len(n_tokens) * len(n_kv) * n_seq * len(flash)
    if lengths > MAX_LENGTHS:
        message = f"attention of {lengths} combinations of n_tokens, n_kv and sequences, more than {MAX_LENGTHS}"
        r.fail(r.node("n_tokens"), message, "list the lengths that matter under n_kv")
    if len(report.diagnostics) > before or id(model) in report.wrong:
        return None
    return Hyperparameters(
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=n_ff,
        n_vocab=r.value("vocab_size"),
        head=head or 0,
        eps=float(r.value("layer_norm_rms_epsilon")),
        rope=rope,
        freq_factors=bool(r.value("rope", "freq_factors", default=False)),
        weights=weights,
        biases=biases,
        fused_qkv=fused,
        n_ctx=cells or 0,
        n_seq=n_seq,
        n_tokens=n_tokens,
        n_outputs=n_outputs,
        n_kv=n_kv,
        type_k=r.value("type_k", default="f16"),
        type_v=r.value("type_v", default="f16"),
        flash_attn=flash,
    )


def _head_size(r: _Reader, n_embd: int | None, n_head: int | None) -> int | None:
    given: int | None = r.value("key_length")
    if given or not n_embd or not n_head or r.node("key_length"):
        return given
    if n_embd % n_head:
        r.fail(
            r.node("head_count"),
            f"head_count divides embedding_length, and {n_head} does not divide {n_embd}",
            "give the size of a head as key_length when it is not embedding_length / head_count",
        )
        return None
    return n_embd // n_head


def _weights(r: _Reader, n_embd: int | None, n_ff: int | None, n_embd_q: int | None) -> dict[str, tuple[str, ...]]:
    """Returns the types of every weight; a row must hold whole blocks."""
    rows = dict.fromkeys(_WEIGHTS, n_embd) | {"ffn_down": n_ff, "attn_output": n_embd_q}
    one = r.node("weights")
    table = one is not None and one.kind == "map"
    general = r.nodes("weights", "default") if table else r.nodes("weights")
    found: dict[str, tuple[str, ...]] = {}
    reported: set[int] = set()
    for name in _WEIGHTS:
        nodes = r.nodes("weights", name) if table else []
        if name == "output" and not nodes and table:
            nodes = r.nodes("weights", "token_embd")  # tied embeddings
        nodes = nodes or general
        found[name] = tuple(str(node.value) for node in nodes) or ("f16",)
        for node in nodes:
            t = TYPES.get(str(node.value))
            row = rows[name]
            if t is None or id(node) in reported:
                continue
            if t.name in ("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K"):
                reported.add(id(node))
                r.fail(node, f"{t.name} is not a type of weights")
            elif row and row % t.block:
                reported.add(id(node))
                r.fail(node, f"a row of {name} has {row} values, which {t.name}'s blocks of {t.block} don't divide")
    return found


def _check_cache(r: _Reader, flash: tuple[bool, ...], head: int | None, n_head_kv: int | None) -> None:
    for key in ("type_k", "type_v"):
        node = r.node(key)
        if node is None:
            continue
        if node.value not in _CACHE_TYPES:
            r.fail(node, f"llama.cpp keeps no cache of {node.value}", f"{key} is one of {', '.join(_CACHE_TYPES)}")
            continue
        t = TYPES[str(node.value)]
        if head and n_head_kv and head % t.block:
            r.fail(node, f"a head has {head} values, which {t.name}'s blocks of {t.block} don't divide")
        elif key == "type_v" and t.quantized and False in flash:
            r.fail(
                node,
                f"a V cache of {t.name} needs flash attention, and flash_attn is {r.value('flash_attn', default='both')}",
                "set flash_attn: on, or take f16 for type_v",
            )


def _lengths(
    r: _Reader, cells: int | None, n_seq: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]:
    """Returns n_tokens, n_outputs and n_kv; `cells` is the length of one sequence's cache, None when it is not known."""
    tokens = r.nodes("n_tokens")
    for node in tokens:
        if cells and node.value > cells * n_seq:
            r.fail(node, f"n_tokens is at most n_ctx, {cells * n_seq}, not {node.value}")
    n_tokens = tuple(int(node.value) for node in tokens)
    outputs = r.nodes("n_outputs")
    for node in outputs:
        if n_tokens and node.value > max(n_tokens):
            r.fail(node, f"there are no more outputs than tokens, {max(n_tokens)}, so not {node.value}")
    least = pad(-(-min(n_tokens) // n_seq)) if n_tokens else N_KV_UNIT
    lengths = r.nodes("n_kv")
    for node in lengths:
        if node.value % N_KV_UNIT:
            r.fail(
                node, f"llama.cpp reads the cache in multiples of {N_KV_UNIT}, as {pad(node.value)}, not {node.value}"
            )
        elif cells and node.value > cells:
            r.fail(node, f"n_kv is at most the length of a cache, {cells}, not {node.value}")
        elif node.value < least:
            r.fail(
                node,
                f"n_kv is at least {least}, since graphs have {min(n_tokens)} tokens or more; {node.value} can't occur",
            )
    n_kv = tuple(int(node.value) for node in lengths)
    if not lengths and cells:
        n_kv = tuple(range(N_KV_UNIT, cells + 1, N_KV_UNIT))
    return n_tokens, tuple(int(node.value) for node in outputs) or None, n_kv


def _rope(r: _Reader, head: int | None) -> dict[str, ParamValue]:
    """Returns ROPE's parameters as llama_context computes them, in binary32 at every step."""
    scaling = r.value("rope", "scaling", "type", default="linear")
    factor = _f32_round(r.value("rope", "scaling", "factor", default=1.0))
    freq_scale = 1.0 if scaling == "none" or factor == 0.0 else _f32_round(1.0 / factor)
    ext = float(r.value("rope", "scaling", "ext_factor", default=1.0 if scaling == "yarn" else 0.0))
    attn = 1.0
    if ext != 0.0 and freq_scale > 0.0:
        inverse = _f32_round(1.0 / freq_scale)
        tenth = _f32_round(0.1)
        term = _f32_round(_f32_round(tenth * _f32_round(math.log(inverse))) + 1.0)
        attn = 1.0 if inverse <= 1.0 else term
        # The ROPE op multiplies by this term itself, so it is divided out here.
        attn = _f32_round(attn * _f32_round(1.0 / term))
    attn = _f32_round(attn * _f32_round(r.value("rope", "scaling", "attn_factor", default=1.0)))
    return {
        "n_dims": head or 0,
        "mode": 0,
        "n_ctx_orig": r.value(
            "rope", "scaling", "original_context_length", default=r.value("context_length", default=0)
        ),
        "freq_base": float(r.value("rope", "freq_base", default=10000.0)),
        "freq_scale": freq_scale,
        "ext_factor": ext,
        "attn_factor": attn,
        "beta_fast": float(r.value("rope", "scaling", "beta_fast", default=32.0)),
        "beta_slow": float(r.value("rope", "scaling", "beta_slow", default=1.0)),
    }
