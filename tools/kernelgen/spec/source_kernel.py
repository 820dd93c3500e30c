"""The spec of a kernel that is not a ggml op: a function in a file, and the arrays that it is called with.

Arrays are row-major and of any rank, as in JAX and NumPy: `f32[150,2,2500]`. A program finds such a kernel by its name.
`kernelgen.lowering.function` turns the function into HLO. docs/reference/source-kernels.md describes the manifest entries.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.op_kernel import MAX_ID, spec_json

KEY = "source"
"""Replaces an op's name in the key of such a kernel."""

NUMPY_NAMES: Mapping[str, str] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "pred": "bool",
    "f8e4m3": "float8_e4m3",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    **{
        f"{short}{bits}": f"{long}{bits}"
        for short, long in (("i", "int"), ("s", "int"), ("u", "uint"))
        for bits in (8, 16, 32)
    },
}
"""Manifest names of array dtypes, with their names in NumPy and ml_dtypes, which are accepted, too."""

_SHORT = {long: short for short, long in [*NUMPY_NAMES.items()][::-1]}
_ARRAY = re.compile(r"\s*([A-Za-z0-9_]+)\s*\[([^\[\]]*)\]\s*")


@dataclass(frozen=True, slots=True)
class ArrayDesc:
    """A row-major array: `f32[150,2,2500]`.

    Attributes:
        shape: elements per dimension, the last one fastest.
        dtype: one of `NUMPY_NAMES`.
    """

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def parse(text: str) -> ArrayDesc:
        """Returns the array that `text` describes, in its own notation or, if contiguous, in ggml's.

        Raises:
            ValueError: `text` describes no such array.
        """
        if text.lstrip().startswith("("):
            return _of_tensor(TensorDesc.parse(text))
        match = _ARRAY.fullmatch(text)
        sizes = [] if match is None or not match[2].strip() else [d.strip() for d in match[2].split(",")]
        if match is None or not all(re.fullmatch("[0-9]{1,18}", d) for d in sizes):
            raise ValueError("expected a dtype and a shape such as f32[128,512], or a tensor (512,128,1,1)/f32")
        dtype = _SHORT.get(match[1]) or (_SHORT[NUMPY_NAMES[match[1]]] if match[1] in NUMPY_NAMES else None)
        if dtype is None:
            raise ValueError(f"unknown dtype '{match[1]}': it is one of {', '.join(NUMPY_NAMES)}")
        shape = tuple(map(int, sizes))
        if 0 in shape:
            raise ValueError("dimensions are positive, not 0")
        if math.prod(shape) >= 2**60:
            raise ValueError("the array is larger than 2^60 elements")
        return ArrayDesc(shape, dtype)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return "float" in NUMPY_NAMES[self.dtype]

    @property
    def numpy(self) -> tuple[tuple[int, ...], str]:
        """The shape, and the dtype's name in NumPy or ml_dtypes."""
        return self.shape, NUMPY_NAMES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def _of_tensor(tensor: TensorDesc) -> ArrayDesc:
    if tensor.dtype not in NUMPY_NAMES:
        raise ValueError(f"an array of a kernel that is named by its source is of plain numbers, not {tensor.dtype}")
    if not tensor.contiguous:
        raise ValueError("an array of a kernel that is named by its source has no gaps")
    return ArrayDesc(tensor.shape, tensor.dtype)


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The computation of one kernel: a function and its arguments.

    Attributes:
        name: the name by which a program finds it; unique in a bundle.
        source: `FILE.py:FUNCTION`, relative to the manifest's folder, with `/`.
        inputs: the array arguments, in order.
        outputs: the results, in order. Inputs that the function changes in place follow them.
        params: (name, value) of its static arguments, sorted by name: numbers, texts, true, false, None, and tuples of these.
        grid: number of programs in each dimension; empty for a launch without a grid.
        env: (name, value) of the environment variables that the file gets, sorted.
        alias: (output, input) of results that are written to an input's memory, sorted.
        lowering: `interpreted`, or `native` for the output of the language's own compiler.
        arguments: names of the arguments that receive the inputs; empty if these are the function's first arguments.
    """

    name: str
    source: str
    inputs: tuple[ArrayDesc, ...]
    outputs: tuple[ArrayDesc, ...]
    params: tuple[tuple[str, Any], ...] = ()
    grid: tuple[int, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    alias: tuple[tuple[int, int], ...] = ()
    lowering: str = "interpreted"
    arguments: tuple[str, ...] = ()
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(spec_json(self).encode()).hexdigest()[:12]
        out = self.outputs[0]
        head = "-".join(filter(None, (self.name, "x".join(map(str, out.shape)), out.dtype)))
        object.__setattr__(self, "id", f"{head[: MAX_ID - 13]}-{digest}")

    @property
    def op(self) -> str:
        """Replaces the op of other kernels in lists and patterns."""
        return self.name

    @property
    def function(self) -> str:
        """The function's name."""
        return self.source.rpartition(":")[2]

    @property
    def file(self) -> str:
        """The file, relative to the manifest's folder."""
        return self.source.rpartition(":")[0]

    @property
    def interpreted(self) -> SourceSpec:
        """The same kernel lowered by the interpreter, which a CPU can run."""
        return self if self.lowering == "interpreted" else replace(self, lowering="interpreted")

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as plain values; `from_json` is its inverse. Empty values are omitted."""
        made: dict[str, Any] = {
            "name": self.name,
            "source": self.source,
            "inputs": [str(a) for a in self.inputs],
            "outputs": [str(a) for a in self.outputs],
            "params": dict(self.params),
        }
        more = {"grid": self.grid, "env": dict(self.env), "alias": {str(k): i for k, i in self.alias}}
        more |= {"arguments": list(self.arguments)}
        made |= {name: value for name, value in more.items() if value}
        return made if self.lowering == "interpreted" else made | {"lowering": self.lowering}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SourceSpec:
        """Returns the spec that `to_json` wrote.

        Raises:
            ValueError, KeyError: `value` is not such a spec.
        """
        return SourceSpec(
            value["name"],
            value["source"],
            tuple(map(ArrayDesc.parse, value["inputs"])),
            tuple(map(ArrayDesc.parse, value["outputs"])),
            tuple(sorted((name, static(v)) for name, v in value["params"].items())),
            tuple(value.get("grid", ())),
            tuple(sorted(value.get("env", {}).items())),
            tuple(sorted((int(k), i) for k, i in value.get("alias", {}).items())),
            value.get("lowering", "interpreted"),
            tuple(value.get("arguments", ())),
        )


def own_target(spec: object, targets: Sequence[str]) -> str:
    """Returns the one target that a kernel's HLO is for; empty if the HLO is the same for all targets."""
    return targets[0] if isinstance(spec, SourceSpec) and spec.lowering == "native" and targets else ""


def static(value: Any) -> Any:
    """Returns a static argument in the form for functions: lists as tuples."""
    return tuple(map(static, value)) if isinstance(value, list | tuple) else value
