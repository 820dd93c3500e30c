"""The modelled cost of a kernel: the work of each engine, bytes of DMA and their runs, memory in use at once, and times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kernelgen.bundle import describe
from kernelgen.dispatch import chips, modelled_cost
from kernelgen.errors import KernelgenError
from kernelgen.lowering import emit
from kernelgen.spec.filenames import notes_file
from kernelgen.spec.kernel import KernelSpec
from nki_interpreter import kernel, loading
from nki_interpreter.cost import cost

with loading.interpreter():
    import neuronxcc.nki.isa as older_nisa
    import neuronxcc.nki.language as older_nl
    import nki.isa as nisa
    import nki.language as nl


def products(a, b):
    """`a.T @ b` in blocks of 128 of the contracted axis, then an exponential with its sum."""
    sums = nl.ndarray((64, 256), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(a.shape[0] // 128):
        left, right = nl.ndarray((128, 64), a.dtype, buffer=nl.sbuf), nl.ndarray((128, 256), b.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=left, src=a[nl.ds(128 * k, 128)])
        nisa.dma_copy(dst=right, src=b[nl.ds(128 * k, 128)])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    done, total = nl.ndarray((64, 256), nl.float32, buffer=nl.sbuf), nl.ndarray((64, 1), nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(done, nl.exp, sums, nl.add, total)
    nisa.tensor_scalar(total, total, nl.multiply, 2.0)
    nisa.tensor_partition_reduce(dst=total[0:1], op=nl.add, data=total)
    result = nl.ndarray((64, 256), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=done)
    return result


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("bound", [0, 1000])
def test_a_kernel_takes_what_the_formulas_say_rolled_or_not(dtype, bound):
    a, b = np.zeros((1024, 64), dtype), np.zeros((1024, 256), dtype)
    recorded = kernel.record(products, [a, b], {}, older=False, bound=bound)
    assert any("rolled" in note for note in recorded.notes) == (bound == 0)
    found = cost(recorded.block, recorded.storages)
    size = a.itemsize
    assert found.work == {
        "tensor": {np.dtype(dtype).name: 8 * 256},
        "scalar": {"one": 256 + 64},
        "vector": {"one": 1},
        "gpsimd": {"one": 1},
        # A row of `a` or `b` is contiguous and fills a partition; a row of the result too.
        "dma": {str(64 * size): a.nbytes, str(256 * size): b.nbytes + (64 * 256 * 4 if size == 4 else 0)}
        | ({"1024": 64 * 256 * 4} if size == 2 else {}),
    }
    assert found.instructions == {"tensor": 8, "scalar": 1, "vector": 1, "gpsimd": 1, "dma": 17}
    assert found.dma_bytes == a.nbytes + b.nbytes + 64 * 256 * 4
    assert found.psum_bytes == 2048
    # The tiles of one step of the loop, or the result and its sum.
    assert found.sbuf_bytes == max((64 + 256) * a.itemsize, 256 * 4 + 4)


def test_the_memory_of_a_kernel_of_the_older_generation_is_its_compilers_choice():
    def blocks(x):
        tiles = older_nl.ndarray((64, older_nl.par_dim(128), 2048), x.dtype, buffer=older_nl.sbuf)
        result = older_nl.ndarray(x.shape, x.dtype, buffer=older_nl.shared_hbm)
        for i in older_nl.affine_range(64):
            tiles[i] = older_nl.load(x[nl.ds(128 * i, 128)])
        for i in older_nl.affine_range(64):
            older_nl.store(result[nl.ds(128 * i, 128)], tiles[i])
        return result

    recorded = kernel.record(blocks, [np.zeros((8192, 2048), np.float32)], {}, older=True)
    noted = cost(recorded.block, recorded.storages, recorded.older).to_json()
    assert not [name for name in noted if "per_partition" in name]
    text = "\n".join(modelled_cost.lines(modelled_cost.total([modelled_cost.of_noted(noted)])))
    assert "SBUF and PSUM are not modelled" in text and "at once" not in text


def test_inspect_prints_the_cost_that_is_noted_beside_the_hlo(tmp_path: Path):
    tensor = "(4,1,1,1)/f32"
    spec = KernelSpec.from_json({"op": "toy", "inputs": [tensor], "output": tensor, "params": {}, "alias": None})
    file = tmp_path / "toy.hlo.pb"
    file.write_bytes(emit(spec, lambda x: x))
    with pytest.raises(KernelgenError, match="no cost is recorded"):
        describe.describe(file, cost=True)
    a, b = np.zeros((1024, 64), np.float16), np.zeros((1024, 256), np.float16)
    recorded = kernel.record(products, [a, b], {}, older=False)
    noted = cost(recorded.block, recorded.storages).to_json()
    (tmp_path / notes_file("toy")).write_text(json.dumps({"nki": ["a note"], "costs": [noted]}))
    assert describe.describe(file)["notes"] == {"nki": ["a note"]}
    found = describe.describe(file, cost=True)
    (made,) = found["cost"]
    assert made["modelled"] is True
    assert made["bottleneck"] == "dma"
    # 0.16 bytes per ns if runs have 512 bytes, and less in proportion if they are shorter
    runs = noted["work"]["dma"]
    assert made["ns"]["dma"] == round(
        sum(n / (160 * min(1, int(run) / 512)) for run, n in runs.items() if run != "1024")
        + runs["1024"] / chips.of("trn1").at("dma_gb_per_s", 1024)
    )
    text = describe.text(found)
    assert "modelled for trn1, not measured; the bottleneck is dma" in text
    assert f"17 instructions{made['ns']['dma'] / 1e3:>12,.1f} µs, {made['dma_bytes']:,} bytes" in text


def test_time_of_a_product_follows_its_dtype_and_the_target():
    found = {}
    for dtype in (np.float16, np.float32):
        a, b = np.zeros((1024, 64), dtype), np.zeros((1024, 256), dtype)
        recorded = kernel.record(products, [a, b], {}, older=False)
        noted = cost(recorded.block, recorded.storages).to_json()
        for target in ("trn1", "inf2", "trn2"):
            found[target, dtype] = modelled_cost.of_noted(noted, target)["ns"]
    for target, chip in ((target, chips.of(target, 1)) for target in ("trn1", "trn2")):
        for dtype in (np.float16, np.float32):
            rate = chip.by("tensor_ns_per_column", np.dtype(dtype).name)
            assert found[target, dtype]["tensor"] == round(8 * 256 * rate)
    assert found["trn1", np.float32]["tensor"] > 5 * found["trn1", np.float16]["tensor"]
    assert found["inf2", np.float16] == found["trn1", np.float16]
    assert found["trn2", np.float16]["vector"] > found["trn1", np.float16]["vector"]  # a slower clock


def older_kernel(x, row, twice):
    """Adds a row of one partition to tiles, then squares them, in the older NKI's language."""
    result = older_nl.ndarray(x.shape, x.dtype, buffer=older_nl.shared_hbm)
    weights = older_nl.load(row)
    for i in older_nl.affine_range(4):
        tile = older_nl.ndarray((older_nl.par_dim(128), 512), x.dtype, buffer=older_nl.sbuf)
        tile[...] = older_nl.load(x[nl.ds(128 * i, 128)])
        added = older_nl.add(tile, tile) if twice else older_nl.add(tile, weights.broadcast_to((128, 512)))
        older_nl.store(result[nl.ds(128 * i, 128)], older_nl.square(added))
    return result


