"""State-space models and linear attention: ops that carry a state from token to token.

Each uses `_run`: a loop whose body computes one token and carries the state; a single token needs no loop. Everything that does not
depend on the state (decays, softplus, the token's own share) is computed for all tokens before the loop, so the body's only matrix
products are with the state. A prompt takes one step per token, and each step reads and writes the state: a matrix of some KiB per
head, a few MiB in the largest models, which fits into on-chip memory. Forms that process tokens in chunks would need fewer and
larger products, but are exact only for a decay per head.

ggml's result is one tensor with the tokens' results followed by the states after them.
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import Unsupported, repeat, result

Step = Callable[[Array, tuple[Array, ...]], tuple[Array, Array]]


def _run(step: Step, state: Array, xs: Sequence[Array], snapshots: int = 1) -> tuple[Array, Array]:
    """Returns the result of `step` for each token, [tokens, ...], and the last states, newest first: [snapshots, ...].

    States before the first token are zeros.

    Args:
        step: takes a state and the token's part of each of `xs`; returns the next state and the token's result.
        state: the state before the first token.
        xs: arrays of [tokens, ...].
        snapshots: the number of states to return.
    """
    xs = tuple(xs)
    tokens = xs[0].shape[0]
    kept = min(snapshots, tokens)
    if tokens == 1:
        state, y = step(state, tuple(x[0] for x in xs))
        ys, states = y[None], state[None]
    elif kept == 1:
        state, ys = lax.scan(step, state, xs)
        states = state[None]
    else:
        parts = []
        if tokens > kept:
            state, y = lax.scan(step, state, tuple(x[:-kept] for x in xs))
            parts.append(y)
            xs = tuple(x[-kept:] for x in xs)

        def keeping(state: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            state, y = step(state, x)
            return state, (y, state)

        _, (y, states) = lax.scan(keeping, state, xs)
        ys, states = jnp.concatenate([*parts, y]), lax.rev(states, (0,))
    if kept < snapshots:
        states = lax.pad(states, np.float32(0), [(0, snapshots - kept, 0)] + [(0, 0, 0)] * (states.ndim - 1))
    return ys, states


def _joined(out, *parts: Array) -> Array:
    """Returns the elements of arrays, one array after the other, in the result's shape."""
    return result(jnp.concatenate([lax.reshape(p, (math.prod(p.shape),)) for p in parts]), out)


def _dot(a: Array, b: Array, batch: int, axes: tuple[int, int]) -> Array:
    """Returns the product of `a` and `b` over one axis of each; the first `batch` axes of both are batch axes."""
    same = tuple(range(batch))
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), (same, same)), preferred_element_type=jnp.float32)


def _outer(a: Array, b: Array) -> Array:
    """Returns the outer products [..., i, j] of [..., i] and [..., j]."""
    return a[..., :, None] * b[..., None, :]


# --- state-space models: Mamba ---------------------------------------------------------------------------------------------


@emitter("ssm_conv", types="f32, f32")
def ssm_conv(sx, c, *, out):
    """Each channel's tokens, filtered: result i of a channel is the sum of `sx[i + k] * c[k]`.

    sx: [1, n_seqs, d_inner, n_tokens + d_conv - 1] f32; c: [1, 1, d_inner, d_conv] f32, a filter of a few taps. Returns
    [1, n_seqs, n_tokens, d_inner].
    """
    n_tokens, d_conv = out.ne[1], c.shape[3]
    if d_conv > 64:
        raise Unsupported(f"a filter of {d_conv} taps; at most 64 are unrolled")
    y = None
    for k in range(d_conv):
        part = lax.slice_in_dim(sx, k, k + n_tokens, axis=3) * lax.slice_in_dim(c, k, k + 1, axis=3)
        y = part if y is None else y + part
    return result(lax.transpose(y, (0, 1, 3, 2)), out)


def _softplus(x: Array) -> Array:
    """ggml's `ggml_compute_softplus_f32`: `log(1 + exp(x))`, and `x` above 20."""
    large = x > np.float32(20)
    return lax.select(large, x, lax.log(np.float32(1) + lax.exp(lax.select(large, lax.full_like(x, 0), x))))


