"""Writes small projectors with random weights, as GGUF files for llama.cpp's `--mmproj`: for images or for sound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

KINDS = ("gemma3", "gemma4v", "idefics3", "qwen2vl_merger", "ultravox")
"""llama.cpp's names of the projectors: for images of one size; for images of any size, with clamped activations; for
images that are cut into tiles of one size; for images of any size; for sound.
"""

CLAMP = 1.25
"""The bound of the inputs of a gemma4v's attention matrices; the bound of their outputs is twice as large."""

_STACKED = 4
"""The frames per token of sound: llama.cpp requires a divisor of 1,500."""


@dataclass(frozen=True)
class Size:
    """The sizes of a projector, by llama.cpp's names."""

    n_embd: int = 64
    n_head: int = 2
    n_ff: int = 128
    n_layer: int = 2
    n_out: int = 256
    """The elements of its output for each token."""
    image_size: int = 112
    patch_size: int = 14
    n_merge: int = 2
    """The patches of a token, along each side."""
    n_mel: int = 32
    """The elements of a frame of sound."""


def write(
    path: Path,
    kind: str,
    *,
    seed: int = 1,
    size: Size = Size(),
    weights: type[np.floating] | gguf.GGMLQuantizationType = np.float16,
) -> None:
    """Writes a projector; the same seed gives the same bytes.

    Args:
        path: the file.
        kind: one of `KINDS`.
        seed: the seed of the weights.
        size: its sizes.
        weights: the type of its layers' matrices: F16, F32 or Q8_0.
    """
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name("random")
    writer.add_string("clip.projector_type", kind)
    sound = kind == "ultravox"
    side = "audio" if sound else "vision"
    writer.add_bool(f"clip.has_{side}_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for key, value in (
        ("embedding_length", size.n_embd),
        ("attention.head_count", size.n_head),
        ("feed_forward_length", size.n_ff),
        ("block_count", size.n_layer),
        ("projection_dim", size.n_out),
    ):
        writer.add_uint32(f"clip.{side}.{key}", value)
    writer.add_float32(f"clip.{side}.attention.layer_norm_epsilon", 1e-6)
    tensors = _Tensors(writer, np.random.default_rng(seed), weights)
    if sound:
        writer.add_uint32("clip.audio.num_mel_bins", size.n_mel)
        writer.add_uint32("clip.audio.projector.stack_factor", _STACKED)
    else:
        writer.add_uint32("clip.vision.image_size", size.image_size)
        writer.add_uint32("clip.vision.patch_size", size.patch_size)
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
        writer.add_uint32("clip.vision.projector.scale_factor", size.n_merge)
        if kind == "idefics3":
            writer.add_uint32("clip.vision.preproc_image_size", 4 * size.image_size)
        for i in range(2 if kind == "qwen2vl_merger" else 1):
            tensors.f16(f"v.patch_embd.weight{f'.{i}' if i else ''}", size.n_embd, 3, size.patch_size, size.patch_size)
    _layers(tensors, "a" if sound else "v", size, kind)
    merged = size.n_embd * size.n_merge**2
    if kind == "gemma4v":
        tensors.matrix("mm.input_projection.weight", size.n_out, size.n_embd)
    elif kind == "gemma3":
        tensors.f16("mm.input_projection.weight", size.n_embd, size.n_out)
        tensors.norm("mm.soft_emb_norm.weight", size.n_embd)
    elif kind == "idefics3":
        tensors.matrix("mm.model.fc.weight", size.n_out, merged)
    elif kind == "qwen2vl_merger":
        tensors.layer("mm.0", merged, merged)
        tensors.layer("mm.2", size.n_out, merged)
    else:
        stacked = _STACKED * size.n_embd
        tensors.f16("a.conv1d.1.weight", size.n_embd, size.n_mel, 3)
        tensors.bias("a.conv1d.1.bias", 1, size.n_embd)
        tensors.f16("a.conv1d.2.weight", size.n_embd, size.n_embd, 3)
        tensors.bias("a.conv1d.2.bias", 1, size.n_embd)
        tensors.norm("mm.a.norm_pre.weight", stacked)
        tensors.matrix("mm.a.mlp.1.weight", 2 * size.n_ff, stacked)
        tensors.norm("mm.a.norm_mid.weight", size.n_ff)
        tensors.matrix("mm.a.mlp.2.weight", size.n_out, size.n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def picture(width: int, height: int, *, seed: int = 1) -> bytes:
    """Returns a picture of random colours, as a PPM file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return f"P6\n{width} {height}\n255\n".encode() + pixels.tobytes()


def _layers(tensors: _Tensors, prefix: str, size: Size, kind: str) -> None:
    """Adds the tensors that all kinds have: positions, layers of attention and a feed-forward network, and the last norm."""
    if kind == "ultravox":
        tensors.bias(f"{prefix}.position_embd.weight", 1500, size.n_embd)
    elif kind == "gemma4v":
        tensors.bias(f"{prefix}.position_embd.weight", 2, 256, size.n_embd)
    elif kind != "qwen2vl_merger":
        tensors.bias(f"{prefix}.position_embd.weight", (size.image_size // size.patch_size) ** 2, size.n_embd)
    for i in range(size.n_layer):
        block = f"{prefix}.blk.{i}"
        for part in ("q", "k", "v", "out"):
            tensors.matrix(f"{block}.attn_{part}.weight", size.n_embd, size.n_embd)
            if kind == "gemma4v":
                tensors.clamps(f"{block}.attn_{part}")
            elif kind != "ultravox" or part != "k":
                tensors.bias(f"{block}.attn_{part}.bias", size.n_embd)
        tensors.layer(f"{block}.ffn_up", size.n_ff, size.n_embd)
        tensors.layer(f"{block}.ffn_down", size.n_embd, size.n_ff)
        for norm in ("ln1", "ln2"):
            tensors.norm(f"{block}.{norm}.weight", size.n_embd)
            if kind != "gemma4v":
                tensors.bias(f"{block}.{norm}.bias", size.n_embd)
    if kind != "gemma4v":
        tensors.norm(f"{prefix}.post_ln.weight", size.n_embd)
        tensors.bias(f"{prefix}.post_ln.bias", size.n_embd)


@dataclass(frozen=True)
class _Tensors:
    """Adds tensors of random weights."""

    writer: gguf.GGUFWriter
    random: np.random.Generator
    weights: type[np.floating] | gguf.GGMLQuantizationType

    def _values(self, *shape: int) -> np.ndarray:
        values: np.ndarray = self.random.standard_normal(shape, dtype=np.float32)
        return values / np.sqrt(np.float32(np.prod(shape[1:]) or 1))

    def matrix(self, name: str, *shape: int) -> None:
        values = self._values(*shape)
        if isinstance(self.weights, gguf.GGMLQuantizationType):
            self.writer.add_tensor(name, gguf.quants.quantize(values, self.weights), raw_dtype=self.weights)
        else:
            self.writer.add_tensor(name, values.astype(self.weights))

    def f16(self, name: str, *shape: int) -> None:
        self.writer.add_tensor(name, self._values(*shape).astype(np.float16))

    def layer(self, name: str, *shape: int) -> None:
        self.matrix(f"{name}.weight", *shape)
        self.bias(f"{name}.bias", shape[0])

    def bias(self, name: str, *shape: int) -> None:
        values: np.ndarray = 0.1 * self.random.standard_normal(shape, dtype=np.float32)
        # a single column in the file, as a convolution requires
        self.writer.add_tensor(name, values.reshape(-1, 1) if shape[0] == 1 else values)

    def clamps(self, name: str) -> None:
        """Adds the bounds of a matrix's input and output; random values exceed them."""
        for side, most in (("input", CLAMP), ("output", 2 * CLAMP)):
            self.writer.add_tensor(f"{name}.{side}_max", np.array([most], np.float32))
            self.writer.add_tensor(f"{name}.{side}_min", np.array([-most], np.float32))

    def norm(self, name: str, n: int) -> None:
        self.writer.add_tensor(name, 1 + 0.1 * self.random.standard_normal(n, dtype=np.float32))
