"""State-space models and linear attention, token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, below, example, out, reference


def _f64(*arrays: Array) -> list[Array]:
    return [a.astype(np.float64) for a in arrays]


def _joined(spec: KernelSpec, *parts: Array) -> Array:
    return out(spec, np.concatenate([p.reshape(-1) for p in parts]))


@reference("ssm_conv")
def ssm_conv(spec: KernelSpec, sx: Array, c: Array) -> Array:
    sx, c = _f64(sx, c)
    y = np.zeros(spec.output.shape)
    d_conv = c.shape[3]
    for s, t, i in np.ndindex(y.shape[1:]):
        y[0, s, t, i] = sx[0, s, i, t : t + d_conv] @ c[0, 0, i]
    return out(spec, y)


example("ssm_conv", inputs=("(8,5,2,1)", "(4,5,1,1)"))


@reference("ssm_scan")
def ssm_scan(spec: KernelSpec, s: Array, x: Array, dt: Array, a: Array, b: Array, c: Array, ids: Array) -> Array:
    snapshots = int(dict(spec.params)["K"])
    s, x, dt, a, b, c = _f64(s, x, dt, a, b, c)
    n_seqs, n_tokens, n_head, dim = x.shape
    d_state, per_group = s.shape[3], n_head // b.shape[2]
    y = np.zeros(x.shape)
    states = np.zeros((snapshots, n_seqs, n_head, dim, d_state))
    for i3 in range(n_seqs):
        state = s[ids[0, 0, 0, i3]].copy()
        for i2 in range(n_tokens):
            for h in range(n_head):
                step = math.log1p(math.exp(dt[0, i3, i2, h])) if dt[0, i3, i2, h] <= 20 else dt[0, i3, i2, h]
                g = h // per_group
                for i1 in range(dim):
                    decay = np.exp(step * a[0, 0, h])
                    state[h, i1] = state[h, i1] * decay + b[i3, i2, g] * x[i3, i2, h, i1] * step
                    y[i3, i2, h, i1] = state[h, i1] @ c[i3, i2, g]
            if n_tokens - 1 - i2 < snapshots:
                states[n_tokens - 1 - i2, i3] = state
    return _joined(spec, y, states)


example(
    "ssm_scan",
    inputs=("(8,3,4,5)", "(3,4,6,2)", "(4,6,2,1)", "(1,4,1,1)", "(8,2,6,2)", "(8,2,6,2)", "(2,1,1,1)"),
    values={3: lambda rng, shape: -rng.uniform(0.1, 1, shape), 6: below(5)},
    K=2,
)


def _linear(spec: KernelSpec, state: Array, heads: int, size: int, n_tokens: int, step: Any) -> Array:
    """Runs `step` over the tokens of every sequence; it takes a head's state and the numbers of a token and a head."""
    n_seqs = state.shape[2]
    states = state.astype(np.float64).reshape(n_seqs, heads, size, size).copy()
    y = np.zeros((n_tokens, heads, size))
    for t, h in np.ndindex(n_tokens, heads):
        s = t // (n_tokens // n_seqs)
        states[s, h], y[t, h] = step(states[s, h], t, h)
    return _joined(spec, y, states)


@reference("rwkv_wkv6")
def rwkv_wkv6(spec: KernelSpec, k: Array, v: Array, r: Array, tf: Array, td: Array, state: Array) -> Array:
    k, v, r, tf, td = _f64(k[0], v[0], r[0], tf[0, 0], td[0])

    def step(s: Array, t: int, h: int) -> tuple[Array, Array]:
        kv = np.outer(k[t, h], v[t, h])
        return s * td[t, h][:, None] + kv, r[t, h] @ (kv * tf[h][:, None] + s)

    return _linear(spec, state, k.shape[1], k.shape[2], k.shape[0], step)


_VECTOR = "(6,3,4,1)"
example(
    "rwkv_wkv6",
    inputs=(_VECTOR, _VECTOR, _VECTOR, "(6,3,1,1)", _VECTOR, "(108,2,1,1)"),
    values={4: lambda rng, shape: rng.uniform(0, 1, shape)},
)


@reference("rwkv_wkv7")
def rwkv_wkv7(spec: KernelSpec, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> Array:
    r, w, k, v, a, b = _f64(r[0], w[0], k[0], v[0], a[0], b[0])

    def step(s: Array, t: int, h: int) -> tuple[Array, Array]:
        s = s * w[t, h] + np.outer(v[t, h], k[t, h]) + np.outer(s @ a[t, h], b[t, h])
        return s, s @ r[t, h]

    return _linear(spec, state, k.shape[1], k.shape[2], k.shape[0], step)


example("rwkv_wkv7", inputs=(*[_VECTOR] * 6, "(108,2,1,1)"))


@reference("gated_linear_attn")
def gated_linear_attn(spec: KernelSpec, k: Array, v: Array, q: Array, g: Array, state: Array) -> Array:
    k, v, q, g = _f64(k[0], v[0], q[0], g[0])
    scale = dict(spec.params)["scale"]

    def step(s: Array, t: int, h: int) -> tuple[Array, Array]:
        s = s * g[t, h][:, None] + np.outer(k[t, h], v[t, h])
        return s, q[t, h] @ s * scale

    return _linear(spec, state, k.shape[1], k.shape[2], k.shape[0], step)


example("gated_linear_attn", inputs=(*[_VECTOR] * 4, "(108,2,1,1)"), scale=0.4)


@reference("gated_delta_net")
def gated_delta_net(spec: KernelSpec, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> Array:
    snapshots = int(dict(spec.params)["K"])
    q, k, v, g, beta, state = _f64(q, k, v, g, beta, state)
    n_seqs, n_tokens, heads, size = v.shape
    y = np.zeros(v.shape)
    states = np.zeros((snapshots, *state.shape))
    for i3, h in np.ndindex(n_seqs, heads):
        s = state[i3, h].copy()
        for t in range(n_tokens):
            key = k[i3 // (n_seqs // k.shape[0]), t, h % k.shape[2]]
            query = q[i3 // (n_seqs // q.shape[0]), t, h % q.shape[2]]
            s = s * np.exp(g[i3, t, h])
            s = s + np.outer((v[i3, t, h] - s @ key) * beta[i3, t, h, 0], key)
            y[i3, t, h] = s @ query / math.sqrt(size)
            if n_tokens - 1 - t < snapshots:
                states[n_tokens - 1 - t, i3, h] = s
    return _joined(spec, y, states)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns rows of length 1, like the keys and queries of models: with other rows the state grows without bound."""
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def gates(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return -rng.uniform(0, 2, shape)


example(
    "gated_delta_net",
    inputs=("(6,2,5,2)", "(6,2,5,1)", "(6,4,5,2)", "(1,4,5,2)", "(1,4,5,2)", "(6,6,4,2)"),
    values={0: unit, 1: unit, 3: gates, 4: lambda rng, shape: rng.uniform(0, 1, shape)},
    K=2,
)
