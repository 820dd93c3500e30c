"""The ready manifests: `kernelgen model` writes them from headers, which are built from models' hyperparameters.

The hyperparameters of published models are those in their config.json, under llama.cpp's names.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from published.header import GgufHeader, Tensor, Value, decoder

FOLDER = Path("manifests") / "models"
"""The folder of the manifests, relative to the project's root."""

FTYPES = ("F16", "Q4_K_M")

OPTIONS = ("--n-ctx", "any")
"""The options of all models: the command's defaults, with a few numbers of tokens that serve any number."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that `kernelgen model` writes.

    Attributes:
        path: the path, relative to the project's root.
        name: the manifest's name.
        model: a key of `MODELS`, or `SMALL`.
        ftype: the types of the weights, by llama-quantize's name.
        options: more options of the command.
    """

    path: Path
    name: str
    model: str
    ftype: str
    options: tuple[str, ...] = OPTIONS

    def header(self) -> GgufHeader:
        """Returns the header of the model's file."""
        return model_header(self.model)


DECODERS = {
    "Llama-3-8B": """llama n_embd=4096 n_head=32 n_head_kv=8 n_ff=14336 n_vocab=128256 n_layer=32 eps=1e-5
        freq_base=500000.0 context_length=8192""",
    "Llama-3.2-1B": """llama n_embd=2048 n_head=32 n_head_kv=8 n_ff=8192 n_vocab=128256 n_layer=16 rope_freqs tied eps=1e-5
        freq_base=500000.0 context_length=131072""",
    "Qwen2.5-7B": """qwen2 n_embd=3584 n_head=28 n_head_kv=4 n_ff=18944 n_vocab=152064 n_layer=28 qkv_bias
        context_length=32768""",
    "Qwen3-8B": """qwen3 n_embd=4096 n_head=32 n_head_kv=8 head=128 n_ff=12288 n_vocab=151936 n_layer=36 qk_norm
        context_length=40960""",
    "Gemma-2-2B": """gemma2 n_embd=2304 n_head=8 n_head_kv=4 head=256 n_ff=9216 n_vocab=256000 n_layer=26 post_norms tied
        freq_base=10000.0 context_length=8192 attention.sliding_window=4096 attn_logit_softcapping=50.0
        final_logit_softcapping=30.0""",
    "Gemma-3-4B": """gemma3 n_embd=2560 n_head=8 n_head_kv=4 head=256 n_ff=10240 n_vocab=262144 n_layer=34 qk_norm post_norms
        tied context_length=131072 attention.sliding_window=1024 rope.scaling.type=linear rope.scaling.factor=8.0""",
    "Mistral-7B-v0.3": """llama n_embd=4096 n_head=32 n_head_kv=8 n_ff=14336 n_vocab=32768 n_layer=32 eps=1e-5
        context_length=32768""",
    "Mixtral-8x7B": """llama n_embd=4096 n_head=32 n_head_kv=8 n_ff=14336 n_vocab=32000 n_layer=32 n_expert=8 eps=1e-5
        context_length=32768""",
    "Phi-3-mini-4k": """phi3 n_embd=3072 n_head=32 n_head_kv=32 n_ff=8192 n_vocab=32064 n_layer=32 fused eps=1e-5
        freq_base=10000.0 context_length=4096 rope.dimension_count=96 attention.sliding_window=2047""",
}
"""The architecture of each model, and the arguments of `decoder`; other names are keys of its header."""

_ARGUMENTS = frozenset(inspect.signature(decoder).parameters)


def _decoder(text: str) -> GgufHeader:
    architecture, *words = text.split()
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            values[name] = ast.literal_eval(value) if value else True
        except ValueError:
            values[name] = value
    fields = {name: value for name, value in values.items() if name not in _ARGUMENTS}
    return decoder(architecture, **{name: values[name] for name in values.keys() - fields.keys()}, fields=fields)


