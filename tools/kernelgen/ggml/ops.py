"""ggml's ops as a table: names, numbers, parameters and each parameter's position in `op_params`.

A kernel's op is the `ggml_op_desc` name in lower case: `rms_norm`, but also `relu` and `swiglu`, which ggml stores as variants of
UNARY and GLU. `kernelgen.ggml.shapes` has the shape rules; the emitters are in `kernels/`.

The enum values are ggml 0.25.3's; only files in which llama.cpp writes numbers need them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

N_WORDS = 16
"""Length of `op_params` in 32-bit words (GGML_MAX_OP_PARAMS / 4)."""

F32_MAX = float.fromhex("0x1.fffffep+127")
F32_TINY = float.fromhex("0x1p-126")
"""The largest finite binary32 number."""

ANY = "any"
"""The value of a number that a kernel receives at run time: the kernel accepts any value."""
ANY_WORD = 15
"""The word of `op_params` with a bit for each word that is `ANY`; ggml leaves it 0."""

ParamValue = int | float | bool | str
"""A number or a flag, or `ANY`."""

# `enum ggml_op`, in order; the position is the number.
ENUM = tuple(
    """
none dup add add_id add1 acc sub mul div sqr sqrt log sin cos sum sum_rows cumsum mean argmax count_equal repeat repeat_back
concat silu_back norm rms_norm rms_norm_back group_norm l2_norm mul_mat mul_mat_id out_prod scale set cpy cont reshape view
permute transpose get_rows get_rows_back set_rows diag diag_mask_inf diag_mask_zero soft_max soft_max_back rope rope_back clamp
conv_transpose_1d im2col im2col_back im2col_3d col2im_1d conv_2d conv_3d conv_2d_dw conv_transpose_2d pool_1d pool_2d
pool_2d_back upscale pad pad_reflect_1d roll arange timestep_embedding argsort top_k leaky_relu tri fill flash_attn_ext
flash_attn_back ssm_conv ssm_scan win_part win_unpart get_rel_pos add_rel_pos rwkv_wkv6 gated_linear_attn rwkv_wkv7 solve_tri
gated_delta_net lightning_indexer dsv4_hc_comb dsv4_hc_pre dsv4_hc_post unary map_custom1 map_custom2 map_custom3 custom
cross_entropy_loss cross_entropy_loss_back opt_step_adamw opt_step_sgd glu
""".split()
)

# `enum ggml_unary_op` and `enum ggml_glu_op`; op_params word 0 holds the number.
UNARY = tuple(
    """
abs sgn neg step tanh elu relu sigmoid gelu gelu_quick silu hardswish hardsigmoid exp expm1 softplus gelu_erf xielu floor ceil
round trunc
""".split()
)
GLU = tuple("reglu geglu swiglu swiglu_oai geglu_erf geglu_quick swiglu_clamp".split())

ALIASES = MappingProxyType(
    {
        "softmax": "soft_max",
        "matmul": "mul_mat",
        "gemm": "mul_mat",
        "dot": "mul_mat",
        "linear": "mul_mat",
        "multiply": "mul",
        "subtract": "sub",
        "divide": "div",
        "rmsnorm": "rms_norm",
        "layernorm": "norm",
        "layer_norm": "norm",
        "flash_attn": "flash_attn_ext",
        "flash_attention": "flash_attn_ext",
        "attention": "flash_attn_ext",
        "embedding": "get_rows",
        "gather": "get_rows",
        "scatter": "set_rows",
        "copy": "cpy",
        "contiguous": "cont",
        "swish": "silu",
        "softcap": "tanh",
        "mean_pool": "pool_2d",
        "topk": "top_k",
    }
)
"""Names of these ops in other frameworks; used only to suggest ggml's name in an error."""


