"""A kernel that breaks a limit of the hardware or a rule of NKI is refused, with the code and the kernel's file and line."""

from __future__ import annotations

import numpy as np
import pytest

from nki_interpreter import kernel, loading
from nki_interpreter.errors import NkiError

with loading.interpreter():
    import neuronxcc.nki as older_nki
    import neuronxcc.nki.language as older_nl
    import nki.isa as nisa
    import nki.language as nl

X = np.zeros((128, 512), np.float32)


def sbuf(*shape, dtype=np.float32):
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def psum(*shape, dtype=np.float32):
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def integers(*shape):
    return sbuf(*shape, dtype=np.int32)


def half(*shape):
    return sbuf(*shape, dtype=np.float16)


def at_run_time(*shape):
    """Returns a part of a tile whose beginning is in a register."""
    rows, columns = shape
    return sbuf(rows, 64).ap([[64, rows], [1, columns]], scalar_offset=nisa.register_alloc(3), indirect_dim=1)


def halves(rows=16, columns=8, dtype=np.float16, **options):
    """Returns rows of a tensor in HBM."""
    table = nl.ndarray((64, 256), dtype, buffer=nl.private_hbm)
    return table.ap([[256, rows], [1, columns]], **options)


GPSIMD, SCALAR = nisa.engine.gpsimd, nisa.engine.scalar


def matmul(k=128, m=128, n=512, a=np.float32, b=np.float32, **options):
    nisa.nc_matmul(dst=psum(m, n), stationary=sbuf(k, m, dtype=a), moving=sbuf(k, n, dtype=b), **options)


def into(dtype, n=8):
    """Puts a product of bfloat16 into a tile of PSUM."""
    nisa.nc_matmul(
        dst=psum(8, n, dtype=dtype), stationary=sbuf(8, 8, dtype=nl.bfloat16), moving=sbuf(8, n, dtype=nl.bfloat16)
    )


def double_row(dtype, **options):
    a = sbuf(8, 2, 8, dtype=dtype)
    nisa.nc_matmul(psum(8, 8), a, a, perf_mode=nisa.matmul_perf_mode.double_row, **options)


def does(call):
    """Returns a kernel that evaluates a call on its argument `x` and copies `x`."""
    code = compile(call, __file__, "eval")

    def function(x):
        eval(code, globals(), {"x": x})
        result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result, src=x)
        return result

    return function


