"""Attention without flash attention, in pieces and in a longer cache, equals its references' result at once."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import Array, spec
from reference import compute

from kernelgen.dispatch.lengths import LengthIndex
from kernelgen.ggml.unfused_attention import Member, members
from kernelgen.spec.kernel import KernelSpec

N, CELLS, HEADS, HEAD, ROOM = 7, 9, 4, 16, 24
SHAPE = f"({CELLS},{N},{HEADS},1)/f32"
NODES = [
    spec(
        "mul_mat",
        [f"({HEAD},{CELLS},2,1)/f16/(2,64,32,1536)", f"({HEAD},{N},{HEADS},1)/f32/(4,256,64,1792)"],
        SHAPE,
    ),
    spec("scale", [SHAPE], SHAPE, s=0.05),
    spec("tanh", [SHAPE], SHAPE),
    spec("scale", [SHAPE], SHAPE, s=20.0),
    spec("soft_max", [SHAPE, f"({CELLS},{N},1,1)/f32", f"({HEADS},1,1,1)/f32"], SHAPE, scale=0.25),
    spec("mul_mat", [f"({CELLS},{HEAD},2,1)/f16/(2,48,768,1536)", SHAPE], f"({HEAD},{N},{HEADS},1)/f32"),
    spec("mul_mat", [f"({HEAD},8,{HEADS},1)/f16", f"({HEAD},{N},{HEADS},1)/f32"], f"(8,{N},{HEADS},1)/f32"),
    spec("cont", [f"(8,{HEADS},{N},1)/f32/(4,224,32,896)"], f"({8 * HEADS},{N},1,1)/f32"),
]
CELLS_AXES: list[dict[int, int]] = [
    {0: 1, 2: 0},
    *[{0: 0, 1: 0}] * 3,
    {0: 0, 1: 0, 3: 0},
    {0: 0, 1: 0},
    {},
    {},
]
"""The axes of cells in each node's tensors."""


def member(node: KernelSpec, cells: dict[int, int]) -> Member:
    return next(m for m in members(node.op, node.inputs, node.output) if dict(m.cells) == cells and m.n == N)


def pieced(node: KernelSpec, cells: dict[int, int], n: int, n_cells: int | None) -> KernelSpec:
    *inputs, output = member(node, cells).chunk(n, n_cells)
    assert output is not None
    return KernelSpec(node.op, tuple(inputs), output, node.params)


def attention(nodes: list[KernelSpec], q: Array, k: Array, mask: Array, sinks: Array, v: Array, w: Array) -> Array:
    """Returns the result of the nodes, one after another; arrays are in the axis order of NumPy."""
    t = compute(nodes[0], [k, q])
    for node in nodes[1:4]:
        t = compute(node, [t])
    t = compute(nodes[4], [t, mask, sinks])
    t = compute(nodes[6], [w, compute(nodes[5], [v, t])])
    return compute(nodes[7], [np.swapaxes(t, 1, 2)])


@pytest.mark.parametrize("n", [1, 4, N])
@pytest.mark.parametrize("n_cells", [CELLS, 16])
def test_pieces_are_the_whole(n: int, n_cells: int) -> None:
    rng = np.random.default_rng(5)

    def random(shape: tuple[int, ...], dtype: type[np.floating]) -> Array:
        return rng.normal(size=shape).astype(dtype)

    q, sinks = random((1, HEADS, N, HEAD), np.float32), random((1, 1, 1, HEADS), np.float32)
    k, v = random((1, 2, ROOM, HEAD), np.float16), random((1, 2, HEAD, ROOM), np.float16)
    w = random((1, HEADS, 8, HEAD), np.float16)
    mask = np.full((1, 1, N, ROOM), -np.inf, np.float32)
    mask[..., :CELLS] = np.where(rng.random((1, 1, N, CELLS)) < 0.5, -np.inf, 0)
    want = attention(NODES, q, k[:, :, :CELLS], mask[..., :CELLS], sinks, v[..., :CELLS], w)
    nodes = [pieced(node, cells, n, n_cells) for node, cells in zip(NODES, CELLS_AXES, strict=True)]
    have = np.zeros_like(want)
    for start in {*range(0, N - n + 1, n), N - n}:
        some = slice(start, start + n)
        read = (k[:, :, :n_cells], mask[:, :, some, :n_cells], sinks, v[..., :n_cells], w)
        have[:, :, some] = attention(nodes, q[:, :, some], *read)
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_kernels_of_other_sizes_serve_each_node() -> None:
    kernels = [pieced(node, cells, 4, 16) for node, cells in zip(NODES, CELLS_AXES, strict=True)]
    index = LengthIndex.of(kernels)
    for node, kernel in zip(NODES, kernels, strict=True):
        selection = index.select(node)
        assert selection is not None
        assert (selection.kernels, selection.chunks, selection.padding) == ((kernel, kernel), ((0, 4), (3, 4)), 1)
    # the cache ends before the kernel's cache
    assert [index.select(node, room=12) is not None for node in NODES] == [not cells for cells in CELLS_AXES]


@pytest.mark.parametrize(
    "node",
    [
        # several streams
        spec("mul_mat", ["(16,9,2,2)/f16", "(16,7,4,2)/f32"], "(9,7,4,2)/f32"),
        # scores with a bias each
        spec("add", [SHAPE, SHAPE], SHAPE),
        # a mask for each head
        spec("soft_max", [SHAPE, f"({CELLS},{N},{HEADS},1)/f32"], SHAPE),
        # heads that are not swapped with tokens
        spec("cont", [f"(8,{HEADS},{N},1)/f32"], f"({8 * HEADS},{N},1,1)/f32"),
    ],
    ids=lambda k: k.id,
)
def test_what_is_not_of_attention(node: KernelSpec) -> None:
    assert list(members(node.op, node.inputs, node.output)) == []
