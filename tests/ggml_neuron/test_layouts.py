"""Weights in other layouts than ggml's: the program reads back the bytes it wrote, and kernels for a layout compute the
same results.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from programs import Programs, Result, build

from kernelgen.ggml import weight_layouts
from kernelgen.ggml.types import TYPES
from kernelgen.model import gguf_weights, repacked

QUANTIZED = tuple(weight_layouts.FIELDS)
FLOATS = ("f32", "f16", "bf16")

MANIFEST = """\
format: 1
name: weights
targets: [TARGET]
graphs:
  - &group
    inputs: {w: "(512,24,1,1)/q8_0", x: "(512,3,1,1)/f32"}
    nodes:
      - {name: y, op: mul_mat, inputs: [w, x], output: "(24,3,1,1)/f32"}
      - {name: z, op: relu, inputs: [y], output: "(24,3,1,1)/f32"}
    outputs: [z]
    weights: [planes]
    fallback: false
  - {<<: *group, weights: [bf16]}
  - {<<: *group, weights: [f8_e4m3_128x128]}
kernels:
  - {op: relu, inputs: ["(24,3,1,1)/f32"], output: "(24,3,1,1)/f32"}
"""
PRODUCTS = ("q8_0", "q4_K", "q6_K", "f16", "f32")
ROUNDED = ("q8_0", "q4_K")
"""Types that also have kernels for weights in the layout bf16."""
F8 = "f8_e4m3_128x128"
TILED = ("q8_0", "q4_K", "f16")
"""Types that also have kernels for weights in the layout f8_e4m3_128x128."""

RunLayouts = Callable[..., Result]


def entries(types: tuple[str, ...], weights: str) -> str:
    """Returns manifest entries of products with weights of these types."""
    return "".join(
        f'  - {{op: mul_mat, inputs: ["(512,24,1,1)/{t}", "(512,3,1,1)/f32"], output: "(24,3,1,1)/f32", {weights}}}\n'
        f'  - {{op: mul_mat_id, inputs: ["(512,24,4,1)/{t}", "(512,1,3,1)/f32", "(2,3,1,1)/i32"], '
        f'output: "(24,2,3,1)/f32", {weights}}}\n'
        for t in types
    )


@pytest.fixture(scope="session")
def both(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with kernels for weights in layouts and for the same weights in ggml's order."""
    folder = tmp_path_factory.mktemp("weights")
    text = (
        MANIFEST.replace("TARGET", neuron_target)
        + entries(PRODUCTS, "weights: []")
        + entries(PRODUCTS, "weights: [planes, transposed]")
    )
    text += entries(ROUNDED, "weights: [bf16]")
    text += entries(TILED, f"weights: [{F8}]")
    for layout in ("planes", "bf16"):
        text += (
            f'  - {{op: mul_mat, inputs: ["(512,7,1,1)/q8_0:{layout}", "(512,3,1,1)/f32"], output: "(7,3,1,1)/f32"}}\n'
        )
    (folder / "weights.yaml").write_text(text)
    build(folder / "weights.yaml", folder / "kernels")
    return folder / "kernels"


def kernels_in(folder: Path, target: str, layouts: str, types: tuple[str, ...]) -> Path:
    """Builds kernels that take weights of some types only in some layouts, and returns their folder."""
    head = f"format: 1\nname: {folder.name.rstrip('0123456789')}\ntargets: [{target}]\nweights: [{layouts}]\nkernels:\n"
    (folder / "layouts.yaml").write_text(head + entries(types, "params: {}"))
    build(folder / "layouts.yaml", folder / "kernels")
    return folder / "kernels"


