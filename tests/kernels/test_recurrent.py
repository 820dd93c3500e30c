"""State-space models and linear attention."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from kernel_harness import check, emit, spec
from reference import gates, unit

from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto


def uniform(low: float, high: float, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).uniform(low, high, shape)


@pytest.mark.parametrize("d_conv, n_tokens, n_seqs", [(3, 1, 1), (4, 5, 3), (9, 64, 1), (1, 2, 2)])
def test_convolution(d_conv: int, n_tokens: int, n_seqs: int) -> None:
    inputs = [f"({n_tokens + d_conv - 1},7,{n_seqs},1)/f32", f"({d_conv},7,1,1)/f32"]
    check(spec("ssm_conv", inputs, f"(7,{n_tokens},{n_seqs},1)/f32"), 1e-12)


def test_a_long_filter_is_refused() -> None:
    with pytest.raises(KernelgenError, match="a filter of 65 taps"):
        emit(spec("ssm_conv", ["(70,2,1,1)/f32", "(65,2,1,1)/f32"], "(2,6,1,1)/f32"))


def scan(n_tokens: int, *, d_state: int = 8, dim: int = 3, groups: int = 2, decays: int = 1, K: int = 1) -> Any:
    heads, n_seqs = 4, 2
    inputs = [
        f"({d_state},{dim},{heads},5)/f32",
        f"({dim},{heads},{n_tokens},{n_seqs})/f32",
        f"({heads},{n_tokens},{n_seqs},1)/f32",
        f"({decays},{heads},1,1)/f32",
        *[f"({d_state},{groups},{n_tokens},{n_seqs})/f32"] * 2,
        f"({n_seqs},1,1,1)/i32",
    ]
    elements = dim * heads * n_tokens * n_seqs + K * d_state * dim * heads * n_seqs
    return spec("ssm_scan", inputs, f"({elements},1,1,1)/f32", K=K)


@pytest.mark.parametrize("n_tokens", [1, 2, 7])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dim, decays", [(3, 1), (1, 8)])
def test_scan(n_tokens: int, groups: int, dim: int, decays: int) -> None:
    kernel = scan(n_tokens, dim=dim, groups=groups, decays=decays)
    check(kernel, 1e-10, src3=uniform(-1, -0.1, 4, decays), src6=np.int32([3, 1]))


@pytest.mark.parametrize("n_tokens, snapshots", [(1, 2), (2, 2), (2, 4), (7, 3)])
def test_scan_keeps_the_last_states(n_tokens: int, snapshots: int) -> None:
    check(scan(n_tokens, K=snapshots), 1e-10, src3=uniform(-1, -0.1, 4), src6=np.int32([0, 4]))


def test_scan_takes_large_steps_as_they_are() -> None:
    """ggml's softplus is the identity above 20, because exp would overflow."""
    dt = np.float32([[19.5, 20.5, 100, -100]] * 6).reshape(2, 3, 4)
    check(scan(3), 1e-10, src2=dt, src3=uniform(-1, -0.1, 4), src6=np.int32([0, 1]))


def test_scan_of_views() -> None:
    """x, b and c are parts of one projection with rows of 64 channels."""
    view = "/(4,{},256,2048)"
    kernel = spec(
        "ssm_scan",
        [
            "(8,4,4,2)/f32",
            "(4,4,8,2)/f32" + view.format(16),
            "(4,8,2,1)/f32",
            "(1,4,1,1)/f32",
            *["(8,2,8,2)/f32" + view.format(32)] * 2,
            "(2,1,1,1)/i32",
        ],
        f"({4 * 4 * 8 * 2 + 8 * 4 * 4 * 2},1,1,1)/f32",
    )
    check(kernel, 1e-10, src3=uniform(-1, -0.1, 4), src6=np.int32([1, 0]))


