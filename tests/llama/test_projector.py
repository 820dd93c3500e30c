"""Embeddings of images and sound that llama.cpp's mtmd makes on the simulated NeuronCore: results are the CPU's, and no
op runs on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import calls
import gguf
import harness
import numpy as np
import pytest
import random_llama
import random_projector

SIZE = random_projector.Size(n_layer=3)


@dataclass(frozen=True)
class Encoded:
    """The output of the program `media`.

    Attributes:
        calls: the projector's calls: medium, chunks and tokens.
        nmse: the normalized mean squared error of each call.
        device: the device that mtmd chose.
        ops: the device's ops of all graphs.
        cpu: the CPU's ops.
        log: the backend's log.
    """

    calls: list[tuple[str, int, int]]
    nmse: list[float]
    device: str
    ops: int
    cpu: str
    log: str

    @property
    def groups(self) -> tuple[int, int]:
        """Ops in groups, and launches of groups."""
        ran = harness.ran(self.log)
        return ran.grouped, ran.launches


@dataclass(frozen=True)
class Bench:
    """A random projector and kernels for it."""

    programs: harness.Programs
    folder: Path
    kind: str

    def derive(self, *more: object, weights: type[np.floating] | gguf.GGMLQuantizationType = np.float16) -> str:
        """Builds the kernels that `kernelgen model` derives of the projector; returns the manifest.

        Args:
            more: arguments, such as a model.
            weights: the type of the projector's matrices.
        """
        random_projector.write(self.folder / "projector.gguf", self.kind, size=SIZE, weights=weights)
        written = self.folder / "projector.yaml"
        harness.write_manifest(self.programs, written, "--mmproj", self.folder / "projector.gguf", *more)
        harness.build_manifest(written, self.folder / "kernels")
        return written.read_text()

    def encode(self, *media: str) -> Encoded:
        """Makes embeddings on the device and on the CPU."""
        model = self.folder / "model.gguf"
        random_llama.write(model, size=random_llama.Size(n_embd=SIZE.n_out, n_layer=1))
        program = harness.built("LLAMA_MEDIA", "media/media/media")
        variables = {"LD_LIBRARY_PATH": str(self.programs.llama_cpp), "GGML_SCHED_DEBUG": "2", "OMP_THREAD_LIMIT": "1"}
        environment = self.programs.environment(kernels=self.folder / "kernels", log=True) | variables
        command = [program, self.programs.llama_cpp, model, self.folder / "projector.gguf", *media]
        done = harness.run(command, environment)
        assert done.returncode == 0, done.stderr[-3000:]
        print(done.stdout, *re.findall(r"^ggml-neuron: .*ran.*$", done.stderr, re.MULTILINE), sep="\n")
        printed = re.findall(r"^(\S+) chunks=(\d+) tokens=(\d+) nmse=(\S+)$", done.stdout, re.MULTILINE)
        ((device, ops, cpu),) = re.findall(r"^chosen=(\S*) device=(\d+) cpu=(\S+)$", done.stdout, re.MULTILINE)
        return Encoded(
            [(what, int(chunks), int(tokens)) for what, chunks, tokens, _ in printed],
            [float(nmse) for *_, nmse in printed],
            device,
            int(ops),
            cpu,
            done.stderr,
        )


def check(found: Encoded, expected: Sequence[tuple[str, int, int]]) -> None:
    """Checks that these calls agree with the CPU's and that the device computed all of them."""
    assert found.calls == list(expected)
    assert max(found.nmse) < calls.LIMIT_CPU
    assert found.device.startswith("NEURON")
    assert found.ops > 0
    assert found.cpu == "none", found.cpu
    assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in found.log


def test_an_image_is_a_launch_for_each_layer(programs: harness.Programs, tmp_path: Path) -> None:
    """A projector for images of one size: one launch per layer, one before the first and one after the last."""
    bench = Bench(programs, tmp_path, "gemma3")
    bench.derive()
    found = bench.encode("100x80")
    check(found, [("100x80", 1, 16)])
    ran, launches = found.groups
    assert 2 * ran == found.ops, "what the warm-up asks for is not run"
    assert launches == SIZE.n_layer + 2


@pytest.mark.long
def test_an_image_is_cut_into_parts(programs: harness.Programs, tmp_path: Path) -> None:
    bench = Bench(programs, tmp_path, "idefics3")
    bench.derive()
    found = bench.encode("300x200")
    check(found, [("300x200", 1, 16)] * 13)  # 4 times 3 parts, and the whole image


@pytest.mark.long
def test_images_of_the_sizes_that_are_named(programs: harness.Programs, tmp_path: Path) -> None:
    """The device computes images of these sizes. Of another size the CPU computes the ops without a kernel; the backend
    prints this once.
    """
    bench = Bench(programs, tmp_path, "qwen2vl_merger")
    bench.derive("--image-size", "300x200")
    check(bench.encode("300x200"), [("300x200", 1, 77)])
    found = bench.encode("280x280", "280x280")
    assert found.calls == [("280x280", 1, 100)] * 2
    assert max(found.nmse) < calls.LIMIT_CPU
    assert "IM2COL:4" in found.cpu.split(",")
    assert found.log.count("no kernel for im2col of (14,14,3,64)/f16, (280,280,3,1)/f32: the CPU computes it") == 1


@pytest.mark.long
def test_activations_are_clamped(programs: harness.Programs, tmp_path: Path) -> None:
    """Gemma 4 clamps its activations and takes images of any size."""
    bench = Bench(programs, tmp_path, "gemma4v")
    bench.derive("--image-size", "300x200")
    check(bench.encode("300x200"), [("300x200", 1, 77)])


@pytest.mark.long
def test_sound(programs: harness.Programs, tmp_path: Path) -> None:
    """More than 30 seconds of sound: each piece is a call."""
    bench = Bench(programs, tmp_path, "ultravox")
    bench.derive()
    found = bench.encode(str(16000 * 31))
    check(found, [(str(16000 * 31), 1, 375)] * 2)


@pytest.mark.long
def test_weights_of_a_projector_have_the_layout_of_ggml(programs: harness.Programs, tmp_path: Path) -> None:
    """This does not depend on the layout of the model's weights."""
    bench = Bench(programs, tmp_path, "gemma3")
    model = tmp_path / "quantized.gguf"
    size = random_llama.Size(n_embd=SIZE.n_out, n_layer=1)
    random_llama.write(model, size=size, weights=gguf.GGMLQuantizationType.Q8_0)
    text = bench.derive(
        *(model, "--weights", "bf16", "--n-tokens", "1", "--n-kv", "256"), weights=gguf.GGMLQuantizationType.Q8_0
    )
    assert "\nweights: [bf16]\n" in text
    assert "    weights: []\n" in text
    check(bench.encode("112x112"), [("112x112", 1, 16)])
