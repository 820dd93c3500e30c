"""Fused attention, and the indexer of sparse attention."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, dequantize, dot_type, example, out, reference
from .softmax import slope


@reference("flash_attn_ext")
def flash_attn_ext(
    spec: KernelSpec, q: Array, k: Array, v: Array, mask: Array | None = None, sinks: Array | None = None
) -> Array:
    p = dict(spec.params)
    q = dot_type(q, spec.inputs[1]).astype(np.float64)
    k, v = (dequantize(x, t).astype(np.float64) for x, t in zip((k, v), spec.inputs[1:3], strict=True))
    n3, n2, n1, _ = q.shape
    y = np.zeros((n3, n1, n2, v.shape[3]))
    for i3, i2, i1 in np.ndindex(n3, n2, n1):
        keys = k[i3 // (n3 // k.shape[0]), i2 // (n2 // k.shape[1])]
        values = v[i3 // (n3 // v.shape[0]), i2 // (n2 // v.shape[1])]
        s = keys @ q[i3, i2, i1] * p["scale"]
        if p["logit_softcap"]:
            s = p["logit_softcap"] * np.tanh(s / p["logit_softcap"])
        if mask is not None:
            s = s + slope(i2, n2, p["max_bias"]) * mask[i3 % mask.shape[0], i2 % mask.shape[1], i1].astype(np.float64)
        seen = s > -np.inf
        top = max([*s[seen], *([] if sinks is None else [sinks[0, 0, 0, i2]])], default=0.0)
        e = np.where(seen, np.exp(np.where(seen, s, 0) - top), 0)
        total = e.sum() + (0 if sinks is None else np.exp(sinks[0, 0, 0, i2] - top))
        if total:
            y[i3, i1, i2] = e @ values / total
    return out(spec, y)


example(
    "flash_attn_ext",
    inputs=("(256,3,4,2)", "(256,32,2,2)", "(256,32,2,2)", "(32,3,1,2)", "(4,1,1,1)"),
    limit=1e-5,
    scale=0.06,
    max_bias=8.0,
)


@reference("lightning_indexer")
def lightning_indexer(spec: KernelSpec, q: Array, k: Array, weights: Array, mask: Array) -> Array:
    k = dequantize(k, spec.inputs[1]).astype(np.float64)
    y = np.zeros(spec.output.shape)
    streams, tokens, heads, _ = q.shape
    for s, t in np.ndindex(streams, tokens):
        for h in range(heads):
            y[s, 0, t] += np.maximum(k[s, :, 0] @ q[s, t, h].astype(np.float64), 0) * weights[s, 0, t, h]
        y[s, 0, t] += mask[s % mask.shape[0], 0, t].astype(np.float64)
    return out(spec, y)


example("lightning_indexer", inputs=("(256,3,5,4)", "(256,1,6,4)", "(3,5,1,4)", "(6,5,1,2)"))
