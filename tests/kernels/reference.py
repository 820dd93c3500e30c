"""What the kernels must compute: ggml's CPU backend computes the same ops, and each op has an example.

NumPy computes what ggml leaves open (the order of equal elements), what the CPU does not compute (views) or gets wrong, and
the rounding of a product's factors, which on the CPU depends on the weight's type and here does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ggml_cpu
import ml_dtypes
import numpy as np

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.spec.kernel import KernelSpec

Array = np.ndarray[Any, Any]
Make = Callable[[np.random.Generator, tuple[int, ...]], Array]
"""A function that makes the values of an input, from a generator and the shape `[ne3, ne2, ne1, ne0]`."""

DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}

REFERENCES: dict[str, Callable[..., Array]] = {}
"""The ops that NumPy computes."""


def reference(*names: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Registers a function as what some ops compute: it takes the kernel and its inputs, and returns the result."""

    def add(function: Callable[..., Array]) -> Callable[..., Array]:
        REFERENCES.update(dict.fromkeys(names, function))
        return function

    return add


def view(storage: Array, t: TensorDesc) -> Array:
    """Returns the logical array over the bytes of its storage; rows of bytes for a quantized type."""
    ggml = TYPES[t.dtype]
    if ggml.quantized:
        row = t.ne[0] // ggml.block * ggml.size
        return np.lib.stride_tricks.as_strided(storage, (*t.shape[:3], row), (*t.nb[:0:-1], 1))
    element = np.frombuffer(storage, DTYPES[t.dtype], 1)
    return np.lib.stride_tricks.as_strided(element, t.shape, t.nb[::-1])


def compute(spec: KernelSpec, inputs: list[Array | None]) -> Array | tuple[Array, ...]:
    """Returns the result of a kernel, `[ne3, ne2, ne1, ne0]`; for an op that changes further inputs also their new content.

    Args:
        spec: the kernel.
        inputs: the inputs as logical arrays in their own types; None for an absent input. Quantized tensors are bytes per
            row, here and in the result.
    """
    if spec.op in REFERENCES:
        return round_to(REFERENCES[spec.op](spec, *inputs).reshape(spec.output.shape), spec.output)
    if spec.op in ("mul_mat", "mul_mat_id"):
        inputs = [*factors(spec, inputs[0], inputs[1]), *inputs[2:]]
        spec = replace(spec, inputs=(*(TensorDesc.make(t.ne, "f32") for t in spec.inputs[:2]), *spec.inputs[2:]))
    wide, inputs = widened(spec, inputs)
    tensors = [wide.output, *(wide.inputs[i] for i in spec.updates)]
    found = [
        view(data, TensorDesc.make(t.ne, t.dtype))
        for data, t in zip(ggml_cpu.compute(wide, inputs), tensors, strict=True)
    ]
    result = round_to(found[0], spec.output) if wide.output.dtype != spec.output.dtype else found[0]
    return (result, *found[1:]) if spec.updates else result


IN_F32 = frozenset(
    """
    add sub mul div add1 mul_mat mul_mat_id out_prod flash_attn_ext norm rms_norm l2_norm sum_rows mean repeat repeat_back
    get_rows_back clamp scale pad roll im2col pool_2d_back
    """.split()
)
"""Ops that the CPU computes in some types only, or wrong in some: the values in F32 have the same result."""


def widened(spec: KernelSpec, inputs: list[Array | None]) -> tuple[KernelSpec, list[Array | None]]:
    """Returns a kernel with the same values in F32, if the CPU may not compute the kernel in its own types."""
    tensors = [t for t in (*spec.inputs, spec.output) if t is not None]
    narrow = {t.dtype for t in tensors} & {"i8", "i16"} and spec.op in ("cpy", "get_rows", "set_rows")
    if not narrow and spec.op not in IN_F32:
        return spec, inputs

    values, tensors = list(inputs), list(spec.inputs)
    for i, (t, x) in enumerate(zip(spec.inputs, inputs, strict=True)):
        is_index = t is None or t.dtype == "i64" or (t.dtype == "i32" and spec.op not in ("pad", "roll", "repeat"))
        if t is None or x is None or is_index or (spec.op == "flash_attn_ext" and i == 3):
            continue
        if (spec.op, i) == ("flash_attn_ext", 0) and not TYPES[spec.inputs[1].dtype].quantized:
            x = x.astype(DTYPES[spec.inputs[1].dtype])  # the CPU rounds queries to the type of the keys
        values[i], tensors[i] = dequantize(x, t), TensorDesc.make(t.ne, "f32")
    output = TensorDesc.make(spec.output.ne, "f32")
    return KernelSpec(spec.op, tuple(tensors), output, spec.params, spec.alias), values


