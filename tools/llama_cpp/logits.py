"""Prints a model's likeliest next tokens after a prompt: on a NeuronCore, on llama.cpp's CPU backend, and with F32 weights.

    python tools/llama_cpp/logits.py model.gguf --prompt "Hi-and-" --plugin libggml-neuron.so --kernels kernels --llama-cpp build/bin

Greedy texts of two backends differ if two tokens are nearly equally likely, or if one backend is wrong. The F32
reference on the CPU shows which. The program prints the likeliest tokens after each token of the prompt, with their
logits, and each run's normalised mean squared error against the reference. llama.cpp's CPU backend rounds the
activations that it multiplies with quantized weights to 8 bits; kernels round them to bfloat16. The prompt is computed
one token at a time, as in text generation; llama-results requires a multiple of four tokens. libnrt, or the simulator,
is found as the backend finds it (docs/reference/environment.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np


def write_f32(model: Path, path: Path) -> None:
    """Writes a model with all weights in F32."""
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    left_out = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in left_out:
            of = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(llama_cpp: Path, model: Path, prompt: str, *options: str, **variables: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompt's tokens, and the logits after each token, as float64[n_tokens, n_vocab].

    Raises:
        RuntimeError: llama-results failed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "GGML_BACKEND_PATH"}
    environment |= {"LD_LIBRARY_PATH": str(llama_cpp), **variables}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.gguf")
        command: list[str | Path] = [llama_cpp / "llama-results", "-m", model, "-o", output, "-p", prompt]
        command += ["-c", "256", "-ub", "1", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            raise RuntimeError(f"llama-results ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        found = {t.name: np.array(t.data) for t in gguf.GGUFReader(output).tensors}
    tokens = found["tokens"].view(np.int32).ravel()
    return tokens, found["logits"].reshape(len(tokens), -1).astype(np.float64)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", required=True, help="the prompt; its number of tokens must be a multiple of four")
    parser.add_argument("--plugin", type=Path, required=True, help="libggml-neuron.so")
    parser.add_argument(
        "--kernels", type=Path, required=True, help="a folder with kernels of the model, for caches of 256 cells"
    )
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the folder with llama.cpp's programs")
    parser.add_argument("--top", type=int, default=4, help="the number of tokens to print at each position")
    chosen = parser.parse_args(arguments)
    llama_cpp = chosen.llama_cpp.absolute()
    device = {"GGML_BACKEND_PATH": str(chosen.plugin.absolute()), "GGML_NEURON_KERNEL_DIR": str(chosen.kernels)}
    words = gguf.GGUFReader(chosen.model).fields["tokenizer.ggml.tokens"].contents()
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_f32(chosen.model, Path(folder, "f32.gguf"))
            cache = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
            tokens, reference = logits(llama_cpp, Path(folder, "f32.gguf"), chosen.prompt, "-ngl", "0", *cache)
        runs = {
            "F32": reference,
            "device": logits(llama_cpp, chosen.model, chosen.prompt, "-ngl", "99", **device)[1],
            "CPU": logits(llama_cpp, chosen.model, chosen.prompt, "-ngl", "0")[1],
        }
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for i in range(len(tokens)):
        print("after " + " ".join(repr(words[t]) for t in tokens[: i + 1]))
        for name, values in runs.items():
            distance = np.sum((values[i] - reference[i]) ** 2) / np.sum(reference[i] ** 2)
            likeliest = np.argsort(-values[i])[: chosen.top]
            said = "  ".join(f"{words[t]!r} {values[i][t]:.3f}" for t in likeliest)
            print(f"  {name:<6}  {distance:.1e}  {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
