"""Kernels of the generation that imports neuronxcc.nki, one per function, each with its reference in NumPy."""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
from neuronxcc.nki.language import par_dim

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
P = random(32, 24, seed=5, low=0.5)
B = random(32, 6, 4, seed=3)
N = np.random.default_rng(4).integers(0, 100, (32, 24)).astype(np.int32)


def out(*tiles):
    made = []
    for t in tiles:
        result = nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm)
        nl.store(result, value=t)
        made.append(result)
    return tuple(made)


def unary(name, reference, source=X):
    def kernel(x):
        return out(getattr(nl, name)(nl.load(x)))

    kernel.__name__ = f"nl_{name}"
    case(reference, source)(kernel)


def binary(name, reference, a=X, b=Y):
    def kernel(x, y):
        return out(getattr(nl, name)(nl.load(x), nl.load(y)))

    kernel.__name__ = f"nl_{name}"
    case(reference, a, b)(kernel)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


for name in "abs arctan ceil cos exp floor negative reciprocal sign sin square tan tanh trunc".split():
    unary(name, getattr(np, name))
for name in "log sqrt".split():
    unary(name, getattr(np, name), P)
unary("rsqrt", lambda x: 1 / np.sqrt(x), P)
unary("relu", lambda x: np.maximum(x, 0))
unary("sigmoid", _sigmoid)
unary("silu", lambda x: x * _sigmoid(x))
unary("silu_dx", lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))))
unary("softplus", lambda x: np.log1p(np.exp(x)))
unary("mish", lambda x: x * np.tanh(np.log1p(np.exp(x))))
unary("gelu_apprx_tanh", lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
unary("gelu_apprx_sigmoid", lambda x: x * _sigmoid(1.702 * x))
unary("erf_dx", lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x))
unary("invert", np.invert, N)
unary("logical_not", lambda i: i == 0, N % 3)
for name in "add subtract multiply divide maximum minimum".split():
    binary(name, getattr(np, name))
for name in "equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor".split():
    binary(name, getattr(np, name), N % 3, N[::-1] % 3)
for name in "bitwise_and bitwise_or bitwise_xor left_shift right_shift".split():
    binary(name, getattr(np, name), N, N[::-1] % 5)
binary("power", np.power, P)
binary("fmod", np.fmod, X, P)
binary("mod", np.mod, X, P)


@case(lambda x, v: (3 * x + v) / 2 - (1 - x), X, V)
def operators(x, v):
    a = nl.load(x)
    return out((3 * a + nl.load(v)) / 2 - (1 - a))


@case(lambda b: (b.sum((1, 2))[:, None], b.max(2), b.min(1), b.mean((1, 2))[:, None], b.prod(2)), B)
def reductions(b):
    t = nl.load(b)
    return out(
        nl.sum(t, axis=[1, 2]), nl.max(t, axis=-1), nl.min(t, axis=1), nl.mean(t, axis=[1, 2]), nl.prod(t, axis=2)
    )


@case(lambda x: (x.var(1, keepdims=True), (x > -9).all(1, keepdims=True)), X)
def variance_and_all(x):
    t = nl.load(x)
    return out(nl.var(t, axis=1), nl.all(t > -9, axis=1))


@case(lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True), X)
def softmax(x):
    return out(nl.softmax(nl.load(x), axis=1))


@case(lambda x, y: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * y, X, Y)
def rms_norm(x, y):
    return out(nl.rms_norm(nl.load(x), nl.load(y), axis=1, n=24))


@case(lambda x, y: np.where(x > 0, y, 7.0), X, Y)
def where(x, y):
    return out(nl.where(nl.load(x) > 0, nl.load(y), 7.0))


@case(lambda x, y: (x @ y.T, y.T @ x), X[:24], Y[:24])
def matmul(x, y):
    a, b = nl.load(x), nl.load(y)
    return out(nl.matmul(a, nl.copy(nl.transpose(b))), nl.matmul(b, a, transpose_x=True))


@case(lambda x: x.T, X)
def load_transpose2d(x):
    return out(nl.load_transpose2d(x))


@case(lambda x, i: np.take_along_axis(x, i % 24, 1), X, N)
def gather_flattened(x, i):
    return out(nl.gather_flattened(nl.load(x), nl.mod(nl.load(i), 24, dtype=nl.uint32)))


@case(lambda x: np.where(np.arange(24) < 20, x, 1) * np.where(np.arange(32) < 30, 1, 0)[:, None], X)
def masks(x):
    i, j = nl.arange(32)[:, None], nl.arange(24)[None, :]
    result = nl.ndarray((32, 24), x.dtype, buffer=nl.shared_hbm)
    nl.store(result, nl.zeros((32, 24), x.dtype))
    nl.store(result[i, j], nl.full((32, 24), 1, x.dtype), mask=(i < 30))
    t = nl.load(x[i, j], mask=(j < 20) & (i < 30))
    nl.store(result[i, j], value=t)
    return result