# The code of the refusal, and the call that is refused.
REFUSED = """
err_access_out_of_bounds: nisa.dma_copy(dst=sbuf(128, 8), src=x[:, 508:516])
err_access_out_of_bounds: x.ap([[512, 128], [1, 513]])
err_activation_bias_invalid_type: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), bias=sbuf(8, 1, dtype=np.int8))
err_activation_scale_invalid_type: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), scale=sbuf(8, 1, dtype=np.float16))
err_arguments: nisa.memset(sbuf(8, 8), 0.0, evil=3)
err_bitwise_on_float: nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), nl.bitwise_and)
err_bitwise_on_float: nisa.tensor_scalar(sbuf(8, 8), integers(8, 8), nl.bitwise_and, 1)
err_bitwise_on_float: nisa.tensor_scalar(integers(8, 8), integers(8, 8), nl.bitwise_and, 0.5)
err_dma_engine: nisa.dma_copy(dst=sbuf(128, 512), src=x, engine=SCALAR)
err_dma_priority: nisa.dma_copy(dst=sbuf(128, 512), src=x, priority=4)
err_dma_scales: nisa.dma_compute(sbuf(128, 512), [x, x], nl.add, scales=[1.0, 2.0])
err_dma_size_mismatch: nisa.dma_copy(dst=sbuf(128, 511), src=x)
err_dma_sources: nisa.dma_compute(sbuf(128, 512), [x] * 17, nl.add)
err_double_row: double_row(nl.float8_e4m3, tile_position=(0, 0), tile_size=(128, 64))
err_index_out_of_bounds: x[128, 0]
err_indirect_dim: x.ap([[512, 8], [1, 8]], vector_offset=integers(8, 1), indirect_dim=1)
err_instruction_name: nisa.memset(sbuf(8, 8), 0.0, name=3)
err_local_gather_partitions: nisa.local_gather(sbuf(8, 16), sbuf(8, 8), sbuf(8, 1, dtype=np.uint16))
err_matmul_contraction: nisa.nc_matmul(dst=psum(8, 8), stationary=sbuf(8, 8), moving=sbuf(9, 8))
err_matmul_dtype: matmul(b=np.float16)
err_matmul_dtype: matmul(a=np.int32)
err_matmul_dtype: matmul(a=np.float16, b=np.int32)
err_matmul_dtype: matmul(a=np.int32, b=np.int32)
err_matmul_dtype: into(np.float16)
err_matmul_dtype: matmul(a=nl.float8_e4m3, b=nl.float8_e4m3fn)
err_matmul_dtype: double_row(nl.bfloat16)
err_mixed_bitwise: nisa.tensor_scalar(integers(8, 8), integers(8, 8), nl.bitwise_and, 1, op1=nl.add, operand1=1)
err_cannot_broadcast_partition: nl.add(sbuf(1, 8), sbuf(8, 8))
err_reshape_not_contiguous: x[:, 0:500].reshape((100, 640))
err_num_partition_exceed_arch_limit: sbuf(129, 4)
err_num_partition_exceed_arch_limit: matmul(m=129)
err_oob_mode: nisa.dma_transpose(sbuf(8, 128), x[:, 0:8], oob_mode=nisa.oob_mode.skip)
err_psum_bank: nisa.nc_matmul(dst=psum(128, 2, 2, 256)[:, :, :, 0:128], stationary=sbuf(1, 128), moving=sbuf(1, 512))
err_psum_exceed_arch_limit: psum(128, 8192)
err_sbuf_exceed_arch_limit: sbuf(128, 50000)
err_scalar_or_vector: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.add, sbuf(8, 2))
err_shape_mismatch: nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 9), nl.add)
err_shape_mismatch: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), reduce_op=nl.add, reduce_res=sbuf(8, 2))
err_shape_mismatch: nisa.set_rng_seed(integers(2, 1))
err_size_of_dimension_exceed_arch_limit: nisa.nc_matmul(dst=psum(128, 2, 8), stationary=sbuf(8, 256), moving=sbuf(8, 8))
err_size_of_dimension_exceed_arch_limit: matmul(n=513)
err_size_of_dimension_exceed_arch_limit: nisa.bn_stats(sbuf(8, 6), sbuf(8, 513))
err_size_of_dimension_exceed_arch_limit: nisa.max8(sbuf(8, 8), sbuf(8, 7))
err_size_of_dimension_exceed_arch_limit: nisa.nc_transpose(sbuf(33, 8), sbuf(8, 33), engine=nisa.engine.vector)
err_start_partition: nisa.tensor_copy(sbuf(64, 8), sbuf(128, 8)[5:69])
err_start_partition: nisa.activation(sbuf(128, 8)[16:32], nl.exp, sbuf(16, 8))
err_start_partition: nisa.nc_matmul(psum(8, 8), sbuf(128, 8)[32:96], sbuf(64, 8))
err_start_partition: nisa.tensor_copy(sbuf(65, 8), sbuf(128, 8).ap([[8, 65], [1, 8]], offset=32 * 8))
err_tensor_rank_too_small: sbuf(128)
err_tile_position_and_size: matmul(tile_position=(0, 0))
err_tile_position_and_size: matmul(k=64, tile_position=(0, 0), tile_size=(32, 128))
err_unique_indices: nisa.dma_compute(sbuf(128, 512), [x, x], nl.add, unique_indices=False)
err_unique_indices: nisa.dma_copy(dst=sbuf(128, 512), src=x, dst_rmw_op=nl.add, unique_indices=False)
err_unsupported_dtype: sbuf(4, 4, dtype='complex64')
err_unsupported_dtype: nisa.tensor_copy_predicated(sbuf(8, 8), sbuf(8, 8), integers(8, 8))
err_unsupported_dtype: nisa.tensor_copy_predicated(half(8, 8), sbuf(8, 8), sbuf(8, 8, dtype=np.uint8))
err_unsupported_dtype: nisa.nc_transpose(half(8, 8), sbuf(8, 8), engine=nisa.engine.vector)
err_unsupported_dtype: nisa.dma_transpose(half(8, 128), x[:, 0:8])
err_unsupported_dtype: nisa.local_gather(sbuf(16, 16), sbuf(16, 8), integers(16, 1))
err_unsupported_dtype: nisa.local_gather(half(16, 16), sbuf(16, 8), sbuf(16, 1, dtype=np.uint16))
err_unsupported_dtype: nisa.nc_n_gather(sbuf(8, 8), sbuf(8, 8), integers(8, 8))
err_unsupported_dtype: nisa.nc_n_gather(half(8, 8), sbuf(8, 8), sbuf(8, 8, dtype=np.uint32))
err_unsupported_dtype: nisa.nc_stream_shuffle(half(32, 8), sbuf(32, 8), [0] * 32)
err_unsupported_dtype: nisa.rng(sbuf(8, 8))
err_unsupported_dtype: nisa.set_rng_seed(half(1, 1))
err_unsupported_dtype: nisa.dropout(half(8, 8), sbuf(8, 8), 0.5)
err_unsupported_dtype: nisa.sequence_bounds(half(1, 2, 8), half(1, 8))
err_unsupported_dtype: nisa.range_select(integers(8, 8), integers(8, 8), nl.greater, nl.less, sbuf(8, 1), sbuf(8, 1))
err_unsupported_dtype: nisa.select_reduce(integers(8, 8), sbuf(8, 8, dtype=np.uint8), integers(8, 8), 0.0)
err_unsupported_dtype: nisa.select_reduce(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), 0.0)
err_unsupported_dtype: nisa.nonzero_with_count(integers(16, 9), half(16, 8))
err_unsupported_dtype: nisa.sendrecv(sbuf(8, 8), half(8, 8), 1, 1)
err_unsupported_engine: nisa.memset(sbuf(8, 8), 0.0, engine=SCALAR)
err_unsupported_engine: nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), nl.add, engine=SCALAR)
err_unsupported_engine: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.maximum, 0.0, engine=SCALAR)
err_unsupported_engine: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.add, 0.0, engine=GPSIMD)
err_unsupported_memory: nisa.nc_matmul(dst=sbuf(8, 8), stationary=sbuf(8, 8), moving=sbuf(8, 8))
err_unsupported_memory: nisa.nc_matmul(dst=psum(8, 8), stationary=psum(8, 8), moving=sbuf(8, 8))
err_unsupported_memory: nisa.tensor_tensor(dst=sbuf(128, 512), data1=x, data2=sbuf(128, 512), op=nl.add)
err_unsupported_memory: nisa.tensor_tensor(sbuf(8, 8), psum(8, 8), sbuf(8, 8), nl.add, engine=GPSIMD)
err_unsupported_memory: nisa.dma_copy(dst=psum(128, 512), src=x)
err_unsupported_memory: nisa.tensor_tensor(sbuf(8, 8), psum(8, 8), psum(8, 8), nl.add)
err_unsupported_memory: nisa.scalar_tensor_tensor(sbuf(8, 8), psum(8, 8), nl.add, 1.0, nl.add, psum(8, 8))
err_unsupported_memory: nisa.tensor_tensor_scan(sbuf(8, 8), psum(8, 8), psum(8, 8), 0.0, nl.add, nl.add)
err_unsupported_memory: nisa.tensor_copy_predicated(sbuf(8, 8), psum(8, 8), psum(8, 8, dtype=np.uint8))
err_unsupported_memory: nisa.select_reduce(sbuf(8, 8), psum(8, 8, dtype=np.uint8), psum(8, 8), 0.0)
err_unsupported_memory: nisa.tensor_scalar(sbuf(8, 8), psum(8, 8), nl.add, psum(8, 1))
err_unsupported_memory: nisa.tensor_tensor_scan(sbuf(8, 8), psum(8, 8), sbuf(8, 8), psum(8, 1), nl.add, nl.add)
err_unsupported_memory: nisa.select_reduce(sbuf(8, 8), sbuf(8, 8), psum(8, 8), psum(8, 8))
err_unsupported_memory: nisa.range_select(sbuf(8, 8), psum(8, 8), nl.greater, nl.less, psum(8, 1), sbuf(8, 1))
err_unsupported_memory: nisa.tensor_tensor(sbuf(8, 8), psum(8, 8), sbuf(8, 8), nl.power)
err_unsupported_memory: nisa.tensor_copy(sbuf(8, 8), psum(8, 8), engine=GPSIMD)
err_unsupported_memory: nisa.memset(psum(8, 8), 0.0, engine=GPSIMD)
err_unsupported_memory: nisa.nc_n_gather(sbuf(8, 8), psum(8, 8), sbuf(8, 8, dtype=np.uint32))
err_unsupported_memory: nisa.nonzero_with_count(integers(16, 9), psum(16, 8))
err_unsupported_memory: nisa.sendrecv(sbuf(8, 8), psum(8, 8), 1, 1)
err_unsupported_op: nisa.dma_compute(sbuf(128, 512), [x, x], nl.maximum)
err_unsupported_op: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), reduce_op=nl.maximum, reduce_res=sbuf(8, 1))
err_unsupported_op: nisa.activation_reduce(sbuf(8, 8), nl.exp, sbuf(8, 8), nl.maximum, sbuf(8, 1))
err_unsupported_op: nisa.activate2(sbuf(8, 8), nl.relu, sbuf(8, 8), 1.0, 0.0, nl.multiply, nl.add, relu_param=0.1)
err_unsupported_op: nisa.tensor_scalar_reduce(integers(8, 8), integers(8, 8), nl.bitwise_and, 1, nl.add, sbuf(8, 1))
err_unsupported_op: nisa.range_select(sbuf(8, 8), sbuf(8, 8), nl.greater, nl.less, sbuf(8, 1), sbuf(8, 1), reduce_res=sbuf(8, 1), reduce_op=nl.add)
err_unsupported_op: nisa.range_select(sbuf(8, 8), sbuf(8, 8), nl.add, nl.less, sbuf(8, 1), sbuf(8, 1))
err_unsupported_op: nisa.tensor_scalar_cumulative(integers(8, 8), integers(8, 8), nl.bitwise_and, nl.add, 1)
err_unsupported_reduce_axis: nisa.tensor_reduce(sbuf(8, 1), nl.add, sbuf(8, 8), 0)
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_refused(case):
    code, _, call = case.partition(": ")
    with pytest.raises(NkiError) as caught:
        kernel.record(does(call), [X], {}, older=False)
    assert caught.value.code == code
    assert str(caught.value).startswith(f"{__file__}:{caught.value.line}: {code}: ")


# What NeuronCore-v2 refuses: the call, how the error names it, and the code of AWS's compiler.
NEEDS_V3 = """
nisa.dma_copy(dst=sbuf(128, 512), src=x, dge_mode=nisa.dge_mode.hwdge) | dge_mode hwdge
nisa.tensor_copy(sbuf(8, 8), sbuf(8, 8), engine=SCALAR) | tensor_copy on the scalar engine
nisa.rng(integers(8, 8), engine=GPSIMD) | rng on GpSimd
matmul(k=32, tile_position=(0, 0), tile_size=(32, 128)) | a tile_size of 32 rows
nisa.dma_transpose(sbuf(8, 16), sbuf(16, 8)) | dma_transpose from SBUF, not from HBM,
nisa.dma_transpose(half(8, 16), halves(vector_offset=sbuf(16, 1, dtype=np.uint32))) | dma_transpose of rows that a tile names (DmaGatherTranspose)
nisa.range_select(sbuf(8, 16), sbuf(8, 16), nl.greater_equal, nl.less, sbuf(8, 1), sbuf(8, 1), reduce_res=sbuf(8, 1)) | range_select | NCC_IBIR530
nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), nl.add, engine=GPSIMD) | tensor_tensor on GpSimd | NCC_IXCG965
nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.rsqrt, 0.0, engine=GPSIMD) | tensor_scalar on GpSimd | NCC_IXCG965
nisa.register_store(integers(1, 1), nisa.register_alloc(3)) | register_store to sbuf
nisa.register_load(nisa.register_alloc(), at_run_time(1, 1)) | an address known at run time of register_load, which is not a DMA's, | NCC_IBIR829
nisa.tensor_scalar(sbuf(8, 4), at_run_time(8, 4), nl.add, 1.0) | an address known at run time of data, which is not a DMA's, | NCC_IBIR829
nisa.memset(at_run_time(8, 4), 1.0) | an address known at run time of dst, which is not a DMA's, | NCC_IBIR829
nisa.nc_matmul(psum(4, 8), at_run_time(8, 4), sbuf(8, 8), accumulate=False) | an address known at run time of stationary, which is not a DMA's, | NCC_IBIR040
nisa.activation(sbuf(8, 8), nl.copy, sbuf(8, 8), bias=sbuf(8, 1)) | activation of nl.copy with a tile as bias, not a number, | NCC_IBVF043
nisa.affine_select(sbuf(8, 8), [[1, 8]], 1, psum(8, 8), 0.0) | affine_select, on GpSimd, of a tile in PSUM
nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), bias=1.0) | a number as bias of activation
nisa.iota(psum(8, 8), [[1, 8]]) | iota, on GpSimd, of a tile in PSUM
nisa.local_gather(sbuf(16, 16), psum(16, 8), sbuf(16, 1, dtype=np.uint16)) | local_gather, on GpSimd, of a tile in PSUM
"""
NEEDS_V4 = """
into(nl.bfloat16) | a product into bfloat16 in PSUM (before, it has to be float32)
matmul(a=nl.float8_e4m3fn, b=nl.float8_e4m3fn) | float8_e4m3fn in a product
nisa.activate2(sbuf(8, 8), nl.exp, sbuf(8, 8), 1.0, 0.0, nl.multiply, nl.add) | activate2
nisa.exponential(sbuf(8, 8), sbuf(8, 8)) | exponential
nisa.rand2(sbuf(8, 8), 0.0, 1.0) | rand2
nisa.dma_copy(dst=sbuf(128, 512), src=x, priority=1) | priority of a DMA
"""


@pytest.mark.parametrize(
    "case",
    [(version, case) for version, table in ((3, NEEDS_V3), (4, NEEDS_V4)) for case in table.strip().splitlines()],
)
def test_what_a_target_does_not_have(case):
    version, (call, what, *codes) = case[0], case[1].split(" | ")
    target = {3: "trn1", 4: "trn2"}[version]
    kernel.record(does(call), [X], {}, older=False, targets=("trn3",))
    with pytest.raises(NkiError) as caught:
        kernel.record(does(call), [X], {}, older=False, targets=(target, "trn3"))
    assert f"err_unsupported_on_target: {what} needs NeuronCore-v{version} or newer, and {target}" in str(caught.value)
    assert all(f"({code})" in str(caught.value) for code in codes)


def record(function, *arrays, older=False, targets=()):
    return kernel.record(function, list(arrays) or [X], {}, older=older, targets=targets)


def refuses(match, function, *arrays, **options):
    with pytest.raises(NkiError, match=match) as caught:
        record(function, *arrays, **options)
    assert caught.value.file == __file__


def test_trn3_has_products_of_8192_columns_of_bfloat16():
    record(does("into(nl.bfloat16, 8192)"), targets=("trn3",))


def test_a_limit_holds_for_every_target():
    record(does("sbuf(128, 50_000)"), targets=("trn2",))
    refuses("180224 of trn1's SBUF", does("sbuf(128, 50_000)"), targets=("trn1", "trn2"))


def test_a_result_has_to_be_in_shared_hbm():
    refuses("err_nki_return_not_shared_hbm", lambda x: nl.ndarray((8, 8), np.float32, buffer=nl.private_hbm))


def test_functions_work_inside_a_kernel_only():
    with pytest.raises(NkiError, match="err_outside_kernel"):
        sbuf(8, 8)


def test_indices_known_at_run_time_are_checked_when_a_kernel_runs():
    @older_nki.jit
    def function(x, rows):
        result = older_nl.ndarray((8, 8), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, older_nl.load(x[older_nl.load(rows), older_nl.arange(8)[None, :]]))
        return result

    rows = np.arange(8, dtype=np.int32)[:, None]
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(function(x, rows), x)
    with pytest.raises(IndexError, match="index 64 is out of bounds for axis 0 with size 64"):
        function(x, rows + 1)


# The older generation


def _writes_its_argument(x):
    older_nl.store(x, older_nl.load(x))
    return x


def _masks_a_product(x):
    tile = older_nl.load(x[0:16, 0:16])
    older_nki.isa.nc_matmul(tile, tile, mask=older_nl.arange(9)[None, :] < 3)


def _broadcasts_a_row(x):
    rows, columns = older_nl.mgrid[0:64, 0:512]
    target = older_nl.ndarray((64, 512), x.dtype, buffer=older_nl.sbuf)
    older_nki.isa.dma_copy(dst=target[rows, columns], src=x[rows * 0, columns])


def _broadcasts_before_it_loads(x):
    return older_nl.load(x[0:1].broadcast_to((128, 512)))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (_writes_its_argument, "err_mutable_annotation_needed"),
        (_masks_a_product, "err_mask_shape"),
        (_broadcasts_a_row, "err_dma_partition_broadcast"),
        (_broadcasts_before_it_loads, "err_unsupported_memory: broadcast_to takes a tile in SBUF or PSUM"),
    ],
)
def test_what_the_older_generation_refuses(function, match):
    refuses(match, function, older=True)


def test_the_older_generation_multiplies_a_transpose_that_is_in_psum():
    def function(x):
        tile = older_nl.load(x)
        product = older_nki.isa.nc_matmul(older_nki.isa.nc_transpose(tile), tile)
        result = older_nl.ndarray((64, 64), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, product)
        return result

    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    np.testing.assert_allclose(record(function, x, older=True)(x)[0], x @ x, rtol=1e-4, atol=1e-4)


def test_block_dimensions_of_the_older_generation_are_no_limit():
    def blocks(x):
        tiles = older_nl.ndarray((64, older_nl.par_dim(128), 2048), x.dtype, buffer=older_nl.sbuf)
        result = older_nl.ndarray((128, 512), x.dtype, buffer=older_nl.shared_hbm)
        for i in older_nl.affine_range(64):
            tiles[i, :, 0:512] = older_nl.load(x)
        for i in older_nl.affine_range(64):
            older_nl.store(result, tiles[i, :, 0:512])
        return result

    record(blocks, older=True, targets=("trn1", "trn2"))


# Transposes


@pytest.mark.parametrize(
    ("transposed", "given", "targets", "allowed"),
    [
        (np.float32, np.float16, ("trn1",), True),
        (np.float32, np.float16, ("inf2",), True),
        (np.float16, np.float16, ("trn1",), False),
        (np.float16, np.float16, ("trn2",), True),
        (np.float32, np.float16, ("trn2",), False),
        (np.float32, np.float16, ("trn1", "trn2"), False),
        (np.float32, np.float32, ("trn1", "trn2", "trn3"), True),
        (np.float16, np.float16, (), True),
        (np.float32, np.float16, (), True),
        (np.int32, np.float16, (), False),
    ],
)
def test_a_transpose_goes_to_psum_in_the_dtype_of_the_targets(transposed, given, targets, allowed):
    function = does(
        f"nisa.nc_transpose(psum(8, 16, dtype={str(np.dtype(transposed))!r}), sbuf(16, 8, dtype={str(np.dtype(given))!r}))"
    )
    if allowed:
        record(function, targets=targets)
    else:
        refuses("err_transpose_dtype", function, targets=targets)


# The source, the generator of the descriptors, and what is missing.
DMA_TRANSPOSES = """
halves(16, 128) | hwdge |
halves(16, 256) | hwdge |
halves(32, 128) | hwdge | 16 rows
halves(16, 64) | hwdge | a multiple of 128 elements in the last dimension
halves(16, 128, np.float32) | hwdge | a dtype of 2 bytes
halves(32, 64, np.float32) | unknown |
halves(16, 128) | swdge | dge_mode unknown, none or hwdge
halves(32, 64, vector_offset=sbuf(32, 1, dtype=np.uint32)) | swdge |
halves(32, 64, vector_offset=sbuf(32, 1, dtype=np.uint32)) | hwdge | dge_mode unknown or swdge
halves(32, 64, vector_offset=integers(32, 1)) | unknown | indices of uint32 in SBUF
halves(24, 64, vector_offset=sbuf(24, 1, dtype=np.uint32)) | unknown | a multiple of 16 rows
halves(16, 192, vector_offset=sbuf(16, 1, dtype=np.uint32)) | unknown | at most 128 elements in the last dimension
halves(16, 64, np.float32, vector_offset=sbuf(16, 1, dtype=np.uint32)) | unknown | a dtype of 2 bytes
half(16, 64).ap([[64, 16], [1, 64]], vector_offset=sbuf(16, 1, dtype=np.uint32)) | unknown | a source in HBM
"""


@pytest.mark.parametrize("case", DMA_TRANSPOSES.strip().splitlines())
def test_a_dma_transposes_what_its_documentation_says(case):
    source, mode, missing = (part.strip() for part in case.split("|"))

    def function(x):
        src = eval(source)
        result = nl.ndarray((src.shape[1], src.shape[0]), src.dtype, buffer=nl.shared_hbm)
        nisa.dma_transpose(result, src, dge_mode=nisa.dge_mode[mode])
        return result

    if missing:
        refuses(f"err_dma_transpose: dma_transpose .* takes {missing}; src is tensor", function)
    else:
        record(function)


# Partitions


@pytest.mark.parametrize(("count", "start"), [(1, 96), (16, 64), (32, 32), (33, 64), (64, 64), (65, 0), (128, 0)])
def test_an_engine_reads_and_writes_from_these_partitions(count, start):
    part = f"sbuf(128, 8)[{start} : {start + count}]"
    record(does(f"nisa.tensor_copy(dst={part}, src={part})"))


def test_a_dma_reads_from_any_partition_and_the_older_compiler_places_tiles_itself():
    def older(x):
        result = older_nl.ndarray((64, 512), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, older_nl.exp(older_nl.load(x)[5:69]))
        return result

    record(does("nisa.dma_copy(dst=nl.ndarray((64, 8), np.float32, buffer=nl.shared_hbm), src=sbuf(128, 8)[5:69])"))
    record(older, older=True)


# Sums in PSUM

LEFT, RIGHT = slice(0, 8), slice(8, 16)


def _sums(*steps, targets=("trn2",)):
    """Returns the notes of steps on a tensor in PSUM: a product (columns, accumulate), what else writes to it, or None: a read."""

    def function(x):
        sums, a, copied = psum(8, 16), sbuf(8, 8), sbuf(8, 16)
        result = nl.ndarray((8, 16), np.float32, buffer=nl.shared_hbm)
        nisa.memset(a, 1.0)
        for step in (*steps, None):
            if step is None:
                nisa.tensor_copy(dst=copied, src=sums)
            elif callable(step):
                step(sums, a)
            else:
                nisa.nc_matmul(dst=sums[:, step[0]], stationary=a, moving=a, accumulate=step[1])
        nisa.dma_copy(dst=result, src=copied)
        return result

    return record(function, targets=targets).notes


def _ones(sums, a):
    nisa.memset(sums, 1.0)


def _zeros(sums, a):
    nisa.memset(sums, 0.0)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([_ones, (LEFT, None)], "another instruction wrote there"),
        ([_ones, (LEFT, True)], "another instruction wrote there"),
        ([_zeros, (LEFT, True)], "another instruction wrote there"),
        ([lambda sums, a: nisa.tensor_copy(sums[:, LEFT], a), (LEFT, None)], "another instruction wrote there"),
        ([lambda sums, a: nisa.memset(sums[:, 7:9], 1.0), (LEFT, None)], "another instruction wrote there"),
        ([(LEFT, True)], "nothing was written there"),
    ],
)
def test_a_product_is_only_added_to_a_product(steps, why):
    with pytest.raises(NkiError, match=f"err_psum_accumulate: .*{why}"):
        _sums(*steps)


PARTS = "several sums share one tensor in PSUM, and devices have lost parts of such sums"


@pytest.mark.parametrize(
    ("steps", "note"),
    [
        ([_ones, (LEFT, False), (LEFT, True)], None),
        ([(LEFT, None), (LEFT, True)], None),
        ([(LEFT, False), (LEFT, True), None, (RIGHT, False), (RIGHT, True)], None),
        ([(LEFT, False), (LEFT, True), None, (LEFT, False), (LEFT, True)], None),
        ([(LEFT, False), (RIGHT, False)], None),
        ([_zeros, (LEFT, None)], "leaves accumulate out, and an instruction that is not a product put zeros there"),
        ([(LEFT, None), None, (LEFT, None)], "leaves accumulate out, and its tile in PSUM was read before"),
        ([(LEFT, None), (RIGHT, None)], "leaves accumulate out, and several sums share one tensor in PSUM"),
        ([lambda sums, a: nisa.memset(sums[:, RIGHT], 1.0), (LEFT, None)], "and several sums share one tensor in PSUM"),
        ([(LEFT, False), (RIGHT, False), (LEFT, True), (RIGHT, True)], PARTS),
        ([(LEFT, False), (LEFT, True), (RIGHT, False), (RIGHT, True)], PARTS),
    ],
)
def test_sums_that_devices_compute_otherwise_are_noted(steps, note):
    notes = _sums(*steps)
    assert len(notes) == (note is not None)
    if note:
        assert notes[0].startswith(f"{__file__}:") and note in notes[0]


def test_trn3_adds_a_product_to_other_data():
    _sums(_ones, (LEFT, True), targets=("trn3",))


@pytest.mark.parametrize(
    ("transposed", "first", "targets", "allowed"),
    [
        (False, 0, ("trn1",), True),
        (False, 256, ("trn1",), False),
        (False, 512, ("trn1",), True),
        (False, 768, ("trn1", "trn3"), False),
        (False, 256, ("trn3",), True),
        (True, 384, ("trn1",), True),
        (True, 448, ("trn1",), False),
    ],
)
def test_a_product_is_in_one_bank_wherever_it_begins(transposed, first, targets, allowed):
    target = f"psum(128, 2048)[:, nl.ds({first}, {128 if transposed else 512})]"
    if transposed:
        function = does(f"nisa.nc_transpose({target}, sbuf(128, 128))")
    else:
        function = does(f"nisa.nc_matmul({target}, sbuf(128, 128), sbuf(128, 512), accumulate=False)")
    if allowed:
        record(function, targets=targets)
    else:
        refuses(r"err_psum_bank: a product of .* from byte .* exceeds a bank of 2,048", function, targets=targets)


def test_a_scatter_that_adds_is_noted_as_what_devices_hang_in():
    def scattered(x, add):
        rows, index = sbuf(128, 512), integers(128, 1)
        nisa.memset(rows, 1.0)
        nisa.memset(index, 0)
        result = nl.ndarray((256, 512), np.float32, buffer=nl.shared_hbm)
        place = result.ap([[512, 128], [1, 512]], vector_offset=index) if add != "in order" else result[0:128]
        nisa.dma_copy(dst=place, src=rows, dst_rmw_op=nl.add if add else None, oob_mode=nisa.oob_mode.skip)
        return result

    notes = {add: record(lambda x, a=add: scattered(x, a)).notes for add in ("scattered", "in order", "")}
    assert notes["in order"] == notes[""] == ()
    (note,) = notes["scattered"]
    assert note.startswith(f"{__file__}:") and "give it indices that are inside and unique" in note


# SBUF and PSUM


def filled(x, count, columns, buffer=nl.sbuf, **options):
    """Writes `count` tiles of 128 partitions, then reads all of them: they are in use at once."""
    tiles = [nl.ndarray((128, columns), np.float32, buffer=buffer, **options) for _ in range(count)]
    total = sbuf(128, 1)
    for tile in (total, *tiles):
        nisa.memset(dst=tile, value=0.0)
    for tile in tiles:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:1], op=nl.add)
    result = nl.ndarray((128, 1), np.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=total)
    return result


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (lambda x: filled(x, 8, 8192), "err_sbuf_exceed_arch_limit: 9 tiles in sbuf .* 262,148 bytes per partition"),
        (lambda x: filled(x, 5, 8192), None),  # 160 KiB
        (lambda x: filled(x, 12, 512, nl.psum), "err_psum_exceed_arch_limit: 12 tiles in psum .* 24,576 bytes"),
        (lambda x: filled(x, 8, 512, nl.psum), None),
        # Tiles that the kernel places itself may share an address.
        (lambda x: filled(x, 12, 512, nl.psum, address=(0, 2048)), None),
        (lambda x: filled(x, 1, 512, nl.psum, address=(0, 8 * 2048)), "err_psum_exceed_arch_limit"),
        (lambda x: filled(x, 1, 8, address=(0, 180_224)), "err_sbuf_exceed_arch_limit"),
    ],
)
def test_what_is_in_memory_at_once_fits(made, refused):
    if refused is None:
        record(made, targets=("trn1", "trn2"))
    else:
        refuses(refused, made, targets=("trn1", "trn2"))


def test_tiles_that_are_used_one_after_another_share_memory():
    def steps(x):
        result = nl.ndarray((128, 512), np.float32, buffer=nl.shared_hbm)
        for _ in range(40):
            tile = sbuf(128, 16384)
            nisa.memset(dst=tile, value=1.0)
            nisa.dma_copy(dst=result, src=tile[:, 0:512])
        return result

    record(steps, targets=("trn1", "trn2"))
