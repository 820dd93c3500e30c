"""Writes the files in this folder: for each model, llama.cpp's own export of its ops, and the manifest from `kernelgen
model`.

  PYTHONPATH=tools python tests/data/graph-ops/export.py --exporter PROGRAM --llama-cpp FOLDER

llama.cpp's `test-export-graph-ops` writes `<name>.flash-attn.txt` with flash attention and `<name>.no-flash-attn.txt`
without it; `kernelgen model` writes `<name>.yaml`. FOLDER has the former program and llama.cpp's libraries, PROGRAM is
export-graphs. A model's file is sparse: the tensors' sizes are real and their bytes are a hole, so an 8B model takes a
few KiB of disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen import cli
from published.header import GgufHeader, Tensor, decoder, write

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A model, and the settings with which it runs.

    Attributes:
        header: the header of its file.
        n_ctx, n_tokens, n_seq_max: as in `kernelgen model`; the largest of `n_tokens` is llama.cpp's -ub.
        cache: type of both caches.
        flash_attn: the values of this setting.
        manifest: whether the manifest is in this folder; if not, it is in manifests/.
    """

    header: GgufHeader
    n_ctx: int
    n_tokens: Sequence[int]
    n_seq_max: int = 1
    cache: str = "f16"
    flash_attn: Sequence[str] = ("on", "off")
    manifest: bool = True

    def options(self) -> list[str]:
        """Returns the options of `kernelgen model`."""
        found = ["--n-ctx", str(self.n_ctx), "--n-tokens", ",".join(map(str, self.n_tokens))]
        found += ["--n-seq-max", str(self.n_seq_max), "--type-k", self.cache, "--type-v", self.cache]
        return [*found, "--flash-attn", "both" if len(self.flash_attn) > 1 else self.flash_attn[0]]


def retyped(header: GgufHeader, types: Mapping[str, Sequence[str]]) -> GgufHeader:
    """Returns a header with other types of weights, by name without `blk.N.` and `.weight`; layers use the types in turn."""

    def change(tensor: Tensor) -> Tensor:
        parts = tensor.name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" else 0
        mix = types.get(parts[-2]) if parts[-1] == "weight" else None
        return dataclasses.replace(tensor, dtype=mix[layer % len(mix)]) if mix else tensor

    return dataclasses.replace(header, tensors=[change(t) for t in header.tensors])


def biased(header: GgufHeader, names: Sequence[str]) -> GgufHeader:
    """Returns a header with a bias for these weights of each layer."""
    more = [
        Tensor(t.name.replace(".weight", ".bias"), t.ne[1:], "f32")
        for t in header.tensors
        if t.name.split(".")[-2] in names
    ]
    return dataclasses.replace(header, tensors=[*header.tensors, *more])


def _llama3() -> GgufHeader:
    return decoder(
        "llama", n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, n_vocab=128256, eps=1e-5, freq_base=500000.0
    )