@pytest.fixture(scope="session")
def layouts_alone(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder whose kernels take weights only in the layouts planes and transposed."""
    return kernels_in(tmp_path_factory.mktemp("layouts_alone"), neuron_target, "planes, transposed", ("q8_0", "f16"))


@pytest.fixture(scope="session")
def rounded(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder whose kernels take quantized weights only as bf16, and f16 weights only transposed."""
    return kernels_in(tmp_path_factory.mktemp("rounded"), neuron_target, "bf16, transposed", (*ROUNDED, "f16"))


@pytest.fixture(scope="session")
def tiled(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder whose kernels take weights only in 8-bit tiles."""
    return kernels_in(tmp_path_factory.mktemp("tiled"), neuron_target, F8, TILED)


@pytest.fixture(scope="session")
def run_layouts(programs: Programs) -> RunLayouts:
    """Returns a function that runs scenarios of the program `layouts`; keyword arguments are environment variables."""

    def run(*scenarios: str, **variables: str | Path) -> Result:
        result = programs.run("layouts", *scenarios, **variables)
        said = dict(line.rsplit(": ", 1) for line in result.stdout.splitlines() if ": " in line)
        return Result(result.returncode, said, result.stdout + result.stderr)

    return run


def good(result: Result, scenarios: list[str]) -> None:
    assert result.said == dict.fromkeys(scenarios, "ok"), result.log


def test_bytes_are_in_the_order_that_kernels_read(run_layouts: RunLayouts, both: Path) -> None:
    """The bytes in device memory are those that kernelgen packs: both use the same table of fields."""
    types = (*QUANTIZED, *FLOATS)
    result = run_layouts(*(f"bytes:{t}" for t in types), GGML_NEURON_KERNEL_DIR=both)
    good(result, [f"bytes:{t}" for t in types])
    lines = [line for line in result.log.splitlines() if line and set(line) <= set("0123456789abcdef")]
    for t, given, kept in zip(types, lines[::2], lines[1::2], strict=True):
        data = np.frombuffer(bytes.fromhex(given), np.uint8)
        ne = (max(2 * TYPES[t].block, 96), 5, 2, 1)
        layout = weight_layouts.of_type(t)[0]
        assert weight_layouts.pack(data, layout, t, ne).tobytes().hex() == kept, t


def test_what_is_kept_as_bf16_is_rounded(run_layouts: RunLayouts, rounded: Path) -> None:
    """The weights are the elements that the gguf package decodes, rounded; random bytes also contain scales that are NaN."""
    types = [t for t in QUANTIZED if t not in ("q1_0", "q2_0")]  # the package does not decode these
    result = run_layouts(*(f"bytes:{t}:bf16" for t in types), GGML_NEURON_KERNEL_DIR=rounded)
    good(result, [f"bytes:{t}:bf16" for t in types])
    lines = [line for line in result.log.splitlines() if line and set(line) <= set("0123456789abcdef")]
    for t, given, kept in zip(types, lines[::2], lines[1::2], strict=True):
        blocks = np.frombuffer(bytes.fromhex(given), np.uint8).reshape(-1, TYPES[t].size)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(TYPES[t].number))
            wanted, have = (
                np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32)
                for data in (weight_layouts.pack_bf16(values).tobytes(), bytes.fromhex(kept))
            )
        # ggml and the package may differ in a float's last bit, which can change the rounding
        np.testing.assert_allclose(have, wanted, rtol=2**-7, err_msg=t)
        assert np.mean((have == wanted) | np.isnan(wanted)) > 0.99, t


@pytest.mark.long
def test_tiles_of_8_bits_are_those_of_kernelgen(run_layouts: RunLayouts, tiled: Path) -> None:
    """Two matrices of two tiles of rows each; the second has random bytes, whose scales and elements may be NaN."""
    types = [t for t in (*QUANTIZED, "f16", "bf16") if t not in ("q1_0", "q2_0")]  # the package does not decode these
    result = run_layouts(*(f"bytes:{t}:{F8}" for t in types), GGML_NEURON_KERNEL_DIR=tiled)
    good(result, [f"bytes:{t}:{F8}" for t in types])
    lines = [line for line in result.log.splitlines() if line and set(line) <= set("0123456789abcdef")]
    for t, given, kept in zip(types, lines[::2], lines[1::2], strict=True):
        ne = (max(2 * TYPES[t].block, 96), 131, 2, 1)
        blocks = np.frombuffer(bytes.fromhex(given), np.uint8).reshape(-1, TYPES[t].size)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(TYPES[t].number))
            wanted = weight_layouts.pack_f8_tiles(values.reshape(ne[::-1]))
        size = weight_layouts.stored_bytes(F8, t, ne)
        have = np.frombuffer(bytes.fromhex(kept), np.uint8)
        assert len(wanted) == size and len(have) == max(size, len(given) // 2), t
        codes = weight_layouts.tiles(ne)[0] * weight_layouts.TILE * ne[1]
        first, second = (np.split(x[:size].reshape(2, -1), [codes], axis=1) for x in (have, wanted))
        scales = [np.ascontiguousarray(x[1]).view(np.float32) for x in (first, second)]
        np.testing.assert_allclose(*scales, rtol=1e-6, err_msg=t)
        assert np.isfinite(scales[0][0]).all() and first[0][0].any(), t
        # ggml and the package may differ in a float's last bit, which can change a code by one
        apart = np.abs((first[0] & 127).astype(int) - (second[0] & 127))
        assert apart.max() <= 1 and np.mean(first[0] == second[0]) > 0.999, t
        if t in ("f16", "bf16", "q8_0", "q4_0"):  # they agree exactly on these
            assert have[:size].tobytes() == wanted.tobytes(), t


@pytest.mark.parametrize("scenario", ["parts", "copies"])
def test_what_is_written_is_read_back(run_layouts: RunLayouts, both: Path, scenario: str) -> None:
    asked = [f"{scenario}:{t}" for t in ("q8_0", "q4_K", "q5_K", "f16", "f32", "q8_0:bf16", "q4_K:bf16")]
    asked += [f"{scenario}:{t}:{F8}" for t in TILED]
    good(run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_BUFFERS="device"), asked)


def test_a_buffer_of_rounded_weights_is_cleared_with_nothing_but_zeros(run_layouts: RunLayouts, rounded: Path) -> None:
    result = run_layouts("clear:q8_0:bf16", GGML_NEURON_KERNEL_DIR=rounded, GGML_NEURON_BUFFERS="device")
    assert result.status == -signal.SIGABRT
    assert "clearing a buffer: in this layout it can be cleared with 0 alone" in result.log


def test_threads_pack_the_same_bytes(run_layouts: RunLayouts, both: Path) -> None:
    asked = [f"digest:{t}" for t in ("q8_0", "q4_K", "f16", "f32", "q8_0:bf16", f"q4_K:{F8}", f"f16:{F8}")]
    results = [
        run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_REPACK_THREADS=n, GGML_NEURON_LOG="1")
        for n in ("1", "5")
    ]
    digests = []
    for n, result in zip((1, 5), results, strict=True):
        good(result, asked)
        assert result.log.count(f"s by at most {n} threads; originals: ") == len(asked), result.log
        digests.append(re.findall(r"^[0-9a-f]{16}$", result.log, re.MULTILINE))
    assert len(digests[0]) == len(asked) and digests[0] == digests[1]


def test_a_weight_in_a_file_is_not_copied(run_layouts: RunLayouts, both: Path) -> None:
    asked = [f"mapped:{t}" for t in ("q8_0", "f16", "q8_0:bf16", "q4_K:bf16", f"q4_K:{F8}")]
    good(run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both), asked)
    asked = ["memory:q8_0:bf16", f"memory:f16:{F8}"]
    result = run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_REPACK_THREADS="2", GGML_NEURON_LOG="1")
    good(result, asked)
    assert "NEURON0_bf16: 1 weights, 17.0 MiB, repacked in " in result.log
    assert result.log.count("originals: 17.0 MiB in the model's file, 0.0 MiB in host memory") == 1
    assert result.log.count("originals: 0.0 MiB in the model's file, 17.0 MiB in host memory") == 5


def test_a_file_that_was_changed_is_not_read(run_layouts: RunLayouts, both: Path) -> None:
    result = run_layouts("changed:q8_0:bf16", GGML_NEURON_KERNEL_DIR=both)
    assert result.status == -signal.SIGABRT
    assert re.search(
        "reading tensor '.*': the file /tmp/layouts-.* changed after the program loaded the weight", result.log
    )


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_products_are_the_same_with_and_without_layouts(run_layouts: RunLayouts, both: Path, buffers: str) -> None:
    types = (*PRODUCTS, *(f"{t}:bf16" for t in ROUNDED), *(f"{t}:{F8}" for t in TILED))
    asked = [f"{what}:{t}" for what in ("product", "experts") for t in types]
    result = run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_BUFFERS=buffers, GGML_NEURON_LOG="1")
    good(result, asked)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.log


def test_rows_of_a_weight_have_its_layout(run_layouts: RunLayouts, both: Path) -> None:
    asked = ["rows:q8_0", "rows:q8_0:bf16"]
    result = run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    good(result, asked)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.log


@pytest.mark.parametrize("scenario", ["group:q8_0", "group:q8_0:bf16", f"group:q8_0:{F8}"])
def test_a_group_has_its_weights_in_layouts(run_layouts: RunLayouts, both: Path, scenario: str) -> None:
    """The group's kernels take weights only in layouts: without them, its nodes are computed one by one."""
    result = run_layouts(scenario, GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    good(result, [scenario])
    assert "2 ops ran in groups, in 1 launches, 2.0 ops each" in result.log
    assert "2 ops were in no group" in result.log


def test_a_device_offers_buffers_for_the_weights_that_kernels_want(run_layouts: RunLayouts, both: Path) -> None:
    types = (*PRODUCTS, *(f"{t}:bf16" for t in ROUNDED), *(f"{t}:{F8}" for t in TILED))
    asked = [f"probes:{t}" for t in types]
    good(run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_BUFFERS="device"), asked)


def test_repacking_can_be_turned_off(run_layouts: RunLayouts, both: Path) -> None:
    asked = [f"off:{t}" for t in PRODUCTS]
    variables = {"GGML_NEURON_BUFFERS": "device", "GGML_NEURON_REPACK": "0"}
    good(run_layouts(*asked, GGML_NEURON_KERNEL_DIR=both, **variables), asked)


def test_a_kernel_is_found_for_its_layout_alone(
    run_layouts: RunLayouts, layouts_alone: Path, rounded: Path, tiled: Path
) -> None:
    asked = ["other-layout:q8_0", "other-layout:f16"]
    good(run_layouts(*asked, GGML_NEURON_KERNEL_DIR=layouts_alone, GGML_NEURON_BUFFERS="device"), asked)
    asked = ["other-layout:q8_0:bf16", "other-layout:f16"]
    good(run_layouts(*asked, GGML_NEURON_KERNEL_DIR=rounded, GGML_NEURON_BUFFERS="device"), asked)
    asked = [f"other-layout:{t}:{F8}" for t in TILED]
    good(run_layouts(*asked, GGML_NEURON_KERNEL_DIR=tiled, GGML_NEURON_BUFFERS="device"), asked)


def test_what_has_no_kernel_for_the_form_is_refused_and_never_wrong(
    run_layouts: RunLayouts, layouts_alone: Path, rounded: Path, tiled: Path
) -> None:
    asked = ["refused:q8_0", "refused:f16"]
    result = run_layouts(*asked, GGML_NEURON_KERNEL_DIR=layouts_alone, GGML_NEURON_BUFFERS="device")
    good(result, asked)
    assert "(512,7,1,1)/q8_0:planes" in result.log  # rows of a weight in planes are in planes too
    asked = ["refused:q8_0:bf16"]
    log = run_layouts(*asked, GGML_NEURON_KERNEL_DIR=rounded, GGML_NEURON_BUFFERS="device")
    good(log, asked)
    assert "(512,7,1,1)/q8_0:bf16" in log.log
    assert "(256,24,1,1)/q8_0:scattered" in result.log
    asked = [f"refused:q8_0:{F8}"]
    log = run_layouts(*asked, GGML_NEURON_KERNEL_DIR=tiled, GGML_NEURON_BUFFERS="device")
    good(log, asked)
    assert "(512,7,1,1)/q8_0:scattered" in log.log  # rows without the rest of their tile


def write_model(path: Path, types: Iterable[str], seed: int = 0) -> Path:
    """Writes a GGUF file with a 2D and a 3D weight of several tiles for each type; all scales are finite."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    for t in types:
        kind = TYPES[t]
        columns = 288 if kind.block <= 32 else 3 * kind.block  # with blocks of 32 elements, rows are not whole words
        for name, shape in (("one", (131, columns)), ("two", (2, 37, columns))):
            rows = (*shape[:-1], columns // kind.block * kind.size)
            noise = random.integers(0, 0x40, rows, np.uint8)
            writer.add_tensor(f"{t}.{name}", noise, raw_shape=rows, raw_dtype=gguf.GGMLQuantizationType(kind.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def repack(model: Path, layout: str, output: Path) -> Path:
    """Repacks all of a model's weights that can have a layout into it."""
    weights = gguf_weights.read(model)
    wanted = {(w.dtype, w.ne): layout for w in weights if layout in weight_layouts.of_type(w.dtype)}
    repacked.write(output, repacked.choose(weights, wanted), model.name, 2)
    return output


@pytest.mark.parametrize(
    "types",
    [
        ("q8_0", "q4_K", "q6_K", "mxfp4", *FLOATS),
        # all that the gguf package decodes
        pytest.param(tuple(t for t in QUANTIZED if t not in ("q1_0", "q2_0")), marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_the_backend_reads_what_was_repacked_before(
    run_layouts: RunLayouts, programs: Programs, both: Path, tmp_path: Path, types: tuple[str, ...]
) -> None:
    """The repacked bytes equal those that the backend packs itself."""
    model = write_model(tmp_path / "model.gguf", types)
    asked = [f"model:{t}:{layout}" for t in types for layout in weight_layouts.of_type(t)]
    layouts = sorted({layout for t in types for layout in weight_layouts.of_type(t)})
    files = ":".join(str(repack(model, layout, tmp_path / layout)) for layout in layouts)
    variables = {
        "GGML_NEURON_KERNEL_DIR": both,
        "GGML_NEURON_LIBNRT": programs.find("libnrt-noop.so"),
        "GGML_NEURON_LOG": "1",
        "LAYOUTS_MODEL": model,
    }
    itself = run_layouts(*asked, **variables)
    read = run_layouts(*asked, **variables, GGML_NEURON_REPACKED=files)
    good(itself, asked)
    good(read, asked)
    assert stored_bytes(read) == stored_bytes(itself) and len(stored_bytes(read)) == 2 * len(asked)
    assert "repacked before" not in itself.log
    assert read.log.count("2 weights were repacked before") == len(asked), read.log
    assert "GGML_NEURON_REPACKED" not in read.log


def stored_bytes(result: Result) -> list[str]:
    """Returns the device memory's bytes of each weight of the scenario `model`."""
    return re.findall("^[0-9a-f]+$", result.log, re.MULTILINE)


@pytest.fixture
def load(run_layouts: RunLayouts, programs: Programs, both: Path, tmp_path: Path) -> Callable[..., Result]:
    """Returns a function that loads a model's q8_0 weights as bf16 with files of repacked weights, and checks their bytes."""
    model = write_model(tmp_path / "model.gguf", ["q8_0"])
    variables = {"GGML_NEURON_KERNEL_DIR": both, "GGML_NEURON_LIBNRT": programs.find("libnrt-noop.so")}
    expected = run_layouts("model:q8_0:bf16", **variables, LAYOUTS_MODEL=model)

    def load(*files: Path) -> Result:
        listed = ":".join(map(str, files))
        result = run_layouts("model:q8_0:bf16", **variables, LAYOUTS_MODEL=model, GGML_NEURON_REPACKED=listed)
        good(result, ["model:q8_0:bf16"])
        assert stored_bytes(result) == stored_bytes(expected)
        return result

    return load


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.long)])
def test_no_flipped_byte_changes_a_weight(load: Callable[..., Result], tmp_path: Path, step: int) -> None:
    """A flipped byte in the header is noticed, except in parts without effect: the model's name, the file's type, the
    alignment's key.
    """
    whole = repack(tmp_path / "model.gguf", "bf16", tmp_path / "whole.gguf")
    data, begin = whole.read_bytes(), int(gguf.GGUFReader(whole).tensors[0].data_offset)
    end = data.index(b"q8_0.two") + len("q8_0.two") + 4 + 8 + 4 + 8
    free = [*range(data.index(b"general.type"), data.index(b"general.alignment") + len("general.alignment"))]
    free += range(at := data.index(b"model.gguf"), at + len("model.gguf"))
    assert end <= begin < end + 64 and len(free) < 100
    for at in range(0, end, step):
        (tmp_path / "one").write_bytes(flipped(data, at))
        log = load(tmp_path / "one").log
        refused = f"{tmp_path / 'one'} can't be used: " in log
        assert refused or at in free, at
    for at in (begin, begin + 5001, len(data) - 64):
        (tmp_path / "one").write_bytes(flipped(data, at))
        log = load(tmp_path / "one").log
        found = re.search(
            "1 of 2 weights are not read from files of GGML_NEURON_REPACKED, .*\n.* the first is (.*?): (.*)", log
        )
        assert found and found[2].startswith(f"{tmp_path / 'one'} is damaged there, between bytes "), log


def test_a_file_that_has_other_weights_is_reported(load: Callable[..., Result], tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    data = repack(model, "bf16", tmp_path / "whole.gguf").read_bytes()
    assert "GGML_NEURON_REPACKED" not in load(tmp_path / "whole.gguf").log
    (tmp_path / "short").write_bytes(data[:-1000])
    (tmp_path / "empty").write_bytes(b"")
    cases = {
        tmp_path
        / "short": "short can't be used: .*truncated: tensor 'q8_0.two' has bytes .*\n.*\n.*kernelgen repack MODEL.gguf KERNELS",
        tmp_path / "empty": "empty can't be used: .*empty; expected a GGUF file",
        tmp_path / "none": "none can't be used: .*can't be opened: No such file or directory",
        model: "model.gguf can't be used: .*has 2 dimensions; expected 1",
        repack(
            model, "planes", tmp_path / "planes"
        ): "2 of 2 .*\n.*planes has it of another type or shape, or in another layout",
        repack(write_model(tmp_path / "x.gguf", ["q8_0"], 1), "bf16", tmp_path / "other"): (
            "2 of 2 .*\n.*other is for other bytes, those of x.gguf\n.*kernelgen repack MODEL.gguf KERNELS"
        ),
        repack(write_model(tmp_path / "y.gguf", ["q4_K"]), "bf16", tmp_path / "names"): (
            "2 of 2 .*\n.* the first is q8_0.one: no file has a weight of this name"
        ),
    }
    for file, expected in cases.items():
        assert re.search(expected, load(file).log), file
    # The last of these files has the weights.
    log = load(*cases, tmp_path / "whole.gguf").log
    assert "not read from files" not in log and log.count("can't be used") == 4, log