def dequantize(x: Array, t: TensorDesc) -> Array:
    """Returns float32 elements of bytes per row, or of elements of another type."""
    if not TYPES[t.dtype].quantized:
        return x.astype(np.float32)
    source, target = TensorDesc.make(t.ne, t.dtype), TensorDesc.make(t.ne, "f32")
    (data,) = ggml_cpu.compute(KernelSpec.make("cpy", [source, target], target), [x, np.zeros(t.shape, np.float32)])
    return view(data, target)


def round_to(x: Array, t: TensorDesc) -> Array:
    """Returns float or integer values in a type that is not quantized."""
    return x.astype(DTYPES[t.dtype])


def factors(spec: KernelSpec, a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the factors of a product in F32. With quantized weights both are rounded to BF16, unless F32 is requested.

    With weights in tiles the codes are not rounded, and the scales are F32.
    """
    weights = spec.inputs[0]
    kept = DTYPES["f32" if dict(spec.params)["prec_src1"] == 10 else "bf16"]
    if weights.layout == "f8_e4m3_128x128":
        return in_tiles(dequantize(a, weights)), b.astype(kept).astype(np.float32)
    if TYPES[weights.dtype].quantized:
        return dequantize(a, weights).astype(kept).astype(np.float32), b.astype(kept).astype(np.float32)
    return a.astype(np.float32), b.astype(DTYPES[weights.dtype]).astype(np.float32)


def in_tiles(values: Array) -> Array:
    """Returns a weight `[..., ne1, ne0]` as the layout f8_e4m3_128x128 stores it: a code times its tile's scale."""
    made = np.empty(values.shape, np.float32)
    for r in range(0, values.shape[-2], 128):
        for c in range(0, values.shape[-1], 128):
            for matrix in np.ndindex(*values.shape[:-2]):
                at = (*matrix, slice(r, r + 128), slice(c, c + 128))
                scale = np.abs(values[at]).max() / np.float32(240)
                codes = (values[at] / (scale or np.float32(1))).astype(ml_dtypes.float8_e4m3)
                made[at] = codes.astype(np.float32) * scale
    return made


@reference("reshape")
def reshape(spec: KernelSpec, x: Array) -> Array:
    return x


@reference("transpose")
def transpose(spec: KernelSpec, x: Array) -> Array:
    return np.swapaxes(x, 2, 3)


@reference("count_equal")
def count_equal(spec: KernelSpec, x: Array, y: Array) -> Array:
    """The CPU takes other rows if the second and the third dimension differ (ggml 0.25.3)."""
    return np.array((x == y).sum())


@reference("soft_max_back")
def soft_max_back(spec: KernelSpec, grad: Array, y: Array) -> Array:
    """The CPU takes no ALiBi, which is not in the gradient."""
    grad, y = grad.astype(np.float64), y.astype(np.float64)
    return (grad - (y * grad).sum(axis=3, keepdims=True)) * y * dict(spec.params)["scale"]


@reference("argsort")
def argsort(spec: KernelSpec, x: Array) -> Array:
    """Keeps the order of equal elements."""
    return np.argsort(-x if dict(spec.params)["order"] else x, axis=3, kind="stable")


@reference("top_k")
def top_k(spec: KernelSpec, x: Array) -> Array:
    """Takes the first of equal elements, and returns the places in their order."""
    return np.sort(np.argsort(-x, axis=3, kind="stable")[..., : spec.output.ne[0]], axis=3)


# --- examples: the shapes with which a test runs every combination of an emitter's registered types -----------------------


@dataclass(frozen=True)
class Example:
    """An example of an op.

    Attributes:
        inputs: ggml's dimensions of each input, `(256,8,1,1)`.
        output: the result's dimensions; None if `kernelgen.ggml.shapes` computes them, or if they are the first input's.
        dtype: the result's type, with `output`.
        limit: the largest normalized mean squared error.
        params: the op's parameters.
        values: the functions that make the values of inputs, by index; the default is normal numbers, small integers or
            random blocks.
    """

    inputs: tuple[str, ...]
    output: str | None
    dtype: str
    limit: float
    params: dict[str, float]
    values: dict[int, Make]


EXAMPLES: dict[str, Example] = {}


def example(
    *names: str,
    inputs: tuple[str, ...],
    output: str | None = None,
    dtype: str = "f32",
    limit: float = 1e-6,
    values: dict[int, Make] | None = None,
    **params: float,
) -> None:
    """Registers the example of some ops; see `Example`."""
    EXAMPLES.update(dict.fromkeys(names, Example(inputs, output, dtype, limit, params, values or {})))


def below(n: int) -> Make:
    """Returns a function that makes indices below `n`, distinct in the last axis if possible."""

    def make(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if shape[-1] > n:
            return rng.integers(0, n, shape)
        return np.stack([rng.permutation(n)[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))]).reshape(shape)

    return make


def fraction(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(0, 1, shape)


def distribution(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns rows of numbers that add up to 1."""
    x = rng.random(shape)
    return x / x.sum(axis=-1, keepdims=True)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns rows of length 1, like the keys and queries of models: with other rows the state grows without bound."""
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def gates(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return -rng.uniform(0, 2, shape)


def triangles(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns well-conditioned lower triangular matrices; nothing reads what is above the diagonal, so it is not 0."""
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    diagonal = np.arange(shape[3])
    x[..., diagonal, diagonal] = rng.uniform(1, 2, shape[:3])
    return x


example(
    "flash_attn_ext",
    inputs=("(256,3,4,2)", "(256,32,2,2)", "(256,32,2,2)", "(32,3,1,2)", "(4,1,1,1)"),
    limit=1e-5,
    scale=0.06,
    max_bias=8.0,
)
example("lightning_indexer", inputs=("(256,3,5,4)", "(256,1,6,4)", "(3,5,1,4)", "(6,5,1,2)"))
example("im2col", inputs=("(3,2,3,4)", "(7,5,3,2)"), output="(18,4,6,2)", s0=2, p0=1, p1=1, is_2D=True)
example("im2col_back", inputs=("(18,4,6,2)", "(3,2,3,4)"), output="(7,5,3,2)", s0=2, p0=1, p1=1, is_2D=True)
example("im2col_3d", inputs=("(3,2,2,6)", "(5,4,3,4)"), output="(24,3,5,8)", s0=2, p0=1, p1=1, p2=1, IC=2)
example("col2im_1d", inputs=("(15,7,1,1)",), s0=2, oc=3, p0=1)
example("conv_2d", inputs=("(3,2,4,5)", "(7,5,4,2)"), s0=2, p0=1, p1=1)
example("conv_2d_dw", inputs=("(3,2,1,4)", "(7,5,4,2)"), s0=2, p0=1, p1=1)
example("conv_3d", inputs=("(3,2,2,6)", "(5,4,3,4)"), s0=2, p0=1, p1=1, p2=1, c=2, n=2, oc=3)
example("conv_transpose_1d", inputs=("(5,3,2,1)", "(7,2,1,1)"), s0=2)
example("conv_transpose_2d", inputs=("(3,2,3,4)", "(7,5,4,2)"), stride=2)
example("add", "sub", "mul", inputs=("(33,4,3,2)", "(33,2,1,2)"))
example("div", inputs=("(33,4,3,2)", "(33,2,1,2)"), values={1: lambda rng, shape: rng.uniform(1, 2, shape)})
example("add1", inputs=("(33,4,3,2)", "(1,1,1,1)"))
example("add_id", inputs=("(33,4,3,2)", "(33,5,1,1)", "(4,3,1,1)"), values={2: below(5)})
example("leaky_relu", inputs=("(33,4,3,2)",), negative_slope=0.1)
example("xielu", inputs=("(33,4,3,2)",), alpha_n=4.5, alpha_p=2.0, beta=0.5, eps=-1e-6)
example("scale", inputs=("(33,4,3,2)",), s=0.7, b=-1.5)
example("clamp", inputs=("(33,4,3,2)",), min=-0.5, max=0.7)
UNARY = """
abs sgn neg step tanh elu relu sigmoid gelu gelu_quick silu hardswish hardsigmoid exp expm1 softplus gelu_erf floor ceil round
trunc sqr sin cos
"""
example(*UNARY.split(), inputs=("(33,4,3,2)",))
example("sqrt", "log", inputs=("(33,4,3,2)",), values={0: lambda rng, shape: rng.uniform(0.1, 4, shape)})
example("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick", inputs=("(33,4,3,2)", "(33,4,3,2)"))
example("swiglu_oai", inputs=("(33,4,3,2)", "(33,4,3,2)"), alpha=1.702, limit=1.0)
example("swiglu_clamp", inputs=("(33,4,3,2)", "(33,4,3,2)"), limit=1.0)
example("dsv4_hc_pre", inputs=("(31,4,5,1)", "(4,5,1,1)"), scale=0.5)
example("dsv4_hc_comb", inputs=("(24,5,1,1)", "(3,1,1,1)", "(24,1,1,1)"), eps=1e-6, n_iter=3)
example("dsv4_hc_post", inputs=("(31,5,1,1)", "(31,3,5,1)", "(3,5,1,1)", "(3,3,5,1)"))
example("upscale", inputs=("(5,4,3,2)",), output="(8,6,3,2)", mode=2)
example("pad", inputs=("(5,4,3,2)",), lp0=1, rp0=2, lp1=3, rp2=1, lp3=1)
example("pad_reflect_1d", inputs=("(5,4,3,2)",), p0=4, p1=2)
example("roll", inputs=("(5,4,3,2)",), shift0=3, shift1=-2, shift2=1, shift3=-1)
example("timestep_embedding", inputs=("(3,1,1,1)",), dim=10)
example("win_part", inputs=("(3,7,5,1)",), npx=3, npy=2, w=3)
example("win_unpart", inputs=("(3,3,3,6)",), output="(3,7,5,1)", w=3)
example("get_rel_pos", inputs=("(3,9,1,1)",))
example("add_rel_pos", inputs=("(9,8,2,1)", "(3,4,2,2)", "(3,4,2,2)"))
example("cont", "dup", "reshape", inputs=("(256,4,3,2)",), output="(256,4,3,2)", dtype="same")
example("transpose", inputs=("(256,4,3,2)",))
example("cpy", inputs=("(256,4,3,2)", "(256,4,3,2)"))
example("solve_tri", inputs=("(9,9,3,2)", "(4,9,3,2)"), values={0: triangles})
example("mul_mat", inputs=("(512,6,1,2)", "(512,3,4,2)"))
example("out_prod", inputs=("(256,6,1,2)", "(3,6,4,2)"))
example("mul_mat_id", inputs=("(256,6,3,1)", "(256,1,5,1)", "(2,5,1,1)"), values={2: below(3)})
example("concat", inputs=("(256,4,3,2)", "(256,4,5,2)"), dim=2)
example("repeat", inputs=("(3,4,3,1)",), output="(6,4,9,2)", dtype="same")
example("acc", "set", inputs=("(8,6,4,3)", "(5,4,2,3)"), nb1=32, nb2=192, nb3=768, offset=36)
example("diag", inputs=("(9,1,3,2)",))
example("tri", inputs=("(9,9,3,2)",), tri_type=2)
example("fill", inputs=("(9,4,3,2)",), c=-1.5)
example("arange", inputs=(), output="(12,1,1,1)", start=0.5, stop=4.0, step=0.3)
example("group_norm", inputs=("(5,3,8,2)",), n_groups=3, eps=1e-5)
example("sum_rows", inputs=("(33,4,3,2)",))
example("norm", "rms_norm", "l2_norm", inputs=("(33,4,3,2)",), eps=1e-5)
example("pool_1d", inputs=("(11,3,2,2)",), pool=1, k0=3, s0=2, p0=1)
example("pool_2d", inputs=("(11,7,2,2)",), output="(5,8,2,2)", pool=1, k0=3, k1=2, s0=2, s1=1, p1=1)
example("pool_2d_back", inputs=("(5,8,2,2)", "(11,7,2,2)"), output="(11,7,2,2)", pool=0, k0=3, k1=2, s0=2, s1=1, p1=1)
example("ssm_conv", inputs=("(8,5,2,1)", "(4,5,1,1)"))
example(
    "ssm_scan",
    inputs=("(8,3,4,5)", "(3,4,6,2)", "(4,6,2,1)", "(1,4,1,1)", "(8,2,6,2)", "(8,2,6,2)", "(2,1,1,1)"),
    values={3: lambda rng, shape: -rng.uniform(0.1, 1, shape), 6: below(5)},
    K=2,
)
_VECTOR = "(32,3,4,1)"
example(
    "rwkv_wkv6",
    inputs=(_VECTOR, _VECTOR, _VECTOR, "(32,3,1,1)", _VECTOR, "(3072,2,1,1)"),
    values={4: fraction},
)
example("rwkv_wkv7", inputs=(*[_VECTOR] * 6, "(3072,2,1,1)"))
example("gated_linear_attn", inputs=(*[_VECTOR] * 4, "(3072,2,1,1)"), scale=0.4)
example(
    "gated_delta_net",
    inputs=("(6,2,5,2)", "(6,2,5,1)", "(6,4,5,2)", "(1,4,5,2)", "(1,4,5,2)", "(6,6,4,2)"),
    values={0: unit, 1: unit, 3: gates, 4: fraction},
    K=2,
)
example("sum", "mean", inputs=("(33,4,3,2)",))
example("cumsum", inputs=("(33,4,3,2)",))
example("argmax", inputs=("(33,4,1,1)",))
example(
    "count_equal",
    inputs=("(33,4,3,1)", "(33,4,3,1)"),
    values={i: lambda rng, shape: rng.integers(0, 3, shape) for i in (0, 1)},
)
example("repeat_back", inputs=("(6,4,9,2)",), output="(3,4,3,1)", dtype="same")
example(
    "rope",
    "rope_back",
    inputs=("(64,3,5,2)", "(5,1,1,1)", "(32,1,1,1)"),
    values={1: below(512), 2: lambda rng, shape: rng.uniform(1, 2, shape)},
    n_dims=64,
)
example("get_rows", inputs=("(256,8,2,3)", "(4,2,3,1)"), values={1: below(8)})
example("set_rows", inputs=("(256,4,2,3)", "(4,2,1,1)", "(256,8,2,3)"), values={1: below(8)})
example("get_rows_back", inputs=("(17,6,1,1)", "(6,1,1,1)"), output="(17,5,1,1)", values={1: below(5)})
example("soft_max", inputs=("(33,4,3,2)", "(33,5,1,2)", "(3,1,1,1)"), scale=0.3, max_bias=8.0)
example("soft_max_back", inputs=("(33,4,3,2)", "(33,4,3,2)"), scale=0.3)
example("diag_mask_inf", "diag_mask_zero", inputs=("(9,4,3,2)",), n_past=3)
example("argsort", inputs=("(33,4,3,2)",), order=1)
example("top_k", inputs=("(33,4,3,2)",), output="(5,4,3,2)", dtype="i32")
example("silu_back", inputs=("(33,4,3,2)", "(33,4,3,2)"))
example("rms_norm_back", inputs=("(33,4,3,2)", "(33,4,3,2)"), eps=1e-5)
example("cross_entropy_loss", inputs=("(33,4,3,2)", "(33,4,3,2)"), values={1: distribution})
example("cross_entropy_loss_back", inputs=("(1,1,1,1)", "(33,4,3,2)", "(33,4,3,2)"), values={2: distribution})
example("opt_step_sgd", inputs=("(33,4,3,2)", "(33,4,3,2)", "(2,1,1,1)"), values={2: fraction})
example("opt_step_adamw", inputs=(*["(33,4,3,2)"] * 4, "(7,1,1,1)"), values={3: fraction, 4: fraction})
