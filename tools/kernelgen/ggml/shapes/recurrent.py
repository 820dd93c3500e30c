"""Shapes and types of state-space models and linear attention."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    Inputs,
    Rule,
    ShapeError,
    dims,
    given,
    rows_contiguous,
    want,
    want_type,
)
from kernelgen.ggml.tensor import Dims, TensorDesc

_F32 = frozenset({"f32"})


def _shape(inputs: Inputs, i: int, name: str, ne: Dims) -> None:
    have = given(inputs, i).ne
    want(have == ne, i, f"{name} is {dims(ne)}, not {dims(have)}")


def _contiguous(inputs: Inputs, i: int, name: str) -> None:
    want(given(inputs, i).contiguous, i, f"{name} is contiguous: leave its strides out")


def _rows(inputs: Inputs, i: int, name: str) -> None:
    t = given(inputs, i)
    want(rows_contiguous(t), i, f"the rows of {name} are contiguous: nb0 is 4, not {t.nb[0]}")


def _ssm_conv(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    sx, c = given(inputs, 0), given(inputs, 1)
    for i, name in enumerate(("sx", "c")):
        want_type(inputs, i, name, _F32)
    n, d_inner, n_seqs, _ = sx.ne
    d_conv = c.ne[0]
    want(sx.ne[3] == 1, 0, f"ne3 of sx is 1, not {sx.ne[3]}")
    want(
        c.ne == (d_conv, d_inner, 1, 1),
        1,
        f"c has a filter for each of sx's {d_inner} channels (ne1), and is not {dims(c.ne)}",
    )
    want(n >= d_conv, 0, f"sx has {d_conv} values (c's ne0) per row or more, not {n}")
    want(c.contiguous, 1, "c is contiguous: leave its strides out")
    _rows(inputs, 0, "sx")
    want(sx.ne[1] == 1 or sx.nb[1] == n * 4, 0, f"sx has no gaps between rows: nb1 is {n * 4}, not {sx.nb[1]}")
    return (d_inner, n - d_conv + 1, n_seqs, 1), "f32"


def _no_gap(inputs: Inputs, i: int, name: str) -> TensorDesc:
    _rows(inputs, i, name)
    t = given(inputs, i)
    want(
        t.ne[1] == 1 or t.nb[1] == t.ne[0] * 4,
        i,
        f"{name} has no gaps between rows: nb1 is {t.ne[0] * 4}, not {t.nb[1]}",
    )
    return t


def _ssm_scan(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    s, x, a, b = (given(inputs, i) for i in (0, 1, 3, 4))
    names = ("s", "x", "dt", "a", "b", "c")
    for i, name in enumerate(names):
        want_type(inputs, i, name, _F32)
    want_type(inputs, 6, "ids", frozenset({"i32"}))
    dim, n_head, n_tokens, n_seqs = x.ne
    d_state = s.ne[0]
    _shape(inputs, 0, "s", (d_state, dim, n_head, s.ne[3]))
    _shape(inputs, 2, "dt", (n_head, n_tokens, n_seqs, 1))
    for i in (0, 2, 3):
        _contiguous(inputs, i, names[i])
    for i in (1, 4, 5):
        _no_gap(inputs, i, names[i])
    snapshots = int(params["K"])
    if a.ne[0] != 1:
        _shape(inputs, 3, "a", (d_state, n_head, 1, 1))
        if snapshots > 1:
            raise ShapeError(
                "params", "K", f"with a decay for each element of the state (Mamba-1) K is 1, not {snapshots}"
            )
    _shape(inputs, 3, "a", (a.ne[0], n_head, 1, 1))
    groups = b.ne[1]
    want(n_head % groups == 0, 4, f"b's {groups} groups (ne1) share out x's {n_head} heads")
    for i in (4, 5):
        _shape(inputs, i, names[i], (d_state, groups, n_tokens, n_seqs))
    _shape(inputs, 6, "ids", (n_seqs, 1, 1, 1))
    return (x.elements + snapshots * d_state * dim * n_head * n_seqs, 1, 1, 1), "f32"


def _matrix_states(names: tuple[str, ...], vectors: tuple[int, ...]) -> Rule:
    """Returns the rule of an op on tokens of [S, H, n_tokens] at `vectors`, whose last input is a state of S * S * H."""

    def rule(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
        first, state = given(inputs, vectors[0]), given(inputs, len(names) - 1)
        size, heads, n_tokens, _ = first.ne
        for i, name in enumerate(names):
            want_type(inputs, i, name, _F32)
            _contiguous(inputs, i, name)
            if i in vectors:
                _shape(inputs, i, name, (size, heads, n_tokens, 1))
            elif name == "tf":
                _shape(inputs, i, name, (size, heads, 1, 1))
        n_seqs = state.ne[1]
        _shape(inputs, len(names) - 1, "state", (size * size * heads, n_seqs, 1, 1))
        want(n_tokens % n_seqs == 0, vectors[0], f"{n_seqs} sequences (state's ne1) share out {n_tokens} tokens (ne2)")
        return (size * heads, n_tokens + size * n_seqs, 1, 1), "f32"

    return rule


def _gated_delta_net(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    v, g = given(inputs, 2), given(inputs, 3)
    names = ("q", "k", "v", "g", "beta", "state")
    for i, name in enumerate(names):
        want_type(inputs, i, name, _F32)
    size, heads, n_tokens, n_seqs = v.ne
    for i in (0, 1, 2):
        _rows(inputs, i, names[i])
    for i in (0, 1):
        t = given(inputs, i)
        _shape(inputs, i, names[i], (size, t.ne[1], n_tokens, t.ne[3]))
        want(heads % t.ne[1] == 0, i, f"{names[i]}'s {t.ne[1]} heads (ne1) divide v's {heads}")
        want(n_seqs % t.ne[3] == 0, i, f"{names[i]}'s {t.ne[3]} sequences (ne3) divide v's {n_seqs}")
    for i in (3, 4, 5):
        _contiguous(inputs, i, names[i])
    if g.ne[0] != 1:
        _shape(inputs, 3, "g", v.ne)
    _shape(inputs, 3, "g", (g.ne[0], heads, n_tokens, n_seqs))
    _shape(inputs, 4, "beta", (1, heads, n_tokens, n_seqs))
    _shape(inputs, 5, "state", (size, size, heads, n_seqs))
    return (size * heads, n_tokens * n_seqs + int(params["K"]) * size * n_seqs, 1, 1), "f32"


RULES: Mapping[str, Rule] = {
    "ssm_conv": _ssm_conv,
    "ssm_scan": _ssm_scan,
    "rwkv_wkv6": _matrix_states(("k", "v", "r", "tf", "td", "state"), (0, 1, 2, 4)),
    "rwkv_wkv7": _matrix_states(("r", "w", "k", "v", "a", "b", "state"), (2, 0, 1, 3, 4, 5)),
    "gated_linear_attn": _matrix_states(("k", "v", "q", "g", "state"), (0, 1, 2, 3)),
    "gated_delta_net": _gated_delta_net,
}
