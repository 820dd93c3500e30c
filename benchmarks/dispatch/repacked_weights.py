"""Compares loading weights that were repacked before with repacking them at load, in ms.

    ./bazelw run //benchmarks/dispatch:repacked_weights

For each type and layout, the model has four matrices of 4096 x 4096, and is mapped as llama.cpp maps a model. The
backend's test program `layouts` sets the matrices alternately by their names in the file and by other names. The least
time of several turns counts, with as many threads as processors. Both files are in the page cache. The libnrt only
copies the written data.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

import figures
from backend_programs import KERNELGEN, built, environment
from kernelgen.ggml.types import TYPES

CASES = (
    ("q8_0", "bf16"),
    ("q4_K", "bf16"),
    ("q6_K", "bf16"),
    ("iq2_xs", "bf16"),
    ("q4_K", "planes"),
    ("f16", "transposed"),
    ("q4_K", "f8_e4m3_128x128"),
)
SIZE = 4096
MATRICES = 4


def write_model(path: Path, dtype: str, size: int) -> None:
    """Writes a model of several matrices of noise, with finite scales."""
    kind = TYPES[dtype]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for number in range(MATRICES):
        data = random.integers(0, 0x40, (size, size // kind.block * kind.size), np.uint8)
        writer.add_tensor(f"blk.{number}.weight", data, raw_dtype=gguf.GGMLQuantizationType(kind.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(quick: bool) -> Iterator[figures.Figure]:
    size = 512 if quick else SIZE
    programs = built("backend/ggml-neuron/test_programs", "GGML_NEURON_TEST_PROGRAMS")
    libraries = built("tools/llama_cpp/llama_cpp", "LLAMA_CPP_PROGRAMS")
    layouts, plugin, noop = (next(programs.rglob(name)) for name in ("layouts", "libggml-neuron.so", "libnrt-noop.so"))
    for dtype, layout in CASES[:1] if quick else CASES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model, file = folder / "model.gguf", folder / "repacked.gguf"
            write_model(model, dtype, size)
            (folder / "kernels.yaml").write_text(
                f"format: 1\nname: kernels\ntargets: [trn1]\nweights: [{layout}]\nkernels:\n"
                f'  - {{op: mul_mat, inputs: ["({size},{size},1,1)/{dtype}", "({size},1,1,1)/f32"], '
                f'output: "({size},1,1,1)/f32"}}\n'
            )
            for words in (
                ("build", folder / "kernels.yaml", "--compiler", "simulator", "-o", folder / "kernels"),
                ("repack", model, folder / "kernels", "-o", file),
            ):
                subprocess.run([*KERNELGEN, *map(str, words)], check=True, env=environment(), capture_output=True)
            done = subprocess.run(
                [layouts, plugin, libraries, f"timed:{dtype}:{layout}"],
                check=True,
                env=environment(
                    LD_LIBRARY_PATH=str(libraries),
                    GGML_NEURON_LIBNRT=str(noop),
                    GGML_NEURON_KERNEL_DIR=str(folder / "kernels"),
                    GGML_NEURON_REPACKED=str(file),
                    LAYOUTS_MODEL=str(model),
                ),
                capture_output=True,
                text=True,
            )
            found = re.search("^ms: (.*) (.*)$", done.stdout, re.MULTILINE)
            if not found or f"timed:{dtype}:{layout}: ok" not in done.stdout:
                raise SystemExit(done.stdout + done.stderr)
            read, repacked = map(float, found.groups())
            sizes = f"{model.stat().st_size >> 20} MiB as {file.stat().st_size >> 20}"
            yield figures.Figure(
                f"{dtype} in {layout}, read; {sizes}, {len(os.sched_getaffinity(0))} threads",
                read,
                "ms",
                peer=figures.Peer("repacked at load", repacked),
                direction="peer / value",
            )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
