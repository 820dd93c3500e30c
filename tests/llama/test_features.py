"""Features of llama.cpp beside a plain model, on the simulated NeuronCore: results are the CPU's, and no op is left to
the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import calls
import gguf
import harness
import llama_programs
import numpy as np
import pytest
import random_llama
from program_cases import CASES

SIZE = random_llama.Size(n_embd=128, n_head=2, n_head_kv=2, n_ff=128, n_layer=4, n_ctx=1024)
"""Heads of 64: llama.cpp shifts the keys of a quantized cache only if the head size is a multiple of 64."""

NUMBERS = (1, 8)
"""Numbers of tokens that have kernels."""


@dataclass
class Device:
    """A random Llama with kernels for it.

    Attributes:
        folder: the folder of all files.
        cache: the cache's type.
        options: the program's options.
        buffers: the value of GGML_NEURON_BUFFERS.
    """

    programs: harness.Programs
    folder: Path
    cache: str = "f16"
    options: Sequence[str] = ()
    buffers: str = "device"
    kernels: list[Path] = field(default_factory=list)
    log: str = ""

    def __post_init__(self) -> None:
        self.file = self.folder / "model.gguf"
        random_llama.write(self.file, size=SIZE)

    def derive(
        self, *more: str, n_ctx: Sequence[int] | None = None, n_tokens: Sequence[int] = NUMBERS, fuse: str = "layer"
    ) -> None:
        """Adds the kernels that `kernelgen model` derives with these arguments."""
        self.kernels.append(self.folder / f"kernels-{len(self.kernels)}")
        options = {"n_tokens": n_tokens, "n_ctx": n_ctx, "cache": self.cache, "fuse": fuse}
        harness.derive(self.programs, self.file, self.kernels[-1], *more, **options)

    def calls(
        self, *lines: str, n_ctx: int = 256, n_ubatch: int = 16, cores: int = 1, more: str = ""
    ) -> list[calls.CallResult]:
        """Makes calls in a context of `n_ctx` cells.

        Checks that they agree with the CPU and that no op runs on the CPU.
        """
        cache = calls.Model("llama", cache=self.cache).options
        script = [f"context one n_ctx={n_ctx} n_batch={n_ubatch} n_ubatch={n_ubatch} {cache} {more}", *lines]
        environment = self.programs.environment(kernels=self.kernels, buffers=self.buffers, cores=cores)
        results, self.log = calls.run(self.programs, self.file, self.folder, [script], environment, *self.options)
        print(*results, *re.findall(r"^ggml-neuron: .*ran.*$", self.log, re.MULTILINE), sep="\n")
        assert max(call.nmse for call in results) < calls.LIMIT_CPU
        assert all(set(call.cpu) <= harness.ON_THE_CPU for call in results)
        assert " 0 ops ran on the CPU instead of a NeuronCore" in self.log
        return results

    def launches(self) -> int:
        """Returns the launches of groups; checks that all nodes on the device are in groups."""
        ran = harness.ran(self.log)
        assert ran.grouped == ran.device.total()
        return ran.launches


@pytest.mark.parametrize("unified", [0, 1])
def test_sequences_with_a_cache_each_are_one_line(programs: harness.Programs, tmp_path: Path, unified: int) -> None:
    """Kernels for one sequence compute each op of such calls alone; with one cache for all they compute layers."""
    device = Device(programs, tmp_path)
    device.derive("--n-kv", "256,512")
    lines = ("decode 0:0:4:all 1:0:4:all", "decode 0:4:1:all 1:4:1:all")
    device.calls(*lines, n_ctx=512, more=f"n_seq_max=2 kv_unified={unified}")
    message = r"^ggml-neuron: 2 sequences have a cache each.*\n.*--kv-unified.*--n-seq-max 2$"
    assert len(re.findall(message, device.log, re.MULTILINE)) == (not unified)


ALL = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def adapters(folder: Path) -> tuple[str, str]:
    """Writes two adapters of different ranks, types and targets."""
    files = folder / "first.gguf", folder / "second.gguf"
    random_llama.write_adapter(files[0], SIZE, rank=8, targets=("attn_q", "attn_v"), seed=2)
    random_llama.write_adapter(files[1], SIZE, rank=4, targets=ALL, seed=3, weights=np.float32)
    return str(files[0]), str(files[1])


def test_adapters_are_in_the_groups_of_layers(programs: harness.Programs, tmp_path: Path) -> None:
    """Two adapters, one of them scaled: one launch for each layer, and one for the output."""
    device = Device(programs, tmp_path)
    first, second = adapters(tmp_path)
    device.derive("--lora", f"{first}:0.5", "--lora", second, n_ctx=(256,), n_tokens=(8,))
    device.calls(f"adapters {first}:0.5 {second}:1", "decode 0:0:8:all")
    assert device.launches() == SIZE.n_layer + 1


@pytest.mark.parametrize("fuse", ["layer", pytest.param("step", marks=pytest.mark.long)])
def test_adapters_have_any_scale(programs: harness.Programs, tmp_path: Path, fuse: str) -> None:
    """Kernels for one scale compute other scales. Calls with different scales follow one another, so launches of both
    are in flight.
    """
    device = Device(programs, tmp_path)
    first, second = adapters(tmp_path)
    device.derive("--lora", first, "--lora", second, n_ctx=(256,), n_tokens=(8,), fuse=fuse)
    lines = []
    for one, other in ((0.5, 1), (1, -0.25), (3, 0.125)):
        lines += [f"adapters {first}:{one} {second}:{other}", "decode 0:0:8:all", "forget 0 0 -1"]
    results = device.calls(*lines)
    assert len({round(call.nll_cpu, 3) for call in results}) == 3, "scales change what is computed"
    assert device.launches() == 3 * (SIZE.n_layer + 1 if fuse == "layer" else 1)


@pytest.mark.long
def test_calls_with_adapters_and_without_take_turns(programs: harness.Programs, tmp_path: Path) -> None:
    device = Device(programs, tmp_path)
    first, second = adapters(tmp_path)
    device.derive("--n-kv", "256")
    device.derive("--n-kv", "256", "--lora", f"{first}:0.5", "--lora", second)
    lines = ("decode 0:0:8:all", "decode 0:8:1:all", "forget 0 0 -1")
    both = device.calls(f"adapters {first}:0.5 {second}:1", *lines, "adapters", *lines)
    assert abs(both[0].nll_cpu / both[2].nll_cpu - 1) > 0.01, "adapters change what is computed"
    launches = device.launches()
    device.calls(*lines, *lines)
    assert launches == device.launches()


SHIFT = (
    *(f"decode 0:{pos}:8:none" for pos in range(0, 64, 8)),
    "forget 0 8 32",
    "shift 0 32 -1 -24",
    "decode 0:40:8:all",
    "decode 0:48:1:all",
)
"""Calls that fill positions, drop half of them as --context-shift does, and continue."""


@pytest.mark.long
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_a_context_shift_is_computed_in_place(programs: harness.Programs, tmp_path: Path, cache: str) -> None:
    """The cache has three times as many cells as the kernel."""
    device = Device(programs, tmp_path, cache)
    device.derive("--n-kv", "256,512,1024", "--context-shift")
    device.calls(*SHIFT, n_ctx=768)
    assert " ROPE" in device.log


@pytest.mark.long
@pytest.mark.parametrize("n_ctx", [130816, 328448])
def test_a_shift_of_a_large_cache_is_as_many_launches_as_it_needs(
    programs: harness.Programs, tmp_path: Path, n_ctx: int
) -> None:
    """130,816 cells are seven times 16,384, three times 4,096, 1,024 and 256; 328,448 cells take more than 16 launches
    of the largest.
    """
    device = Device(programs, tmp_path)
    device.derive("--n-kv", "256", "--context-shift")
    results = device.calls(*SHIFT, n_ctx=n_ctx)
    assert f" {(len(results) * 2 + 1) * SIZE.n_layer} ROPE" in device.log
    assert f" {len(results) * SIZE.n_layer} FLASH_ATTN_EXT" in device.log


@pytest.mark.long
def test_each_device_shifts_its_slice_of_the_cache(programs: harness.Programs, tmp_path: Path) -> None:
    device = Device(programs, tmp_path, options=("-sm", "tensor"))
    device.derive("--n-kv", "256", "--context-shift", "--split-mode", "tensor", "--devices", "2")
    device.calls(*SHIFT, cores=2)
    assert len(re.findall("core [01]: .* launches", device.log)) == 2


@pytest.mark.long
def test_a_quantized_cache_is_read_and_written_on_the_device(programs: harness.Programs, tmp_path: Path) -> None:
    device = Device(programs, tmp_path, "q8_0")
    device.derive("--n-kv", "256,512")
    device.calls("decode 0:0:8:all", "decode 0:8:3:all", *(f"decode 0:{n}:1:all" for n in range(11, 14)), n_ctx=512)
    assert device.launches() > 0


ENCODERS = {
    "BERT": random_llama.write_bert,
    "mean": partial(random_llama.write_bert, pooling=gguf.PoolingType.MEAN),
    "reranker": partial(random_llama.write_bert, rank=True),
    "T5": random_llama.write_t5,
}
OF_TEXTS = "embeddings=1 n_seq_max=4 kv_unified=1"
THREE = "decode 0:0:7:all 1:0:1:all 2:0:4:all"


def encoder(programs: harness.Programs, folder: Path, kind: str, *more: str, fuse: str) -> Device:
    """Returns a model with an encoder, and kernels for 8 and 16 tokens."""
    device = Device(programs, folder)
    ENCODERS[kind](device.file, SIZE)
    device.derive("--embeddings", *more, n_ctx=(256,), n_tokens=(8, 16), fuse=fuse)
    return device


@pytest.mark.long
@pytest.mark.parametrize("kind", list(ENCODERS))
def test_an_encoder_is_computed_for_any_number_of_tokens(programs: harness.Programs, tmp_path: Path, kind: str) -> None:
    """The kernels compute one and several sequences: the whole graph except the rows of tables, which llama.cpp keeps on
    the CPU. There is one group per layer, one before and one after the layers.
    """
    device = encoder(programs, tmp_path, kind, fuse="layer")
    lines = [f"decode 0:0:{n}:all" for n in range(1, 17)]
    results = device.calls(*lines, "decode 0:0:5:all 1:0:3:all", THREE, more=OF_TEXTS)
    assert [call.rows for call in results] == [1] * len(lines) + [2, 3]
    assert device.launches() <= len(results) * (SIZE.n_layer + 2)


@pytest.mark.parametrize(
    "kind", ["T5", *(pytest.param(kind, marks=pytest.mark.long) for kind in ENCODERS if kind != "T5")]
)
def test_attention_of_an_encoder_is_a_group_where_layers_are_none(
    programs: harness.Programs, tmp_path: Path, kind: str
) -> None:
    """With --fuse none: so no op of attention runs on the CPU, for any number of tokens."""
    device = encoder(programs, tmp_path, kind, fuse="none")
    results = device.calls(*(f"decode 0:0:{n}:all" for n in (1, 5, 8, 13)), THREE, more=OF_TEXTS)
    ran = harness.ran(device.log)
    assert ran.grouped < ran.device.total()
    attention, mean = SIZE.n_layer, kind in ("mean", "T5")
    assert ran.launches == len(results) * (attention + mean)


@pytest.mark.parametrize(
    ("kind", "flash"),
    [
        ("T5", 0),
        *(pytest.param(kind, flash, marks=pytest.mark.long) for kind in ENCODERS for flash in (0, 1) if kind != "T5"),
    ],
)
def test_an_encoder_whose_nodes_are_read_one_by_one(
    programs: harness.Programs, tmp_path: Path, kind: str, flash: int
) -> None:
    """A program like llama-eval-callback reads each node: no group computes them, and nodes of attention still have
    kernels for other numbers of tokens.
    """
    device = encoder(programs, tmp_path, kind, "--flash-attn", "both", fuse="none")
    lines = [f"decode 0:0:{n}:all" for n in (3, 8, 13)]
    device.calls(*lines, THREE, more=f"{OF_TEXTS} watched=1 flash_attn={flash}")
    assert "ran in groups" not in device.log


@pytest.mark.parametrize(
    ("flash_attn", "buffers"),
    [
        (0, "device"),
        pytest.param(0, "host", marks=pytest.mark.long),
        pytest.param(1, "device", marks=pytest.mark.long),
    ],
)
def test_a_model_whose_nodes_are_read_one_by_one(
    programs: harness.Programs, tmp_path: Path, flash_attn: int, buffers: str
) -> None:
    """A model with a cache: the scores of several heads lie between its keys and values."""
    device = Device(programs, tmp_path, buffers=buffers)
    random_llama.write(device.file, size=replace(SIZE, n_head_kv=1))
    flash = "on" if flash_attn else "off"
    device.derive("--flash-attn", flash, "--n-kv", "256", n_ctx=(256,), fuse="none")
    lines = ("decode 0:0:5:all", "decode 0:5:8:all", "decode 0:13:3:last")
    device.calls(*lines, more=f"watched=1 flash_attn={flash_attn}")


@pytest.mark.long
def test_calls_of_2_to_16_tokens_are_a_launch_for_each_layer(programs: harness.Programs, tmp_path: Path) -> None:
    """A target verifies a draft this way: it reads the logits of all tokens."""
    device = Device(programs, tmp_path)
    device.derive("--n-kv", "256", n_tokens=(1, 8, 16))
    device.calls(*(line for n in range(2, 17) for line in (f"decode 0:0:{n}:all", "forget 0 0 -1")))
    assert device.launches() == 15 * (SIZE.n_layer + 1)


@pytest.mark.long
def test_a_saved_state_is_put_back(programs: harness.Programs, tmp_path: Path) -> None:
    device = Device(programs, tmp_path)
    device.derive("--n-kv", "256")
    filled = ("decode 0:0:8:all", "decode 0:8:8:all")
    results = device.calls(*filled, "save 0", "decode 0:16:5:all", "restore 0", "decode 0:16:5:all")
    assert results[-1].nll == results[-2].nll


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "name"), [("llama", "save-load-state"), ("bert", "encoder-nodes"), ("t5", "encoder-decoder-none")]
)
def test_programs_leave_no_op_to_the_cpu(
    programs: harness.Programs, there: Callable[[Path, str], Path], tmp_path: Path, model: str, name: str
) -> None:
    """Contexts of all kinds, programs that read each node, and kernels without groups: results are those of the CPU."""
    (case,) = (case for case in CASES if case.name == name)
    there(llama_programs.path_of(str(case.commands).split()[0], programs), "LLAMA_MORE_PROGRAMS")
    ((row, wrong),) = llama_programs.check_all(programs, [model], [case], tmp_path)
    print(llama_programs.HEAD, row, sep="\n")
    assert not wrong
