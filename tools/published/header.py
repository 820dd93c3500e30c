"""Writes GGUF files that consist only of a header: hyperparameters and a list of tensors. `kernelgen model` needs no more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

Value = int | float | str | bool | Sequence[int]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a header: its name, ggml's dimensions, and its type."""

    name: str
    ne: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GgufHeader:
    """The content of a header.

    Attributes:
        architecture: llama.cpp's name.
        fields: keys without the architecture's prefix; a key that begins with a dot is written without the dot and
            without a prefix.
        tensors: the tensors in the file's order.
    """

    architecture: str
    fields: dict[str, Value]
    tensors: list[Tensor] = field(default_factory=list)


def write(header: GgufHeader, path: Path, *, part: tuple[int, int] = (0, 1), sparse: bool = False) -> Path:
    """Writes a header to `path` and returns the path.

    Args:
        header: its content.
        path: the file.
        sparse: whether the file is as long as with the weights, which are a hole; otherwise it ends with the header.
        part: (number, count) of a file of a split model. The first file has the fields; each file has every `count`-th tensor.
    """
    number, count = part
    writer = gguf.GGUFWriter(path, header.architecture)
    fields = dict(header.fields) if number == 0 else {}
    if count > 1:
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(header.tensors))
    for key, value in fields.items():
        full = key[1:] if key.startswith(".") else f"{header.architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, list(value))
    for tensor in header.tensors[number::count]:
        kind = gguf.GGMLQuantizationType[tensor.dtype.upper()]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        elements = int(np.prod(tensor.ne))
        plain = {"F32": np.float32, "F16": np.float16}.get(kind.name)
        shape = (*reversed(tensor.ne[1:]), tensor.ne[0] if plain else tensor.ne[0] // block * size)
        writer.add_tensor_info(
            tensor.name, shape, np.dtype(plain or np.uint8), elements // block * size, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    if sparse:
        unit = writer.data_alignment
        sizes = [info.nbytes for infos in writer.tensors for info in infos.values()]
        os.truncate(path, sum(-(-size // unit) * unit for size in (path.stat().st_size, *sizes)))
    return path


def decoder(
    architecture: str,
    *,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    n_ff: int,
    n_vocab: int,
    n_layer: int = 2,
    head: int | None = None,
    types: Sequence[str] = ("f16",),
    qk_norm: bool = False,
    qkv_bias: bool = False,
    fused: bool = False,
    post_norms: bool = False,
    rope_freqs: bool = False,
    n_expert: int = 0,
    tied: bool = False,
    eps: float = 1e-6,
    freq_base: float = 1e6,
    context_length: int = 8192,
    fields: dict[str, Value] | None = None,
) -> GgufHeader:
    """Returns the header of a model of llama.cpp's usual form.

    Args:
        architecture: llama.cpp's name.
        n_embd: size of the hidden state; this name and the next ones are llama.cpp's.
        n_head: query heads.
        n_head_kv: key and value heads.
        n_ff: size of the feed-forward layer.
        n_vocab: tokens in the vocabulary.
        n_layer: layers.
        head: size of a head; `n_embd / n_head` by default.
        types: the types of the matrices; layers take them in turn.
        qk_norm: whether queries and keys are normalised.
        qkv_bias: whether Q, K and V have a bias.
        fused: whether Q, K and V are one matrix, and the two matrices of the gated layer another, as in Phi-3.
        post_norms: whether norms follow attention and the feed-forward layer, as in Gemma.
        rope_freqs: whether a tensor has factors of the rotation's frequencies, as in Llama 3.1 and later.
        n_expert: experts of the feed-forward layer, two of which are used; none by default.
        tied: whether the output matrix is the embedding's.
        eps: the epsilon of the RMS norms.
        freq_base: the base of the rotation's frequencies.
        context_length: the context length in training.
        fields: further keys.
    """
    head = head or n_embd // n_head
    keys: dict[str, Value] = {
        "context_length": context_length,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": freq_base,
        "vocab_size": n_vocab,
        ".tokenizer.ggml.model": "no_vocab",
    }
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": 2}
    tensors = [Tensor("token_embd.weight", (n_embd, n_vocab), types[0]), Tensor("output_norm.weight", (n_embd,), "f32")]
    if not tied:
        tensors.append(Tensor("output.weight", (n_embd, n_vocab), types[0]))
    if rope_freqs:
        tensors.append(Tensor("rope_freqs.weight", (head // 2,), "f32"))
    q, kv = n_head * head, n_head_kv * head
    norms = [
        (name, n_embd) for name in ["attn_norm", "ffn_norm"] + ["post_attention_norm", "post_ffw_norm"] * post_norms
    ]
    norms += [(name, head) for name in ["attn_q_norm", "attn_k_norm"] * qk_norm]
    for i in range(n_layer):
        kind = types[i % len(types)]
        tensors += [Tensor(f"blk.{i}.{name}.weight", (n,), "f32") for name, n in norms]
        tensors += _attention(i, n_embd, q, kv, kind, fused=fused, biased=qkv_bias)
        tensors += _feed_forward(i, n_embd, n_ff, kind, fused=fused, n_expert=n_expert)
    return GgufHeader(architecture, keys | (fields or {}), tensors)


def _attention(layer: int, n_embd: int, q: int, kv: int, kind: str, *, fused: bool, biased: bool) -> Iterator[Tensor]:
    """Yields a layer's matrices of attention; `q` and `kv` are the sizes of all heads together."""
    into = [("attn_qkv", q + 2 * kv)] if fused else [("attn_q", q), ("attn_k", kv), ("attn_v", kv)]
    for name, n_out in into:
        yield Tensor(f"blk.{layer}.{name}.weight", (n_embd, n_out), kind)
        if biased:
            yield Tensor(f"blk.{layer}.{name}.bias", (n_out,), "f32")
    yield Tensor(f"blk.{layer}.attn_output.weight", (q, n_embd), kind)


def _feed_forward(layer: int, n_embd: int, n_ff: int, kind: str, *, fused: bool, n_expert: int) -> Iterator[Tensor]:
    """Yields the matrices of the gated feed-forward layer, or those of its experts and the router."""
    if n_expert:
        yield Tensor(f"blk.{layer}.ffn_gate_inp.weight", (n_embd, n_expert), "f32")
    gated = [("ffn_up", n_embd, 2 * n_ff)] if fused else [("ffn_gate", n_embd, n_ff), ("ffn_up", n_embd, n_ff)]
    for name, n_in, n_out in (*gated, ("ffn_down", n_ff, n_embd)):
        if n_expert:
            yield Tensor(f"blk.{layer}.{name}_exps.weight", (n_in, n_out, n_expert), kind)
        else:
            yield Tensor(f"blk.{layer}.{name}.weight", (n_in, n_out), kind)
