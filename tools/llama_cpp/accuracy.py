"""How far a model on a simulated NeuronCore, and on llama.cpp's CPU backend, is from the same weights multiplied in F32.

    ./bazelw run //tools/llama_cpp:accuracy -- MODEL.gguf TEXT [--windows 4]

The reference is a model in F32 whose weights are those that the quantized file stands for, with a cache in F32, on the CPU. So what is
compared is the rounding of the products alone: kernels round weights and activations to bfloat16, or have weights that were rounded at
load, and llama.cpp's CPU backend rounds activations to 8 bits. Printed are, over the tokens of the second half of each window of the text:

- the perplexity;
- the mean Kullback-Leibler divergence of the next token's distribution from the reference's, in nats;
- the normalised mean squared error of the logits;
- the share of tokens of which the likeliest next token is the reference's.

Exit status 1 when the device's divergence is larger than the CPU's, except for weights in f8_e4m3_128x128, which rounds them further:
that divergence is printed and not judged.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.ggml import weight_layouts

sys.path.insert(0, str(Path(__file__).parent))

import any_tokens
import harness
import logits
import numpy as np

WINDOW = 256
BATCH = 32
N_CTX = 256
F32_CACHE = "type_k=0 type_v=0 cpu_flash_attn=0"
F16_CACHE = "type_k=1 type_v=1"
DEVICE = {
    "device": "none",
    "device, weights in bf16": "bf16",
    "device, weights in f8_e4m3_128x128": weight_layouts.F8_TILES,
}
"""What `--weights` of `kernelgen model` is for each run on the device."""


@dataclass(frozen=True)
class Distance:
    """Of a run from the reference.

    Attributes:
        perplexity: of the text.
        divergence: mean Kullback-Leibler divergence, in nats.
        nmse: normalised mean squared error of the logits.
        same: share of tokens with the same likeliest next one.
    """

    perplexity: float
    divergence: float
    nmse: float
    same: float


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Returns the logarithms of probabilities from logits: [rows, n_vocab] f64."""
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def distance(run: np.ndarray, reference: np.ndarray, perplexity: float, *, rows: int = 64) -> Distance:
    """Returns how far the logits of a run, [tokens, n_vocab] f32, are from the reference's; a few rows at a time."""
    divergence = error = size = same = 0.0
    for start in range(0, len(reference), rows):
        have, want = (x[start : start + rows].astype(np.float64) for x in (run, reference))
        p, q = log_softmax(want), log_softmax(have)
        divergence += float((np.exp(p) * (p - q)).sum())
        error += float(((have - want) ** 2).sum())
        size += float((want**2).sum())
        same += float((have.argmax(axis=1) == want.argmax(axis=1)).sum())
    return Distance(perplexity, divergence / len(reference), error / size, same / len(reference))


def script(windows: int, options: str, device: Path, cpu: Path) -> Iterator[str]:
    """Yields the calls of llama-perplexity for windows of a text, each a sequence that begins elsewhere in it."""
    yield f"context text n_ctx={N_CTX} n_batch={BATCH} n_ubatch={BATCH} n_seq_max={windows} kv_unified=1 {options}"
    yield f"logits {device} {cpu}"
    for seq in range(windows):
        for pos in range(0, WINDOW - 1, BATCH):
            yield f"decode {seq}:{pos}:{min(BATCH, WINDOW - 1 - pos)}:{WINDOW // 2}"
        yield f"forget {seq} 0 -1"


def measure(programs: harness.Programs, model: Path, text: str, windows: int, folder: Path) -> dict[str, Distance]:
    """Returns the distances of the runs "reference", "CPU" and of `DEVICE` from the reference.

    Raises:
        RuntimeError: kernels can't be derived or built, or a program failed.
    """
    cache = any_tokens.RandomModel("model")
    kernels = {name: folder / f"kernels-{layout}" for name, layout in DEVICE.items()}
    for name, layout in DEVICE.items():
        any_tokens.derive(programs, cache, model, kernels[name], n_tokens=(1, BATCH), n_ctx=(N_CTX,), weights=layout)
    exact = folder / "f32.gguf"
    logits.write_f32(model, exact)

    def run(
        file: Path, name: str, options: str, environment: dict[str, str]
    ) -> tuple[list[any_tokens.CallResult], list[Path]]:
        files = [folder / f"{name}-{side}" for side in ("device", "cpu")]
        calls, _ = any_tokens.run(programs, file, folder, [script(windows, options, *files)], environment, words=text)
        return calls, files

    def read(file: Path, calls: Sequence[any_tokens.CallResult]) -> np.ndarray:
        return np.memmap(file, np.float32, "r").reshape(sum(call.rows for call in calls), -1)

    def perplexity(calls: Sequence[any_tokens.CallResult], *, device: bool) -> float:
        nll = sum(call.nll if device else call.nll_cpu for call in calls)
        return math.exp(nll / sum(call.rows for call in calls))

    first, *_ = kernels.values()
    calls, (_, cpu) = run(exact, "reference", F32_CACHE, programs.environment(kernels=first))
    reference = read(cpu, calls)
    found = {"reference": distance(reference, reference, perplexity(calls, device=False))}
    for name in DEVICE:
        calls, (device, cpu) = run(model, "model", F16_CACHE, programs.environment(kernels=kernels[name]))
        on_cpu = sum((call.cpu for call in calls), start=type(calls[0].cpu)())
        if set(on_cpu) - {"GET_ROWS"}:
            raise RuntimeError(f"{name}: the CPU computed ops that are the device's: {dict(on_cpu)}")
        found[name] = distance(read(device, calls), reference, perplexity(calls, device=True))
    found["CPU"] = distance(read(cpu, calls), reference, perplexity(calls, device=False))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file with quantized weights")
    parser.add_argument("text", type=Path, help="a text that is longer than the windows")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    for file in (chosen.model, chosen.text):
        if not file.is_file():
            parser.error(f"{file} is not a file")
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(
                harness.Programs.find(),
                chosen.model.absolute(),
                chosen.text.read_text(),
                chosen.windows,
                Path(folder),
            )
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("| | perplexity | divergence | error of the logits | same likeliest token |\n|---|--:|--:|--:|--:|")
    for name, one in found.items():
        print(f"| {name} | {one.perplexity:.4f} | {one.divergence:.2e} | {one.nmse:.1e} | {one.same:.1%} |")
    judged = [name for name, layout in DEVICE.items() if layout != weight_layouts.F8_TILES]
    further = [name for name in judged if found[name].divergence > found["CPU"].divergence]
    for name in further:
        print(f"WRONG: the {name} is further from F32 than the CPU is", file=sys.stderr)
    return int(bool(further))


if __name__ == "__main__":
    sys.exit(main())
