"""A token of a small model with groups of nodes in one launch, and without: `./bazelw run //benchmarks:groups`.

The model is a Llama of three layers with random weights; llama-bench generates with it on the simulator, whose launches take 0, 13
and 180 µs besides, as on a device at best and as they take with a current runtime. The same run measures llama.cpp's CPU backend.
The simulator's own time per launch is in every figure: only the difference that the launches make means something.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Links, where Bazel runs this: beside them is what it built. Python is started without this folder in its path.
sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "tools" / "llama_cpp"))
sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "benchmarks"))

import random_llama

import figures
from derive import Programs

ROOT = Path(__file__).absolute().parent.parent

KERNELGEN = (sys.executable, "-m", "kernelgen")
LAUNCH_US = (0, 13, 180)
N_TOKENS = 32
ROUNDS = 3


def _path(variable: str, built: str) -> Path:
    """Returns what a variable names, or what Bazel built."""
    found = Path(os.environ.get(variable, ROOT / built)).absolute()
    if not found.exists():
        raise SystemExit(f"{found} is not there; run this as ./bazelw run //benchmarks:groups")
    return found


def token_ms(programs: Programs, model: Path, quick: bool, **variables: str | Path) -> float:
    """Returns the milliseconds that a generated token takes."""
    llama = programs.libraries
    command = [llama / "llama-bench", "-m", model, "-p", "0", "-n", str(8 if quick else N_TOKENS), "-o", "json"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(llama)} | {k: str(v) for k, v in variables.items()}
    said = subprocess.run(
        [*map(str, command), "-r", str(1 if quick else ROUNDS), "-fa", "1", "-t", str(len(os.sched_getaffinity(0)))],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    (result,) = json.loads(said)
    return float(result["avg_ns"]) / result["n_gen"] / 1e6


def build(programs: Programs, model: Path, manifest: Path, kernels: Path, n_tokens: str = "1,2") -> None:
    """Builds the kernels of a model, layers and nodes, for the simulator; the manifest is left beside them."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    sizes = ["--n-ctx=256", f"--n-tokens={n_tokens}", "--flash-attn=on", "--fuse=layer", "--target=trn1"]

    def kernelgen(*arguments: str | Path) -> None:
        subprocess.run([*KERNELGEN, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)

    kernelgen("model", model, "-o", manifest, *sizes, *programs.options())
    kernelgen("build", manifest, "--compiler=simulator", "-o", kernels)


def device(kernels: Path, cache: Path) -> dict[str, str | Path]:
    """Returns the variables with which a program uses kernels on the simulator; XLA's results are kept in `cache`."""
    cache.mkdir(mode=0o700, exist_ok=True)
    return {
        "GGML_BACKEND_PATH": _path("GGML_NEURON_PLUGIN", "backend/ggml-neuron/test_programs/libggml-neuron.so"),
        "GGML_NEURON_LIBNRT": _path("GGML_NEURON_LIBNRT", "backend/simulator/libnrt.so.1"),
        "GGML_NEURON_KERNEL_DIR": kernels,
        "NEURON_RT_NUM_CORES": "1",
        "NEURON_SIMULATOR_PYTHON": sys.executable,
        "NEURON_SIMULATOR_PATH": ROOT / "tools",
        "NEURON_SIMULATOR_CACHE": cache,
    }


def measure(quick: bool) -> Iterator[figures.Figure]:
    programs = Programs.find()
    with tempfile.TemporaryDirectory() as folder:
        model, manifest, kernels = (Path(folder) / name for name in ("model.gguf", "model.yaml", "kernels"))
        random_llama.write(model)
        build(programs, model, manifest, kernels)
        variables = device(kernels, Path(folder) / "cache")
        for launch_us in LAUNCH_US:
            fused, unfused = (
                token_ms(
                    programs,
                    model,
                    quick,
                    NEURON_SIMULATOR_LAUNCH_US=str(launch_us),
                    GGML_NEURON_FUSION=on,
                    **variables,
                )
                for on in ("1", "0")
            )
            yield figures.Figure(
                f"a token with groups, a launch taking {launch_us} µs more",
                fused,
                "ms",
                peer=figures.Peer("without groups", unfused),
                direction="peer / value",
            )
        cpu = token_ms(programs, model, quick)
        yield figures.Figure("a token on llama.cpp's CPU backend", cpu, "ms")


def main() -> int:
    args = figures.arguments(__doc__).parse_args()
    return figures.report(args, lambda: measure(args.quick))


if __name__ == "__main__":
    sys.exit(main())
