"""Hyper-connections."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, out, reference


@reference("dsv4_hc_pre")
def dsv4_hc_pre(spec: KernelSpec, x: Array, weights: Array) -> Array:
    p = dict(spec.params)
    _, n_tokens, streams, n_embd = x.shape
    y = np.zeros((n_tokens, n_embd))
    for t, h in np.ndindex(n_tokens, streams):
        w = 1 / (1 + np.exp(-weights[0, t, h].astype(np.float64))) if p["gated"] else float(weights[0, 0, t, h])
        y[t] += x[0, t, h].astype(np.float64) * w
    return out(spec, y * p["scale"])


example("dsv4_hc_pre", inputs=("(31,4,5,1)", "(4,5,1,1)"), scale=0.5)


@reference("dsv4_hc_comb")
def dsv4_hc_comb(spec: KernelSpec, mixes: Array, scale: Array, base: Array) -> Array:
    p = dict(spec.params)
    n_tokens = mixes.shape[2]
    y = np.zeros((n_tokens, 4, 4))
    for t in range(n_tokens):
        m = y[t]
        for source in range(4):
            at = slice(8 + 4 * source, 12 + 4 * source)
            v = mixes[0, 0, t, at].astype(np.float64) * scale[0, 0, 0, 2] + base[0, 0, 0, at]
            e = np.exp(v - v.max())
            m[source] = e / e.sum() + p["eps"]
        for i in range(int(p["n_iter"])):
            if i:
                m /= m.sum(axis=1, keepdims=True) + p["eps"]
            m /= m.sum(axis=0, keepdims=True) + p["eps"]
    return out(spec, y)


example("dsv4_hc_comb", inputs=("(24,5,1,1)", "(3,1,1,1)", "(24,1,1,1)"), eps=1e-6, n_iter=3)


@reference("dsv4_hc_post")
def dsv4_hc_post(spec: KernelSpec, x: Array, residual: Array, post: Array, comb: Array | None = None) -> Array:
    _, n_tokens, streams, n_embd = residual.shape
    y = np.zeros((n_tokens, streams, n_embd))
    for t, to in np.ndindex(n_tokens, streams):
        y[t, to] = x[0, 0, t].astype(np.float64) * post[0, 0, t, to]
        if comb is None:
            y[t, to] += residual[0, t, to]
        else:
            for source in range(streams):
                y[t, to] += residual[0, t, source].astype(np.float64) * comb[0, t, source, to]
    return out(spec, y)


example("dsv4_hc_post", inputs=("(31,5,1,1)", "(31,3,5,1)", "(3,5,1,1)", "(3,3,5,1)"))
