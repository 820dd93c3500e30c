"""Writes small Llama, Qwen3, Gemma 3, Mixtral and other models with random weights, as GGUF files that llama.cpp's programs run."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np


@dataclass(frozen=True)
class Size:
    """The sizes of a model, by llama.cpp's names."""

    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 512
    n_layer: int = 3
    n_ctx: int = 512
    n_vocab: int = 260
    """At least 260: the bytes, the space and three special tokens. The tokens above that occur in no text."""
    n_expert: int = 0
    n_expert_used: int = 0
    """The number of experts per token, of `n_expert`, as in a Mixtral. 0: all tokens share one feed-forward network."""
    n_swa: int = 0
    """The window of every other layer of a Gemma 3, in tokens."""


Weights = type[np.floating] | gguf.GGMLQuantizationType
"""The type of matrices."""

_ALIGNMENT = 32
"""The alignment of tensors in a GGUF file, in bytes."""

_SPECIAL = ("<unk>", "<s>", "</s>")
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def write(
    path: Path,
    *,
    seed: int = 1,
    weights: Weights = np.float16,
    architecture: str = "llama",
    size: Size = Size(),
    tied: bool = False,
    sparse: bool = False,
    added: float = 1.0,
) -> None:
    """Writes a model; the same seed gives the same bytes.

    Its vocabulary consists of bytes and the space, in SentencePiece's form, so that any text can be a prompt.

    Args:
        path: the file.
        seed: the seed of the weights.
        weights: the type of the matrices: a float type, a type to which gguf quantizes, or Q4_K. The norms are F32, as in
            real files.
        architecture: `llama` (also for a Mixtral); `qwen3`, which normalizes the heads of queries and keys; or
            `gemma3`, which also normalizes the output of each layer before adding it.
        size: the sizes of the model.
        tied: whether the embedding is also the output matrix.
        sparse: whether to leave the tensors' data as a hole in the file, which takes no disk space and reads as zeros;
            F16 or F32 only.
        added: the factor of each layer's contribution. With a small factor, the next token depends mostly on the last
            token, so fewer layers with the same weights make a good draft.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, size, architecture)
    n_vocab = _add_vocabulary(writer, size.n_vocab)
    tensors = _Tensors(writer, np.random.default_rng(seed), weights, sparse)
    head = size.n_embd // size.n_head
    tensors.matrix("token_embd.weight", n_vocab, size.n_embd)
    for layer in range(size.n_layer):
        tensors.norm(f"blk.{layer}.attn_norm.weight", size.n_embd)
        tensors.matrix(f"blk.{layer}.attn_q.weight", size.n_embd, size.n_embd)
        tensors.matrix(f"blk.{layer}.attn_k.weight", head * size.n_head_kv, size.n_embd)
        tensors.matrix(f"blk.{layer}.attn_v.weight", head * size.n_head_kv, size.n_embd)
        if architecture in ("qwen3", "gemma3"):
            tensors.norm(f"blk.{layer}.attn_q_norm.weight", head)
            tensors.norm(f"blk.{layer}.attn_k_norm.weight", head)
        tensors.matrix(f"blk.{layer}.attn_output.weight", size.n_embd, size.n_embd, scale=added)
        tensors.norm(f"blk.{layer}.ffn_norm.weight", size.n_embd)
        experts = (size.n_expert,) if size.n_expert else ()
        suffix = "_exps" if experts else ""
        if experts:
            tensors.matrix(f"blk.{layer}.ffn_gate_inp.weight", size.n_expert, size.n_embd)
        tensors.matrix(f"blk.{layer}.ffn_gate{suffix}.weight", *experts, size.n_ff, size.n_embd)
        tensors.matrix(f"blk.{layer}.ffn_up{suffix}.weight", *experts, size.n_ff, size.n_embd)
        tensors.matrix(f"blk.{layer}.ffn_down{suffix}.weight", *experts, size.n_embd, size.n_ff, scale=added)
        if architecture == "gemma3":
            tensors.norm(f"blk.{layer}.post_attention_norm.weight", size.n_embd)
            tensors.norm(f"blk.{layer}.post_ffw_norm.weight", size.n_embd)
    tensors.norm("output_norm.weight", size.n_embd)
    if not tied:
        tensors.matrix("output.weight", n_vocab, size.n_embd)
    _finish(writer, path if sparse else None)


def _rewrite(
    path: Path, source: Path, field: Callable[[str, Any], Any], tensors: Callable[[str], Iterable[str]], kind: str
) -> None:
    """Writes a file's header and tensors again.

    Args:
        path: the new file.
        source: the file.
        field: returns a field's new value, given its name and value; None or an empty list leaves it out.
        tensors: returns the new names of a tensor: none leaves it out, several repeat it.
        kind: the tensors' data: `same`, `f32` for F32, `hole` for none.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        value = field(name, entry.contents())
        if not name.startswith("GGUF.") and name != "general.architecture" and value is not None and value != []:
            writer.add_key_value(name, value, entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    for tensor in reader.tensors:
        for name in tensors(tensor.name):
            if kind == "hole":
                shape = [int(n) for n in reversed(tensor.shape)]
                # With a type of the file, gguf does not look at the type in NumPy.
                writer.add_tensor_info(name, shape, np.dtype(np.float32), int(tensor.n_bytes), tensor.tensor_type)
            elif kind == "f32":
                writer.add_tensor(name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
            else:
                writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    _finish(writer, path if kind == "hole" else None)


def write_f32(path: Path, source: Path) -> None:
    """Writes a model with all weights in F32."""
    types = {"general.file_type", "general.quantization_version"}
    _rewrite(path, source, lambda name, value: None if name in types else value, lambda name: [name], "f32")


def write_shorter(path: Path, source: Path, n_layer: int) -> None:
    """Writes the first layers of a model, with its embedding and output matrix: a draft of the model."""

    def tensors(name: str) -> list[str]:
        layer = _LAYER.match(name)
        return [name] if layer is None or int(layer[1]) < n_layer else []

    _rewrite(path, source, lambda name, value: n_layer if name.endswith(".block_count") else value, tensors, "same")


def write_longer(path: Path, source: Path, first: int, times: int) -> None:
    """Writes a model's header with the layers from `first` on repeated `times` times, and a hole as the tensors' data."""
    n = n_layer(source)

    def field(name: str, value: Any) -> Any:
        if name.endswith(".block_count"):
            return first + (n - first) * times
        if isinstance(value, list) and len(value) == n and not any(word in name for word in ("sections", "tokenizer.")):
            return value[:first] + value[first:] * times
        return value

    def tensors(name: str) -> list[str]:
        layer = _LAYER.match(name)
        if layer is None or int(layer[1]) < first:
            return [name]
        return [f"blk.{int(layer[1]) + k * (n - first)}.{layer[2]}" for k in range(times)]

    _rewrite(path, source, field, tensors, "hole")


def n_layer(file: Path) -> int:
    """Returns the number of layers in a model's header."""
    fields = gguf.GGUFReader(file).fields
    return int(fields[f"{fields['general.architecture'].contents()}.block_count"].contents())


def write_glm4_moe(path: Path, size: Size, *, seed: int = 1, added: float = 0.05) -> None:
    """Writes a GLM-4.5 with an MTP head: layers with one feed-forward network each, and a head with `n_expert` experts.

    Args:
        path: the file.
        size: the sizes of the model, without the head's layer.
        seed: the seed of the weights, which are F32.
        added: as in `write`; the head's result, too, depends mostly on the last token.
    """
    writer = gguf.GGUFWriter(path, "glm4moe")
    _add_sizes(writer, dataclasses.replace(size, n_layer=size.n_layer + 1), "glm4moe")
    writer.add_nextn_predict_layers(1)
    writer.add_leading_dense_block_count(size.n_layer)
    writer.add_expert_feed_forward_length(size.n_ff)
    writer.add_expert_shared_count(1)
    n_vocab = _add_vocabulary(writer, size.n_vocab)
    tensors = _Tensors(writer, np.random.default_rng(seed), np.float32, False)
    kv = size.n_embd // size.n_head * size.n_head_kv
    tensors.matrix("token_embd.weight", n_vocab, size.n_embd)
    for i in range(size.n_layer + 1):
        tensors.norm(f"blk.{i}.attn_norm.weight", size.n_embd)
        tensors.matrix(f"blk.{i}.attn_q.weight", size.n_embd, size.n_embd)
        tensors.matrix(f"blk.{i}.attn_k.weight", kv, size.n_embd)
        tensors.matrix(f"blk.{i}.attn_v.weight", kv, size.n_embd)
        tensors.matrix(f"blk.{i}.attn_output.weight", size.n_embd, size.n_embd, scale=added)
        tensors.norm(f"blk.{i}.post_attention_norm.weight", size.n_embd)
        head = i == size.n_layer
        if head:
            tensors.matrix(f"blk.{i}.ffn_gate_inp.weight", size.n_expert, size.n_embd)
            tensors.norm(f"blk.{i}.exp_probs_b.bias", size.n_expert)
        for suffix, experts in (("_exps", (size.n_expert,)), ("_shexp", ())) if head else (("", ()),):
            tensors.matrix(f"blk.{i}.ffn_gate{suffix}.weight", *experts, size.n_ff, size.n_embd)
            tensors.matrix(f"blk.{i}.ffn_up{suffix}.weight", *experts, size.n_ff, size.n_embd)
            tensors.matrix(f"blk.{i}.ffn_down{suffix}.weight", *experts, size.n_embd, size.n_ff, scale=added)
    i = size.n_layer
    ahead = np.eye(size.n_embd, 2 * size.n_embd) / math.sqrt(size.n_embd)
    tensors.matrix(f"blk.{i}.nextn.eh_proj.weight", size.n_embd, 2 * size.n_embd, scale=added / 2, plus=ahead)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        tensors.norm(f"blk.{i}.nextn.{norm}.weight", size.n_embd)
    tensors.norm("output_norm.weight", size.n_embd)
    tensors.matrix("output.weight", n_vocab, size.n_embd)
    _finish(writer)


def write_eagle3(path: Path, size: Size, layers: tuple[int, int, int], *, seed: int = 1) -> None:
    """Writes an Eagle3 draft of a model from `write`, whose embedding and output matrix it uses: one layer in F32.

    Its attention reads only the last token, and passes on that token's embedding.

    Args:
        path: the file.
        size: the model's sizes.
        layers: the layers of the model whose inputs the draft reads; the number of layers means the result of the last one.
        seed: the seed of the weights.
    """
    writer = gguf.GGUFWriter(path, "eagle3")
    _add_sizes(writer, dataclasses.replace(size, n_layer=1, n_head_kv=size.n_head), "eagle3")
    writer.add_key_value("eagle3.target_layers", list(layers), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    writer.add_key_value("eagle3.target_hidden_size", size.n_embd, gguf.GGUFValueType.UINT32)
    _add_vocabulary(writer, size.n_vocab)
    random = np.random.default_rng(seed)
    tensors = _Tensors(writer, random, np.float32, False)
    n = size.n_embd
    tensors.matrix("fc.weight", n, 3 * n, scale=0.1)
    for norm in ("attn_norm", "attn_norm_2", "ffn_norm"):
        tensors.norm(f"blk.0.{norm}.weight", n)
    ahead = np.eye(n, 2 * n)
    for part, scale, plus in (("q", 0.1, 4 * ahead), ("k", 0.1, 4 * ahead), ("v", 0.1, ahead)):
        tensors.matrix(f"blk.0.attn_{part}.weight", n, 2 * n, scale=scale, plus=plus)
    tensors.matrix("blk.0.attn_output.weight", n, n, scale=0.1, plus=np.eye(n))
    tensors.matrix("blk.0.ffn_gate.weight", size.n_ff, n)
    tensors.matrix("blk.0.ffn_up.weight", size.n_ff, n)
    tensors.matrix("blk.0.ffn_down.weight", n, size.n_ff, scale=0.1)
    tensors.norm("output_norm.weight", n)
    _finish(writer)


def write_gemma4(path: Path, size: Size, *, seed: int = 1, added: float = 0.05) -> None:
    """Writes a Gemma 4: every other layer has a sliding window; the last layer has none.

    Args:
        path: the file.
        size: the sizes of the model, with an even number of layers.
        seed: the seed of the weights, which are F32.
        added: as in `write`.
    """
    writer = gguf.GGUFWriter(path, "gemma4")
    _add_gemma4_sizes(writer, size)
    n_vocab = _add_vocabulary(writer, size.n_vocab)
    tensors = _Tensors(writer, np.random.default_rng(seed), np.float32, False)
    head = size.n_embd // size.n_head
    tensors.matrix("token_embd.weight", n_vocab, size.n_embd)
    writer.add_tensor("rope_freqs.weight", np.ones(head // 2, np.float32))
    for i in range(size.n_layer):
        for part in ("k", "v"):
            tensors.matrix(f"blk.{i}.attn_{part}.weight", head * size.n_head_kv, size.n_embd)
        tensors.norm(f"blk.{i}.attn_k_norm.weight", head)
        _add_gemma4_layer(tensors, i, size, head, added)
    tensors.norm("output_norm.weight", size.n_embd)
    tensors.matrix("output.weight", n_vocab, size.n_embd)
    _finish(writer)


def write_gemma4_head(path: Path, model: Path, size: Size, *, seed: int = 1, added: float = 0.05) -> None:
    """Writes a head for a model from `write_gemma4`. Its two layers, one with a sliding window, read the model's cache.

    It is twice as wide as the model, and uses the model's output matrix.

    Args:
        path: the file.
        model: the model's file.
        size: the model's sizes.
        seed: the seed of the weights, which are F32.
        added: as in `write`.
    """
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    head = size.n_embd // size.n_head
    wide = dataclasses.replace(size, n_embd=2 * size.n_embd, n_head=2 * size.n_head, n_layer=2)
    _add_gemma4_sizes(writer, wide)
    writer.add_key_value("gemma4-assistant.embedding_length_out", size.n_embd, gguf.GGUFValueType.UINT32)
    writer.add_nextn_predict_layers(wide.n_layer)
    _add_vocabulary(writer, size.n_vocab)
    tensors = _Tensors(writer, np.random.default_rng(seed), np.float32, False)
    of_model = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(model).tensors}

    def widened(name: str) -> np.ndarray:
        x = of_model[name]
        return np.concatenate([x, np.zeros_like(x)], axis=-1)

    writer.add_tensor("token_embd.weight", widened("output.weight"))
    writer.add_tensor("rope_freqs.weight", np.ones(head // 2, np.float32))
    # The head reads the token's embedding and the model's hidden state, and passes the embedding on.
    tensors.matrix(
        "nextn.pre_projection.weight",
        wide.n_embd,
        2 * size.n_embd,
        scale=added,
        plus=np.eye(wide.n_embd, 2 * size.n_embd),
    )
    for i in range(wide.n_layer):
        _add_gemma4_layer(tensors, i, wide, head, added)
    writer.add_tensor("output_norm.weight", widened("output_norm.weight"))
    tensors.matrix("nextn.post_projection.weight", size.n_embd, wide.n_embd)
    _finish(writer)


def _add_gemma4_sizes(writer: gguf.GGUFWriter, size: Size) -> None:
    _add_sizes(writer, size, "gemma4")
    head = size.n_embd // size.n_head
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_key_length_swa(head)
    writer.add_value_length_swa(head)
    writer.add_sliding_window(size.n_swa)
    writer.add_sliding_window_pattern([i % 2 == 0 for i in range(size.n_layer)])
    writer.add_embedding_length_per_layer_input(0)


def _add_gemma4_layer(tensors: _Tensors, i: int, size: Size, head: int, added: float) -> None:
    """Adds the tensors of a layer, without the matrices of keys and values."""
    for norm in ("attn_norm", "ffn_norm"):
        tensors.norm(f"blk.{i}.{norm}.weight", size.n_embd)
    for norm in ("post_attention_norm", "post_ffw_norm"):  # the norms of the layer's contributions
        tensors.writer.add_tensor(f"blk.{i}.{norm}.weight", np.full(size.n_embd, added, np.float32))
    tensors.matrix(f"blk.{i}.attn_q.weight", head * size.n_head, size.n_embd)
    tensors.norm(f"blk.{i}.attn_q_norm.weight", head)
    tensors.matrix(f"blk.{i}.attn_output.weight", size.n_embd, head * size.n_head)
    tensors.matrix(f"blk.{i}.ffn_gate.weight", size.n_ff, size.n_embd)
    tensors.matrix(f"blk.{i}.ffn_up.weight", size.n_ff, size.n_embd)
    tensors.matrix(f"blk.{i}.ffn_down.weight", size.n_embd, size.n_ff)
    tensors.writer.add_tensor(f"blk.{i}.layer_output_scale.weight", np.ones(1, np.float32))


def write_t5(path: Path, size: Size, *, seed: int = 1, decoder: bool = False) -> None:
    """Writes a T5 with random weights. As an encoder, its embedding of a text is the mean of the tokens' embeddings.

    Args:
        path: the file.
        size: the sizes of the model; `n_head_kv` is not used.
        seed: the seed of the weights.
        decoder: whether the model also has a decoder.
    """
    writer = gguf.GGUFWriter(path, "t5" if decoder else "t5encoder")
    writer.add_context_length(size.n_ctx)
    writer.add_embedding_length(size.n_embd)
    writer.add_block_count(size.n_layer)
    writer.add_feed_forward_length(size.n_ff)
    writer.add_head_count(size.n_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_relative_attn_buckets_count(32)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    n_vocab = _add_vocabulary(writer, size.n_vocab)
    tensors = _Tensors(writer, np.random.default_rng(seed), np.float32, False)
    tensors.matrix("token_embd.weight", n_vocab, size.n_embd)
    for side in ("enc", "dec") if decoder else ("enc",):
        for i in range(size.n_layer):
            for attention in ("attn", "cross_attn") if side == "dec" else ("attn",):
                tensors.norm(f"{side}.blk.{i}.{attention}_norm.weight", size.n_embd)
                for part in ("q", "k", "v", "o"):
                    tensors.matrix(f"{side}.blk.{i}.{attention}_{part}.weight", size.n_embd, size.n_embd)
            if i == 0:
                tensors.matrix(f"{side}.blk.{i}.attn_rel_b.weight", 32, size.n_head)
            tensors.norm(f"{side}.blk.{i}.ffn_norm.weight", size.n_embd)
            tensors.matrix(f"{side}.blk.{i}.ffn_gate.weight", size.n_ff, size.n_embd)
            tensors.matrix(f"{side}.blk.{i}.ffn_up.weight", size.n_ff, size.n_embd)
            tensors.matrix(f"{side}.blk.{i}.ffn_down.weight", size.n_embd, size.n_ff)
        tensors.norm(f"{side}.output_norm.weight", size.n_embd)
    _finish(writer)


def write_control_vector(path: Path, size: Size, *, seed: int = 1, architecture: str = "llama") -> None:
    """Writes a control vector for a model from `write`: random directions for all layers but the first."""
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", architecture)
    writer.add_int32("controlvector.layer_count", size.n_layer - 1)
    random = np.random.default_rng(seed)
    for layer in range(1, size.n_layer):
        writer.add_tensor(f"direction.{layer}", random.standard_normal(size.n_embd, dtype=np.float32))
    _finish(writer)


def write_bert(
    path: Path, size: Size, *, seed: int = 1, rank: bool = False, pooling: gguf.PoolingType = gguf.PoolingType.CLS
) -> None:
    """Writes a BERT with random weights: an encoder whose embedding is by default that of its first token.

    Args:
        path: the file.
        seed: the seed of the weights.
        size: the sizes of the model; `n_head_kv` is not used.
        rank: whether the model is a reranker, with a head of one output.
        pooling: how the tokens' embeddings are combined, if it is not a reranker.
    """
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(size.n_ctx)
    writer.add_embedding_length(size.n_embd)
    writer.add_block_count(size.n_layer)
    writer.add_feed_forward_length(size.n_ff)
    writer.add_head_count(size.n_head)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if rank else pooling)
    n_vocab = _add_vocabulary(writer, size.n_vocab)
    writer.add_token_type_count(2)
    tensors = _Tensors(writer, np.random.default_rng(seed), np.float32, False)

    def layer(name: str, *shape: int) -> None:
        tensors.matrix(f"{name}.weight", *shape)
        tensors.norm(f"{name}.bias", shape[0])

    def norm(name: str) -> None:
        tensors.norm(f"{name}.weight", size.n_embd)
        tensors.norm(f"{name}.bias", size.n_embd)

    tensors.matrix("token_embd.weight", n_vocab, size.n_embd)
    tensors.matrix("position_embd.weight", size.n_ctx, size.n_embd)
    tensors.matrix("token_types.weight", 2, size.n_embd)
    norm("token_embd_norm")
    for i in range(size.n_layer):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            layer(f"blk.{i}.{part}", size.n_embd, size.n_embd)
        norm(f"blk.{i}.attn_output_norm")
        layer(f"blk.{i}.ffn_up", size.n_ff, size.n_embd)
        layer(f"blk.{i}.ffn_down", size.n_embd, size.n_ff)
        norm(f"blk.{i}.layer_output_norm")
    if rank:
        layer("cls", size.n_embd, size.n_embd)
        layer("cls.output", 1, size.n_embd)
    _finish(writer)


def write_adapter(
    path: Path,
    size: Size,
    *,
    rank: int,
    targets: Sequence[str],
    seed: int = 1,
    weights: type[np.floating] = np.float16,
    architecture: str = "llama",
    added: float = 1.0,
) -> None:
    """Writes a LoRA adapter with random weights for a model from `write`; the same seed gives the same bytes.

    Args:
        path: the file.
        size: the model's sizes.
        rank: the rows of each first matrix.
        targets: the matrices of each layer that the adapter changes, such as `attn_q`.
        seed: the seed of the weights.
        weights: the type of the weights.
        architecture: the model's architecture.
        added: the factor of the adapter's contribution.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 2.0 * rank)
    tensors = _Tensors(writer, np.random.default_rng(seed), weights, False)
    kv = size.n_embd // size.n_head * size.n_head_kv
    rows = {"attn_k": kv, "attn_v": kv, "ffn_gate": size.n_ff, "ffn_up": size.n_ff}
    for layer in range(size.n_layer):
        for target in targets:
            name = f"blk.{layer}.{target}.weight"
            tensors.matrix(f"{name}.lora_a", rank, size.n_ff if target == "ffn_down" else size.n_embd)
            tensors.matrix(f"{name}.lora_b", rows.get(target, size.n_embd), rank, scale=added)
    _finish(writer)


def _add_sizes(writer: gguf.GGUFWriter, size: Size, architecture: str) -> None:
    writer.add_name("random")
    writer.add_context_length(size.n_ctx)
    writer.add_embedding_length(size.n_embd)
    writer.add_block_count(size.n_layer)
    writer.add_feed_forward_length(size.n_ff)
    writer.add_head_count(size.n_head)
    writer.add_head_count_kv(size.n_head_kv)
    writer.add_rope_dimension_count(size.n_embd // size.n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if size.n_expert:
        writer.add_expert_count(size.n_expert)
        writer.add_expert_used_count(size.n_expert_used)
    if architecture == "gemma3":
        writer.add_key_length(size.n_embd // size.n_head)
        writer.add_value_length(size.n_embd // size.n_head)
        writer.add_sliding_window(size.n_swa)
        writer.add_sliding_window_pattern(2)


def _add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> int:
    """Adds a vocabulary of bytes and the space; returns its number of tokens, which is at least `n_vocab`."""
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    tokens += [f"unused{i}" for i in range(n_vocab - len(tokens))]
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(types))
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    return len(tokens)


def _finish(writer: gguf.GGUFWriter, sparse: Path | None = None) -> None:
    """Writes the file and closes it; `sparse` is its path if the tensors' data is a hole."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if not sparse:
        writer.write_tensors_to_file()
        writer.close()
        return
    writer.write_ti_data_to_file()
    writer.close()
    data = [tensor.nbytes + -tensor.nbytes % _ALIGNMENT for table in writer.tensors for tensor in table.values()]
    os.truncate(sparse, sparse.stat().st_size + -sparse.stat().st_size % _ALIGNMENT + sum(data))


@dataclass(frozen=True)
class _Tensors:
    """Adds tensors with random weights; `write` describes the attributes."""

    writer: gguf.GGUFWriter
    random: np.random.Generator
    weights: Weights
    sparse: bool

    def matrix(self, name: str, *shape: int, scale: float = 1.0, plus: np.ndarray | float = 0.0) -> None:
        """Adds a matrix of rows and columns, or one per expert; experts can't be quantized.

        The values are multiplied by `scale`; then `plus` is added.
        """
        columns = shape[-1]
        quantized = isinstance(self.weights, gguf.GGMLQuantizationType)
        if self.sparse:
            assert not quantized
            dtype = np.dtype(self.weights)
            self.writer.add_tensor_info(name, shape, dtype, math.prod(shape) * dtype.itemsize)
            return
        if self.weights == gguf.GGMLQuantizationType.Q4_K:
            self.writer.add_tensor(name, _random_q4_k(self.random, *shape), raw_dtype=self.weights)
            return
        values = self.random.standard_normal(shape, dtype=np.float32) / np.sqrt(np.float32(columns))
        if scale != 1 or np.any(plus):
            values = values * np.float32(scale) + np.asarray(plus, np.float32)
        if quantized:
            self.writer.add_tensor(name, gguf.quants.quantize(values, self.weights), raw_dtype=self.weights)
        else:
            self.writer.add_tensor(name, values.astype(self.weights))

    def norm(self, name: str, n: int) -> None:
        if self.sparse:
            self.writer.add_tensor_info(name, (n,), np.dtype(np.float32), 4 * n)
            return
        self.writer.add_tensor(name, 1 + 0.1 * self.random.standard_normal(n, dtype=np.float32))


def _random_q4_k(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Returns random blocks of Q4_K, to which gguf can't quantize; their values have mean 0 and a matrix's standard deviation."""
    kind = gguf.GGMLQuantizationType.Q4_K
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)

    def set_factors(blocks: np.ndarray, scale: float, minimum: float) -> None:
        """Writes the factors of the scales and of the minima, which stand first in a block."""
        blocks[:, :4] = np.array([scale, minimum], np.float16).view(np.uint8)

    def values(scale: float, minimum: float) -> np.ndarray:
        sample = data[:1024].copy()
        set_factors(sample, scale, minimum)
        return np.asarray(gguf.quants.dequantize(sample, kind))

    minimum = values(1, 0).mean() / -values(0, 1).mean()
    factor = 1 / (np.sqrt(np.float32(columns)) * values(1, minimum).std())
    set_factors(data, factor, minimum * factor)
    return data.reshape(rows, -1)
