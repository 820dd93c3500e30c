"""Kernels of the newer generation, one per function, each with its reference in NumPy."""

import math

import nki.isa as nisa
import nki.language as nl
import numpy as np

import nki

CASES = {}


def case(reference, *inputs):
    """Registers a kernel, its inputs, and the function of them that it must compute."""

    def register(kernel):
        CASES[kernel.__name__] = (nki.jit(kernel), inputs, reference)
        return kernel

    return register


def random(*shape, seed=0, low=-2.0, high=2.0, dtype=np.float32):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


X, Y, V = random(32, 24), random(32, 24, seed=1), random(32, 1, seed=2)
B = random(32, 6, 4, seed=3)
N = np.random.default_rng(4).integers(0, 100, (32, 24)).astype(np.int32)


def tile(source):
    made = nl.ndarray(source.shape, source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=made, src=source)
    return made


def like(t, shape=None, dtype=None, buffer=nl.sbuf):
    return nl.ndarray(shape or t.shape, dtype or t.dtype, buffer=buffer)


def out(*tiles):
    made = []
    for t in tiles:
        if t.buffer == nl.psum:
            copied = like(t)
            nisa.tensor_copy(dst=copied, src=t)
            t = copied
        result = nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result, src=t)
        made.append(result)
    return tuple(made)


@case(lambda x, y: x * y, X, Y)
def tensor_tensor(x, y):
    r = like(x)
    nisa.tensor_tensor(dst=r, data1=tile(x), data2=tile(y), op=nl.multiply)
    return out(r)


@case(lambda x, v: (3.0 - x) * v, X, V)
def tensor_scalar(x, v):
    r = like(x)
    nisa.tensor_scalar(r, tile(x), nl.subtract, 3.0, True, op1=nl.multiply, operand1=tile(v))
    return out(r)


@case(lambda x, y: (x + 2) * y, X, Y)
def scalar_tensor_tensor(x, y):
    r = like(x)
    nisa.scalar_tensor_tensor(r, tile(x), nl.add, 2.0, nl.multiply, tile(y))
    return out(r)


@case(lambda i: (i >> 2) & 7, N)
def tensor_scalar_bits(i):
    r = like(i)
    nisa.tensor_scalar(r, tile(i), nl.right_shift, 2, op1=nl.bitwise_and, operand1=7)
    return out(r)


@case(lambda x: (x * 2, (x * 2).max(1, keepdims=True)), X)
def tensor_scalar_reduce(x):
    r, top = like(x), like(x, (32, 1))
    nisa.tensor_scalar_reduce(r, tile(x), nl.multiply, 2.0, nl.maximum, top)
    return out(r, top)


@case(lambda x: -x.sum(1, keepdims=True), X)
def tensor_reduce(x):
    r = like(x, (32, 1))
    nisa.tensor_reduce(dst=r, op=nl.add, data=tile(x), axis=1, negate=True)
    return out(r)


@case(lambda b: b.min(2), B)
def tensor_reduce_last(b):
    r = like(b, (32, 6))
    nisa.tensor_reduce(dst=r, op=nl.minimum, data=tile(b), axis=2)
    return out(r)


@case(lambda x: x.sum(0, keepdims=True), X)
def tensor_partition_reduce(x):
    r = like(x, (1, 24))
    nisa.tensor_partition_reduce(dst=r, op=nl.add, data=tile(x))
    return out(r)


def _scan(a, b, first):
    r, rows = first[:, 0], []
    for i in range(a.shape[1]):
        r = a[:, i] * r + b[:, i]
        rows.append(r)
    return np.stack(rows, 1)


@case(_scan, X, Y, V)
def tensor_tensor_scan(x, y, v):
    r = like(x)
    nisa.tensor_tensor_scan(r, tile(x), tile(y), tile(v), nl.multiply, nl.add)
    return out(r)


@case(lambda x: np.cumsum(x + 1, 1), X)
def tensor_scalar_cumulative(x):
    r = like(x)
    data = tile(x)
    nisa.tensor_scalar_cumulative(r[:, 0:10], data[:, 0:10], nl.add, nl.add, 1.0)
    nisa.tensor_scalar_cumulative(r[:, 10:24], data[:, 10:24], nl.add, nl.add, 1.0, reduce_cmd=nisa.reduce_cmd.reduce)
    return out(r)


