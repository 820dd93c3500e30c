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


REFUSED = {
    "partitions": (lambda x: sbuf(129, 4), "err_num_partition_exceed_arch_limit"),
    "sbuf bytes": (lambda x: sbuf(128, 50_000), "err_sbuf_exceed_arch_limit"),
    "psum bytes": (lambda x: psum(128, 8192), "err_psum_exceed_arch_limit"),
    "psum bank": (
        lambda x: nisa.nc_matmul(
            dst=psum(128, 2, 2, 256)[:, :, :, 0:128], stationary=sbuf(1, 128), moving=sbuf(1, 512)
        ),
        "err_psum_bank",
    ),
    "one dimension": (lambda x: sbuf(128), "err_tensor_rank_too_small"),
    "dtype": (lambda x: sbuf(4, 4, dtype="complex64"), "err_unsupported_dtype"),
    "stationary": (lambda x: matmul(m=129), "err_num_partition_exceed_arch_limit"),
    "stationary free": (
        lambda x: nisa.nc_matmul(dst=psum(128, 2, 8), stationary=sbuf(8, 256), moving=sbuf(8, 8)),
        "err_size_of_dimension_exceed_arch_limit",
    ),
    "moving free": (lambda x: matmul(n=513), "err_size_of_dimension_exceed_arch_limit"),
    "contraction": (
        lambda x: nisa.nc_matmul(dst=psum(8, 8), stationary=sbuf(8, 8), moving=sbuf(9, 8)),
        "err_matmul_contraction",
    ),
    "matmul dtypes": (lambda x: matmul(b=np.float16), "err_matmul_dtype"),
    "matmul result": (
        lambda x: nisa.nc_matmul(dst=sbuf(8, 8), stationary=sbuf(8, 8), moving=sbuf(8, 8)),
        "err_unsupported_memory",
    ),
    "matmul operand": (
        lambda x: nisa.nc_matmul(dst=psum(8, 8), stationary=psum(8, 8), moving=sbuf(8, 8)),
        "err_unsupported_memory",
    ),
    "tile position": (lambda x: matmul(tile_position=(0, 0)), "err_tile_position_and_size"),
    "operand in hbm": (
        lambda x: nisa.tensor_tensor(dst=sbuf(128, 512), data1=x, data2=sbuf(128, 512), op=nl.add),
        "err_unsupported_memory",
    ),
    "gpsimd and psum": (
        lambda x: nisa.tensor_tensor(sbuf(8, 8), psum(8, 8), sbuf(8, 8), nl.add, engine=nisa.engine.gpsimd),
        "err_unsupported_memory",
    ),
    "dma and psum": (lambda x: nisa.dma_copy(dst=psum(128, 512), src=x), "err_unsupported_memory"),
    "shapes": (
        lambda x: nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 9), nl.add),
        "err_shape_mismatch",
    ),
    "dma sizes": (lambda x: nisa.dma_copy(dst=sbuf(128, 511), src=x), "err_dma_size_mismatch"),
    "bitwise on floats": (
        lambda x: nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), nl.bitwise_and),
        "err_bitwise_on_float",
    ),
    "bitwise mixed": (
        lambda x: nisa.tensor_scalar(
            sbuf(8, 8, dtype=np.int32), sbuf(8, 8, dtype=np.int32), nl.bitwise_and, 1, op1=nl.add, operand1=1
        ),
        "err_mixed_bitwise",
    ),
    "vector operand": (
        lambda x: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.add, sbuf(8, 2)),
        "err_scalar_or_vector",
    ),
    "bias dtype": (
        lambda x: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), bias=sbuf(8, 1, dtype=np.int8)),
        "err_activation_bias_invalid_type",
    ),
    "scale dtype": (
        lambda x: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), scale=sbuf(8, 1, dtype=np.float16)),
        "err_activation_scale_invalid_type",
    ),
    "bn_stats": (lambda x: nisa.bn_stats(sbuf(8, 6), sbuf(8, 513)), "err_size_of_dimension_exceed_arch_limit"),
    "max8": (lambda x: nisa.max8(sbuf(8, 8), sbuf(8, 7)), "err_size_of_dimension_exceed_arch_limit"),
    "local_gather": (
        lambda x: nisa.local_gather(sbuf(8, 16), sbuf(8, 8), sbuf(8, 1, dtype=np.uint16)),
        "err_local_gather_partitions",
    ),
    "transpose": (
        lambda x: nisa.nc_transpose(sbuf(33, 8), sbuf(8, 33), engine=nisa.engine.vector),
        "err_size_of_dimension_exceed_arch_limit",
    ),
    "partition axis": (lambda x: nisa.tensor_reduce(sbuf(8, 1), nl.add, sbuf(8, 8), 0), "err_unsupported_reduce_axis"),
    "dma_compute unique_indices": (
        lambda x: nisa.dma_compute(sbuf(128, 512), [x, x], nl.add, unique_indices=False),
        "err_unique_indices",
    ),
    "dma_copy unique_indices": (
        lambda x: nisa.dma_copy(dst=sbuf(128, 512), src=x, dst_rmw_op=nl.add, unique_indices=False),
        "err_unique_indices",
    ),
    "dma_compute reduce_op": (lambda x: nisa.dma_compute(sbuf(128, 512), [x, x], nl.maximum), "err_unsupported_op"),
    "dma_compute scales": (
        lambda x: nisa.dma_compute(sbuf(128, 512), [x, x], nl.add, scales=[1.0, 2.0]),
        "err_dma_scales",
    ),
    "dma_compute sources": (lambda x: nisa.dma_compute(sbuf(128, 512), [x] * 17, nl.add), "err_dma_sources"),
    "integer stationary": (lambda x: matmul(a=np.int32), "err_matmul_dtype"),
    "integer moving": (lambda x: matmul(a=np.float16, b=np.int32), "err_matmul_dtype"),
    "integers both": (lambda x: matmul(a=np.int32, b=np.int32), "err_matmul_dtype"),
    "activation reduce_op": (
        lambda x: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), reduce_op=nl.maximum, reduce_res=sbuf(8, 1)),
        "err_unsupported_op",
    ),
    "activation_reduce reduce_op": (
        lambda x: nisa.activation_reduce(sbuf(8, 8), nl.exp, sbuf(8, 8), nl.maximum, sbuf(8, 1)),
        "err_unsupported_op",
    ),
    "activate2 relu_param": (
        lambda x: nisa.activate2(sbuf(8, 8), nl.relu, sbuf(8, 8), 1.0, 0.0, nl.multiply, nl.add, relu_param=0.1),
        "err_unsupported_op",
    ),
    "tensor_tensor from PSUM": (
        lambda x: nisa.tensor_tensor(sbuf(8, 8), psum(8, 8), psum(8, 8), nl.add),
        "err_unsupported_memory",
    ),
    "scalar_tensor_tensor from PSUM": (
        lambda x: nisa.scalar_tensor_tensor(sbuf(8, 8), psum(8, 8), nl.add, 1.0, nl.add, psum(8, 8)),
        "err_unsupported_memory",
    ),
    "tensor_tensor_scan from PSUM": (
        lambda x: nisa.tensor_tensor_scan(sbuf(8, 8), psum(8, 8), psum(8, 8), 0.0, nl.add, nl.add),
        "err_unsupported_memory",
    ),
    "tensor_copy_predicated from PSUM": (
        lambda x: nisa.tensor_copy_predicated(sbuf(8, 8), psum(8, 8), psum(8, 8, dtype=np.uint8)),
        "err_unsupported_memory",
    ),
    "select_reduce from PSUM": (
        lambda x: nisa.select_reduce(sbuf(8, 8), psum(8, 8, dtype=np.uint8), psum(8, 8), 0.0),
        "err_unsupported_memory",
    ),
    "tensor_scalar from PSUM": (
        lambda x: nisa.tensor_scalar(sbuf(8, 8), psum(8, 8), nl.add, psum(8, 1)),
        "err_unsupported_memory",
    ),
    "tensor_tensor_scan of PSUM from PSUM": (
        lambda x: nisa.tensor_tensor_scan(sbuf(8, 8), psum(8, 8), sbuf(8, 8), psum(8, 1), nl.add, nl.add),
        "err_unsupported_memory",
    ),
    "select_reduce of PSUM or PSUM": (
        lambda x: nisa.select_reduce(sbuf(8, 8), sbuf(8, 8), psum(8, 8), psum(8, 8)),
        "err_unsupported_memory",
    ),
    "range_select from PSUM": (
        lambda x: nisa.range_select(sbuf(8, 8), psum(8, 8), nl.greater, nl.less, psum(8, 1), sbuf(8, 1)),
        "err_unsupported_memory",
    ),
    "power on GpSimd and PSUM": (
        lambda x: nisa.tensor_tensor(sbuf(8, 8), psum(8, 8), sbuf(8, 8), nl.power),
        "err_unsupported_memory",
    ),
    "tensor_copy on GpSimd": (
        lambda x: nisa.tensor_copy(sbuf(8, 8), psum(8, 8), engine=nisa.engine.gpsimd),
        "err_unsupported_memory",
    ),
    "memset on GpSimd": (
        lambda x: nisa.memset(psum(8, 8), 0.0, engine=nisa.engine.gpsimd),
        "err_unsupported_memory",
    ),
    "memset on scalar": (
        lambda x: nisa.memset(sbuf(8, 8), 0.0, engine=nisa.engine.scalar),
        "err_unsupported_engine",
    ),
    "tensor_tensor on scalar": (
        lambda x: nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), nl.add, engine=nisa.engine.scalar),
        "err_unsupported_engine",
    ),
    "tensor_scalar on scalar": (
        lambda x: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.maximum, 0.0, engine=nisa.engine.scalar),
        "err_unsupported_engine",
    ),
    "tensor_scalar on GpSimd": (
        lambda x: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.add, 0.0, engine=nisa.engine.gpsimd),
        "err_unsupported_engine",
    ),
    "engine of a DMA": (
        lambda x: nisa.dma_copy(dst=sbuf(128, 512), src=x, engine=nisa.engine.scalar),
        "err_dma_engine",
    ),
    "priority of a DMA": (lambda x: nisa.dma_copy(dst=sbuf(128, 512), src=x, priority=4), "err_dma_priority"),
    "oob_mode of a transpose": (
        lambda x: nisa.dma_transpose(sbuf(8, 128), x[:, 0:8], oob_mode=nisa.oob_mode.skip),
        "err_oob_mode",
    ),
    "name": (lambda x: nisa.memset(sbuf(8, 8), 0.0, name=3), "err_instruction_name"),
    "unknown argument": (lambda x: nisa.memset(sbuf(8, 8), 0.0, evil=3), "err_arguments"),
    "start partition of data": (
        lambda x: nisa.tensor_copy(sbuf(64, 8), sbuf(128, 8)[5:69]),
        "err_start_partition",
    ),
    "start partition of a result": (
        lambda x: nisa.activation(sbuf(128, 8)[16:32], nl.exp, sbuf(16, 8)),
        "err_start_partition",
    ),
    "start partition of an operand": (
        lambda x: nisa.nc_matmul(psum(8, 8), sbuf(128, 8)[32:96], sbuf(64, 8)),
        "err_start_partition",
    ),
    "start partition of a pattern": (
        lambda x: nisa.tensor_copy(sbuf(65, 8), sbuf(128, 8).ap([[8, 65], [1, 8]], offset=32 * 8)),
        "err_start_partition",
    ),
    "tile size": (lambda x: matmul(k=64, tile_position=(0, 0), tile_size=(32, 128)), "err_tile_position_and_size"),
    "bitwise into floats": (
        lambda x: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8, dtype=np.int32), nl.bitwise_and, 1),
        "err_bitwise_on_float",
    ),
    "bitwise with a fraction": (
        lambda x: nisa.tensor_scalar(sbuf(8, 8, dtype=np.int32), sbuf(8, 8, dtype=np.int32), nl.bitwise_and, 0.5),
        "err_bitwise_on_float",
    ),
    "bitwise with a reduction": (
        lambda x: nisa.tensor_scalar_reduce(
            sbuf(8, 8, dtype=np.int32), sbuf(8, 8, dtype=np.int32), nl.bitwise_and, 1, nl.add, sbuf(8, 1)
        ),
        "err_unsupported_op",
    ),
    "index": (lambda x: x[128, 0], "err_index_out_of_bounds"),
    "slice": (lambda x: nisa.dma_copy(dst=sbuf(128, 8), src=x[:, 508:516]), "err_access_out_of_bounds"),
    "pattern": (lambda x: x.ap([[512, 128], [1, 513]]), "err_access_out_of_bounds"),
    "product into float16": (lambda x: into(np.float16), "err_matmul_dtype"),
    "product of float8 of both kinds": (
        lambda x: matmul(a=nl.float8_e4m3, b=nl.float8_e4m3fn),
        "err_matmul_dtype",
    ),
    "double_row of bfloat16": (lambda x: double_row(nl.bfloat16), "err_matmul_dtype"),
    "double_row on some columns": (
        lambda x: double_row(nl.float8_e4m3, tile_position=(0, 0), tile_size=(128, 64)),
        "err_double_row",
    ),
    "tensor_copy_predicated predicate": (
        lambda x: nisa.tensor_copy_predicated(sbuf(8, 8), sbuf(8, 8), integers(8, 8)),
        "err_unsupported_dtype",
    ),
    "tensor_copy_predicated dtypes": (
        lambda x: nisa.tensor_copy_predicated(half(8, 8), sbuf(8, 8), sbuf(8, 8, dtype=np.uint8)),
        "err_unsupported_dtype",
    ),
    "nc_transpose dtypes": (
        lambda x: nisa.nc_transpose(half(8, 8), sbuf(8, 8), engine=nisa.engine.vector),
        "err_unsupported_dtype",
    ),
    "dma_transpose dtypes": (lambda x: nisa.dma_transpose(half(8, 128), x[:, 0:8]), "err_unsupported_dtype"),
    "activation reduce_res": (
        lambda x: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), reduce_op=nl.add, reduce_res=sbuf(8, 2)),
        "err_shape_mismatch",
    ),
    "local_gather index": (
        lambda x: nisa.local_gather(sbuf(16, 16), sbuf(16, 8), integers(16, 1)),
        "err_unsupported_dtype",
    ),
    "local_gather dtypes": (
        lambda x: nisa.local_gather(half(16, 16), sbuf(16, 8), sbuf(16, 1, dtype=np.uint16)),
        "err_unsupported_dtype",
    ),
    "nc_n_gather indices": (
        lambda x: nisa.nc_n_gather(sbuf(8, 8), sbuf(8, 8), integers(8, 8)),
        "err_unsupported_dtype",
    ),
    "nc_n_gather dtypes": (
        lambda x: nisa.nc_n_gather(half(8, 8), sbuf(8, 8), sbuf(8, 8, dtype=np.uint32)),
        "err_unsupported_dtype",
    ),
    "nc_n_gather from PSUM": (
        lambda x: nisa.nc_n_gather(sbuf(8, 8), psum(8, 8), sbuf(8, 8, dtype=np.uint32)),
        "err_unsupported_memory",
    ),
    "nc_stream_shuffle dtypes": (
        lambda x: nisa.nc_stream_shuffle(half(32, 8), sbuf(32, 8), [0] * 32),
        "err_unsupported_dtype",
    ),
    "rng of floats": (lambda x: nisa.rng(sbuf(8, 8)), "err_unsupported_dtype"),
    "set_rng_seed shape": (lambda x: nisa.set_rng_seed(integers(2, 1)), "err_shape_mismatch"),
    "set_rng_seed bits": (lambda x: nisa.set_rng_seed(half(1, 1)), "err_unsupported_dtype"),
    "dropout dtypes": (lambda x: nisa.dropout(half(8, 8), sbuf(8, 8), 0.5), "err_unsupported_dtype"),
    "sequence_bounds dtypes": (lambda x: nisa.sequence_bounds(half(1, 2, 8), half(1, 8)), "err_unsupported_dtype"),
    "range_select of integers": (
        lambda x: nisa.range_select(integers(8, 8), integers(8, 8), nl.greater, nl.less, sbuf(8, 1), sbuf(8, 1)),
        "err_unsupported_dtype",
    ),
    "range_select reduce_op": (
        lambda x: nisa.range_select(
            sbuf(8, 8), sbuf(8, 8), nl.greater, nl.less, sbuf(8, 1), sbuf(8, 1), reduce_res=sbuf(8, 1), reduce_op=nl.add
        ),
        "err_unsupported_op",
    ),
    "range_select comparison": (
        lambda x: nisa.range_select(sbuf(8, 8), sbuf(8, 8), nl.add, nl.less, sbuf(8, 1), sbuf(8, 1)),
        "err_unsupported_op",
    ),
    "select_reduce of integers": (
        lambda x: nisa.select_reduce(integers(8, 8), sbuf(8, 8, dtype=np.uint8), integers(8, 8), 0.0),
        "err_unsupported_dtype",
    ),
    "select_reduce predicate": (
        lambda x: nisa.select_reduce(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), 0.0),
        "err_unsupported_dtype",
    ),
    "tensor_scalar_cumulative of bits": (
        lambda x: nisa.tensor_scalar_cumulative(integers(8, 8), integers(8, 8), nl.bitwise_and, nl.add, 1),
        "err_unsupported_op",
    ),
    "nonzero_with_count dtypes": (
        lambda x: nisa.nonzero_with_count(integers(16, 9), half(16, 8)),
        "err_unsupported_dtype",
    ),
    "nonzero_with_count from PSUM": (
        lambda x: nisa.nonzero_with_count(integers(16, 9), psum(16, 8)),
        "err_unsupported_memory",
    ),
    "sendrecv to PSUM": (lambda x: nisa.sendrecv(sbuf(8, 8), psum(8, 8), 1, 1), "err_unsupported_memory"),
    "sendrecv dtypes": (lambda x: nisa.sendrecv(sbuf(8, 8), half(8, 8), 1, 1), "err_unsupported_dtype"),
    "indirect dimension": (
        lambda x: x.ap([[512, 8], [1, 8]], vector_offset=sbuf(8, 1, dtype=np.int32), indirect_dim=1),
        "err_indirect_dim",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    act, code = REFUSED[name]

    def function(x):
        act(x)
        raise AssertionError("nothing was refused")

    with pytest.raises(NkiError) as caught:
        kernel.record(function, [X], {}, older=False)
    assert caught.value.code == code
    assert caught.value.file == __file__
    assert str(caught.value).startswith(f"{__file__}:{caught.value.line}: {code}: ")


def test_a_result_has_to_be_in_shared_hbm():
    def function(x):
        return nl.ndarray((8, 8), np.float32, buffer=nl.private_hbm)

    with pytest.raises(NkiError, match="err_nki_return_not_shared_hbm"):
        kernel.record(function, [X], {}, older=False)


def test_an_argument_is_written_only_where_it_is_declared_mutable():
    def function(x):
        older_nl.store(x, older_nl.load(x))
        return x

    with pytest.raises(NkiError, match="err_mutable_annotation_needed"):
        kernel.record(function, [X], {}, older=True)


def test_the_partitions_of_operands_are_not_broadcast():
    def function(x):
        nl.add(sbuf(1, 8), sbuf(8, 8))

    with pytest.raises(NkiError, match="err_cannot_broadcast_partition"):
        kernel.record(function, [X], {}, older=False)


def test_a_limit_holds_for_every_target():
    def function(x):
        r = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        sbuf(128, 50_000)
        nisa.dma_copy(dst=r, src=x)
        return r

    kernel.record(function, [X], {}, older=False, targets=("trn2",))
    with pytest.raises(NkiError, match="180224 of trn1's SBUF"):
        kernel.record(function, [X], {}, older=False, targets=("trn1", "trn2"))


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


def test_functions_work_inside_a_kernel_only():
    with pytest.raises(NkiError, match="err_outside_kernel"):
        sbuf(8, 8)


def test_the_older_generation_multiplies_a_transpose_that_is_in_psum():
    def function(x):
        tile = older_nl.load(x[0:64, 0:64])
        product = older_nki.isa.nc_matmul(older_nki.isa.nc_transpose(tile), tile)
        result = older_nl.ndarray((64, 64), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, product)
        return result

    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    np.testing.assert_allclose(kernel.record(function, [x], {}, older=True)(x)[0], x @ x, rtol=1e-4, atol=1e-4)


def _older(function, *inputs):
    return kernel.record(function, list(inputs), {}, older=True)(*inputs)[0]


@pytest.mark.parametrize("columns", [6, 9, 18, 24, 36])
def test_a_contiguous_tensor_is_reshaped_across_the_borders_of_its_dimensions(columns):
    def function(x):
        wide = x.reshape((4, 72 // columns, columns))
        result = older_nl.ndarray((4, columns), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, older_nl.load(wide[:, 1 % (72 // columns)]))
        return result

    x = np.arange(12 * 24, dtype=np.float32).reshape(12, 24)
    np.testing.assert_array_equal(_older(function, x), x.reshape(4, 72 // columns, columns)[:, 1])


def test_a_view_with_gaps_is_not_reshaped_across_them():
    with pytest.raises(NkiError, match="err_reshape_not_contiguous"):
        kernel.record(lambda x: x[:, 0:500].reshape((100, 640)), [X], {}, older=False)


def test_a_mask_of_a_product_may_fit_the_moving_operand_alone():
    def function(x, y):
        a, b = older_nl.load(x), older_nl.load(y)
        shown = older_nl.arange(20)[None, :] < 13
        product = older_nki.isa.nc_matmul(a, b, mask=shown)
        result = older_nl.zeros((8, 20), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, product)
        return result

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    y = np.random.default_rng(1).normal(size=(16, 20)).astype(np.float32)
    np.testing.assert_allclose(_older(function, x, y)[:, :13], (x.T @ y)[:, :13], rtol=1e-5, atol=1e-5)


def test_a_mask_that_fits_no_operand_of_a_product_is_refused():
    def function(x):
        tile = older_nl.load(x[0:16, 0:16])
        older_nki.isa.nc_matmul(tile, tile, mask=older_nl.arange(9)[None, :] < 3)

    with pytest.raises(NkiError, match="err_mask_shape"):
        kernel.record(function, [X], {}, older=True)


@pytest.mark.parametrize("loaded", [False, True], ids=["from HBM", "from SBUF"])
def test_a_dma_of_the_older_generation_does_not_broadcast_a_row_to_partitions(loaded):
    def function(x):
        rows, columns = older_nl.mgrid[0:64, 0:512]
        source = older_nl.load(x) if loaded else x
        target = older_nl.ndarray((64, 512), x.dtype, buffer=older_nl.sbuf)
        older_nki.isa.dma_copy(dst=target[rows, columns], src=source[rows * 0, columns])

    with pytest.raises(NkiError, match="err_dma_partition_broadcast"):
        kernel.record(function, [X], {}, older=True)


def test_a_row_that_is_loaded_once_meets_all_partitions():
    def function(x):
        tile, row = older_nl.load(x), older_nl.load(x[0:1, :])
        result = older_nl.ndarray(x.shape, x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, older_nl.add(tile, row.broadcast_to((128, 512))))
        return result

    x = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    np.testing.assert_array_equal(_older(function, x), x + x[0:1])


def _transpose(transposed, given):
    def function(x):
        tile = sbuf(16, 8, dtype=given)
        turned = psum(8, 16, dtype=transposed)
        result = nl.ndarray((8, 16), transposed, buffer=nl.shared_hbm)
        copied = sbuf(8, 16, dtype=transposed)
        nisa.memset(tile, 1.0)
        nisa.nc_transpose(dst=turned, data=tile)
        nisa.tensor_copy(dst=copied, src=turned)
        nisa.dma_copy(dst=result, src=copied)
        return result

    return function


TRANSPOSES = [
    (np.float32, np.float16, ("trn1",), True),
    (np.float32, np.float16, ("inf2",), True),
    (np.float16, np.float16, ("trn1",), False),
    (np.float16, np.float16, ("trn2",), True),
    (np.float32, np.float16, ("trn2",), False),
    (np.float16, np.float16, ("trn1", "trn2"), False),
    (np.float32, np.float16, ("trn1", "trn2"), False),
    (np.float32, np.float32, ("trn1", "trn2", "trn3"), True),
    (np.float16, np.float16, (), True),
    (np.float32, np.float16, (), True),
    (np.int32, np.float16, (), False),
]


@pytest.mark.parametrize(("transposed", "given", "targets", "allowed"), TRANSPOSES)
def test_a_transpose_goes_to_psum_in_the_dtype_of_the_targets(transposed, given, targets, allowed):
    function = _transpose(transposed, given)
    if allowed:
        kernel.record(function, [X], {}, older=False, targets=targets)
        return
    with pytest.raises(NkiError, match="err_transpose_dtype"):
        kernel.record(function, [X], {}, older=False, targets=targets)


def _sums(*steps):
    """Returns the notes of products into PSUM. A step is (columns of the tensor, accumulate), or None, which reads the
    tensor.
    """

    def function(x):
        sums, a = psum(8, 16), sbuf(8, 8)
        result = nl.ndarray((8, 16), np.float32, buffer=nl.shared_hbm)
        copied = sbuf(8, 16)
        nisa.memset(a, 1.0)
        for step in steps:
            if step is None:
                nisa.tensor_copy(dst=copied, src=sums)
            else:
                nisa.nc_matmul(dst=sums[:, step[0]], stationary=a, moving=a, accumulate=step[1])
        nisa.tensor_copy(dst=copied, src=sums)
        nisa.dma_copy(dst=result, src=copied)
        return result

    return [
        note
        for note in kernel.record(function, [X], {}, older=False).notes
        if "sums share" in note or "accumulate" in note
    ]


STARTS = [(1, 96), (16, 64), (32, 32), (33, 64), (64, 64), (65, 0), (128, 0)]


@pytest.mark.parametrize(("count", "start"), STARTS)
def test_an_engine_reads_and_writes_from_these_partitions(count, start):
    def function(x):
        a, b = sbuf(128, 8), sbuf(128, 8)
        result = nl.ndarray((count, 8), np.float32, buffer=nl.shared_hbm)
        nisa.memset(a, 1.0)
        nisa.tensor_copy(dst=b[start : start + count], src=a[start : start + count])
        nisa.dma_copy(dst=result, src=b[start : start + count])
        return result

    kernel.record(function, [X], {}, older=False)


def test_a_dma_reads_from_any_partition_and_the_older_compiler_places_tiles_itself():
    def newer(x):
        result = nl.ndarray((64, 512), x.dtype, buffer=nl.shared_hbm)
        tile = sbuf(128, 512)
        nisa.dma_copy(dst=tile, src=x)
        nisa.dma_copy(dst=result, src=tile[5:69])
        return result

    def older(x):
        result = older_nl.ndarray((64, 512), x.dtype, buffer=older_nl.shared_hbm)
        older_nl.store(result, older_nl.exp(older_nl.load(x)[5:69]))
        return result

    kernel.record(newer, [X], {}, older=False)
    kernel.record(older, [X], {}, older=True)


def integers(*shape):
    return sbuf(*shape, dtype=np.int32)


def at_run_time(*shape):
    """Returns a part of a tile whose beginning is in a register."""
    rows, columns = shape
    return sbuf(rows, 64).ap([[64, rows], [1, columns]], scalar_offset=nisa.register_alloc(3), indirect_dim=1)


def half(*shape, buffer=None):
    return nl.ndarray(shape, np.float16, buffer=buffer or nl.sbuf)


def halves(rows=16, columns=8, dtype=np.float16, **options):
    """Returns rows of a tensor in HBM."""
    table = nl.ndarray((64, 256), dtype, buffer=nl.private_hbm)
    return table.ap([[256, rows], [1, columns]], **options)


DYNAMIC = "an address known at run time of {}, which is not a DMA's,"
GPSIMD = nisa.engine.gpsimd
NEEDS = [
    (lambda x: nisa.dma_copy(dst=sbuf(128, 512), src=x, dge_mode=nisa.dge_mode.hwdge), "dge_mode hwdge", ""),
    (
        lambda x: nisa.tensor_copy(sbuf(8, 8), sbuf(8, 8), engine=nisa.engine.scalar),
        "tensor_copy on the scalar engine",
        "",
    ),
    (lambda x: nisa.rng(integers(8, 8), engine=GPSIMD), "rng on GpSimd", ""),
    (lambda x: matmul(k=32, tile_position=(0, 0), tile_size=(32, 128)), "a tile_size of 32 rows", ""),
    (lambda x: nisa.dma_transpose(sbuf(8, 16), sbuf(16, 8)), "dma_transpose from SBUF, not from HBM,", ""),
    (
        lambda x: nisa.dma_transpose(half(8, 16), halves(vector_offset=sbuf(16, 1, dtype=np.uint32))),
        "dma_transpose of rows that a tile names .DmaGatherTranspose.",
        "",
    ),
    (
        lambda x: nisa.range_select(
            sbuf(8, 16), sbuf(8, 16), nl.greater_equal, nl.less, sbuf(8, 1), sbuf(8, 1), reduce_res=sbuf(8, 1)
        ),
        "range_select",
        "NCC_IBIR530",
    ),
    (
        lambda x: nisa.tensor_tensor(sbuf(8, 8), sbuf(8, 8), sbuf(8, 8), nl.add, engine=GPSIMD),
        "tensor_tensor on GpSimd",
        "NCC_IXCG965",
    ),
    (
        lambda x: nisa.tensor_scalar(sbuf(8, 8), sbuf(8, 8), nl.rsqrt, 0.0, engine=GPSIMD),
        "tensor_scalar on GpSimd",
        "NCC_IXCG965",
    ),
    (lambda x: nisa.register_store(integers(1, 1), nisa.register_alloc(3)), "register_store to sbuf", ""),
    (
        lambda x: nisa.register_load(nisa.register_alloc(), at_run_time(1, 1)),
        DYNAMIC.format("register_load"),
        "NCC_IBIR829",
    ),
    (lambda x: nisa.tensor_scalar(sbuf(8, 4), at_run_time(8, 4), nl.add, 1.0), DYNAMIC.format("data"), "NCC_IBIR829"),
    (lambda x: nisa.memset(at_run_time(8, 4), 1.0), DYNAMIC.format("dst"), "NCC_IBIR829"),
    (
        lambda x: nisa.nc_matmul(psum(4, 8), at_run_time(8, 4), sbuf(8, 8), accumulate=False),
        DYNAMIC.format("stationary"),
        "NCC_IBIR040",
    ),
    (
        lambda x: nisa.activation(sbuf(8, 8), nl.copy, sbuf(8, 8), bias=sbuf(8, 1)),
        "activation of nl.copy with a tile as bias, not a number,",
        "NCC_IBVF043",
    ),
    (
        lambda x: nisa.affine_select(sbuf(8, 8), [[1, 8]], 1, psum(8, 8), 0.0),
        "affine_select, on GpSimd, of a tile in PSUM",
        "",
    ),
    (
        lambda x: nisa.activation(sbuf(8, 8), nl.exp, sbuf(8, 8), bias=1.0),
        "a number as bias of activation",
        "",
    ),
    (lambda x: nisa.iota(psum(8, 8), [[1, 8]]), "iota, on GpSimd, of a tile in PSUM", ""),
    (
        lambda x: nisa.local_gather(sbuf(16, 16), psum(16, 8), sbuf(16, 1, dtype=np.uint16)),
        "local_gather, on GpSimd, of a tile in PSUM",
        "",
    ),
]


SINCE_V4 = [
    (lambda x: into(nl.bfloat16), "a product into bfloat16 in PSUM"),
    (lambda x: matmul(a=nl.float8_e4m3fn, b=nl.float8_e4m3fn), "float8_e4m3fn in a product"),
    (lambda x: nisa.activate2(sbuf(8, 8), nl.exp, sbuf(8, 8), 1.0, 0.0, nl.multiply, nl.add), "activate2"),
    (lambda x: nisa.exponential(sbuf(8, 8), sbuf(8, 8)), "exponential"),
    (lambda x: nisa.rand2(sbuf(8, 8), 0.0, 1.0), "rand2"),
    (lambda x: nisa.dma_copy(dst=sbuf(128, 512), src=x, priority=1), "priority of a DMA"),
]


def beside_a_copy(act):
    """Returns a kernel that does something and copies its argument."""

    def function(x):
        act(x)
        result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result, src=x)
        return result

    return function


@pytest.mark.parametrize(("act", "what"), SINCE_V4, ids=[what for _, what in SINCE_V4])
def test_what_only_trn3_has(act, what):
    kernel.record(beside_a_copy(act), [X], {}, older=False, targets=("trn3",))
    with pytest.raises(NkiError, match=f"err_unsupported_on_target: {what}.* needs NeuronCore-v4 .* trn2 has v3"):
        kernel.record(beside_a_copy(act), [X], {}, older=False, targets=("trn2", "trn3"))


def test_trn3_has_products_of_8192_columns_of_bfloat16():
    kernel.record(beside_a_copy(lambda x: into(nl.bfloat16, 8192)), [X], {}, older=False, targets=("trn3",))


@pytest.mark.parametrize(("act", "what", "code"), NEEDS, ids=[what for _, what, _ in NEEDS])
def test_what_a_target_does_not_have(act, what, code):
    function = beside_a_copy(act)
    kernel.record(function, [X], {}, older=False, targets=("trn2", "trn3"))
    with pytest.raises(NkiError, match=f"err_unsupported_on_target: {what} needs NeuronCore-v3 .* trn1 has v2.*{code}"):
        kernel.record(function, [X], {}, older=False, targets=("trn2", "trn1"))


def _sum_onto(prepare, *accumulate, targets=("trn2",)):
    def function(x):
        sums, a = psum(8, 16), sbuf(8, 8)
        result = nl.ndarray((8, 16), np.float32, buffer=nl.shared_hbm)
        copied = sbuf(8, 16)
        nisa.memset(a, 1.0)
        prepare(sums, a)
        for each in accumulate:
            nisa.nc_matmul(dst=sums[:, LEFT], stationary=a, moving=a, accumulate=each)
        nisa.tensor_copy(dst=copied, src=sums)
        nisa.dma_copy(dst=result, src=copied)
        return result

    return kernel.record(function, [X], {}, older=False, targets=targets)


LEFT, RIGHT = slice(0, 8), slice(8, 16)
ONTO = {
    "other data": (lambda sums, a: nisa.memset(sums, 1.0), (None,), "another instruction wrote there"),
    "other data, said so": (lambda sums, a: nisa.memset(sums, 1.0), (True,), "another instruction wrote there"),
    "zeros, said so": (lambda sums, a: nisa.memset(sums, 0.0), (True,), "another instruction wrote there"),
    "a copy": (lambda sums, a: nisa.tensor_copy(sums[:, LEFT], a), (None,), "another instruction wrote there"),
    "some other data": (lambda sums, a: nisa.memset(sums[:, 7:9], 1.0), (None,), "another instruction wrote there"),
    "nothing": (lambda sums, a: None, (True,), "nothing was written there"),
}


@pytest.mark.parametrize("name", ONTO)
def test_a_product_is_only_added_to_a_product(name):
    prepare, accumulate, why = ONTO[name]
    with pytest.raises(NkiError, match=f"err_psum_accumulate: .*{why}"):
        _sum_onto(prepare, *accumulate)


@pytest.mark.parametrize(
    ("prepare", "accumulate", "targets"),
    [
        (lambda sums, a: nisa.memset(sums, 1.0), (False, True), ("trn2",)),
        (lambda sums, a: nisa.memset(sums[:, RIGHT], 1.0), (None, None), ("trn2",)),
        (lambda sums, a: nisa.memset(sums, 1.0), (True,), ("trn3",)),
        (lambda sums, a: None, (None, True), ("trn2",)),
    ],
)
def test_a_product_is_added_to_products(prepare, accumulate, targets):
    _sum_onto(prepare, *accumulate, targets=targets)


def test_a_product_onto_zeros_that_leaves_accumulate_out_is_noted():
    notes = _sum_onto(lambda sums, a: nisa.memset(sums, 0.0), None).notes
    assert any("an instruction that is not a product put zeros there; give accumulate=False" in note for note in notes)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(LEFT, None), None, (LEFT, None)], "its tile in PSUM was read before"),
        ([(LEFT, None), (RIGHT, None)], "several sums share one tensor in PSUM"),
    ],
)
def test_a_product_that_leaves_accumulate_out_is_noted_where_a_device_may_add_to_another_sum(steps, why):
    (note,) = _sums(*steps)
    assert note.startswith(f"{__file__}:")
    assert f"nc_matmul leaves accumulate out, and {why}; give accumulate=False" in note


@pytest.mark.parametrize(
    "steps",
    [
        [(LEFT, False), (RIGHT, False), (LEFT, True), (RIGHT, True)],
        [(LEFT, False), (LEFT, True), (RIGHT, False), (RIGHT, True)],
    ],
)
def test_sums_that_share_a_tensor_in_psum_are_noted_whatever_accumulate_says(steps):
    (note,) = _sums(*steps)
    assert note.startswith(f"{__file__}:")
    assert "several sums share one tensor in PSUM, and devices have lost parts of such sums" in note


@pytest.mark.parametrize(
    "steps",
    [
        [(LEFT, False), (LEFT, True), None, (RIGHT, False), (RIGHT, True)],
        [(LEFT, None), (LEFT, None)],
        [(LEFT, False), (LEFT, True), None, (LEFT, False), (LEFT, True)],
        [(LEFT, False), (RIGHT, False)],
    ],
)
def test_products_of_one_sum_or_with_accumulate_are_not_noted(steps):
    assert _sums(*steps) == []


HWDGE, SWDGE = nisa.dge_mode.hwdge, nisa.dge_mode.swdge


@pytest.mark.parametrize(
    ("source", "mode", "missing"),
    [
        (lambda: halves(16, 128), HWDGE, None),
        (lambda: halves(16, 256), HWDGE, None),
        (lambda: halves(32, 128), HWDGE, "16 rows"),
        (lambda: halves(16, 64), HWDGE, "a multiple of 128 elements in the last dimension"),
        (lambda: halves(16, 128, np.float32), HWDGE, "a dtype of 2 bytes"),
        (lambda: halves(32, 64, np.float32), None, None),
        (lambda: halves(16, 128), SWDGE, "dge_mode unknown, none or hwdge"),
        (lambda: halves(32, 64, vector_offset=sbuf(32, 1, dtype=np.uint32)), SWDGE, None),
        (lambda: halves(32, 64, vector_offset=sbuf(32, 1, dtype=np.uint32)), HWDGE, "dge_mode unknown or swdge"),
        (lambda: halves(32, 64, vector_offset=integers(32, 1)), None, "indices of uint32 in SBUF"),
        (lambda: halves(24, 64, vector_offset=sbuf(24, 1, dtype=np.uint32)), None, "a multiple of 16 rows"),
        (lambda: halves(16, 192, vector_offset=sbuf(16, 1, dtype=np.uint32)), None, "at most 128 elements in the last dimension"),
        (lambda: halves(16, 64, np.float32, vector_offset=sbuf(16, 1, dtype=np.uint32)), None, "a dtype of 2 bytes"),
        (
            lambda: half(16, 64).ap([[64, 16], [1, 64]], vector_offset=sbuf(16, 1, dtype=np.uint32)),
            None,
            "a source in HBM",
        ),
    ],
)  # fmt: skip
def test_a_dma_transposes_what_its_documentation_says(source, mode, missing):
    def function(x):
        src = source()
        result = nl.ndarray((src.shape[1], src.shape[0]), src.dtype, buffer=nl.shared_hbm)
        nisa.dma_transpose(result, src, dge_mode=mode)
        return result

    if missing is None:
        kernel.record(function, [X], {}, older=False)
        return
    with pytest.raises(NkiError, match=f"err_dma_transpose: dma_transpose .* takes {missing}; src is tensor"):
        kernel.record(function, [X], {}, older=False)


def test_what_is_in_hbm_is_loaded_before_the_older_generation_broadcasts_it():
    def function(x):
        return older_nl.load(x[0:1].broadcast_to((128, 512)))

    with pytest.raises(NkiError, match="err_unsupported_memory: broadcast_to takes a tile in SBUF or PSUM"):
        kernel.record(function, [X], {}, older=True)


def test_a_scatter_that_adds_is_noted_as_what_devices_hang_in():
    def scattered(x, add, older=False):
        rows, index = sbuf(128, 512), integers(128, 1)
        nisa.memset(rows, 1.0)
        nisa.memset(index, 0)
        result = nl.ndarray((256, 512), np.float32, buffer=nl.shared_hbm, name="partly_written")
        place = result.ap([[512, 128], [1, 512]], vector_offset=index) if add != "in order" else result[0:128]
        nisa.dma_copy(dst=place, src=rows, dst_rmw_op=nl.add if add else None, oob_mode=nisa.oob_mode.skip)
        return result

    notes = {
        add: [n for n in kernel.record(lambda x, a=add: scattered(x, a), [X], {}, older=False).notes if "hang" in n]
        for add in ("scattered", "in order", "")
    }
    assert notes["in order"] == notes[""] == []
    (note,) = notes["scattered"]
    assert note.startswith(f"{__file__}:") and "give it indices that are inside and unique" in note


def filled(x, count, columns, *, dtype=np.float32, buffer=None, **options):
    """Writes `count` tiles of 128 partitions, then reads all of them: they are in use at once."""
    tiles = [nl.ndarray((128, columns), dtype, buffer=buffer or nl.sbuf, **options) for _ in range(count)]
    for tile in tiles:
        nisa.memset(dst=tile, value=1.0)
    return added(x, tiles)


def added(x, tiles):
    total = nl.ndarray((128, 1), np.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0.0)
    for tile in tiles:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:1], op=nl.add)
    result = nl.ndarray((128, 1), np.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=total)
    return result


def record(function, *, older=False, targets=("trn1", "trn2"), x=X):
    return kernel.record(function, [x], {}, older=older, targets=targets)


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (lambda x: filled(x, 8, 8192), "err_sbuf_exceed_arch_limit: 9 tiles in sbuf .* 262,148 bytes per partition"),
        (lambda x: filled(x, 5, 8192), None),  # 160 KiB
        (lambda x: filled(x, 12, 512, buffer=nl.psum), "err_psum_exceed_arch_limit: 12 tiles in psum .* 24,576 bytes"),
        (lambda x: filled(x, 8, 512, buffer=nl.psum), None),
        # Tiles that the kernel places itself may share an address.
        (lambda x: filled(x, 12, 512, buffer=nl.psum, address=(0, 2048)), None),
        (lambda x: filled(x, 1, 512, buffer=nl.psum, address=(0, 8 * 2048)), "err_psum_exceed_arch_limit"),
        (lambda x: filled(x, 1, 8, address=(0, 180_224)), "err_sbuf_exceed_arch_limit"),
    ],
)
def test_what_is_in_memory_at_once_fits(made, refused):
    if refused is None:
        record(made)
        return
    with pytest.raises(NkiError, match=refused) as caught:
        record(made)
    assert caught.value.file == __file__