def _gpt_oss_20b() -> GgufHeader:
    n_embd, n_head, n_head_kv, head, n_ff, n_vocab, n_layer, n_expert = 2880, 64, 8, 64, 2880, 201088, 24, 32
    fields: dict[str, Value] = {
        "context_length": 131072,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "expert_feed_forward_length": n_ff,
        "expert_count": n_expert,
        "expert_used_count": 4,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.sliding_window": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "vocab_size": n_vocab,
        ".tokenizer.ggml.model": "no_vocab",
    }
    tensors = [
        Tensor("token_embd.weight", (n_embd, n_vocab), "f16"),
        Tensor("output_norm.weight", (n_embd,), "f32"),
        Tensor("output.weight", (n_embd, n_vocab), "f16"),
    ]
    for i in range(n_layer):
        block = f"blk.{i}"
        tensors += [Tensor(f"{block}.{name}.weight", (n_embd,), "f32") for name in ("attn_norm", "post_attention_norm")]
        for name, n_in, n_out in (
            ("attn_q", n_embd, n_head * head),
            ("attn_k", n_embd, n_head_kv * head),
            ("attn_v", n_embd, n_head_kv * head),
            ("attn_output", n_head * head, n_embd),
        ):
            tensors.append(Tensor(f"{block}.{name}.weight", (n_in, n_out), "f16"))
            tensors.append(Tensor(f"{block}.{name}.bias", (n_out,), "f32"))
        tensors.append(Tensor(f"{block}.attn_sinks.weight", (n_head,), "f32"))
        tensors.append(Tensor(f"{block}.ffn_gate_inp.weight", (n_embd, n_expert), "f32"))
        tensors.append(Tensor(f"{block}.ffn_gate_inp.bias", (n_expert,), "f32"))
        for name, n_in, n_out in (("ffn_gate", n_embd, n_ff), ("ffn_up", n_embd, n_ff), ("ffn_down", n_ff, n_embd)):
            tensors.append(Tensor(f"{block}.{name}_exps.weight", (n_in, n_out, n_expert), "f16"))
            tensors.append(Tensor(f"{block}.{name}_exps.bias", (n_out, n_expert), "f32"))
    return GgufHeader("gpt-oss", fields, tensors)


SMALL = "Small"
"""An unpublished llama with every kind of kernel that Llama-3-8B has, and a few of each."""


def _small() -> GgufHeader:
    return decoder(
        "llama", n_embd=64, n_head=4, n_head_kv=2, n_ff=64, n_vocab=64, eps=1e-5, freq_base=10000.0, context_length=256
    )


MODELS: Mapping[str, Callable[[], GgufHeader]] = MappingProxyType(
    {name: partial(_decoder, text) for name, text in DECODERS.items()} | {"gpt-oss-20b": _gpt_oss_20b}
)
"""The models by name."""

READY = ("Llama-3-8B", "Qwen3-8B", "Gemma-3-4B", "gpt-oss-20b")
"""The models with ready manifests: a plain Llama, norms of heads, windows, and experts with sinks."""


def model_header(model: str) -> GgufHeader:
    """Returns the header of a model's file: one of `MODELS`, or `SMALL`."""
    header = _small() if model == SMALL else MODELS[model]()
    header.fields[".general.name"] = model
    return header


def manifest_name(model: str, ftype: str) -> str:
    """Returns the name of a model's manifest: `qwen3_8b_q4_k_m`."""
    return f"{model}_{ftype}".lower().replace("-", "_").replace(".", "_")


_FEWER_TARGETS = tuple(part for target in ("trn1", "inf2", "trn2") for part in ("--target", target))

# Only kernels of single ops, so that they are few: tests wait for these builds, and a first build uses one of them.
_OPS = ("--fuse", "none")

# With and without flash attention, and each length of the cache separately.
_LENGTHS = ",".join(map(str, range(256, 4097, 256)))
_BOTH = ("--n-ctx", "any", "--n-tokens", "1,512", "--n-kv", _LENGTHS, "--flash-attn", "both")

DEVICES_FOLDER = Path("manifests") / "devices"
"""The folder of the manifests for tensors split over the cores of a chip, relative to the project's root."""


def _of_devices(devices: int, *targets: str) -> Manifest:
    """Returns the manifest of Llama-3-8B over the cores of one chip, in groups that the forecast chooses."""
    name = f"llama_3_8b_f16_{devices}_devices"
    split = ("--split-mode", "tensor", "--devices", str(devices), "--fuse", "auto")
    chosen = tuple(part for target in targets for part in ("--target", target))
    return Manifest(DEVICES_FOLDER / f"{name}.yaml", name, "Llama-3-8B", "F16", (*OPTIONS, *split, *chosen))


MANIFESTS = (
    # The first build in README.md.
    Manifest(Path("manifests/llama3.yaml"), "llama3", "Llama-3-8B", "F16", (*_BOTH, *_OPS, *_FEWER_TARGETS)),
    # Tests and quick benchmarks build this manifest instead.
    Manifest(
        Path("benchmarks/small.yaml"),
        "llama3",
        SMALL,
        "F16",
        ("--n-kv", "256", "--n-tokens", "16", "--flash-attn", "both", *_OPS, "--target", "trn1", "--target", "inf2"),
    ),
    *(
        Manifest(FOLDER / f"{manifest_name(model, ftype)}.yaml", manifest_name(model, ftype), model, ftype)
        for model in READY
        for ftype in FTYPES
    ),
    _of_devices(2, "trn1", "trn1n", "inf2"),
)
"""All ready manifests."""