@case(lambda x: (np.exp(2 * x + 1), np.exp(2 * x + 1).sum(1, keepdims=True)), X)
def activation(x):
    r, total, one = like(x), like(x, (32, 1)), like(x, (32, 1))
    nisa.memset(dst=one, value=1.0)
    data = tile(x)
    registers = nisa.reduce_cmd
    nisa.activation(r[:, 0:8], nl.exp, data[:, 0:8], one, 2.0, nl.add, None, registers.reset_reduce)
    nisa.activation(r[:, 8:24], nl.exp, data[:, 8:24], one, 2.0, nl.add, total, registers.reduce)
    return out(r, total)


@case(lambda x: (x * x, (x * x).sum(1, keepdims=True)), X)
def activation_reduce(x):
    r, total = like(x), like(x, (32, 1))
    nisa.activation_reduce(r, nl.square, tile(x), nl.add, total)
    return out(r, total)


@case(lambda x, v: np.maximum(x * 3 - v, 0), X, V)
def activate2(x, v):
    r = like(x)
    nisa.activate2(r, nl.relu, tile(x), 3.0, tile(v), nl.multiply, nl.subtract)
    return out(r)


@case(lambda x, v: (np.exp(x - v), np.exp(x - v).sum(1, keepdims=True)), X, V)
def exponential(x, v):
    r, total = like(x), like(x, (32, 1))
    nisa.exponential(r, tile(x), tile(v), total, nisa.reduce_cmd.reset_reduce)
    return out(r, total)


@case(lambda x: 1 / x, X)
def reciprocal(x):
    r = like(x)
    nisa.reciprocal(r, tile(x))
    return out(r)


@case(lambda x, y: x.T @ y + x[:16].T @ y[:16], X, Y)
def nc_matmul(x, y):
    r = like(x, (24, 24), nl.float32, nl.psum)
    a, b = tile(x), tile(y)
    nisa.nc_matmul(dst=r, stationary=a, moving=b)
    nisa.nc_matmul(dst=r, stationary=a[0:16], moving=b[0:16])
    return out(r)


@case(lambda x, y: x[:16].T @ y[:16], X, Y)
def nc_matmul_overwrites(x, y):
    r = like(x, (24, 24), nl.float32, nl.psum)
    a, b = tile(x), tile(y)
    nisa.nc_matmul(dst=r, stationary=a, moving=b)
    nisa.nc_matmul(dst=r, stationary=a[0:16], moving=b[0:16], accumulate=False)
    return out(r)


@case(lambda x, y: x.T @ y, X, Y)
def nc_matmul_parts(x, y):
    """Each half goes through an access pattern that names the dtype: neither adds to unwritten memory."""
    r = like(x, (24, 24), nl.float32, nl.psum)
    a, b = tile(x), tile(y)
    for i in range(2):
        half = r.ap([[24, 24], [1, 12]], offset=12 * i, dtype=nl.float32)
        nisa.nc_matmul(dst=half, stationary=a, moving=b[:, nl.ds(12 * i, 12)])
    return out(r)


@case(lambda x, y: x.T @ y, X, Y)
def nc_matmul_beside_another_dtype(x, y):
    """Integer zeros are written to one half: the product adds to these, and overwrites the other half."""
    r = like(x, (24, 24), nl.float32, nl.psum)
    nisa.memset(dst=r.ap([[24, 24], [1, 12]], offset=0, dtype=nl.int32), value=0)
    nisa.nc_matmul(dst=r, stationary=tile(x), moving=tile(y))
    return out(r)


@case(
    lambda b: b[:, 0, :].T @ b[:, 0, :] + b[:, 1, :].T @ b[:, 1, :],
    np.random.default_rng(5).integers(-4, 5, (32, 6, 4)).astype(np.float32),
)
def nc_matmul_double_row(b):
    r = like(b, (4, 4), nl.float32, nl.psum)
    t = like(b, dtype=nl.float8_e4m3)
    nisa.tensor_copy(dst=t, src=tile(b))
    nisa.nc_matmul(dst=r, stationary=t[:, 0:2, :], moving=t[:, 0:2, :], perf_mode=nisa.matmul_perf_mode.double_row)
    return out(r)


@case(lambda x: x.T, X)
def nc_transpose(x):
    r = like(x, (24, 32), buffer=nl.psum)
    nisa.nc_transpose(dst=r, data=tile(x))
    return out(r)


@case(lambda b: b.transpose(2, 1, 0), B)
def dma_transpose(b):
    r = like(b, (4, 6, 32))
    nisa.dma_transpose(dst=r, src=b)
    return out(r)


@case(lambda x, y: (x + y, x + y), X, Y)
def dma_compute(x, y):
    r, s = like(x), like(x)
    nisa.dma_compute(r, [x, y], nl.add)
    nisa.dma_copy(dst=s, src=x)
    nisa.dma_copy(dst=s, src=y, dst_rmw_op=nl.add)
    return out(r, s)


