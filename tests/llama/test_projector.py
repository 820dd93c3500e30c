"""Embeddings of images and sound that llama.cpp's mtmd makes on the simulated NeuronCore: as on the CPU, and with no op left to it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import any_tokens
import derived_kernels
import gguf
import harness
import pytest
import random_llama
import random_projector

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library

VARIABLE = "LLAMA_MEDIA"
"""Names the program of tools/llama_cpp/media, when Bazel does not."""

SIZE = random_projector.Size(n_layer=3)


@dataclass(frozen=True)
class Encoded:
    """What the program `media` printed.

    Attributes:
        calls: of the projector: what it was of, its chunks and their tokens.
        nmse: of each call.
        device: that mtmd chose.
        ops: of all graphs that are the device's.
        cpu: ops that are the CPU's.
        log: of the backend.
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
        ((ops, launches),) = re.findall(r"(\d+) ops ran in groups, in (\d+) launches", self.log)
        return int(ops), int(launches)


@dataclass(frozen=True)
class Bench:
    """A random projector and kernels for it."""

    programs: harness.Programs
    folder: Path
    kind: str

    def derive(self, *more: str, size: random_projector.Size = SIZE, weights: object = None) -> str:
        """Builds the kernels that `kernelgen model` derives, and returns the manifest."""
        given = {} if weights is None else {"weights": weights}
        random_projector.write(self.folder / "projector.gguf", self.kind, size=size, **given)
        written = self.folder / "projector.yaml"
        arguments = ["model", "--mmproj", self.folder / "projector.gguf", "-o", written, "--target", harness.target()]
        arguments += ["--exporter", derived_kernels.exporter(), "--llama-cpp", self.programs.llama_cpp, *more]
        assert cli.run(list(map(str, arguments))) == 0
        (request,) = manifest.load([written], Catalog([builtin_library()]))
        built = harness.build_request(request, self.folder / "kernels", say=lambda text: None)
        assert not built.failed and not built.refused
        return written.read_text()

    def encode(self, *media: str, **variables: str) -> Encoded:
        """Makes embeddings on both sides."""
        model = self.folder / "model.gguf"
        random_llama.write(model, size=random_llama.Size(n_embd=SIZE.n_out, n_layer=1))
        program = Path(os.environ.get(VARIABLE) or Path(harness.__file__).parent / "media/media/media")
        done = subprocess.run(
            [program, self.programs.llama_cpp, model, self.folder / "projector.gguf", *media],
            env=self.programs.environment(kernels=self.folder / "kernels", log=True)
            | {"LD_LIBRARY_PATH": str(self.programs.llama_cpp), "GGML_SCHED_DEBUG": "2", "OMP_THREAD_LIMIT": "1"}
            | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        print(done.stdout, *re.findall(r"^ggml-neuron: .*ran.*$", done.stderr, re.MULTILINE), sep="\n")
        calls = re.findall(r"^(\S+) chunks=(\d+) tokens=(\d+) nmse=(\S+)$", done.stdout, re.MULTILINE)
        ((device, ops, cpu),) = re.findall(r"^chosen=(\S*) device=(\d+) cpu=(\S+)$", done.stdout, re.MULTILINE)
        return Encoded(
            [(what, int(chunks), int(tokens)) for what, chunks, tokens, _ in calls],
            [float(nmse) for *_, nmse in calls],
            device,
            int(ops),
            cpu,
            done.stderr,
        )


def check(found: Encoded, calls: Sequence[tuple[str, int, int]]) -> None:
    """Checks that these calls agree with the CPU's, and that the device computed all of them."""
    assert found.calls == list(calls)
    assert max(found.nmse) < any_tokens.LIMIT_CPU
    assert found.device.startswith("NEURON")
    assert found.ops > 0
    assert found.cpu == "none", found.cpu
    assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in found.log
