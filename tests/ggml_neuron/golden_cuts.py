"""Writes tests/data/token-cuts.json: pairs of a node and a kernel, and how Python and C++ must cut the node for the
kernel.

    PYTHONPATH=tools python tests/ggml_neuron/golden_cuts.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernelgen.ggml.ops import GLU, OPS, UNARY, op
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.tokens import cuts, why_not

PATH = Path(__file__).parents[1] / "data" / "token-cuts.json"

Texts = list[str | None]

ROW = "(32,{n},1,1)/f32"
HEADS = "(16,4,{n},1)/f32"
IDS = "({n},1,1,1)/i32"
CACHE = "(16,{m},4,1)/f16/(2,128,32,8192)"
QUERY = "(16,{n},4,1)/f32/(4,256,64,4096)"
STREAMS = "(16,{n},4,2)/f32/(4,256,64,4096)"

# The sources, then the result. {n} is the number of tokens, {m} the number of cells.
NODES: tuple[tuple[str, Texts], ...] = (
    ("mul_mat", ["(32,24,1,1)/q8_0", ROW, "(24,{n},1,1)/f32"]),
    ("mul_mat_id", ["(32,24,3,1)/f16", "(32,1,{n},1)/f32", "(2,{n},1,1)/i32", "(24,2,{n},1)/f32"]),
    ("add_id", ["(32,2,{n},1)/f32", "(32,3,1,1)/f32", "(2,{n},1,1)/i32", "(32,2,{n},1)/f32"]),
    ("rope", [HEADS, IDS, HEADS]),
    ("rope", [HEADS, "(28,1,1,1)/i32", HEADS]),  # four dimensions of positions
    ("rope_back", [HEADS, IDS, "(8,1,1,1)/f32", HEADS]),
    ("get_rows", ["(32,{m},1,1)/q4_0", IDS, ROW]),
    ("get_rows", ["(1,3,{n},1)/f32", "(2,{n},1,1)/i32", "(1,2,{n},1)/f32"]),
    ("set_rows", [ROW, "({n},1,1,1)/i64", "(32,{m},1,1)/f16", "(32,{m},1,1)/f16"]),
    ("flash_attn_ext", [QUERY, CACHE, CACHE, "({m},{n},1,1)/f16", HEADS]),
    ("flash_attn_ext", [QUERY, CACHE, CACHE, None, "(4,1,1,1)/f32", HEADS]),
    ("flash_attn_ext", [STREAMS, "(16,{m},4,2)/f16", "(16,{m},4,2)/f16", "({m},{n},1,2)/f16", "(16,4,{n},2)/f32"]),
    ("mul", [HEADS, "(16,1,1,1)/f32", HEADS]),
    ("add", [ROW, ROW, ROW]),
    ("div", [ROW, "(1,{n},1,1)/f32", ROW]),
    ("repeat", ["(32,1,{n},1)/f32", "(32,2,{n},1)/f32"]),
    ("repeat", ["(32,2,1,1)/f32", "(32,2,{n},1)/f32"]),
    ("soft_max", [ROW, "(32,{n},1,1)/f16", ROW]),
    ("cpy", [ROW, "(32,{n},1,1)/f16", "(32,{n},1,1)/f16"]),
    ("concat", [ROW, "(8,{n},1,1)/f32", "(40,{n},1,1)/f32"]),
    ("swiglu", [ROW, ROW, ROW]),
    ("silu", [HEADS, HEADS]),
    ("top_k", [ROW, "(3,{n},1,1)/i32"]),
    # no rule covers these
    ("ssm_conv", ["(10,32,1,1)/f32", "(4,32,1,1)/f32", ROW]),
    ("conv_2d", ["(3,3,4,8)/f16", "(8,8,4,1)/f32", "(8,8,8,1)/f32"]),
)


def _changed(rng: random.Random, text: str) -> str:
    """Returns a tensor with one change that can matter to a cut: another extent or another stride."""
    t = TensorDesc.parse(text)
    ne = list(t.ne)
    axis = rng.randrange(1, 4)
    if rng.random() < 0.6 or t.dtype not in ("f32", "f16"):
        ne[axis] = rng.choice((1, 2, 4, 7))
        return str(TensorDesc.make(ne, t.dtype))
    nb = list(t.nb)
    nb[axis] = rng.choice((nb[axis] * 2, nb[0] * ne[0], nb[0]))
    return str(TensorDesc.make(ne, t.dtype, nb))


def _cases() -> Iterator[tuple[str, Texts, Texts]]:
    rng = random.Random(11)
    named = [name for name, _ in NODES]
    others = sorted(name for name in {*OPS, *UNARY, *GLU} if name not in named and op(name).tokens)
    nodes = (*NODES, *((name, [ROW, ROW]) for name in others))
    for name, texts in nodes:
        for i in range(12 if name in named else 1):
            n, m = rng.choice(((1, 9), (4, 64), (7, 9))), rng.choice(((1, 9), (4, 64), (7, 64)))
            node, kernel = ([t and t.format(n=n, m=m) for t in texts] for n, m in (n, m))
            if i >= 4:
                at = rng.choice([j for j, t in enumerate(texts) if t])
                node[at] = _changed(rng, node[at] or "")
                if rng.random() < 0.3:
                    kernel[at] = node[at]
            yield name, node, kernel


def cut(name: str, node: Sequence[str | None], kernel: Sequence[str | None]) -> tuple[str, str]:
    """Returns a node's tokens, cells and the axis of each tensor, or `none`; and why the node can't be cut at all, or ""."""
    tensors, its = ([t and TensorDesc.parse(t) for t in texts] for texts in (node, kernel))
    (*sources, result), (*kernels, made) = tensors, its
    assert result and made
    families = {found.family for found in cuts(name, kernels, made)}
    way = next((found for found in cuts(name, sources, result) if found.family in families), None)
    axes = " ".join(str(-1 if a is None else a) for a in way.axes) if way else ""
    return f"{way.n} {way.n_more or 0} {axes}" if way else "none", why_not(name, sources, result) or ""


def main() -> None:
    lines: list[str] = []
    for name, node, kernel in _cases():
        found, why = cut(name, node, kernel)
        case: dict[str, Any] = {"op": name, "node": node, "kernel": kernel, "cut": found, "why_not": why}
        if (line := json.dumps(case)) not in lines:
            lines.append(line)
    PATH.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
