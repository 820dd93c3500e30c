"""Random models for calls of llama.cpp, their caches, and the kernels derived for them."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import derived_kernels
import harness
import random_llama

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library

TYPES = {"f16": 1, "q8_0": 8}
"""ggml's numbers of the cache types."""

SMALL = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=2, n_ctx=4096)
WIDER = random_llama.Size(n_embd=128, n_head=4, n_head_kv=2, n_ff=192, n_layer=2, n_ctx=4096)


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights, and its cache.

    Attributes:
        name: the architecture's name.
        cache: the type of the cache.
        window: whether the cache has a sliding window, and drops positions outside of it.
        layers: the number of layers, unless test-llama-archs writes the model.
    """

    name: str
    cache: str = "f16"
    window: bool = False
    layers: int = 2

    def __str__(self) -> str:
        return f"{self.name}, {self.cache} cache"

    @property
    def key(self) -> str:
        """The model's name for -m."""
        return self.name if self.cache == "f16" else f"{self.name}-{self.cache}"

    @property
    def options(self) -> str:
        """The options of contexts.

        For few tokens, the CPU's flash attention accumulates the values of an F16 cache in F16, and its error at a
        depth of 2,000 exceeds the limit. Without flash attention it accumulates in F32. A quantized cache of values
        requires flash attention, which accumulates it in F32.
        """
        return f"type_k={TYPES[self.cache]} type_v={TYPES[self.cache]} cpu_flash_attn={int(self.cache != 'f16')}"

    def write(self, programs: harness.Programs, folder: Path) -> Path:
        """Writes the model's file and returns its path."""
        path = folder / f"{self.name}.gguf"
        if self.name == "llama":
            random_llama.write(path, size=replace(SMALL, n_layer=self.layers))
        elif self.name == "qwen3":
            size = replace(WIDER, n_layer=self.layers)
            random_llama.write(path, size=size, architecture="qwen3", tied=True)
        else:  # an architecture that test-llama-archs writes
            ((_, made),) = derived_kernels.save(programs, f"^{self.name}$", folder)
            made.rename(path)
        return path


MODELS = (
    RandomModel("llama"),
    RandomModel("qwen3"),
    RandomModel("llama", "q8_0"),
    RandomModel("gemma3", window=True),
)


def derive(
    programs: harness.Programs,
    model: RandomModel,
    file: Path,
    output: Path,
    *,
    n_tokens: Sequence[int],
    n_ctx: Sequence[int] | None,
    fuse: str = "none",
    weights: str = "none",
    more: Sequence[str] = (),
) -> harness.BuiltManifest:
    """Builds into `output` the kernels that `kernelgen model` derives for a few numbers of tokens.

    The call has `--fuse`, `--weights` and `more` arguments.

    Raises:
        RuntimeError: a kernel can't be derived or built.
    """
    output.mkdir(parents=True, exist_ok=True)
    written = output / "derived.yaml"
    arguments = ["model", file, "-o", written, "--n-ctx", ",".join(map(str, n_ctx)) if n_ctx else "any"]
    arguments += ["--n-tokens", ",".join(map(str, n_tokens)), "--n-ubatch", max(n_tokens)]
    arguments += ["--type-k-draft", model.cache, "--type-v-draft", model.cache]
    arguments += ["--type-k", model.cache, "--type-v", model.cache, "--flash-attn", "on", "--target", harness.target()]
    arguments += ["--fuse", fuse, "--weights", weights]
    arguments += ["--exporter", derived_kernels.exporter(), "--llama-cpp", programs.llama_cpp, *more]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.run(list(map(str, arguments)))
    if status:
        raise RuntimeError(said.getvalue())
    (request,) = manifest.load([written], Catalog([builtin_library()]))
    built = harness.build_request(request, output, say=lambda text: None)
    if built.failed or built.refused:
        raise RuntimeError(f"{model}: {built}")
    return built
