"""Rotary position embeddings."""

from __future__ import annotations

import math

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, below, example, out, reference


def _corr_dim(n_dims: int, n_ctx_orig: int, rotations: float, base: float) -> float:
    if not n_ctx_orig:
        return -math.inf
    return n_dims * math.log(n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(base))


@reference("rope", "rope_back")
def rope(spec: KernelSpec, x: Array, pos: Array, factors: Array | None = None) -> Array:
    p = dict(spec.params)
    n_dims, mode, offset = int(p["n_dims"]), p["mode"], int(p["n_offs"])
    n_tokens, ne0 = x.shape[1], x.shape[3]
    sections = [int(p[f"section{i}"]) for i in range(4)]
    step = np.float32(p["freq_base"] ** (-2.0 / n_dims))
    low = high = 0.0
    if p["ext_factor"]:
        low = max(0.0, np.floor(_corr_dim(n_dims, p["n_ctx_orig"], p["beta_fast"], p["freq_base"])))
        high = min(n_dims - 1.0, np.ceil(_corr_dim(n_dims, p["n_ctx_orig"], p["beta_slow"], p["freq_base"])))
    y = x.astype(np.float32).copy()
    flat = pos.reshape(-1)
    for t in range(n_tokens):
        if mode in (0, 2):
            thetas = {"t": np.float32(flat[t])}
        else:
            thetas = {name: np.float32(flat[t + n_tokens * c]) for c, name in enumerate("thwe")}
        start = dict(thetas)
        rotated = ne0 if mode == 24 else n_dims
        for i0 in range(0, rotated, 2):
            name = "t"
            if mode in (8, 24, 40):
                sector = (i0 // 2) % sum(sections)
                bounds = np.cumsum([0, *sections])
                if mode == 24:
                    for c, section in enumerate("thwe"):
                        if sector == bounds[c]:
                            thetas[section] = start[section]
                if mode == 40:
                    if sector % 3 == 1 and sector < 3 * sections[1]:
                        name = "h"
                    elif sector % 3 == 2 and sector < 3 * sections[2]:
                        name = "w"
                    elif sector % 3 == 0 and sector < 3 * sections[0]:
                        name = "t"
                    else:
                        name = "e"
                elif sector >= bounds[3]:
                    name = "e"
                elif sector >= bounds[2]:
                    name = "w"
                elif sector >= bounds[1]:
                    name = "h"
            extrapolated = thetas[name] / (factors[0, 0, 0, i0 // 2] if factors is not None else np.float32(1))
            theta = extrapolated * np.float32(p["freq_scale"])
            magnitude = p["attn_factor"]
            if p["ext_factor"]:
                ramp = 1 - min(1.0, max(0.0, (i0 // 2 - low) / max(0.001, high - low)))
                mix = ramp * p["ext_factor"]
                theta = theta * (1 - mix) + extrapolated * mix
                magnitude *= 1 + 0.1 * math.log(1 / p["freq_scale"])
            cos, sin = math.cos(theta) * magnitude, math.sin(theta) * magnitude
            if spec.op == "rope_back":
                sin = -sin
            if mode == 0:
                first, second = offset + i0, offset + i0 + 1
            elif mode == 24:
                first, second = i0 // 2, i0 // 2 + n_dims
            else:
                first, second = offset + i0 // 2, offset + i0 // 2 + n_dims // 2
            x0, x1 = (x[:, t, :, c].astype(np.float64) for c in (first, second))
            y[:, t, :, first] = x0 * cos - x1 * sin
            y[:, t, :, second] = x0 * sin + x1 * cos
            thetas = {key: value * step for key, value in thetas.items()}
    return out(spec, y)


example(
    "rope",
    "rope_back",
    inputs=("(64,3,5,2)", "(5,1,1,1)", "(32,1,1,1)"),
    values={1: below(512), 2: lambda rng, shape: rng.uniform(1, 2, shape)},
    n_dims=64,
)
