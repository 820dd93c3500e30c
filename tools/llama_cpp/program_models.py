"""Random models for llama.cpp's programs, and the files used with them: adapters, drafts, a projector and pictures."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gguf
import numpy as np
import random_llama
import random_projector

SIZE = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=4, n_ctx=1024)
WINDOWED = dataclasses.replace(SIZE, n_swa=32)
MODELS = {"llama": False, "qwen3": True}
"""The architectures, and whether the embedding is also the output matrix."""
STEADY = 0.03
"""The factor of each layer's contribution in models with drafts, small enough that drafts are accepted."""

ENCODERS: dict[str, Callable[[Path], None]] = {
    "bert": lambda path: random_llama.write_bert(path, SIZE),
    "bert-mean": lambda path: random_llama.write_bert(path, SIZE, pooling=gguf.PoolingType.MEAN),
    "reranker": lambda path: random_llama.write_bert(path, SIZE, rank=True),
    "t5": lambda path: random_llama.write_t5(path, SIZE, decoder=True),
}
"""Models with an encoder, and the functions that write them. Each has its own cases."""

FIRST, SECOND, CONTROL, STEADY_MODEL, DRAFT, MTP, EAGLE3, GEMMA4, GEMMA4_HEAD, PROJECTOR = (
    f"{{models}}/{name}.gguf"
    for name in (
        *("first-adapter", "second-adapter", "control", "steady", "draft", "mtp", "eagle3"),
        *("gemma4", "gemma4-head", "projector"),
    )
)
PICTURES = tuple(f"{{models}}/{name}.ppm" for name in ("first", "second"))


def named(argument: str, model: Path) -> str:
    """Returns an argument with `{models}` replaced by the folder of a model."""
    return argument.replace("{models}", str(model.parent))


def write_beside(model: Path, architecture: str) -> None:
    """Writes the files that programs use with a model: two adapters, a control vector, and models with drafts."""
    layers = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    random_llama.write_adapter(
        Path(named(FIRST, model)), SIZE, rank=8, targets=("attn_q", "attn_v"), architecture=architecture
    )
    random_llama.write_adapter(
        Path(named(SECOND, model)),
        SIZE,
        rank=4,
        targets=layers,
        weights=np.float32,
        seed=2,
        architecture=architecture,
    )
    random_llama.write_control_vector(Path(named(CONTROL, model)), SIZE, architecture=architecture)
    steady, draft, mtp, eagle3 = (Path(named(name, model)) for name in (STEADY_MODEL, DRAFT, MTP, EAGLE3))
    random_llama.write(steady, weights=np.float32, size=SIZE, architecture=architecture, added=STEADY)
    random_llama.write_shorter(draft, steady, n_layer=2)
    random_llama.write_glm4_moe(mtp, dataclasses.replace(SIZE, n_expert=4, n_expert_used=2), added=STEADY)
    random_llama.write_eagle3(eagle3, SIZE, (1, SIZE.n_layer // 2, SIZE.n_layer))
    gemma4, head = (Path(named(name, model)) for name in (GEMMA4, GEMMA4_HEAD))
    random_llama.write_gemma4(gemma4, WINDOWED, added=STEADY)
    random_llama.write_gemma4_head(head, gemma4, WINDOWED, added=STEADY)
    seen = random_projector.Size(n_out=SIZE.n_embd)
    random_projector.write(Path(named(PROJECTOR, model)), "gemma3", size=seen, weights=np.float32)
    for seed, picture in enumerate(PICTURES):
        Path(named(picture, model)).write_bytes(random_projector.picture(100, 80, seed=seed))
