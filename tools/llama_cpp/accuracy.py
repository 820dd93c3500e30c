"""Compares a quantized model on a simulated NeuronCore, and on llama.cpp's CPU backend, with the same weights in F32.

    ./bazelw run //tools/llama_cpp:accuracy -- MODEL.gguf TEXT [--windows 4]

The reference runs on the CPU: an F32 model with the dequantized weights of the file, and a cache in F32. So the
differences come from the rounding of products alone: kernels round weights and activations to bfloat16, or have weights
that were rounded at load; llama.cpp's CPU backend rounds activations to 8 bits. The program prints, over the tokens of
the second half of each window of the text:

- the perplexity;
- the mean Kullback-Leibler divergence of the next token's distribution from the reference's, in nats;
- the normalised mean squared error of the logits;
- the share of tokens whose likeliest next token is the reference's.

Two runs have layers as kernels and calls of whole windows: one with causal attention (`kernelgen model --causal`) and
one without. For these, the program also prints the error of one run's logits against the other's.

Exit status 1 if the device's divergence is larger than the CPU's. Weights in f8_e4m3_128x128 round further; their
divergence is printed, but does not count. Exit status 1 also if causal kernels were not launched, or if they differ
from the others.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kernelgen.ggml import weight_layouts

sys.path.insert(0, str(Path(__file__).parent))

import any_tokens
import harness
import numpy as np
import random_llama

WINDOW = 256
BATCH = 32
N_CTX = 256
F32_CACHE = "type_k=0 type_v=0 cpu_flash_attn=0"
F16_CACHE = "type_k=1 type_v=1"
CAUSAL_LIMIT = 1e-9
"""The limit of the normalised mean squared error of causal kernels' logits against others: the order of sums differs."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a run on the device.

    Attributes:
        weights: `--weights` of `kernelgen model`.
        batch: the tokens of a call.
        fuse: `--fuse`.
        more: other arguments.
    """

    weights: str = "none"
    batch: int = BATCH
    fuse: str = "none"
    more: tuple[str, ...] = ()


PLAIN, CAUSAL = "device, layers", "device, layers, causal"
CAUSAL_FROM_PLAIN = "causal layers, from the others"
_WHOLE = Kernels(batch=WINDOW, fuse="layer", more=("--n-kv", str(N_CTX), "--n-outputs", str(WINDOW // 2)))
DEVICE = {
    "device": Kernels(),
    "device, weights in planes": Kernels("planes"),
    "device, weights in bf16": Kernels("bf16"),
    "device, weights in f8_e4m3_128x128": Kernels(weight_layouts.F8_TILES),
    PLAIN: _WHOLE,
    CAUSAL: replace(_WHOLE, more=(*_WHOLE.more, "--causal")),
}
"""The runs on the device."""


@dataclass(frozen=True)
class Distance:
    """The distance of a run from the reference.

    Attributes:
        perplexity: the perplexity of the text.
        divergence: the mean Kullback-Leibler divergence, in nats.
        nmse: the normalised mean squared error of the logits.
        same: the share of tokens with the same likeliest next token.
    """

    perplexity: float
    divergence: float
    nmse: float
    same: float


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the probabilities, from logits: [rows, n_vocab] f64."""
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def distance(run: np.ndarray, reference: np.ndarray, perplexity: float, *, rows: int = 64) -> Distance:
    """Returns the distance of a run's logits, [tokens, n_vocab] f32, from the reference's; processes `rows` rows at a time."""
    divergence = error = size = same = 0.0
    for start in range(0, len(reference), rows):
        have, want = (x[start : start + rows].astype(np.float64) for x in (run, reference))
        p, q = log_softmax(want), log_softmax(have)
        divergence += float((np.exp(p) * (p - q)).sum())
        error += float(((have - want) ** 2).sum())
        size += float((want**2).sum())
        same += float((have.argmax(axis=1) == want.argmax(axis=1)).sum())
    return Distance(perplexity, divergence / len(reference), error / size, same / len(reference))


def script(windows: int, batch: int, options: str, device: Path, cpu: Path) -> Iterator[str]:
    """Yields the calls of llama-perplexity for windows of a text; each window is a sequence that begins elsewhere in the text."""
    yield f"context text n_ctx={N_CTX} n_batch={batch} n_ubatch={batch} n_seq_max={windows} kv_unified=1 {options}"
    yield f"logits {device} {cpu}"
    for seq in range(windows):
        for pos in range(0, WINDOW - 1, batch):
            yield f"decode {seq}:{pos}:{min(batch, WINDOW - 1 - pos)}:{WINDOW // 2}"
        yield f"forget {seq} 0 -1"


