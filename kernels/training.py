"""The ops of training: gradients, losses and the optimizer's steps. All compute in float32."""

import math

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import f32, per_row, result

_ONE = np.float32(1)


def _sum(x: Array) -> Array:
    return lax.reduce_sum(x, (3,))


@emitter("silu_back", types="f32 f16, same")
def silu_back(grad, x, *, out):
    """The gradient of `silu(x)`, from the gradient of its result."""
    grad, x = f32(grad), f32(x)
    s = _ONE / (_ONE + lax.exp(-x))
    return result(grad * s * (_ONE + x * (_ONE - s)), out)


@emitter("rms_norm_back", types="f32, f32")
def rms_norm_back(grad, x, *, eps: float, out):
    """The gradient of `rms_norm(x)`, from the gradient of its result; both [ne3, ne2, ne1, ne0]."""
    n, eps = np.float32(x.shape[3]), np.float32(eps)
    squares = _sum(x * x)
    scale = -_sum(x * grad) / (squares + eps * n)
    rms = lax.sqrt(squares / n + eps)
    return result((grad + x * per_row(scale, x)) * per_row(_ONE / rms, x), out)


@emitter("cross_entropy_loss", types="f32, f32")
def cross_entropy_loss(logits, labels, *, out):
    """`-sum(labels * log(softmax(logits)))` over the rows, divided by their number: one value."""
    x = logits - per_row(lax.reduce_max(logits, (3,)), logits)
    x = x - per_row(lax.log(_sum(lax.exp(x))), x)
    rows = math.prod(logits.shape[:3])
    return result(lax.reduce_sum(_sum(x * labels), (0, 1, 2)) * np.float32(-1 / rows), out)


@emitter("cross_entropy_loss_back", types="f32, f32, f32")
def cross_entropy_loss_back(grad, logits, labels, *, out):
    """The gradient of `cross_entropy_loss` with respect to the logits, from the gradient of the loss, [1, 1, 1, 1]."""
    e = lax.exp(logits - per_row(lax.reduce_max(logits, (3,)), logits))
    softmax = e * per_row(_ONE / _sum(e), e)
    rows = math.prod(logits.shape[:3])
    scale = lax.reshape(grad, ()) / np.float32(rows)
    return result((softmax - labels) * scale, out)


@emitter("opt_step_sgd", types="f32, f32, f32")
def opt_step_sgd(w, grad, params):
    """A step of gradient descent with weight decay, in place: `w * (1 - alpha * wd) - alpha * grad`.

    w, grad: [ne3, ne2, ne1, ne0]; params: [1, 1, 1, 2], alpha and wd.
    """
    alpha, wd = (params[0, 0, 0, i] for i in range(2))
    return w * (_ONE - alpha * wd) - alpha * grad


@emitter("opt_step_adamw", types="f32, f32, f32, f32, f32")
def opt_step_adamw(w, grad, m, v, params):
    """A step of AdamW: the new weights and the new momenta `m` and `v`, all in place.

    w, grad, m, v: [ne3, ne2, ne1, ne0]; params: [1, 1, 1, 7], alpha, beta1, beta2, eps, wd, beta1h, beta2h, where beta1h is
    `1 / (1 - beta1^t)` at step t.
    """
    alpha, beta1, beta2, eps, wd, beta1h, beta2h = (params[0, 0, 0, i] for i in range(7))
    m = m * beta1 + grad * (_ONE - beta1)
    v = v * beta2 + grad * grad * (_ONE - beta2)
    return w * (_ONE - alpha * wd) - alpha * (m * beta1h) / (lax.sqrt(v * beta2h) + eps), m, v
