"""Resizing, padding, windows and embeddings, element by element as in ggml's CPU backend."""

from __future__ import annotations

from itertools import product
from math import floor

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, f32, out, reference

F = np.float32


@reference("upscale")
def upscale(spec: KernelSpec, x: Array) -> Array:
    mode = dict(spec.params)["mode"]
    n3, n2, n1, n0 = spec.output.shape
    sf = [F(n) / F(m) for n, m in zip(spec.output.ne, x.shape[::-1], strict=True)]
    offset = F(0.5)
    if mode & 256:
        offset = F(0)
        for d in (0, 1):
            n, m = spec.output.ne[d], x.shape[3 - d]
            if n > 1 and m > 1:
                sf[d] = F(n - 1) / F(m - 1)
    y = np.zeros(spec.output.shape, np.float32)
    for i3, i2, i1, i0 in np.ndindex(n3, n2, n1, n0):
        plane = x[int(F(i3) / sf[3]), int(F(i2) / sf[2])]
        if mode & 255 == 0:
            y[i3, i2, i1, i0] = plane[int(F(i1) / sf[1]), int(F(i0) / sf[0])]
        elif mode & 512:
            y[i3, i2, i1, i0] = antialiased(plane, i1, i0, sf, offset)
        else:
            at = (F(i1) + offset) / sf[1] - offset, (F(i0) + offset) / sf[0] - offset
            y[i3, i2, i1, i0] = (bilinear if mode & 255 == 1 else bicubic)(plane, *at)
    return out(spec, y)


def clamped(plane: Array, y: int, x: int) -> float:
    return plane[min(max(y, 0), plane.shape[0] - 1), min(max(x, 0), plane.shape[1] - 1)]


def bilinear(plane: Array, y: float, x: float) -> float:
    y0, x0 = (min(max(floor(v), 0), n - 1) for v, n in zip((y, x), plane.shape, strict=True))
    y1, x1 = (min(max(floor(v) + 1, 0), n - 1) for v, n in zip((y, x), plane.shape, strict=True))
    dy, dx = min(max(y - F(y0), 0), 1), min(max(x - F(x0), 0), 1)
    top = plane[y0, x0] * (1 - dx) + plane[y0, x1] * dx
    return top * (1 - dy) + (plane[y1, x0] * (1 - dx) + plane[y1, x1] * dx) * dy


def bicubic(plane: Array, y: float, x: float) -> float:
    a = -0.75
    y0, x0 = floor(y), floor(x)

    def blend(p: list[float], t: float) -> float:
        def near(v: float) -> float:
            return ((a + 2) * v - (a + 3)) * v * v + 1

        def far(v: float) -> float:
            return ((a * v - 5 * a) * v + 8 * a) * v - 4 * a

        return p[0] * far(t + 1) + p[1] * near(t) + p[2] * near(1 - t) + p[3] * far(2 - t)

    rows = [blend([clamped(plane, y0 + i, x0 + j) for j in range(-1, 3)], x - x0) for i in range(-1, 3)]
    return blend(rows, y - y0)


def antialiased(plane: Array, i1: int, i0: int, sf: list[np.float32], offset: np.float32) -> float:
    support = [max(F(1), F(1) / sf[d]) for d in (0, 1)]
    y, x = (F(i1) + offset) / sf[1], (F(i0) + offset) / sf[0]
    value = total = 0.0
    for sy in range(max(int(y - support[1] + offset), 0), min(int(y + support[1] + offset), plane.shape[0])):
        for sx in range(max(int(x - support[0] + offset), 0), min(int(x + support[0] + offset), plane.shape[1])):
            wy = max(1 - abs((sy - y + offset) / support[1]), 0)
            weight = max(1 - abs((sx - x + offset) / support[0]), 0) * wy
            value += plane[sy, sx] * weight
            total += weight
    return value / total if total > 0 else value


@reference("pad")
def pad(spec: KernelSpec, x: Array) -> Array:
    params = dict(spec.params)
    y = np.zeros(spec.output.shape, x.dtype)
    for at in np.ndindex(*y.shape):
        source = [at[3 - d] - params[f"lp{d}"] for d in (3, 2, 1, 0)]
        if params["circular"]:
            source = [i % n for i, n in zip(source, x.shape, strict=True)]
        if all(0 <= i < n for i, n in zip(source, x.shape, strict=True)):
            y[at] = x[tuple(source)]
    return out(spec, y)


