"""Pooling, window by window as in ggml's CPU backend."""

from __future__ import annotations

from itertools import product

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, f32, out, reference

LOWEST = np.finfo(np.float32).min


@reference("pool_1d")
def pool_1d(spec: KernelSpec, x: Array) -> Array:
    params = dict(spec.params)
    x = f32(x)
    y = np.zeros(spec.output.shape, np.float32)
    for at in range(spec.output.ne[0]):
        begin = at * params["s0"] - params["p0"]
        window = x[..., max(begin, 0) : max(begin + params["k0"], 0)]
        if params["pool"] == 0:
            y[..., at] = window.max(axis=3, initial=LOWEST)
        elif window.shape[3]:
            y[..., at] = window.sum(axis=3) / np.float32(window.shape[3])
    return out(spec, y)


def windows(
    spec: KernelSpec, size: tuple[int, int], places: tuple[int, int]
) -> dict[tuple[int, int], tuple[slice, slice]]:
    """Returns the part of an image of this size, [H, W], that each place's window covers."""
    params = dict(spec.params)
    found = {}
    for place in product(*map(range, places)):
        part = []
        for i, axis in enumerate((1, 0)):
            begin = place[i] * params[f"s{axis}"] - params[f"p{axis}"]
            part.append(slice(max(begin, 0), min(max(begin + params[f"k{axis}"], 0), size[i])))
        found[place] = (part[0], part[1])
    return found


@reference("pool_2d")
def pool_2d(spec: KernelSpec, x: Array) -> Array:
    params = dict(spec.params)
    x = f32(x)
    y = np.zeros(spec.output.shape, np.float32)
    for (h, w), part in windows(spec, x.shape[2:], spec.output.shape[2:]).items():
        window = x[:, :, part[0], part[1]]
        if params["pool"] == 0:
            y[:, :, h, w] = window.max(axis=(2, 3), initial=LOWEST)
        else:
            y[:, :, h, w] = window.sum(axis=(2, 3)) / np.float32(params["k0"] * params["k1"])
    return out(spec, y)


@reference("pool_2d_back")
def pool_2d_back(spec: KernelSpec, gradient: Array, x: Array) -> Array:
    params = dict(spec.params)
    x = f32(x)
    y = np.zeros(spec.output.shape, np.float32)
    for (h, w), (high, wide) in windows(spec, x.shape[2:], gradient.shape[2:]).items():
        if params["pool"] == 1:
            y[:, :, high, wide] += (gradient[:, :, h, w] / np.float32(params["k0"] * params["k1"]))[:, :, None, None]
            continue
        for n, c in np.ndindex(*x.shape[:2]):
            best, best_at = LOWEST, None
            for at in product(range(high.start, high.stop), range(wide.start, wide.stop)):
                if x[(n, c, *at)] > best:
                    best, best_at = x[(n, c, *at)], at
            if best_at:
                y[(n, c, *best_at)] += gradient[n, c, h, w]
    return out(spec, y)


example("pool_1d", inputs=("(11,3,2,2)",), pool=1, k0=3, s0=2, p0=1)
example("pool_2d", inputs=("(11,7,2,2)",), output="(5,8,2,2)", pool=1, k0=3, k1=2, s0=2, s1=1, p1=1)
example("pool_2d_back", inputs=("(5,8,2,2)", "(11,7,2,2)"), output="(11,7,2,2)", pool=0, k0=3, k1=2, s0=2, s1=1, p1=1)
