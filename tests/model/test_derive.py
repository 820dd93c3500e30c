"""Deriving a manifest from graphs made here: formulas where they exist, otherwise an entry for each size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_sizes import BASE

from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.model import sizes, writing
from kernelgen.model.derive import derive
from kernelgen.model.derived import Derived
from kernelgen.model.graphs import ExportedNode, Graph, Shape
from kernelgen.model.sizes import DecodeCall, Settings, pad
from kernelgen.spec.kernel import KernelSpec

from .conftest import specs

NO_WORDS = (0,) * 16

Build = Callable[[DecodeCall, int], Sequence[ExportedNode]]
"""A model: returns the nodes of a call that reads this many cells of the cache."""


def shape(*ne: int, dtype: str = "f32", nb: tuple[int, ...] | None = None) -> Shape:
    full = (*ne, 1, 1, 1)[:4]
    return Shape(dtype, full, nb or TensorDesc.make([max(n, 1) for n in full], dtype).nb)


def node(op: str, *inputs: Shape, output: Shape | None = None) -> ExportedNode:
    return ExportedNode(op, inputs, output or inputs[0], NO_WORDS, None)


def run(build: Build, settings: Settings = BASE, exports: list[int] | None = None) -> Derived:
    """Derives; appends to `exports` the number of calls of each export."""

    def export(calls: Sequence[DecodeCall]) -> Iterable[tuple[DecodeCall, Graph]]:
        if exports is not None:
            exports.append(len(calls))
        for flash in settings.flash_attn:
            for call in calls:
                n_kv = call.n_kv or pad(call.n_tokens // call.n_seqs)
                nodes = tuple(build(call, n_kv))
                point = {"n_tokens": call.n_tokens, "n_outputs": call.n_outputs, "n_seqs": call.n_seqs, "n_kv": n_kv}
                yield call, Graph(point, {"flash_attn": flash}, nodes, tuple(f"node-{i}" for i in range(len(nodes))))

    return derive(settings, Catalog([builtin_library()]), export)


def text(derived: Derived) -> str:
    return writing.text(writing.ManifestHead("m", ["trn1"], "a model", ["made here"]), derived)


def kernels(derived: Derived, tmp_path: Path) -> set[KernelSpec]:
    """Returns the kernels of the manifest that is written."""
    path = tmp_path / "m.yaml"
    path.write_text(text(derived), encoding="utf-8")
    return specs(path)


def of(build: Build, settings: Settings = BASE) -> set[KernelSpec]:
    """Returns the kernels that the calls need, node by node."""
    found = set()
    for n_seqs in range(1, settings.n_seq_max + 1):
        for call in sizes.requested_calls(settings, n_seqs):
            for n in build(call, call.n_kv or pad(call.n_tokens // n_seqs)):
                inputs = [None if t is None else TensorDesc.make(t.ne, t.dtype, t.nb) for t in n.inputs]
                params = ggml_ops.op(n.op).decode(n.words)
                found.add(KernelSpec.make(n.op, inputs, TensorDesc.make(n.output.ne, n.output.dtype), params))
    return found


def attention(call: DecodeCall, n_kv: int) -> list[ExportedNode]:
    n = call.n_tokens // call.n_seqs
    q = shape(8, n, 4, call.n_seqs, nb=(4, 128, 32, 128 * n))
    cells = pad(call.n_ctx)
    k = shape(8, n_kv, 2, call.n_seqs, dtype="f16", nb=(2, 32, 16, 32 * cells))
    cache = shape(16, cells, dtype="f16")
    new = node("set_rows", shape(16, call.n_tokens), shape(call.n_tokens, dtype="i64"), cache, output=cache)
    kq = shape(n_kv, n, 4, call.n_seqs)
    rows = node(
        "get_rows", shape(32, call.n_tokens), shape(call.n_outputs, dtype="i32"), output=shape(32, call.n_outputs)
    )
    last = shape(32, call.n_outputs)
    return [
        new,
        node("mul_mat", k, q, output=kq),
        node("soft_max", kq),
        rows,
        node("silu", last),
        node("silu", shape(32, call.n_tokens)),
    ]


def rounded(call: DecodeCall, n_kv: int) -> list[ExportedNode]:
    return [node("silu", shape(8, -(-call.n_tokens // 64) * 64)), node("relu", shape(n_kv, call.n_tokens))]


def by_size(call: DecodeCall, n_kv: int) -> list[ExportedNode]:
    """Has other ops for one token, and for long caches."""
    x = shape(8, call.n_tokens)
    return [node("silu", x), *([node("relu", x)] if call.n_tokens == 1 else []), *([node("neg", x)] * (n_kv > 600))]


def squares(call: DecodeCall, n_kv: int) -> list[ExportedNode]:
    return [node("exp", shape(call.n_tokens**2, n_kv))]


@pytest.mark.parametrize("build", [attention, rounded, by_size, squares])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_tokens": (1, 7, 300), "n_outputs": (1, 3, 300)},
        {"n_seq_max": 2, "n_tokens": (1, 2, 300)},
        {"n_kv": (512, 1024)},
        {"n_tokens": (300,), "flash_attn": (True, False)},
        {"n_ctx": (256,), "n_tokens": (1,)},
        {"n_ctx": (256, 512, 1024), "n_tokens": (1, 2, 300)},
    ],
)
def test_the_manifest_stands_for_what_the_calls_need_and_for_nothing_else(
    build: Build, changes: dict[str, object], tmp_path: Path
) -> None:
    settings = replace(BASE, **changes)  # type: ignore[arg-type]
    assert kernels(run(build, settings), tmp_path) == of(build, settings)


def test_formulas_make_it_short() -> None:
    exports: list[int] = []
    derived = run(attention, exports=exports)
    assert derived.listed == 0
    assert len(exports) == 1  # a few sizes were enough
    shown = text(derived)
    assert shown.count("- op:") == 5  # the rows of outputs pass through the same silu as those of tokens
    assert "sizes:\n  n_tokens: [1, 300]\n  n_kv: [256, 512, 1024]\n  n_outputs: [1, 300]\n" in shown
    assert "where: [n_outputs <= n_tokens, n_tokens <= n_kv]\n" in shown
    assert '"(8,${n_tokens},4,1)/f32/(4,128,32,128)"' in shown
    assert "batch" not in shown


def test_a_few_lengths_of_the_cache_stand_for_all(tmp_path: Path) -> None:
    settings = replace(BASE, n_ctx=(4096,), n_kv=tuple(range(256, 4097, 256)))
    exports: list[int] = []
    derived = run(attention, settings, exports)
    assert len(exports) == 1
    assert exports[0] < len(list(sizes.requested_calls(settings, 1)))
    assert kernels(derived, tmp_path) == of(attention, settings)


def test_what_has_no_formula_is_listed_and_said() -> None:
    exports: list[int] = []
    derived = run(squares, exports=exports)
    assert derived.listed == 5
    assert exports[1] == len(list(sizes.requested_calls(BASE, 1)))
    assert "${" not in text(derived)


def test_a_node_without_a_kernel_is_a_comment_with_its_reason(tmp_path: Path) -> None:
    def build(call: DecodeCall, n_kv: int) -> list[ExportedNode]:
        x = shape(8, call.n_tokens)
        return [
            node("silu", x),
            node("win_part", x),
            node("silu", shape(8, call.n_tokens, dtype="i32")),
            node("add", x, shape(0)),
        ]

    derived = run(build)
    shown = text(derived)
    assert "no emitter" in shown
    reasons = {entry.reason for entry in derived.entries if entry.reason}
    assert "silu: no emitter for these types: i32" in reasons
    assert "add: a tensor without elements" in reasons
    assert {spec.op for spec in kernels(derived, tmp_path)} <= {"silu", "win_part"}
    assert all(sum(call.without.values()) >= 2 for call in derived.calls)


def test_equal_graphs_give_equal_bytes() -> None:
    assert text(run(attention)) == text(run(attention))