def measure(programs: harness.Programs, model: Path, text: str, windows: int, folder: Path) -> dict[str, Distance]:
    """Returns the distances of the runs "reference", "CPU" and those of `DEVICE` from the reference, and of `CAUSAL` from `PLAIN`.

    Raises:
        RuntimeError: kernels can't be derived or built, a program failed, or layers did not run in their kernels.
    """
    cache = any_tokens.RandomModel("model")
    kernels = {name: folder / f"kernels-{i}" for i, name in enumerate(DEVICE)}
    for name, of in DEVICE.items():
        numbers = (1, of.batch)
        any_tokens.derive(
            programs,
            cache,
            model,
            kernels[name],
            n_tokens=numbers,
            n_ctx=(N_CTX,),
            fuse=of.fuse,
            weights=of.weights,
            more=of.more,
        )
    exact = folder / "f32.gguf"
    random_llama.write_f32(exact, model)

    def run(
        file: Path, name: str, options: str, kernels: Path, batch: int = BATCH
    ) -> tuple[list[any_tokens.CallResult], list[Path], str]:
        files = [folder / f"{name}-{side}" for side in ("device", "cpu")]
        environment = programs.environment(kernels=kernels)
        scripts = [script(windows, batch, options, *files)]
        calls, log = any_tokens.run(programs, file, folder, scripts, environment, words=text)
        return calls, files, log

    def read(file: Path, calls: Sequence[any_tokens.CallResult]) -> np.ndarray:
        return np.memmap(file, np.float32, "r").reshape(sum(call.rows for call in calls), -1)

    def perplexity(calls: Sequence[any_tokens.CallResult], *, device: bool) -> float:
        nll = sum(call.nll if device else call.nll_cpu for call in calls)
        return math.exp(nll / sum(call.rows for call in calls))

    first, *_ = kernels.values()
    calls, (_, cpu), _ = run(exact, "reference", F32_CACHE, first)
    reference = read(cpu, calls)
    found = {"reference": distance(reference, reference, perplexity(calls, device=False))}
    made = {}
    for i, (name, of) in enumerate(DEVICE.items()):
        calls, (device, cpu), log = run(model, f"model-{i}", F16_CACHE, kernels[name], of.batch)
        on_cpu = sum((call.cpu for call in calls), start=type(calls[0].cpu)())
        if set(on_cpu) - {"GET_ROWS"}:
            raise RuntimeError(f"{name}: the CPU computed ops that are the device's: {dict(on_cpu)}")
        in_groups = re.search(r"(\d+) ops ran in groups", log)
        if of.fuse != "none" and int(in_groups[1] if in_groups else 0) < 0.9 * sum(call.device for call in calls):
            raise RuntimeError(f"{name}: layers were not computed by their kernels:\n{log[-1000:]}")
        made[name] = read(device, calls)
        found[name] = distance(made[name], reference, perplexity(calls, device=True))
        if name == "device":
            found["CPU"] = distance(read(cpu, calls), reference, perplexity(calls, device=False))
    found["CPU"] = found.pop("CPU")
    found[CAUSAL_FROM_PLAIN] = distance(made[CAUSAL], made[PLAIN], found[CAUSAL].perplexity)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file with quantized weights")
    parser.add_argument("text", type=Path, help="a text file with more tokens than the windows")
    parser.add_argument(
        "--windows", type=int, default=4, help=f"the number of windows of {WINDOW} tokens (default: %(default)s)"
    )
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
    judged = [name for name, of in DEVICE.items() if of.weights != weight_layouts.F8_TILES]
    further = [name for name in judged if found[name].divergence > found["CPU"].divergence]
    for name in further:
        print(f"WRONG: the {name} is further from F32 than the CPU is", file=sys.stderr)
    if differs := found[CAUSAL_FROM_PLAIN].nmse > CAUSAL_LIMIT:
        print(f"WRONG: logits of causal layers are further than {CAUSAL_LIMIT} from those of others", file=sys.stderr)
    return int(bool(further) or differs)


if __name__ == "__main__":
    sys.exit(main())