def linear(op: str, count: int, n_tokens: int, n_seqs: int, **params: Any) -> Any:
    size, heads = 32, 3
    vector = f"({size},{heads},{n_tokens},1)/f32"
    extra = [f"({size},{heads},1,1)/f32"] if op == "rwkv_wkv6" else []
    inputs = [*[vector] * 3, *extra, *[vector] * (count - 3), f"({size * size * heads},{n_seqs},1,1)/f32"]
    return spec(op, inputs, f"({size * heads},{n_tokens + size * n_seqs},1,1)/f32", **params)


@pytest.mark.parametrize("n_tokens, n_seqs", [(1, 1), (5, 1), (3, 3), (8, 2)])
def test_linear_attention(n_tokens: int, n_seqs: int) -> None:
    decay = uniform(0, 1, n_tokens, 3, 32)
    check(linear("rwkv_wkv6", 4, n_tokens, n_seqs), 1e-10, src4=decay)
    check(linear("gated_linear_attn", 4, n_tokens, n_seqs, scale=0.4), 1e-10, src3=decay)
    small = {f"src{i}": uniform(-0.2, 0.2, n_tokens, 3, 32) for i in (4, 5)}
    check(linear("rwkv_wkv7", 6, n_tokens, n_seqs), 1e-10, src1=decay, **small)


def delta(
    n_tokens: int,
    *,
    size: int = 6,
    repeat: int = 1,
    per_channel: bool = False,
    K: int = 1,
    permuted: bool = False,
) -> Any:
    n_seqs, heads = 2, 2 * repeat
    gates = size if per_channel else 1

    def vector(h: int) -> str:
        strides = f"/(4,{4 * size * n_tokens},{4 * size},{4 * size * n_tokens * h})" if permuted else ""
        return f"({size},{h},{n_tokens},{n_seqs})/f32{strides}"

    inputs = [
        vector(2),
        vector(2),
        vector(heads),
        f"({gates},{heads},{n_tokens},{n_seqs})/f32",
        f"(1,{heads},{n_tokens},{n_seqs})/f32",
        f"({size},{size},{heads},{n_seqs})/f32",
    ]
    rows = n_tokens * n_seqs + K * size * n_seqs
    return spec("gated_delta_net", inputs, f"({size * heads},{rows},1,1)/f32", K=K)


def delta_values(kernel: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    made = {f"src{i}": unit(rng, kernel.inputs[i].shape) for i in (0, 1)}
    made["src3"] = gates(rng, kernel.inputs[3].shape)
    made["src4"] = rng.uniform(0, 1, kernel.inputs[4].shape)
    return made


@pytest.mark.parametrize("n_tokens", [1, 2, 9])
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("permuted", [False, True])
def test_delta_rule(n_tokens: int, repeat: int, per_channel: bool, permuted: bool) -> None:
    kernel = delta(n_tokens, repeat=repeat, per_channel=per_channel, permuted=permuted)
    check(kernel, 1e-10, **delta_values(kernel))


@pytest.mark.parametrize("n_tokens, snapshots", [(1, 2), (2, 2), (2, 4), (7, 3)])
def test_delta_rule_keeps_the_last_states(n_tokens: int, snapshots: int) -> None:
    kernel = delta(n_tokens, K=snapshots)
    check(kernel, 1e-10, **delta_values(kernel))


def opcodes(kernel: Any) -> list[str]:
    module = proto.parse(emit(kernel))
    return [i.opcode for c in module.computations for i in c.instructions]


def test_one_token_needs_no_loop() -> None:
    assert "while" not in opcodes(delta(1))
    assert "while" in opcodes(delta(2))


def test_a_prompt_is_a_loop_and_not_unrolled() -> None:
    assert len(opcodes(delta(512))) == len(opcodes(delta(64)))


def test_sequences_of_different_lengths_are_refused() -> None:
    with pytest.raises(KernelgenError, match=re.escape("7 tokens can't be shared out over 2 sequences")):
        emit(linear("gated_linear_attn", 4, 7, 2, scale=1.0))
