"""Embeddings of images and sound that llama.cpp's mtmd makes on the simulated NeuronCore: results are the CPU's, and no
op runs on the CPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import calls
import gguf
import harness
import numpy as np
import pytest
import random_llama
import random_projector

SIZE = random_projector.Size(n_layer=3)
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def derive(programs: harness.Programs, folder: Path, kind: str, *more: object, weights: object = np.float16) -> str:
    """Writes a random projector, and builds the kernels that `kernelgen model` derives; returns the manifest."""
    projector, manifest = folder / "projector.gguf", folder / "projector.yaml"
    random_projector.write(projector, kind, size=SIZE, weights=weights)
    harness.write_manifest(programs, manifest, "--mmproj", projector, *more)
    harness.build_manifest(manifest, folder / "kernels")
    return manifest.read_text()


def encode(programs: harness.Programs, folder: Path, *media: str) -> tuple[list[str], int, str, str]:
    """Makes embeddings on the device and on the CPU, and checks that they agree.

    Returns:
        the calls of the projector with their numbers of chunks and tokens, the device's ops of all graphs, the CPU's
        ops, and the backend's log.
    """
    random_llama.write(folder / "model.gguf", size=random_llama.Size(n_embd=SIZE.n_out, n_layer=1))
    program = harness.built("LLAMA_MEDIA", "media/media/media")
    variables = {"LD_LIBRARY_PATH": str(programs.llama_cpp), "GGML_SCHED_DEBUG": "2", "OMP_THREAD_LIMIT": "1"}
    environment = programs.environment(kernels=folder / "kernels", log=True) | variables
    command = [program, programs.llama_cpp, folder / "model.gguf", folder / "projector.gguf", *media]
    done = harness.run(command, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout, *re.findall(r"^ggml-neuron: .*ran.*$", done.stderr, re.MULTILINE), sep="\n")
    found = re.findall(r"^(\S+ chunks=\d+ tokens=\d+) nmse=(\S+)$", done.stdout, re.MULTILINE)
    assert max(float(nmse) for _, nmse in found) < calls.LIMIT_CPU
    ((device, ops, cpu),) = re.findall(r"^chosen=(\S*) device=(\d+) cpu=(\S+)$", done.stdout, re.MULTILINE)
    assert device.startswith("NEURON") and int(ops) > 0
    return [call for call, _ in found], int(ops), cpu, done.stderr


@pytest.mark.parametrize(
    ("kind", "options", "medium", "expected"),
    [
        ("gemma3", (), "100x80", ["100x80 chunks=1 tokens=16"]),
        # an image that is cut into 4 times 3 parts, and the whole image
        pytest.param("idefics3", (), "300x200", ["300x200 chunks=1 tokens=16"] * 13, marks=pytest.mark.long),
        # images of any size; gemma4v clamps its activations
        *(
            pytest.param(
                kind, ("--image-size", "300x200"), "300x200", ["300x200 chunks=1 tokens=77"], marks=pytest.mark.long
            )
            for kind in ("qwen2vl_merger", "gemma4v")
        ),
        # more than 30 seconds of sound: each piece is a call
        pytest.param("ultravox", (), "496000", ["496000 chunks=1 tokens=375"] * 2, marks=pytest.mark.long),
    ],
)
def test_media_of_each_kind(
    programs: harness.Programs, tmp_path: Path, kind: str, options: tuple[str, ...], medium: str, expected: list[str]
) -> None:
    """All calls run on the device. A projector for images of one size has one launch per layer, one before the first and
    one after the last.
    """
    derive(programs, tmp_path, kind, *options)
    found, ops, cpu, log = encode(programs, tmp_path, medium)
    assert found == expected
    assert cpu == "none"
    assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in log
    if kind == "gemma3":
        ran = harness.ran(log)
        assert 2 * ran.grouped == ops, "what the warm-up asks for is not run"
        assert ran.launches == SIZE.n_layer + 2


@pytest.mark.long
def test_images_of_a_size_that_is_not_named(programs: harness.Programs, tmp_path: Path) -> None:
    """The CPU computes the ops without a kernel; the backend prints this once."""
    derive(programs, tmp_path, "qwen2vl_merger", "--image-size", "300x200")
    found, _, cpu, log = encode(programs, tmp_path, "280x280", "280x280")
    assert found == ["280x280 chunks=1 tokens=100"] * 2
    assert "IM2COL:4" in cpu.split(",")
    assert log.count("no kernel for im2col of (14,14,3,64)/f16, (280,280,3,1)/f32: the CPU computes it") == 1


@pytest.mark.long
def test_weights_of_a_projector_have_the_layout_of_ggml(programs: harness.Programs, tmp_path: Path) -> None:
    """This does not depend on the layout of the model's weights."""
    model = tmp_path / "quantized.gguf"
    random_llama.write(model, size=random_llama.Size(n_embd=SIZE.n_out, n_layer=1), weights=Q8_0)
    more = (model, "--weights", "bf16", "--n-tokens", "1", "--n-kv", "256")
    text = derive(programs, tmp_path, "gemma3", *more, weights=Q8_0)
    assert "\nweights: [bf16]\n" in text
    assert "    weights: []\n" in text
    found, _, cpu, _ = encode(programs, tmp_path, "112x112")
    assert (found, cpu) == (["112x112 chunks=1 tokens=16"], "none")