@pytest.mark.parametrize("twice", [False, True])
def test_the_older_generation_broadcasts_a_row_by_products_and_leaves_engines_to_its_compiler(twice):
    arrays = [np.zeros((512, 512), np.float32), np.zeros((1, 512), np.float32)]
    recorded = kernel.record(older_kernel, arrays, {"twice": twice}, older=True)
    noted = cost(recorded.block, recorded.storages, recorded.older).to_json()
    assert noted["work"]["tensor"] == ({} if twice else {"float32": 4 * 512})
    assert noted["instructions"]["tensor"] == (0 if twice else 4)
    assert noted["work"]["vector"] == {"two": 4 * 512}
    assert noted["work"]["either"] == {"one": 4 * 512}
    # An assignment to a tile does not count as a copy, so the scalar engine is free for the squares.
    made = modelled_cost.of_noted(noted)
    assert made["ns"]["scalar"] == round(4 * 512 * 0.75 + 4 * 40)
    assert made["ns"]["vector"] == round(4 * 512 * 2.0 + 4 * 40)
    assert "of vector or scalar engine" in "\n".join(modelled_cost.lines(made))


def reducing_kernel(x, reduces):
    """Exponentials of sums of tiles; with `reduces`, the activation also adds them up."""
    result = older_nl.ndarray(x.shape, x.dtype, buffer=older_nl.shared_hbm)
    for i in older_nl.affine_range(4):
        tile = older_nl.load(x[nl.ds(128 * i, 128)])
        total = older_nl.ndarray((older_nl.par_dim(128), 1), x.dtype, buffer=older_nl.sbuf)
        added = older_nl.add(tile, tile)
        more = {"reduce_op": np.add, "reduce_res": total, "reduce_cmd": older_nisa.reduce_cmd.reset_reduce}
        made = older_nisa.activation(op=older_nl.exp, data=added, **(more if reduces else {}))
        older_nl.store(result[nl.ds(128 * i, 128)], older_nl.square(made))
    return result


def test_the_older_generation_computes_anew_what_an_activation_reduces():
    def noted(reduces):
        recorded = kernel.record(reducing_kernel, [np.zeros((512, 512), np.float32)], {"reduces": reduces}, older=True)
        return cost(recorded.block, recorded.storages, recorded.older).to_json()

    without, reduced = noted(False), noted(True)
    assert reduced["work"]["vector"]["two"] == 2 * without["work"]["vector"]["two"] == 2 * 4 * 512
    assert reduced["work"]["dma"]["2048"] == without["work"]["dma"]["2048"] + 4 * 512 * 512  # loads, not stores
    assert reduced["work"]["either"] == without["work"]["either"]  # the squares of its result
    assert reduced["instructions"]["scalar"] == without["instructions"]["scalar"] == 4


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        ({"tensor": 100, "vector": 50, "scalar": 0, "gpsimd": 0, "dma": 10}, 130),
        ({"tensor": 20, "vector": 50, "scalar": 30, "gpsimd": 0, "dma": 79}, 80),
        ({"tensor": 20, "vector": 50, "scalar": 30, "gpsimd": 0, "dma": 200}, 200),  # DMA loads ahead
    ],
)
def test_the_longest_engine_waits_for_a_part_of_what_others_do(ns, expected):
    assert modelled_cost.elapsed(ns) == pytest.approx(expected)
