"""Convolutions, element by element as in ggml's CPU backend."""

from __future__ import annotations

from itertools import product

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, f32, out, reference


def columns(
    x: Array, places: tuple[int, ...], kernel: tuple[int, ...], s: list[int], p: list[int], d: list[int]
) -> Array:
    """Returns im2col of x [N, C, ...]: [N, *places, C, *kernel]; s, p and d are in ggml's order, innermost first."""
    n, c = x.shape[:2]
    y = np.zeros((n, *places, c, *kernel), x.dtype)
    for place in product(*map(range, places)):
        for element in product(*map(range, kernel)):
            at = [
                o * s[-1 - i] + k * d[-1 - i] - p[-1 - i] for i, (o, k) in enumerate(zip(place, element, strict=True))
            ]
            if all(0 <= j < m for j, m in zip(at, x.shape[2:], strict=True)):
                y[(slice(None), *place, slice(None), *element)] = x[(slice(None), slice(None), *at)]
    return y


def steps(spec: KernelSpec, rank: int) -> tuple[list[int], list[int], list[int]]:
    params = dict(spec.params)
    return tuple([params[f"{name}{i}"] for i in range(rank)] for name in "spd")  # type: ignore[return-value]


@reference("im2col")
def im2col(spec: KernelSpec, kernel: Array, x: Array) -> Array:
    s, p, d = steps(spec, 2)
    _, oh, ow, _ = spec.output.shape
    if dict(spec.params)["is_2D"]:
        return out(spec, columns(x, (oh, ow), kernel.shape[2:], s, p, d))
    return out(spec, columns(x[0], (ow,), kernel.shape[3:], s[:1], p[:1], d[:1]))


