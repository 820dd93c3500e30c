"""A model of 6 GB on simulated NeuronCores: it loads, or a message says that it does not fit, and llama.cpp's own fit
agrees.

The model's file and the simulator's copy are sparse, so they take no space. Nothing is computed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import calls
import harness
import numpy as np
import pytest
import random_llama

LAYERS = 12
"""Layers of the model of 6 GB."""


def size(layers: int) -> random_llama.Size:
    """Returns the sizes of a model with layers of 416 MiB."""
    return random_llama.Size(n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, n_layer=layers, n_ctx=8192, n_vocab=32000)


WEIGHTS = 2 * (LAYERS * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 4096 * 32000)
"""Bytes of the model's matrices in F16."""


class Loaded(NamedTuple):
    """Whether the program `capacity` made the model and a context; total, free and earlier free MiB of each device; the
    number of layers on the device that llama.cpp's fit chose, negative for all, or None without fit; and the log.
    """

    ok: bool
    devices: list[tuple[int, ...]]
    fit: int | None
    log: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    random_llama.write(path, size=size(LAYERS), sparse=True)
    assert path.stat().st_size > WEIGHTS > 5.4e9
    assert path.stat().st_blocks * 512 < 8 << 20
    return path


@pytest.fixture(scope="module")
def kernels(programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns kernels of a small model with the same types; llama.cpp places weights by them."""
    folder = tmp_path_factory.mktemp("small")
    small = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=1, n_ctx=256)
    random_llama.write(folder / "small.gguf", size=small, weights=np.float16)
    options = {"n_tokens": (1,), "n_ctx": None}
    harness.derive(programs, folder / "small.gguf", folder / "kernels", "--flash-attn", "both", **options)
    return folder / "kernels"


def load(programs: harness.Programs, model: Path, kernels: Path, variables: dict[str, str], **settings: int) -> Loaded:
    environment = programs.environment(kernels=kernels, buffers="device") | {"GGML_NEURON_TARGET": harness.target()}
    del environment["NEURON_RT_NUM_CORES"]
    environment |= {"LD_LIBRARY_PATH": str(programs.llama_cpp), "GGML_NEURON_LOG": "1", **variables}
    numbers = [f"{name}={value}" for name, value in settings.items()]
    command = [calls.program("capacity"), programs.llama_cpp, model, "n_ctx=4096", *numbers]
    done = harness.run(command, environment, timeout=300)
    log = done.stdout + done.stderr
    assert done.returncode in (0, 1), log
    ok = re.search(r"^(not )?loaded$", done.stdout, re.MULTILINE)
    assert ok and (done.returncode == 0) == (ok[1] is None), log
    sizes = re.findall(r"^NEURON\d+ total=(\d+) free=(\d+) before=(\d+)$", done.stdout, re.MULTILINE)
    fit = re.search(r"^fit success n_gpu_layers=(-?\d+) n_ctx=4096$", done.stdout, re.MULTILINE)
    assert bool(fit) == ("fit" in settings), log
    return Loaded(done.returncode == 0, [tuple(map(int, of)) for of in sizes], int(fit[1]) if fit else None, log)


@pytest.mark.long
@pytest.mark.parametrize("fit", [0, 1])
def test_on_many_cores(programs: harness.Programs, model: Path, kernels: Path, fit: int) -> None:
    """ggml uses 15 selected cores, of 64 those that compute one program; memory is taken on no other core."""
    selected = {"NEURON_RT_VISIBLE_CORES": "0-14"} if fit else {"NEURON_RT_NUM_CORES": "64"}
    variables = {"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge"} | selected
    found = load(programs, model, kernels, variables, **({"fit": 1} if fit else {}))
    assert found.ok, found.log
    assert found.fit == (-1 if fit else None)
    assert len(found.devices) == (15 if fit else 8)
    assert {total for total, _, _ in found.devices} == {24 << 10}
    taken = sum(before - free for _, free, before in found.devices)
    # The CPU reads the embedding's rows.
    assert (WEIGHTS >> 20) - 250 < taken < (WEIGHTS >> 20) + 250
    said = "8 of 64 NeuronCores are used: ggml's scheduler takes 15 devices beside the CPU"
    assert (said in found.log) == (not fit)


@pytest.mark.long
def test_on_one_core(programs: harness.Programs, model: Path, kernels: Path) -> None:
    variables = {"NEURON_SIMULATOR_INSTANCE": "trn1.2xlarge", "NEURON_RT_NUM_CORES": "1"}
    found = load(programs, model, kernels, variables, fit=1)
    assert found.ok, found.log
    assert found.fit == -1
    ((total, free, before),) = found.devices
    assert total == 16 << 10 and 5000 < before - free < 6000


@pytest.mark.parametrize(("layers", "memory"), [(3, "1200M"), pytest.param(LAYERS, "4G", marks=pytest.mark.long)])
def test_on_a_core_that_is_too_small(
    programs: harness.Programs, kernels: Path, tmp_path: Path, layers: int, memory: str
) -> None:
    """A message says what does not fit. The number of layers that llama.cpp's fit chooses does fit, and one more does not."""
    model = tmp_path / "model.gguf"
    random_llama.write(model, size=size(layers), sparse=True)
    variables = {"NEURON_SIMULATOR_MEMORY": memory, "NEURON_RT_NUM_CORES": "1"}
    found = load(programs, model, kernels, variables)
    assert not found.ok
    assert re.search(r"ggml-neuron: NEURON0: no buffer of \d+\.\d+ MiB in device memory", found.log), found.log
    assert re.search(r"ggml-neuron: core 0: nrt_tensor_allocate failed: NRT_RESOURCE \(4\): \d+ bytes", found.log)
    ((_, free, before),) = found.devices
    assert free == before  # the memory of what was already loaded is freed

    found = load(programs, model, kernels, variables, fit=1, fit_target=64)
    assert found.ok, found.log
    assert found.fit is not None and 0 < found.fit < layers
    ((_, free, _),) = found.devices
    assert free >= 64
    assert re.search(
        r"NEURON0: no graph used \d+\.\d MiB of weights; a model that is loaded with --model-draft", found.log
    )
    more = load(programs, model, kernels, variables, n_gpu_layers=found.fit + 1)
    assert not more.ok or more.devices[0][1] < 64, more.log