@case(lambda x: x.sum(1, keepdims=True) - x[:, 20:].sum(1, keepdims=True), X)
def masks_past_the_end(x):
    i, j = nl.mgrid[0:128, 0:30]
    t = nl.load(x[i, j], mask=(i < 32) & (j < 20))
    total = nl.sum(t, axis=1, mask=(j < 20))
    result = nl.ndarray((32, 1), x.dtype, buffer=nl.shared_hbm)
    k = nl.arange(128)[:, None]
    nl.store(result[k, nl.arange(1)[None, :]], value=total, mask=(k < 32))
    return result


@case(lambda x: np.where(np.arange(24) <= np.arange(32)[:, None], x, -3), X)
def affine_select(x):
    i, j = nl.mgrid[0:32, 0:24]
    return out(nisa.affine_select(pred=(j <= i), on_true_tile=nl.load(x)[i, j], on_false_value=-3.0))


@case(lambda b: b[:, ::2, :].max((1, 2))[:, None] + b[:, 1, 1:2], B)
def index_patterns(b):
    t = nl.load(b)
    i, j, k = nl.arange(32)[:, None, None], nl.arange(3)[None, :, None], nl.arange(4)[None, None, :]
    return out(nl.max(t[i, 2 * j, k], axis=[1, 2]) + t[:, 1, 1:2])


@case(lambda x: np.stack([x[:, j : j + 20].sum(1) for j in range(5)], 1), X)
def windows_overlap(x):
    t = nl.load(x)
    i, j, k = nl.arange(32)[:, None, None], nl.arange(5)[None, :, None], nl.arange(20)[None, None, :]
    return out(nl.sum(t[i, j + k], axis=2))


@case(lambda x: np.repeat(x, 2, 1), X)
def scattered_stores(x):
    t = nl.load(x)
    both = nl.ndarray((par_dim(32), 48), x.dtype)
    i, j = nl.arange(32)[:, None], nl.arange(24)[None, :]
    both[i, 2 * j] = t
    both[i, 2 * j + 1] = t[i, j]
    return out(both)


@case(lambda x, i: x[i[:, 0] % 32], X, N)
def indirect_load(x, i):
    rows = nl.mod(nl.load(i)[:, 0], 32, dtype=nl.int32)
    return out(nl.load(x[rows, nl.arange(24)[None, :]]))


@case(lambda x: x[::-1], X)
def indirect_store(x):
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    rows = nisa.iota(31 - nl.arange(32)[:, None], dtype=nl.int32)
    nl.store(result[rows, nl.arange(24)[None, :]], value=nl.load(x))
    return result


@case(lambda x, y: x.T @ y, X, Y)
def psum_accumulates(x, y):
    sums = nl.zeros((24, 24), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(4):
        rows = nl.ds(8 * k, 8)
        sums += nisa.nc_matmul(nl.load(x[rows, :]), nl.load(y[rows, :]))
    return out(sums)


@case(lambda x: x * 4 + 6, X)
def block_dimensions(x):
    blocks = nl.ndarray((4, par_dim(32), 24), x.dtype)
    for k in nl.affine_range(4):
        blocks[k] = nl.load(x) + k
    return out(blocks[0] + blocks[1] + blocks[2] + blocks[3])


@case(lambda x: x * 3, X)
def loop_reduce(x):
    for k in nl.affine_range(3):
        total = nl.loop_reduce(nl.load(x), op=np.add, loop_indices=[k])
    return out(total)


@case(lambda x: np.concatenate([3 * x[:16], 6 * x[16:]]), X)
def loop_reduce_has_a_result_for_each_turn_of_other_loops(x):
    blocks = nl.ndarray((2, par_dim(16), 24), x.dtype)
    for k in nl.affine_range(3):
        for half in nl.affine_range(2):
            blocks[half] = nl.loop_reduce((half + 1) * nl.load(x[nl.ds(16 * half, 16), :]), op=np.add, loop_indices=[k])
    made = nl.ndarray((32, 24), x.dtype, buffer=nl.shared_hbm)
    for half in nl.affine_range(2):
        nl.store(made[nl.ds(16 * half, 16), :], blocks[half])
    return made


@case(lambda x: np.square(2 * x), X)
def activation_takes_numpy_functions(x):
    return out(nisa.activation(np.square, nl.load(x), scale=2.0))


@case(lambda x: x, X)
def a_tile_that_is_returned_is_not_rounded(x):
    half = nisa.activation(nl.copy, nl.load(x), dtype=nl.bfloat16)
    return out(nl.copy(half, dtype=nl.float32))


@case(lambda x: (-np.sort(-x, 1)[:, :8], np.argsort(-x, 1)[:, :8].astype(np.uint32)), X)
def max8_and_find(x):
    t = nl.load(x)
    top = nisa.max8(src=t)
    return out(top, nisa.nc_find_index8(data=t, vals=top))


@case(lambda x: np.stack([x.mean(1), x.var(1)], 1), X)
def bn_stats(x):
    return out(nisa.bn_aggr(nisa.bn_stats(nl.load(x))))


@case(lambda x, y: (x - 1) * y, X, Y)
def tensor_scalar_and_tensor(x, y):
    a = nisa.tensor_scalar(nl.load(x), np.subtract, 1.0)
    return out(nisa.tensor_tensor(a, nl.load(y), np.multiply))
