"""Norms and sums of rows."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, out, reference


@reference("sum_rows")
def sum_rows(spec: KernelSpec, x: Array) -> Array:
    return out(spec, x.astype(np.float64).sum(axis=3, keepdims=True))


@reference("norm")
def norm(spec: KernelSpec, x: Array) -> Array:
    x = x.astype(np.float64)
    x = x - x.mean(axis=3, keepdims=True)
    return out(spec, x / np.sqrt((x * x).mean(axis=3, keepdims=True) + dict(spec.params)["eps"]))


@reference("rms_norm")
def rms_norm(spec: KernelSpec, x: Array) -> Array:
    x = x.astype(np.float64)
    return out(spec, x / np.sqrt((x * x).mean(axis=3, keepdims=True) + dict(spec.params)["eps"]))


@reference("l2_norm")
def l2_norm(spec: KernelSpec, x: Array) -> Array:
    x = x.astype(np.float64)
    length = np.sqrt((x * x).sum(axis=3, keepdims=True))
    return out(spec, x / np.maximum(length, dict(spec.params)["eps"]))


@reference("group_norm")
def group_norm(spec: KernelSpec, x: Array) -> Array:
    params = dict(spec.params)
    channels = (x.shape[1] + params["n_groups"] - 1) // params["n_groups"]
    y = np.zeros(x.shape)
    for group in range(params["n_groups"]):
        part = x[:, group * channels : (group + 1) * channels].astype(np.float64)
        if part.size:
            part = part - part.mean(axis=(1, 2, 3), keepdims=True)
            variance = (part * part).mean(axis=(1, 2, 3), keepdims=True)
            y[:, group * channels : (group + 1) * channels] = part / np.sqrt(variance + params["eps"])
    return out(spec, y)


example("group_norm", inputs=("(5,3,8,2)",), n_groups=3, eps=1e-5)
example("sum_rows", inputs=("(33,4,3,2)",))
example("norm", "rms_norm", "l2_norm", inputs=("(33,4,3,2)",), eps=1e-5)
