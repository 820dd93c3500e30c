"""Every op of real models' graphs, from llama.cpp's exports: emitted at full size, and run at a smaller size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernel_harness import check, emit

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo.lint import lint
from kernelgen.model import graph_ops
from kernelgen.spec.kernel import KernelSpec
from kernelgen.targets import TARGETS

DATA = Path(__file__).parents[1] / "data" / "graph-ops"
EXPORTS = sorted(DATA.glob("*.txt"))
LLAMA3 = [DATA / "llama3-8b-f16.flash-attn.txt", DATA / "llama3-8b-f16.no-flash-attn.txt"]

# Llama-3-8B with a head of 16 instead of 128, 8 query heads and 2 key heads, a context of 128, and 5 tokens instead of
# 512. Products map to products, so views keep their meaning.
SMALL = {
    **{128: 16, 8: 2, 32: 8, 4096: 128, 1024: 32, 14336: 56, 128256: 96, 512: 5, 1: 1},
    **{4096 * 1024: 128 * 32, 1024 * 512: 32 * 5},
}
SMALL_STRIDES = {1: 1, 128: 16, 1024: 32, 4096: 128, 128 * 512: 16 * 5, 128 * 4096: 16 * 128, 32 * 4096: 8 * 128}


def shrunk_tensor(t: TensorDesc) -> TensorDesc:
    ne = [SMALL[n] for n in t.ne]
    size = t.nb[0] if t.ne[0] == 1 else {"f32": 4, "f16": 2, "i32": 4, "i64": 8}[t.dtype]
    if t.contiguous:
        return TensorDesc.make(ne, t.dtype)
    return TensorDesc.make(
        ne, t.dtype, [SMALL_STRIDES[b // size] * size if n > 1 else b for n, b in zip(t.ne, t.nb, strict=True)]
    )


def shrunk(spec: KernelSpec) -> KernelSpec:
    params = dict(spec.params)
    if "n_dims" in params:
        params["n_dims"] = SMALL[int(params["n_dims"])]
    inputs = [t and shrunk_tensor(t) for t in spec.inputs]
    return KernelSpec.make(spec.op, inputs, shrunk_tensor(spec.output), params, spec.alias)


def kernels(*files: Path) -> list[KernelSpec]:
    found = {spec.id: spec for file in files for spec, _, _ in graph_ops.read(file)}
    return list(found.values())


@pytest.mark.parametrize("file", EXPORTS, ids=lambda p: p.stem)
def test_every_op_of_a_graph_is_emitted_and_clean_for_every_target(file: Path) -> None:
    findings = {spec.id: lint(emit(spec), t) for spec in kernels(file) for t in TARGETS.values()}
    assert {name: found for name, found in findings.items() if found} == {}


def test_the_exports_are_there() -> None:
    assert [len(kernels(file)) for file in LLAMA3] == [30, 38]


@pytest.mark.parametrize("spec", kernels(*LLAMA3), ids=lambda s: s.id)
def test_llama3_computes_what_ggml_does(spec: KernelSpec) -> None:
    small = shrunk(spec)
    rng = np.random.default_rng(8)
    given = {}
    for i, t in enumerate(small.inputs):
        if t is None:
            continue
        if t.dtype in ("i32", "i64"):
            table = small.inputs[0 if spec.op == "get_rows" else -1]
            count = {"rope": 100}.get(spec.op, table.ne[1])
            given[f"src{i}"] = rng.permutation(max(count, t.ne[0]))[: t.ne[0]]
        elif (spec.op, i) in (("soft_max", 1), ("flash_attn_ext", 3)):
            given[f"src{i}"] = np.where(rng.random(t.shape) < 0.3, -np.inf, 0.0)
    check(small, 1e-6, **given)