@reference("im2col_back")
def im2col_back(spec: KernelSpec, gradient: Array, kernel: Array) -> Array:
    s, p, d = steps(spec, 2)
    if dict(spec.params)["is_2D"]:
        n, ic, ih, iw = spec.output.shape
        kh, kw = kernel.shape[2:]
    else:
        (n, ic, iw), ih = spec.output.shape[1:], 1
        kh, kw = 1, kernel.shape[3]
        s[1], p[1], d[1] = 1, 0, 1
    oh, ow = (gradient.shape[1] if dict(spec.params)["is_2D"] else 1), gradient.shape[2]
    grad = gradient.reshape(n, oh, ow, ic, kh, kw).astype(np.float64)
    y = np.zeros((n, ic, ih, iw))
    for h, w, i, j in product(range(ih), range(iw), range(kh), range(kw)):
        at = (h + p[1] - i * d[1], w + p[0] - j * d[0])
        if at[0] % s[1] == 0 and at[1] % s[0] == 0 and 0 <= at[0] // s[1] < oh and 0 <= at[1] // s[0] < ow:
            y[:, :, h, w] += grad[:, at[0] // s[1], at[1] // s[0], :, i, j]
    return out(spec, y)


@reference("im2col_3d")
def im2col_3d(spec: KernelSpec, kernel: Array, x: Array) -> Array:
    ic = dict(spec.params)["IC"]
    n = x.shape[0] // ic
    od, oh, ow = spec.output.shape[0] // n, spec.output.shape[1], spec.output.shape[2]
    x = x[: n * ic].reshape(n, ic, *x.shape[1:])
    return out(spec, columns(x, (od, oh, ow), kernel.shape[1:], *steps(spec, 3)))


@reference("col2im_1d")
def col2im_1d(spec: KernelSpec, x: Array) -> Array:
    params = dict(spec.params)
    s, oc, p = params["s0"], params["oc"], params["p0"]
    x = f32(x)[0, 0]
    k = x.shape[1] // oc
    y = np.zeros((oc, spec.output.ne[0]), np.float32)
    for t_out, t_in in product(range(y.shape[1]), range(x.shape[0])):
        i = t_out + p - t_in * s
        if 0 <= i < k:
            y[:, t_out] += x[t_in, np.arange(oc) * k + i]
    return out(spec, y)


@reference("conv_2d")
def conv_2d(spec: KernelSpec, kernel: Array, x: Array) -> Array:
    places = spec.output.shape[2:]
    y = columns(x.astype(kernel.dtype), places, kernel.shape[2:], *steps(spec, 2)).astype(np.float64)
    return out(spec, np.einsum("nhwcij,ocij->nohw", y, kernel.astype(np.float64)))


@reference("conv_2d_dw")
def conv_2d_dw(spec: KernelSpec, kernel: Array, x: Array) -> Array:
    y = columns(x, spec.output.shape[2:], kernel.shape[2:], *steps(spec, 2)).astype(np.float64)
    return out(spec, np.einsum("nhwcij,cij->nchw", y, kernel[:, 0].astype(np.float64)))


@reference("conv_3d")
def conv_3d(spec: KernelSpec, kernel: Array, x: Array) -> Array:
    params = dict(spec.params)
    n, c, oc = params["n"], params["c"], params["oc"]
    x = x.astype(kernel.dtype).reshape(n, c, *x.shape[1:])
    kernel = kernel.astype(np.float64).reshape(oc, c, *kernel.shape[1:])
    y = columns(x, spec.output.shape[1:], kernel.shape[2:], *steps(spec, 3)).astype(np.float64)
    return out(spec, np.einsum("ndhwcijk,ocijk->nodhw", y, kernel))


@reference("conv_transpose_1d")
def conv_transpose_1d(spec: KernelSpec, kernel: Array, x: Array) -> Array:
    s = dict(spec.params)["s0"]
    x, kernel = x[0, 0].astype(kernel.dtype).astype(np.float64), kernel[0].astype(np.float64)
    y = np.zeros(spec.output.shape[2:])
    for at in range(x.shape[1]):
        y[:, at * s : at * s + kernel.shape[2]] += np.einsum("i,iok->ok", x[:, at], kernel)
    return out(spec, y)


@reference("conv_transpose_2d")
def conv_transpose_2d(spec: KernelSpec, kernel: Array, x: Array) -> Array:
    s = dict(spec.params)["stride"]
    x, kernel = x.astype(kernel.dtype).astype(np.float64), kernel.astype(np.float64)
    kh, kw = kernel.shape[2:]
    y = np.zeros(spec.output.shape)
    for h, w in product(range(x.shape[2]), range(x.shape[3])):
        y[:, :, h * s : h * s + kh, w * s : w * s + kw] += np.einsum("ni,iokl->nokl", x[:, :, h, w], kernel)
    return out(spec, y)


example("im2col", inputs=("(3,2,3,4)", "(7,5,3,2)"), output="(18,4,6,2)", s0=2, p0=1, p1=1, is_2D=True)
example("im2col_back", inputs=("(18,4,6,2)", "(3,2,3,4)"), output="(7,5,3,2)", s0=2, p0=1, p1=1, is_2D=True)
example("im2col_3d", inputs=("(3,2,2,6)", "(5,4,3,4)"), output="(24,3,5,8)", s0=2, p0=1, p1=1, p2=1, IC=2)
example("col2im_1d", inputs=("(15,7,1,1)",), s0=2, oc=3, p0=1)
example("conv_2d", inputs=("(3,2,4,5)", "(7,5,4,2)"), s0=2, p0=1, p1=1)
example("conv_2d_dw", inputs=("(3,2,1,4)", "(7,5,4,2)"), s0=2, p0=1, p1=1)
example("conv_3d", inputs=("(3,2,2,6)", "(5,4,3,4)"), s0=2, p0=1, p1=1, p2=1, c=2, n=2, oc=3)
example("conv_transpose_1d", inputs=("(5,3,2,1)", "(7,2,1,1)"), s0=2)
example("conv_transpose_2d", inputs=("(3,2,3,4)", "(7,5,4,2)"), stride=2)