@case(lambda x, y: np.where(x > 0, x, y), X, Y)
def tensor_copy_predicated(x, y):
    p, r, data = like(x, dtype=nl.uint8), tile(y), tile(x)
    nisa.tensor_scalar(p, data, nl.greater, 0.0)
    nisa.tensor_copy_predicated(dst=r, src=data, predicate=p)
    return out(r)


@case(lambda x, y: (np.where(x > 0, y, -1), np.where(x > 0, y, -1).max(1, keepdims=True)), X, Y)
def select_reduce(x, y):
    p, r, top = like(x, dtype=nl.uint8), like(x), like(x, (32, 1))
    nisa.tensor_scalar(p, tile(x), nl.greater, 0.0)
    nisa.select_reduce(r, p, tile(y), -1.0, top, nisa.reduce_cmd.reset_reduce, nl.maximum)
    return out(r, top)


def _range(x):
    shown = (np.arange(24) + 5 >= 8) & (np.arange(24) + 5 < 20)
    return np.where(shown, x, np.finfo(np.float32).min)


@case(_range, X)
def range_select(x):
    r, low, high, top = like(x), like(x, (32, 1)), like(x, (32, 1)), like(x, (32, 1))
    nisa.memset(low, 8.0)
    nisa.memset(high, 20.0)
    nisa.range_select(r, tile(x), nl.greater_equal, nl.less, low, high, reduce_res=top, range_start=5)
    return out(r)


@case(lambda x: np.arange(32)[:, None] * 3 + np.arange(24) * 2 + 7 + 0 * x.astype(np.int32), X)
def iota(x):
    r = like(x, dtype=nl.int32)
    nisa.iota(r, pattern=[[2, 24]], offset=7, channel_multiplier=3)
    return out(r)


@case(lambda x: np.where(np.arange(32)[:, None] - np.arange(24) >= 0, x, -5), X)
def affine_select(x):
    r = like(x)
    nisa.affine_select(r, [[-1, 24]], 1, tile(x), -5.0, cmp_op=nl.greater_equal)
    return out(r)


def _stats(x):
    even, odd = x[:, 0::2], x[:, 1::2]
    return np.stack([v for h in (even, odd) for v in (np.full(32, 12), h.mean(1), h.var(1) * 12)], 1)


@case(lambda x: (_stats(x), np.stack([x.mean(1), x.var(1)], 1)), X)
def bn_stats_and_bn_aggr(x):
    stats, both = like(x, (32, 6)), like(x, (32, 2))
    nisa.bn_stats(stats, tile(x))
    nisa.bn_aggr(both, stats)
    return out(stats, both)


@case(lambda x: (-np.sort(-x, 1)[:, :8], np.argsort(-x, 1, kind="stable")[:, :8].astype(np.uint32)), X)
def max8_and_nc_find_index8(x):
    top, places, data = like(x, (32, 8)), like(x, (32, 8), nl.uint32), tile(x)
    nisa.max8(top, data)
    nisa.nc_find_index8(places, data, top)
    return out(top, places)


def _without_top(x):
    y = x.copy()
    np.put_along_axis(y, np.argsort(-x, 1)[:, :8], -9.0, 1)
    return y


@case(_without_top, X)
def nc_match_replace8(x):
    top, r, data = like(x, (32, 8)), like(x), tile(x)
    nisa.max8(top, data)
    nisa.nc_match_replace8(r, data, top, imm=-9.0)
    return out(r)


@case(lambda x: np.where((np.arange(32) == 5)[:, None], 4.0, x[(np.arange(32) + 1) % 32]), X)
def nc_stream_shuffle(x):
    r = like(x)
    nisa.memset(r, 4.0)
    nisa.nc_stream_shuffle(r, tile(x), [255 if i == 5 else (i + 1) % 32 for i in range(32)])
    return out(r)


@case(lambda x, i: np.take_along_axis(x, i % 24, 1), X, N)
def nc_n_gather(x, i):
    r, places = like(x), like(x, dtype=nl.uint32)
    nisa.tensor_scalar(places, tile(i), nl.mod, 24)
    nisa.nc_n_gather(r, tile(x), places)
    return out(r)


def _local(x):
    rows = [x[g * 16 : g * 16 + 16][:, (np.arange(16) % 24)] for g in range(2)]
    return np.concatenate(rows)


@case(_local, X)
def local_gather(x):
    places, r = like(x, (32, 1), nl.uint16), like(x, (32, 16))
    nisa.iota(places, [[0, 1]], 0, 1)
    nisa.tensor_scalar(places, places, nl.mod, 16)
    nisa.local_gather(r, tile(x), places)
    return out(r)