def _fused_qkv_biases() -> GgufHeader:
    """One matrix for Q, K and V, so they are strided views; biases; heads wider than n_embd / n_head."""
    header = decoder(
        "llama",
        n_embd=1024,
        n_head=12,
        n_head_kv=4,
        head=96,
        n_ff=2816,
        n_vocab=32001,
        types=("f32",),
        freq_base=10000.0,
        context_length=4096,
        fields={"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    )
    q, kv = 12 * 96, 4 * 96
    tensors = [t for t in header.tensors if t.name.split(".")[-2] not in ("attn_q", "attn_k", "attn_v")]
    tensors += [Tensor(f"blk.{i}.attn_qkv.weight", (1024, q + 2 * kv), "f32") for i in range(2)]
    return biased(dataclasses.replace(header, tensors=tensors), ("attn_qkv", "attn_output", "ffn_down"))


def _llama_2_7b_yarn() -> GgufHeader:
    """Each query head has its own key head; YaRN."""
    return decoder(
        "llama",
        n_embd=4096,
        n_head=32,
        n_head_kv=32,
        n_ff=11008,
        n_vocab=32000,
        eps=1e-5,
        freq_base=10000.0,
        context_length=65536,
        fields={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 4096,
        },
    )


def _llama_3_2_1b() -> GgufHeader:
    """The embedding is also the output matrix, and ROPE has frequency factors."""
    header = decoder(
        "llama",
        n_embd=2048,
        n_head=32,
        n_head_kv=8,
        n_ff=8192,
        n_vocab=128256,
        types=("bf16",),
        rope_freqs=True,
        tied=True,
        eps=1e-5,
        freq_base=500000.0,
        context_length=131072,
    )
    return retyped(header, {"token_embd": ("q8_0",)})


def _mistral_7b() -> GgufHeader:
    """The types of Q4_K_M; the tensors that may have two types have them in turn."""
    header = decoder(
        "llama",
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        n_ff=14336,
        n_vocab=32000,
        n_layer=3,
        types=("q4_K",),
        eps=1e-5,
        context_length=32768,
    )
    mix = ("q4_K", "q6_K")
    return retyped(header, {"attn_v": mix, "ffn_down": mix, "output": ("q6_K",)})


CASES: Mapping[str, Case] = {
    "llama3-8b-f16": Case(_llama3(), 4096, (1, 512), manifest=False),
    "fused-qkv-biases": Case(_fused_qkv_biases(), 300, (1, 200), cache="f32"),
    # With a quantized cache, llama.cpp first rotates Q, K and V.
    "llama-2-7b-yarn-q8_0-cache": Case(_llama_2_7b_yarn(), 512, (1, 128), cache="q8_0", flash_attn=("on",)),
    "llama-3.2-1b": Case(_llama_3_2_1b(), 2048, (1, 512)),
    # Two sequences with a cache each, and a context that is not a multiple of 256.
    "mistral-7b-q4_k_m": Case(_mistral_7b(), 1000, (2, 64), n_seq_max=2),
}
"""The models by the beginning of their files' names."""


def export(case: Case, file: Path, flash: str, libraries: Path, out: Path) -> None:
    """Writes test-export-graph-ops's export of a model's file to `out`."""
    batch = max(case.n_tokens)
    command = [libraries / "test-export-graph-ops", "-m", file, "-o", out, "-fa", flash, "-c", case.n_ctx]
    command += [
        "-b",
        batch,
        "-ub",
        batch,
        "-ctk",
        case.cache,
        "-ctv",
        case.cache,
        "-ot",
        "zzz=CPU",
        "-np",
        case.n_seq_max,
    ]
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{out.name}: test-export-graph-ops failed\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def derive(name: str, file: Path, arguments: Sequence[str], out: Path) -> None:
    """Writes the manifest of a model's file to `out`."""
    called = name.replace("-", "_").replace(".", "_")
    options = [
        *CASES[name].options(),
        "--name",
        called,
        "--target",
        "trn1",
        "--fuse",
        "none",
        "--weights",
        "none",
        *arguments,
    ]
    if cli.run(["model", str(file), "-o", str(out), *options]):
        raise SystemExit(f"{out.name} is not written")


def files(name: str, program: Path, libraries: Path, folder: Path) -> Iterator[Path]:
    """Writes a case's files into `folder`; yields each."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        file = write(case.header, Path(scratch) / f"{name}.gguf", sparse=True)
        for flash in case.flash_attn:
            out = folder / f"{name}.{'flash-attn' if flash == 'on' else 'no-flash-attn'}.txt"
            export(case, file, flash, libraries, out)
            yield out
        if case.manifest:
            out = folder / f"{name}.yaml"
            derive(name, file, [f"--exporter={program}", f"--llama-cpp={libraries}"], out)
            yield out


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exporter", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    args = parser.parse_args()
    for name in CASES:
        for file in files(name, args.exporter.absolute(), args.llama_cpp.absolute(), HERE):
            print(file.name)


if __name__ == "__main__":
    main()