@reference("pad_reflect_1d")
def pad_reflect_1d(spec: KernelSpec, x: Array) -> Array:
    n = x.shape[3]
    left = dict(spec.params)["p0"]
    y = np.zeros(spec.output.shape, x.dtype)
    for i in range(y.shape[3]):
        j = abs(i - left)
        y[..., i] = x[..., j if j < n else 2 * (n - 1) - j]
    return out(spec, y)


@reference("roll")
def roll(spec: KernelSpec, x: Array) -> Array:
    shifts = [dict(spec.params)[f"shift{d}"] for d in (3, 2, 1, 0)]
    y = np.zeros_like(x)
    for at in np.ndindex(*x.shape):
        y[at] = x[tuple((i - shift) % n for i, shift, n in zip(at, shifts, x.shape, strict=True))]
    return out(spec, y)


@reference("timestep_embedding")
def timestep_embedding(spec: KernelSpec, timesteps: Array) -> Array:
    params = dict(spec.params)
    half = params["dim"] // 2
    y = np.zeros(spec.output.shape[2:], np.float32)
    for i, j in product(range(timesteps.shape[3]), range(half)):
        angle = timesteps[0, 0, 0, i] * np.exp(-np.log(F(params["max_period"])) * F(j) / F(half))
        y[i, j], y[i, j + half] = np.cos(angle), np.sin(angle)
    return out(spec, y)


@reference("win_part")
def win_part(spec: KernelSpec, x: Array) -> Array:
    params = dict(spec.params)
    w = params["w"]
    y = np.zeros(spec.output.shape, np.float32)
    for py, px, i2, i1 in product(range(params["npy"]), range(params["npx"]), range(w), range(w)):
        if py * w + i2 < x.shape[1] and px * w + i1 < x.shape[2]:
            y[py * params["npx"] + px, i2, i1] = x[0, py * w + i2, px * w + i1]
    return out(spec, y)


@reference("win_unpart")
def win_unpart(spec: KernelSpec, x: Array) -> Array:
    w = dict(spec.params)["w"]
    _, high, wide, _ = spec.output.shape
    per_row = (wide + (w - wide % w) % w) // w
    y = np.zeros(spec.output.shape, np.float32)
    for i2, i1 in product(range(high), range(wide)):
        y[0, i2, i1] = x[i2 // w * per_row + i1 // w, i2 % w, i1 % w]
    return out(spec, y)


@reference("get_rel_pos")
def get_rel_pos(spec: KernelSpec, x: Array) -> Array:
    n = spec.output.ne[1]
    y = np.zeros(spec.output.shape, x.dtype)
    for i2, i1 in product(range(n), range(n)):
        y[0, i2, i1] = x[0, 0, n - i1 - 1 + i2]
    return out(spec, y)


@reference("add_rel_pos")
def add_rel_pos(spec: KernelSpec, x: Array, pw: Array, ph: Array) -> Array:
    y = f32(x).reshape(-1).copy()
    n = pw.shape[3]
    for at in range(pw.size):
        for j in range(n):
            y[at * n + j] += ph.reshape(-1)[at]
            y[at * n - (n - 1) * (at % n) + j * n] += pw.reshape(-1)[at]
    return out(spec, y)


example("upscale", inputs=("(5,4,3,2)",), output="(8,6,3,2)", mode=2)
example("pad", inputs=("(5,4,3,2)",), lp0=1, rp0=2, lp1=3, rp2=1, lp3=1)
example("pad_reflect_1d", inputs=("(5,4,3,2)",), p0=4, p1=2)
example("roll", inputs=("(5,4,3,2)",), shift0=3, shift1=-2, shift2=1, shift3=-1)
example("timestep_embedding", inputs=("(3,1,1,1)",), dim=10)
example("win_part", inputs=("(3,7,5,1)",), npx=3, npy=2, w=3)
example("win_unpart", inputs=("(3,3,3,6)",), output="(3,7,5,1)", w=3)
example("get_rel_pos", inputs=("(3,9,1,1)",))
example("add_rel_pos", inputs=("(9,8,2,1)", "(3,4,2,2)", "(3,4,2,2)"))
