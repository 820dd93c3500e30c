"""Gradients, losses and the optimizer's steps."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, f32, out, reference


@reference("silu_back")
def silu_back(spec: KernelSpec, grad: Array, x: Array) -> Array:
    grad, x = f32(grad), f32(x)
    s = 1 / (1 + np.exp(-x))
    return out(spec, grad * s * (1 + x * (1 - s)))


@reference("rms_norm_back")
def rms_norm_back(spec: KernelSpec, grad: Array, x: Array) -> Array:
    grad, x = grad.astype(np.float64), x.astype(np.float64)
    n, eps = x.shape[3], dict(spec.params)["eps"]
    squares = (x * x).sum(axis=3, keepdims=True)
    rms = np.sqrt(squares / n + eps)
    return out(spec, (grad - x * (x * grad).sum(axis=3, keepdims=True) / (squares + eps * n)) / rms)


def _softmax(x: Array) -> Array:
    x = x.astype(np.float64)
    e = np.exp(x - x.max(axis=3, keepdims=True))
    return e / e.sum(axis=3, keepdims=True)


@reference("cross_entropy_loss")
def cross_entropy_loss(spec: KernelSpec, logits: Array, labels: Array) -> Array:
    x = logits.astype(np.float64) - logits.max(axis=3, keepdims=True)
    logs = x - np.log(np.exp(x).sum(axis=3, keepdims=True))
    return out(spec, -(logs * labels).sum() / np.prod(logits.shape[:3]))


@reference("cross_entropy_loss_back")
def cross_entropy_loss_back(spec: KernelSpec, grad: Array, logits: Array, labels: Array) -> Array:
    return out(spec, (_softmax(logits) - labels) * grad.item() / np.prod(logits.shape[:3]))


@reference("opt_step_sgd")
def opt_step_sgd(spec: KernelSpec, w: Array, grad: Array, params: Array) -> Array:
    alpha, wd = params.ravel()
    return w * (1 - alpha * wd) - alpha * grad


@reference("opt_step_adamw")
def opt_step_adamw(
    spec: KernelSpec, w: Array, grad: Array, m: Array, v: Array, params: Array
) -> tuple[Array, Array, Array]:
    alpha, beta1, beta2, eps, wd, beta1h, beta2h = params.ravel().astype(np.float64)
    m = m * beta1 + grad * (1 - beta1)
    v = v * beta2 + grad * grad * (1 - beta2)
    w = w * (1 - alpha * wd) - alpha * (m * beta1h) / (np.sqrt(v * beta2h) + eps)
    return w.astype(np.float32), m.astype(np.float32), v.astype(np.float32)


def _positive(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(0, 1, shape)


def distribution(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns rows of numbers that add up to 1."""
    x = rng.random(shape)
    return x / x.sum(axis=-1, keepdims=True)


example("silu_back", inputs=("(33,4,3,2)", "(33,4,3,2)"))
example("rms_norm_back", inputs=("(33,4,3,2)", "(33,4,3,2)"), eps=1e-5)
example("cross_entropy_loss", inputs=("(33,4,3,2)", "(33,4,3,2)"), values={1: distribution})
example("cross_entropy_loss_back", inputs=("(1,1,1,1)", "(33,4,3,2)", "(33,4,3,2)"), values={2: distribution})
example("opt_step_sgd", inputs=("(33,4,3,2)", "(33,4,3,2)", "(2,1,1,1)"), values={2: _positive})
example("opt_step_adamw", inputs=(*["(33,4,3,2)"] * 4, "(7,1,1,1)"), values={3: _positive, 4: _positive})
