"""A kernel library with an emitter for every op, so these tests do not depend on the existing kernels."""

from __future__ import annotations

import keyword
from pathlib import Path

import pytest

from kernelgen.emitters.library import Library
from kernelgen.ggml.ops import OPS, Op

CUSTOM = """

@emitter("my_bias")
def my_bias(x, bias, gate=None, *, scale: float, steps: int = 2, clip: bool = False):
    raise NotImplementedError
"""


def _emitter(op: Op) -> str:
    names = [f"{name}_" if keyword.iskeyword(name) else name for name in op.inputs]
    inputs = [*names[: op.required], *(f"{name}=None" for name in names[op.required :])]
    params = [f"{p.name}: {p.kind.__name__}" + ("" if p.default is None else f" = {p.default!r}") for p in op.params]
    signature = ", ".join([*inputs, *(["*", *params] if params else [])])
    layouts = ', layouts=("planes", "transposed", "bf16")' if op.name == "mul_mat" else ""
    return f'\n\n@emitter("{op.name}"{layouts})\ndef {op.name}({signature}):\n    raise NotImplementedError\n'


def make_library(folder: Path, ops: list[str] | None = None) -> Library:
    """Writes a library with stub emitters for `ops` (by default all of ggml's), and for the custom op `my_bias`."""
    chosen = OPS.values() if ops is None else [OPS[name] for name in ops]
    text = "from kernelgen.emitters import emitter\n" + "".join(map(_emitter, chosen))
    folder.mkdir(exist_ok=True)
    (folder / "everything.py").write_text(text + CUSTOM, encoding="utf-8")
    return Library("stub", folder)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("stub"))