@emitter("ssm_scan", types="f32, f32, f32, f32, f32, f32, i32")
def ssm_scan(s, x, dt, a, b, c, ids, *, K: int = 1, out):
    """Mamba's selective scan: `state = state * exp(dt a) + x dt b`, `y = state c`, with dt after softplus.

    `a` decays each element of the state (Mamba-1) or each head (Mamba-2). Heads share b and c in groups. It returns the states
    after the last `K` tokens, newest first; states before the first token are zeros.

    s: [n, n_head, dim, d_state]; `ids`, [1, 1, 1, n_seqs] i32, has its index for each sequence; x: [n_seqs, n_tokens, n_head, dim];
    dt: [1, n_seqs, n_tokens, n_head]; a: [1, 1, n_head, d_state or 1]; b, c: [n_seqs, n_tokens, n_group, d_state]; f32.
    """
    n_seqs, n_tokens, n_head, dim = x.shape
    d_state, groups = s.shape[3], b.shape[2]
    if n_head % groups:
        raise Unsupported(f"{n_head} heads can't be shared out over {groups} groups")
    heads = n_head // groups
    dimensions = lax.GatherDimensionNumbers((1, 2, 3), (0,), (0,))
    state = lax.gather(
        s,
        lax.reshape(ids, (n_seqs, 1)),
        dimensions,
        (1, *s.shape[1:]),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    state = lax.reshape(state, (n_seqs, groups, heads, dim, d_state))
    by_token = (n_tokens, n_seqs, groups, heads)
    dt = _softplus(lax.reshape(lax.transpose(dt[0], (1, 0, 2)), by_token))
    a = lax.reshape(a, (groups, heads, a.shape[3]))
    decay = lax.exp(dt[..., None] * a)  # [n_tokens, n_seqs, groups, heads, d_state or 1]
    x = lax.reshape(lax.transpose(x, (1, 0, 2, 3)), (*by_token, dim)) * dt[..., None]
    b, c = (lax.transpose(t, (1, 0, 2, 3)) for t in (b, c))

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        decay, x, b, c = token
        state = state * decay[:, :, :, None, :] + x[..., None] * b[:, :, None, None, :]
        return state, _dot(state, c, 2, (4, 2))  # [n_seqs, groups, heads, dim]

    y, states = _run(step, state, (decay, x, b, c), K)
    y = lax.transpose(y, (1, 0, 2, 3, 4))
    return _joined(out, y, states)


# --- linear attention: RWKV, GLA, gated delta rule ------------------------------------------------------------------------


def _by_token(n_seqs: int, *arrays: Array) -> list[Array]:
    """Returns [n_tokens / n_seqs, n_seqs, H, S] from arrays [1, n_tokens, H, S], which have one sequence after the other."""
    _, n, heads, size = arrays[0].shape
    if n % n_seqs:
        raise Unsupported(f"{n} tokens can't be shared out over {n_seqs} sequences")
    return [lax.transpose(lax.reshape(a, (n_seqs, n // n_seqs, heads, size)), (1, 0, 2, 3)) for a in arrays]


def _matrices(state: Array, heads: int, size: int) -> Array:
    """Returns [n_seqs, H, S, S] from ggml's [1, 1, n_seqs, S * S * H]."""
    return lax.reshape(state, (state.shape[2], heads, size, size))


def _by_sequence(y: Array) -> Array:
    return lax.transpose(y, (1, 0, 2, 3))


@emitter("rwkv_wkv6", types="f32, f32, f32, f32, f32, f32")
def rwkv_wkv6(k, v, r, tf, td, state, *, out):
    """RWKV-6's time mixing: `y = r (tf k^T v + state)`, `state = td state + k^T v`, for each head.

    k, v, r, td: [1, n_tokens, H, S] f32; tf: [1, 1, H, S]; state: [1, 1, n_seqs, S * S * H], rows of k's channels.
    """
    n_seqs, heads, size = state.shape[2], k.shape[2], k.shape[3]
    k, v, r, td = _by_token(n_seqs, k, v, r, td)
    # The token's own share needs no matrix: r (tf k^T v) = (r tf k^T) v.
    own = lax.reduce_sum(r * k * lax.reshape(tf, (1, 1, heads, size)), (3,))[..., None] * v

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        k, v, r, td = token
        return state * td[..., None] + _outer(k, v), _dot(r, state, 2, (2, 2))

    y, states = _run(step, _matrices(state, heads, size), (k, v, r, td))
    return _joined(out, _by_sequence(y + own), states)


@emitter("rwkv_wkv7", types="f32, f32, f32, f32, f32, f32, f32")
def rwkv_wkv7(r, w, k, v, a, b, state, *, out):
    """RWKV-7's time mixing: `state = state w + v^T k + (state a) b`, `y = state r`, for each head.

    r, w, k, v, a, b: [1, n_tokens, H, S] f32; state: [1, 1, n_seqs, S * S * H], rows of v's channels.
    """
    n_seqs, heads, size = state.shape[2], k.shape[2], k.shape[3]

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        r, w, k, v, a, b = token
        seen = _dot(state, a, 2, (3, 2))
        state = state * w[..., None, :] + _outer(v, k) + _outer(seen, b)
        return state, _dot(state, r, 2, (3, 2))

    y, states = _run(step, _matrices(state, heads, size), _by_token(n_seqs, r, w, k, v, a, b))
    return _joined(out, _by_sequence(y), states)


@emitter("gated_linear_attn", types="f32, f32, f32, f32, f32")
def gated_linear_attn(k, v, q, g, state, *, scale: float, out):
    """`state = g state + k^T v`, `y = scale * q state`, for each head.

    k, v, q, g: [1, n_tokens, H, S] f32; state: [1, 1, n_seqs, S * S * H], rows of k's channels.
    """
    n_seqs, heads, size = state.shape[2], k.shape[2], k.shape[3]

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        k, v, q, g = token
        state = state * g[..., None] + _outer(k, v)
        return state, _dot(q, state, 2, (2, 2))

    y, states = _run(step, _matrices(state, heads, size), _by_token(n_seqs, k, v, q * np.float32(scale), g))
    return _joined(out, _by_sequence(y), states)


@emitter("gated_delta_net", types="f32, f32, f32, f32, f32, f32")
def gated_delta_net(q, k, v, g, beta, state, *, K: int = 1, out):
    """The gated delta rule: `state = state exp(g)`, `state += beta (v - state k)^T k`, `y = state q / sqrt(S)`, for each head.

    The gate is a number per head, or one per channel of k. Head h of v uses head h modulo H2 of q and k; V3 / Q3 sequences of v
    share a sequence of q and k. It returns the states after the last `K` tokens, newest first; states before the first token are
    zeros.

    q, k: [Q3, n_tokens, H2, S] f32; v: [V3, n_tokens, H, S]; g: [V3, n_tokens, H, 1 or S]; beta: [V3, n_tokens, H, 1];
    state: [V3, H, S, S], rows of v's channels.
    """
    n_seqs, n_tokens, heads, size = v.shape

    def shared(x: Array) -> Array:
        n3, _, h, _ = x.shape
        if n_seqs % n3 or heads % h:
            raise Unsupported(f"{n3} x {h} heads of q or k can't be shared by {n_seqs} x {heads} of v")
        x = lax.reshape(lax.broadcast_in_dim(x, (n3, n_seqs // n3, *x.shape[1:]), (0, 2, 3, 4)), (n_seqs, *x.shape[1:]))
        return repeat(x, (n_seqs, n_tokens, heads, size))

    q = shared(q * np.float32(1 / math.sqrt(size)))
    xs = [lax.transpose(x, (1, 0, 2, 3)) for x in (q, shared(k), v, lax.exp(g), beta)]

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, beta = token
        state = state * decay[..., None, :]
        delta = (v - _dot(state, k, 2, (3, 2))) * beta
        state = state + _outer(delta, k)
        return state, _dot(state, q, 2, (3, 2))

    y, states = _run(step, state, xs, K)
    return _joined(out, _by_sequence(y), states)