@dataclass(frozen=True, slots=True)
class Param:
    """One op parameter.

    Attributes:
        name: as in ggml's API (`eps`, `n_dims`).
        word: index of its 32-bit word in `op_params`.
        kind: `int`, `float` (IEEE binary32) or `bool`.
        default: the value of an absent parameter; None if it must be given.
        choices: the values that ggml supports, if they are few.
        minimum, maximum: inclusive bounds, if ggml asserts them.
        infinite: whether a `float` may be infinite: a bound or a value that no computation uses.
        ours: whether ggml has no such parameter, in a word that it leaves 0; a kernel with the default value has none either.
        open: whether it may be `ANY`. In a spec all open parameters of an op are `ANY`, or none.
    """

    name: str
    word: int
    kind: type[int] | type[float] | type[bool] = int
    default: ParamValue | None = 0
    choices: tuple[int, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    infinite: bool = False
    ours: bool = False
    open: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """Axes along which an op's rows are independent of each other: the axes of tokens, in a model's graph.

    A node of n tokens can be computed chunk by chunk, by kernels for other numbers of tokens. Axis 0 is the fastest.

    Attributes:
        result: axis of the result; None if the op writes to rows of its alias, and each chunk has the whole result.
        sources: the axis of each source that is cut, by the source's index; each chunk has the other sources whole.
        outermost: whether the result is cut along its outermost axis, and the sources along the same; then `result` and
            `sources` are empty.
        broadcast: with `outermost`, whether a source with one element along the axis stays whole.
        more: axes along which a kernel's sources may be longer than the node's, by the source's index.
        mask: the source that hides elements beyond the node's own along `more`; None if nothing reads them.
        written: the source whose memory holds the result; a kernel may have only its first elements along `more`, if nothing
            beyond them is written. None for other ops.
        streams: whether a node of several streams (sequences with separate caches, along axis 3) can be computed as one node per
            stream, if each tensor has that many of them, or one for all.
    """

    result: int | None = None
    sources: Mapping[int, int] = field(default_factory=dict)
    outermost: bool = False
    broadcast: bool = False
    more: Mapping[int, int] = field(default_factory=dict)
    mask: int | None = None
    written: int | None = None
    streams: bool = False


ROWS = Tokens(outermost=True)
"""All sources have as many rows as the result."""
BROADCAST = Tokens(outermost=True, broadcast=True)


@dataclass(frozen=True, slots=True)
class Op:
    """One op that a kernel can compute.

    Attributes:
        name: `ggml_op_desc`, lower case.
        inputs: names of ggml's `src[0…]`, in order.
        required: number of inputs that must be present; later ones may be absent.
        params: the parameters.
        variant: the number in word 0 for UNARY and GLU variants.
        alias: the input whose memory holds the result, for ops that ggml defines in place.
        updates: other inputs that the op changes.
        custom: whether ggml has no such op. Its emitter defines it: it has no `op_params`, and arbitrary parameters.
        tokens: the ways to cut it along tokens; the first that fits a node applies; empty if it can't be cut.
    """

    name: str
    inputs: tuple[str, ...]
    required: int
    params: tuple[Param, ...] = ()
    variant: int | None = None
    alias: int | None = None
    updates: tuple[int, ...] = ()
    custom: bool = False
    tokens: tuple[Tokens, ...] = ()
    by_name: Mapping[str, Param] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", MappingProxyType({p.name: p for p in self.params}))

    @property
    def opens(self) -> tuple[Param, ...]:
        """The parameters that may be `ANY`, in the order in which a kernel receives them."""
        return tuple(p for p in self.params if p.open)

    def opened(self, params: Mapping[str, ParamValue]) -> tuple[str, ...]:
        """Returns the names of the parameters that are `ANY`.

        Raises:
            ValueError: only some of the open parameters are `ANY`.
        """
        found = tuple(p.name for p in self.opens if params.get(p.name) == ANY)
        if found and len(found) < len(self.opens):
            names = " and ".join(p.name for p in self.opens)
            raise ValueError(f"{self.name}: {names} are '{ANY}' together")
        return found

    def with_defaults(self, params: Mapping[str, ParamValue]) -> dict[str, ParamValue]:
        """Returns all parameters by name, with defaults, floats rounded to binary32.

        A word without a name here can be given as `word4`; it is kept unless 0. A custom op keeps parameters that have no name
        here. If one parameter is `ANY`, so are absent ones that may be.
        """
        if any(params.get(p.name) == ANY for p in self.opens):
            params = {**{p.name: ANY for p in self.opens}, **params}
        named = {
            p.name: _normal(p, params.get(p.name, 0 if p.default is None else p.default))
            for p in self.params
            if not p.ours or params.get(p.name, p.default) != p.default
        }
        if self.custom:
            return {**params, **named}
        raw = {k: int(v) for k, v in params.items() if k not in self.by_name and v}
        return {**named, **raw}

    def encode(self, params: Mapping[str, ParamValue]) -> tuple[int, ...]:
        """Returns `op_params` in ggml's form: 16 words, signed; all 0 for a custom op."""
        words = [0] * N_WORDS
        if self.custom:
            return tuple(words)
        if self.variant is not None:
            words[0] = self.variant
        for name, value in params.items():
            p = self.by_name.get(name)
            if value == ANY and p is not None:
                words[ANY_WORD] |= 1 << p.word
            elif p is None:
                words[int(name.removeprefix("word"))] = int(value)
            else:
                words[p.word] = f32_bits(float(value)) if p.kind is float else int(value)
        return tuple(words)

    def decode(self, words: Sequence[int]) -> dict[str, ParamValue]:
        """Returns the parameters by name from ggml's 16 words; a word without a name that is not 0 becomes `word<N>`."""
        named = {
            p.name: _normal(p, f32_from_bits(words[p.word]) if p.kind is float else words[p.word])
            for p in self.params
            if not p.ours or words[p.word]
        }
        known = {p.word for p in self.params} | ({0} if self.variant is not None else set())
        if self.opens and words[ANY_WORD] == sum(1 << p.word for p in self.opens):
            named |= {p.name: ANY for p in self.opens}
            known |= {ANY_WORD}
        return {**named, **{f"word{i}": w for i, w in enumerate(words) if w and i not in known}}


def f32_bits(value: float) -> int:
    """Returns the bits of `value` as binary32, as a signed 32-bit integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def f32_from_bits(bits: int) -> float:
    """Returns the binary32 number with these bits (signed or unsigned)."""
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


def f32_shortest(value: float) -> float:
    """Returns the number with the fewest decimal digits that rounds to the same binary32 (1e-05, not 9.99999974e-06).

    Raises:
        OverflowError: `value` is finite and beyond binary32's range.
    """
    if math.isnan(value) or math.isinf(value):
        return value
    bits = struct.pack("<f", value)
    # Take the digits from the rounded number: two doubles that round to it must give the same result.
    rounded = float(struct.unpack("<f", bits)[0])
    for digits in range(1, 9):
        short = float(f"{rounded:.{digits}g}")
        # Next to the largest number, fewer digits may exceed it.
        if abs(short) <= F32_MAX and struct.pack("<f", short) == bits:
            return short
    return float(f"{rounded:.9g}")


def _normal(p: Param, value: ParamValue) -> ParamValue:
    if p.open and value == ANY:
        return ANY
    if p.kind is float:
        return f32_shortest(float(value))
    return bool(value) if p.kind is bool else int(value)


# Strides and an offset in bytes of the region that ggml_acc and ggml_set write.
_REGION = (
    *(Param(name, word, default=None, minimum=0) for word, name in enumerate(("nb1", "nb2", "nb3", "offset"))),
    Param("inplace", 4, bool, False),
)
_PREC = Param("prec", 0, choices=(0, 10, 15, 20, 30, 40))
_SOFT_MAX = (Param("scale", 0, float, 1.0), Param("max_bias", 1, float, 0.0, minimum=0.0))
_PREC_SRC1 = Param("prec_src1", 3, choices=_PREC.choices)  # `ggml_prec_set_src` with index 1
_ROPE = (
    Param("n_dims", 1, default=None, minimum=0),
    Param("mode", 2, choices=(0, 2, 8, 24, 40)),
    Param("n_ctx_orig", 4, minimum=0),
    Param("freq_base", 5, float, 10000.0, minimum=F32_TINY),  # otherwise its power is not a number
    Param("freq_scale", 6, float, 1.0),
    Param("ext_factor", 7, float, 0.0),
    Param("attn_factor", 8, float, 1.0),
    Param("beta_fast", 9, float, 32.0),
    Param("beta_slow", 10, float, 1.0),
    Param("section0", 11),
    Param("section1", 12),
    Param("section2", 13),
    Param("section3", 14),
    Param("n_offs", 15),
)
_SWAPPED = Param("swapped", 1, bool, False)
_VARIANT_PARAMS = {
    "xielu": tuple(
        Param(name, i, float, None) for i, name in enumerate(("alpha_n", "alpha_p", "beta", "eps"), start=1)
    ),
    "swiglu_oai": (Param("alpha", 2, float, None), Param("limit", 3, float, None, minimum=0.0, infinite=True)),
    "swiglu_clamp": (Param("limit", 3, float, None, minimum=0.0, infinite=True),),
}
"""Additional parameters of variants of UNARY and GLU."""
_SNAPSHOTS = Param("K", 0, default=1, minimum=1)


def _steps(*names: str) -> tuple[Param, ...]:
    """Returns integer parameters from word 0 on; strides (`s`) and dilations (`d`) are 1 by default, paddings 0."""
    return tuple(Param(name, i, default=int(name[0] in "sd")) for i, name in enumerate(names))


def _needed(word: int, *names: str) -> tuple[Param, ...]:
    """Returns integer parameters from `word` on without defaults."""
    return tuple(Param(name, word + i, default=None) for i, name in enumerate(names))


_CONV = ("kernel", "src1")
_STEPS_2D = _steps("s0", "s1", "p0", "p1", "d0", "d1")
_STEPS_3D = _steps("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2")
_POOL = Param("pool", 0, default=None, choices=(0, 1))
"""ggml's `op`: the maximum or the mean."""


_AB = ("src0", "src1")
_EPS = Param("eps", 0, float, default=None, minimum=0.0)

_ARITHMETIC_AND_NORMS = (
    *(Op(name, _AB, 2) for name in ("add", "sub", "mul", "div")),
    *(Op(name, ("src0",), 1) for name in ("sqr", "sqrt", "log", "sin", "cos", "sum_rows", "cont", "dup")),
    # The view ops cost nothing inside a graph; as kernels they materialise the view.
    *(Op(name, ("src0",), 1) for name in ("reshape", "transpose")),
    # ggml has no such op: llama.cpp's meta backend requests the sum of a tensor over its devices (docs/reference/graphs.md).
    Op("all_reduce", ("src0",), 1, (Param("n_devices", 0, default=None, minimum=2),), alias=0),
    Op("norm", ("src0",), 1, (_EPS,)),
    Op("rms_norm", ("src0",), 1, (_EPS,)),
    Op("l2_norm", ("src0",), 1, (_EPS,)),
    Op(
        "group_norm",
        ("src0",),
        1,
        (Param("n_groups", 0, default=None), Param("eps", 1, float, None, minimum=0.0)),
    ),
)

_PRODUCTS_AND_ROWS = (
    Op("mul_mat", _AB, 2, (_PREC, Param("hint", 1), _PREC_SRC1)),
    Op("mul_mat_id", ("as", "b", "ids"), 3, (_PREC, _PREC_SRC1)),
    Op("out_prod", _AB, 2),
    Op(
        "scale",
        ("src0",),
        1,
        (Param("s", 0, float, None, open=True), Param("b", 1, float, 0.0, infinite=True, open=True)),
    ),
    Op(
        "clamp",
        ("src0",),
        1,
        (Param("min", 0, float, None, infinite=True), Param("max", 1, float, None, infinite=True)),
    ),
    Op("cpy", ("src0", "dst"), 2, alias=1),
    Op("get_rows", ("src0", "rows"), 2),
    Op("set_rows", ("src0", "rows", "dst"), 3, alias=2),
    Op("get_rows_back", ("src0", "rows"), 2),
)

_MOVEMENT = (
    Op("concat", _AB, 2, (Param("dim", 0, default=None, choices=(0, 1, 2, 3)),)),
    *(Op(name, ("src0",), 1) for name in ("repeat", "repeat_back", "diag")),
    *(Op(name, _AB, 2, _REGION) for name in ("acc", "set")),
    Op("tri", ("src0",), 1, (Param("tri_type", 0, default=None, choices=(0, 1, 2, 3)),)),
    Op("fill", ("src0",), 1, (Param("c", 0, float, None, infinite=True),)),
    Op("arange", (), 0, tuple(Param(n, w, float, None) for w, n in enumerate(("start", "stop", "step")))),
)

# Reduction, sorting, linear algebra.
_REDUCTION = (
    *(Op(name, ("src0",), 1) for name in ("sum", "mean", "cumsum", "argmax", "top_k")),
    Op("count_equal", _AB, 2),
    Op("argsort", ("src0",), 1, (Param("order", 0, default=None, choices=(0, 1)),)),
    Op("solve_tri", _AB, 2),
    Op("soft_max", ("src0", "mask", "sinks"), 1, _SOFT_MAX),
    Op("soft_max_back", ("grad", "y"), 2, _SOFT_MAX),
    *(Op(name, ("src0", "pos", "freq_factors"), 2, _ROPE) for name in ("rope", "rope_back")),
    Op(
        "flash_attn_ext",
        ("q", "k", "v", "mask", "sinks"),
        3,
        (
            Param("scale", 0, float, None),
            Param("max_bias", 1, float, 0.0, minimum=0.0),
            Param("logit_softcap", 2, float, 0.0),
            Param("prec", 3, choices=_PREC.choices),
            Param("n_kv_max", 4, minimum=0),
            Param("causal", 15, bool, False, ours=True),  # kernelgen.ggml.causality
        ),
    ),
)

_ELEMENTS = (
    Op("add1", _AB, 2),
    Op("add_id", ("src0", "src1", "ids"), 3),
    Op("leaky_relu", ("src0",), 1, (Param("negative_slope", 0, float, None),)),
    Op("lightning_indexer", ("q", "k", "weights", "mask"), 4),
    *(Op(name, ("src0",), 1, (Param("n_past", 0, minimum=0),)) for name in ("diag_mask_inf", "diag_mask_zero")),
)

# Hyper-connections: DeepSeek-V4's mixing of residual streams.
_HYPER_CONNECTIONS = (
    Op(
        "dsv4_hc_pre",
        ("x", "weights"),
        2,
        (Param("scale", 0, float, 1.0), Param("gated", 1, bool, False)),
    ),
    Op(
        "dsv4_hc_comb",
        ("mixes", "scale", "base"),
        3,
        (Param("eps", 0, float, None), Param("n_iter", 1, default=None, minimum=1)),
    ),
    Op("dsv4_hc_post", ("x", "residual", "post", "comb"), 3),
)

# State-space models and linear attention.
_RECURRENT = (
    Op("ssm_conv", ("sx", "c"), 2),
    Op("ssm_scan", ("s", "x", "dt", "a", "b", "c", "ids"), 7, (_SNAPSHOTS,)),
    Op("rwkv_wkv6", ("k", "v", "r", "tf", "td", "state"), 6),
    Op("rwkv_wkv7", ("r", "w", "k", "v", "a", "b", "state"), 7),
    Op(
        "gated_linear_attn",
        ("k", "v", "q", "g", "state"),
        5,
        (Param("scale", 0, float, None),),
    ),
    Op("gated_delta_net", ("q", "k", "v", "g", "beta", "state"), 6, (_SNAPSHOTS,)),
    *(Op(name, ("src0",), 1, _VARIANT_PARAMS.get(name, ()), variant=number) for number, name in enumerate(UNARY)),
    *(Op(name, _AB, 1, (_SWAPPED, *_VARIANT_PARAMS.get(name, ())), variant=number) for number, name in enumerate(GLU)),
)

_TRAINING = (
    Op("silu_back", ("grad", "src1"), 2),
    Op("rms_norm_back", ("grad", "src1"), 2, (_EPS,)),
    Op("cross_entropy_loss", ("logits", "labels"), 2),
    Op("cross_entropy_loss_back", ("grad", "logits", "labels"), 3),
    Op("opt_step_adamw", ("src0", "grad", "m", "v", "params"), 5, alias=0, updates=(2, 3)),
    Op("opt_step_sgd", ("src0", "grad", "params"), 3, alias=0),
)

# Convolutions, and im2col, which turns them into matrix products.
_CONVOLUTION = (
    Op("im2col", _CONV, 2, (*_STEPS_2D, Param("is_2D", 6, bool, False))),
    Op("im2col_back", ("src0", "kernel"), 2, (*_STEPS_2D, Param("is_2D", 6, bool, False))),
    Op("im2col_3d", _CONV, 2, (*_STEPS_3D, *_needed(9, "IC"))),
    Op("col2im_1d", ("src0",), 1, (*_steps("s0"), *_needed(1, "oc"), Param("p0", 2))),
    Op("conv_2d", _CONV, 2, _STEPS_2D),
    Op("conv_2d_dw", _CONV, 2, _STEPS_2D),
    Op("conv_3d", _CONV, 2, (*_STEPS_3D, *_needed(9, "c", "n", "oc"))),
    Op("conv_transpose_1d", _CONV, 2, _steps("s0", "p0", "d0")),
    Op("conv_transpose_2d", _CONV, 2, _steps("stride")),
)

_POOLING = (
    Op("pool_1d", ("src0",), 1, (_POOL, *_needed(1, "k0", "s0"), Param("p0", 3))),
    *(
        Op(
            name,
            inputs,
            len(inputs),
            (_POOL, *_needed(1, "k0", "k1", "s0", "s1"), Param("p0", 5), Param("p1", 6)),
        )
        for name, inputs in (("pool_2d", ("src0",)), ("pool_2d_back", _AB))
    ),
)

_IMAGES = (
    Op("upscale", ("src0",), 1, (Param("mode", 0, choices=(0, 1, 2, 256, 257, 258, 513, 769)),)),
    Op(
        "pad",
        ("src0",),
        1,
        (*_steps("lp0", "rp0", "lp1", "rp1", "lp2", "rp2", "lp3", "rp3"), Param("circular", 8, bool, False)),
    ),
    Op("pad_reflect_1d", ("src0",), 1, _steps("p0", "p1")),
    Op("roll", ("src0",), 1, tuple(Param(f"shift{i}", i) for i in range(4))),
    Op(
        "timestep_embedding",
        ("src0",),
        1,
        (*_needed(0, "dim"), Param("max_period", 1, default=10000)),
    ),
    Op("win_part", ("src0",), 1, _needed(0, "npx", "npy", "w")),
    Op("win_unpart", ("src0",), 1, _needed(0, "w")),
    Op("get_rel_pos", ("src0",), 1),
    Op("add_rel_pos", ("src0", "pw", "ph"), 3, (Param("inplace", 0, bool, False),)),
)

_ALL = (
    *_ARITHMETIC_AND_NORMS,
    *_PRODUCTS_AND_ROWS,
    *_MOVEMENT,
    *_REDUCTION,
    *_ELEMENTS,
    *_HYPER_CONNECTIONS,
    *_RECURRENT,
    *_TRAINING,
    *_CONVOLUTION,
    *_POOLING,
    *_IMAGES,
)


_TOKENS: Mapping[str, tuple[Tokens, ...]] = {
    # rows of b; one matrix, not a batch
    "mul_mat": (Tokens(result=1, sources={1: 1}),),
    "mul_mat_id": (Tokens(result=2, sources={1: 2, 2: 1}),),
    "add_id": (Tokens(result=2, sources={0: 2, 2: 1}),),
    "rope": (Tokens(result=2, sources={0: 2, 1: 0}),),
    "rope_back": (Tokens(result=2, sources={0: 2, 1: 0}),),
    # from one table, or from each token's own (the weights of the chosen experts)
    "get_rows": (Tokens(result=1, sources={1: 0}, more={0: 1}), Tokens(result=2, sources={0: 2, 1: 1})),
    "set_rows": (Tokens(sources={0: 1, 1: 0}, more={2: 1}, written=2),),
    "flash_attn_ext": (Tokens(result=2, sources={0: 1, 3: 1}, more={1: 1, 2: 1, 3: 0}, mask=3, streams=True),),
    **dict.fromkeys(("add", "sub", "mul", "div", "repeat"), (BROADCAST,)),
    **dict.fromkeys(
        (
            *("sqr", "sqrt", "log", "sin", "cos", "sum_rows", "mean", "cumsum", "cont", "dup", "cpy", "scale", "clamp"),
            *("norm", "rms_norm", "l2_norm", "soft_max", "argsort", "top_k", "concat", "leaky_relu", *UNARY, *GLU),
            "all_reduce",
        ),
        (ROWS,),
    ),
}
"""The cuts of ops along tokens. tests/kernels/test_tokens.py compares each with the op's reference."""

RECURRENT = ("ssm_conv", "ssm_scan", "rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn", "gated_delta_net")
"""Ops in which a token's result depends on earlier tokens: they can't be cut along tokens."""

OPS = MappingProxyType({op.name: replace(op, tokens=_TOKENS.get(op.name, ())) for op in _ALL})
"""Every op that a manifest can name, by name."""


def op(name: str) -> Op:
    """Returns the op of that name.

    An op of ggml without a row in this table has no input names and raw words; any other name is a custom op's.
    """
    if name in OPS:
        return OPS[name]
    if name in UNARY:
        return Op(name, ("src0",), 1, variant=UNARY.index(name))
    if name in GLU:
        return Op(name, ("src0", "src1"), 1, variant=GLU.index(name))
    if name in ENUM:
        return Op(name, (), 0)
    return Op(name, (), 0, custom=True)


_UNARY, _GLU = ENUM.index("unary"), ENUM.index("glu")


def op_name(number: int, words: Sequence[int]) -> str:
    """Returns `ggml_op_desc` in lower case for an enum value and its `op_params`.

    Raises:
        ValueError: no op has that number.
    """
    try:
        if number == _UNARY:
            return UNARY[words[0]]
        if number == _GLU:
            return GLU[words[0]]
        return ENUM[number]
    except IndexError:
        raise ValueError(f"unknown ggml op number {number} with op_params[0] = {words[0] if words else None}") from None
