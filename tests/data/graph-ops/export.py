"""Makes the graph exports in this folder: from a manifest's `model:` to a GGUF file to what llama.cpp itself asks for.

    python tests/data/graph-ops/export.py --exporter BUILD/bin/test-export-graph-ops tests/data/graph-ops/*.yaml

For every manifest and value of `flash_attn` writes `<name>.flash-attn.txt` or `<name>.no-flash-attn.txt` beside it. The model's
file is sparse: the tensors' sizes are real and their bytes are a hole, so that an 8B model takes a few KiB of disk. The exporter
comes from a llama.cpp build with `-DLLAMA_BUILD_TESTS=ON`, target `test-export-graph-ops`.

The GGUF file is written from the manifest's figures without kernelgen's llama family, so the two can't share a mistake.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import yaml


def write_model(model: dict[str, Any], path: Path) -> None:
    """Writes a GGUF file of a one-layer llama model with these hyperparameters (one layer per mix of weight types)."""
    n_embd, n_ff, n_vocab = model["embedding_length"], model["feed_forward_length"], model["vocab_size"]
    n_head = model["head_count"]
    n_head_kv = model.get("head_count_kv", n_head)
    head = model.get("key_length", n_embd // n_head)
    rope, scaling = model.get("rope", {}), model.get("rope", {}).get("scaling", {})
    weights = model.get("weights", "f16")

    def types(name: str) -> list[str]:
        value = weights if isinstance(weights, str) else weights.get(name, weights.get("default", "f16"))
        return value if isinstance(value, list) else [value]

    layers = max(len(types(n)) for n in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(n_vocab)
    writer.add_context_length(model["context_length"])
    writer.add_embedding_length(n_embd)
    writer.add_block_count(layers + 1)  # after the last layer's attention other rows go on than in the layers before
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(float(model["layer_norm_rms_epsilon"]))
    writer.add_rope_freq_base(float(rope.get("freq_base", 10000.0)))
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.get("type", "linear")))
        writer.add_rope_scaling_factor(float(scaling.get("factor", 1.0)))
        if "original_context_length" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_context_length"])
        if "attn_factor" in scaling:
            writer.add_rope_scaling_attn_factors(float(scaling["attn_factor"]))
    writer.add_tokenizer_model("none")

    def tensor(name: str, ne: tuple[int, ...], dtype: str) -> None:
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(ne))
        dims = (*reversed(ne[1:]), ne[0] // block * size) if kind.name not in ("F32", "F16") else ne[::-1]
        numpy_type = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
        writer.add_tensor_info(name, dims, np.dtype(numpy_type), count // block * size, raw_dtype=kind)

    tensor("token_embd.weight", (n_embd, n_vocab), types("token_embd")[0])
    tensor("output_norm.weight", (n_embd,), "f32")
    if isinstance(weights, str) or "output" in weights:
        tensor("output.weight", (n_embd, n_vocab), types("output")[0])
    if rope.get("freq_factors"):
        tensor("rope_freqs.weight", (head // 2,), "f32")
    shapes = {
        "attn_q": (n_embd, n_head * head),
        "attn_k": (n_embd, n_head_kv * head),
        "attn_v": (n_embd, n_head_kv * head),
        "attn_output": (n_head * head, n_embd),
        "ffn_gate": (n_embd, n_ff),
        "ffn_up": (n_embd, n_ff),
        "ffn_down": (n_ff, n_embd),
    }
    if model.get("fused_qkv"):
        shapes["attn_qkv"] = (n_embd, (n_head + 2 * n_head_kv) * head)
        for name in ("attn_q", "attn_k", "attn_v"):
            del shapes[name]
    biases = set(model.get("biases", ()))
    if model.get("fused_qkv") and "attn_q" in biases:
        biases.add("attn_qkv")
    for i in range(layers + 1):
        tensor(f"blk.{i}.attn_norm.weight", (n_embd,), "f32")
        tensor(f"blk.{i}.ffn_norm.weight", (n_embd,), "f32")
        for name, ne in shapes.items():
            mix = types("attn_q" if name == "attn_qkv" else name)
            tensor(f"blk.{i}.{name}.weight", ne, mix[i % len(mix)])
            if name in biases:
                tensor(f"blk.{i}.{name}.bias", ne[1:], "f32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    size = sum(
        -(-info.nbytes // writer.data_alignment) * writer.data_alignment
        for infos in writer.tensors
        for info in infos.values()
    )
    for file in writer.fout or ():
        file.flush()
        offset = -(-file.tell() // writer.data_alignment) * writer.data_alignment
        os.ftruncate(file.fileno(), offset + size)
    writer.close()


def export(exporter: Path, model: dict[str, Any], file: Path, flash: str, out: Path) -> None:
    """Runs the exporter; n_tokens' largest value is the physical batch."""
    tokens = model["n_tokens"]
    batch = max(tokens if isinstance(tokens, list) else [tokens])
    command = [exporter, "-m", file, "-o", out, "-fa", flash, "-c", model["n_ctx"], "-b", batch, "-ub", batch]
    command += ["-ctk", model.get("type_k", "f16"), "-ctv", model.get("type_v", "f16"), "-ot", "zzz=CPU"]
    command += ["-np", model.get("n_seq_max", 1)]
    for key, value in model.get("rope", {}).get("scaling", {}).items():
        if key in ("ext_factor", "beta_fast", "beta_slow"):
            command += [f"--yarn-{key.replace('_', '-')}", value]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{out}: {exporter} failed\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exporter", type=Path, required=True)
    parser.add_argument("manifests", type=Path, nargs="+")
    args = parser.parse_args()
    for path in args.manifests:
        manifest = yaml.safe_load(path.read_text(encoding="utf-8").replace("flash_attn: on", "flash_attn: 'on'"))
        model = manifest["model"]
        model = {key: float(v) if key == "layer_norm_rms_epsilon" else v for key, v in model.items()}
        setting = str(model.get("flash_attn", "both"))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            write_model(model, file)
            for flash in ("on", "off") if setting == "both" else (setting,):
                name = "flash-attn" if flash == "on" else "no-flash-attn"
                export(args.exporter, model, file, flash, path.with_name(f"{path.stem}.{name}.txt"))


if __name__ == "__main__":
    main()