def test_tiles_that_are_used_one_after_another_share_memory():
    def steps(x):
        result = nl.ndarray((128, 512), np.float32, buffer=nl.shared_hbm)
        for _ in range(40):
            tile = nl.ndarray((128, 16384), np.float32, buffer=nl.sbuf)
            nisa.memset(dst=tile, value=1.0)
            nisa.dma_copy(dst=result, src=tile[:, 0:512])
        return result

    record(steps)


def test_block_dimensions_of_the_older_generation_are_no_limit():
    def blocks(x):
        tiles = older_nl.ndarray((64, older_nl.par_dim(128), 2048), x.dtype, buffer=older_nl.sbuf)
        result = older_nl.ndarray((128, 512), x.dtype, buffer=older_nl.shared_hbm)
        for i in older_nl.affine_range(64):
            tiles[i, :, 0:512] = older_nl.load(x)
        for i in older_nl.affine_range(64):
            older_nl.store(result, tiles[i, :, 0:512])
        return result

    record(blocks, older=True)


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
    def product(x):
        sums = psum(128, 2048)
        left, right = sbuf(128, 128), sbuf(128, 512)
        for tile in (sums, left, right):
            nisa.memset(dst=tile, value=0.0)
        if transposed:
            nisa.nc_transpose(dst=sums[:, nl.ds(first, 128)], data=left)
        else:
            nisa.nc_matmul(dst=sums[:, nl.ds(first, 512)], stationary=left, moving=right, accumulate=False)
        return added(x, [sums])

    if allowed:
        record(product, targets=targets)
    else:
        with pytest.raises(NkiError, match=r"err_psum_bank: a product of .* from byte .* exceeds a bank of 2,048"):
            record(product, targets=targets)