def _found(i):
    r = np.zeros((32, 25), np.int32)
    for p in (0, 16):
        places = np.flatnonzero(i[p] % 3 == 0) + 10
        r[p] = np.r_[places, np.full(24 - len(places), -1), len(places)]
    return r


@case(_found, N)
def nonzero_with_count(i):
    r, rest = like(i, (32, 25)), like(i)
    nisa.memset(r, 0)
    nisa.tensor_scalar(rest, tile(i), nl.mod, 3, op1=nl.equal, operand1=0)
    nisa.nonzero_with_count(r, rest, index_offset=10)
    return out(r)


@case(lambda x: (-np.sort(-x, 1)[:, :5], np.argsort(-x, 1)[:, :5].astype(np.uint32)), X)
def topk(x):
    top, places = like(x, (32, 5)), like(x, (32, 5), nl.uint32)
    nisa.topk(top, places, tile(x), 5)
    return out(top, places)


def _bounds(x):
    ids = np.repeat([1, 2, 0, 3], 6).astype(np.float32)
    start = np.where(ids == 0, 24, np.repeat([0, 6, 12, 18], 6))
    stop = np.where(ids == 0, -1, np.repeat([6, 12, 18, 24], 6))
    return np.broadcast_to(np.stack([start, stop]), (32, 2, 24)) + 0 * x[:, None]


@case(_bounds, X)
def sequence_bounds(x):
    ids, r = like(x, (32, 4, 6)), like(x, (32, 2, 24))
    for i, value in enumerate((1, 2, 0, 3)):
        nisa.memset(ids[:, i, :], float(value))
    nisa.sequence_bounds(r, ids)
    return out(r)


@case(lambda x: (x * 0 == 1, x), X)
def dropout(x):
    gone, kept, data = like(x), like(x), tile(x)
    nisa.dropout(gone, data, 1.0)
    nisa.dropout(kept, data, 0.0)
    return out(gone, kept)


@case(lambda i, x: x[i[:, 0] % 32], N, X)
def dma_copy_gathers_rows(i, x):
    places, r = like(i, (32, 1)), like(x)
    nisa.tensor_scalar(places, tile(i)[:, 0:1], nl.mod, 32)
    nisa.dma_copy(dst=r, src=x.ap([[24, 32], [1, 24]], vector_offset=places))
    return out(r)


@case(lambda x: np.concatenate([x[5:7], x[9:11]]), X)
def registers(x):
    r, where = like(x, (4, 24)), like(x, (1, 1), nl.int32)
    nisa.memset(where, 9)
    register = nisa.register_alloc(5)
    nisa.dma_copy(dst=r[0:2], src=x[nl.ds(register, 2)])
    nisa.register_load(register, where)
    nisa.dma_copy(dst=r[2:4], src=x.ap([[24, 2], [1, 24]], scalar_offset=register))
    return out(r)


@case(lambda b: (b.transpose(0, 2, 1), b.reshape(32, 24)[:, ::5], b[0:1, 5]), B)
def views(b):
    t = tile(b)
    permuted, stepped, one = like(b, (32, 4, 6)), like(b, (32, 5)), like(b, (1, 4))
    nisa.tensor_copy(permuted, t.permute((0, 2, 1)))
    nisa.tensor_copy(stepped, t.flatten_dims(1, 2).slice(1, 0, 24, 5))
    nisa.tensor_copy(one, t[0, 5])
    return out(permuted, stepped, one)


@case(lambda x: x.astype(np.float32).view(np.int32), X)
def view_as_another_dtype(x):
    r = like(x, dtype=nl.int32)
    nisa.tensor_copy(r, tile(x).view(nl.int32))
    return out(r)


@case(lambda x: np.clip(np.rint(x * 100), -128, 127).astype(np.int8), X)
def conversions_round_and_saturate(x):
    r = like(x, dtype=nl.int8)
    nisa.tensor_scalar(r, tile(x), nl.multiply, 100.0)
    return out(r)


@case(lambda x: np.broadcast_to(x[:, 3:4], (32, 24)) + math.pi, X)
def broadcasts(x):
    r, data = like(x), tile(x)
    nisa.tensor_scalar(r, data[:, 3:4].broadcast(1, 24), nl.add, math.pi)
    return out(r)


@case(lambda x: np.where(np.arange(24) < 12, x, np.nan), X)
def memory_never_written_is_nan(x):
    r = like(x)
    nisa.dma_copy(dst=r[:, 0:12], src=x[:, 0:12])
    return out(r)
