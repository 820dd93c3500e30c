"""The spec of a kernel: its op, on tensors of exact shapes and types, and the id derived from them.

Other packages compute a kernel (`kernelgen.emitters`) and compile it (`kernelgen.compilers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ANY, ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES_BY_NUMBER
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.spec.canonical import canonical_json

MAX_INPUTS = 16
"""Maximum inputs of an op kernel, and of a node of a graph kernel; the same as in backend/bundle/include/neuron_kernels.h."""
MAX_ID = 63
"""Maximum bytes of a kernel id: it must fit a file name with a suffix, a GGUF tensor name and a C symbol."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The computation of one kernel: the identity that manifests share, HLO is named by, and a backend looks up.

    Attributes:
        op: `ggml_op_desc` in lower case.
        inputs: ggml's `src[0…]`; None for an absent input before a present one.
        output: the result.
        params: all (name, value), sorted by name, floats rounded to binary32.
        alias: the input whose memory holds the result, or None.
    """

    op: str
    inputs: tuple[TensorDesc | None, ...]
    output: TensorDesc
    params: tuple[tuple[str, ParamValue], ...] = ()
    alias: int | None = None
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", _kernel_id(self))

    @staticmethod
    def make(
        op: str,
        inputs: Iterable[TensorDesc | None],
        output: TensorDesc,
        params: Mapping[str, ParamValue] | None = None,
        alias: int | None = None,
    ) -> KernelSpec:
        """Returns the canonical spec: trailing absent inputs dropped, defaults filled in, the op's own aliasing applied.

        Raises:
            ValueError: no kernel can have this spec: an input that is not a weight has a layout, there are more than `MAX_INPUTS`,
                or the input whose memory holds the result is absent.
        """
        srcs = list(inputs)
        while srcs and srcs[-1] is None:
            srcs.pop()
        weight = WEIGHTS.get(op)
        wrong = next((t for i, t in enumerate((*srcs, output)) if t is not None and t.layout and i != weight), None)
        if wrong is not None:
            raise ValueError(f"{op}: only the weights of {' and '.join(WEIGHTS)} have a layout, not {wrong}")
        known = ggml_ops.op(op)
        full = known.with_defaults(params or {})
        known.opened(full)
        shared = known.alias if alias is None else alias
        if len(srcs) > MAX_INPUTS:
            raise ValueError(f"{op}: {len(srcs)} inputs, more than {MAX_INPUTS}")
        if shared is not None and (not 0 <= shared < len(srcs) or srcs[shared] is None):
            raise ValueError(f"{op}: the result shares the memory of input {shared}, which is not there")
        return KernelSpec(op, tuple(srcs), output, tuple(sorted(full.items())), shared)

    @property
    def updates(self) -> tuple[int, ...]:
        """The inputs that the kernel changes, other than `alias` (an optimizer's momenta)."""
        return ggml_ops.op(self.op).updates

    @property
    def opened(self) -> tuple[str, ...]:
        """The parameters that are `ANY`: the kernel receives them at run time, in this order, as one more input of F32."""
        return ggml_ops.op(self.op).opened(dict(self.params))

    @property
    def open(self) -> KernelSpec | None:
        """The kernel of the same op that accepts any numbers; None if the op has none, or this kernel already does."""
        opens = ggml_ops.op(self.op).opens
        if not opens or self.opened:
            return None
        return KernelSpec.make(
            self.op, self.inputs, self.output, {**dict(self.params), **{p.name: ANY for p in opens}}, self.alias
        )

    @property
    def op_params(self) -> tuple[int, ...]:
        """ggml's 16 words of `op_params`; all 0 for a custom op."""
        return ggml_ops.op(self.op).encode(dict(self.params))

    @property
    def without_layouts(self) -> KernelSpec:
        """The kernel of the same op with weights in ggml's layout."""
        if all(t is None or not t.layout for t in self.inputs):
            return self
        return replace(self, inputs=tuple(None if t is None else t.in_layout("") for t in self.inputs))

    @property
    def of_ggml(self) -> KernelSpec:
        """The kernel of the same op with only ggml's parameters, which computes any node of that op."""
        known = ggml_ops.op(self.op).by_name
        return replace(self, params=tuple((k, v) for k, v in self.params if k not in known or not known[k].ours))

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as plain values; `from_json` is its inverse."""
        return {
            "op": self.op,
            "inputs": [None if t is None else str(t) for t in self.inputs],
            "output": str(self.output),
            "params": params_to_json(self.params),
            "alias": self.alias,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> KernelSpec:
        """Returns the spec that `to_json` wrote.

        Raises:
            ValueError, KeyError: `value` is not such a spec.
        """
        if not isinstance(value["op"], str):
            raise ValueError(f"op is a name, not {value['op']!r}")
        if value["alias"] is not None and type(value["alias"]) is not int:
            raise ValueError(f"alias is the number of an input, not {value['alias']!r}")
        return KernelSpec.make(
            value["op"],
            [None if t is None else TensorDesc.parse(t) for t in value["inputs"]],
            TensorDesc.parse(value["output"]),
            {name: param_from_json(v) for name, v in value["params"].items()},
            value["alias"],
        )


def params_to_json(params: Iterable[tuple[str, ParamValue]]) -> dict[str, ParamValue | str]:
    """Returns parameters as JSON values: infinities and "nan" as text."""
    return {name: _param_to_json(value) for name, value in params}


def param_from_json(value: Any) -> ParamValue:
    """Returns a parameter of `params_to_json`. Bazel's attributes pass every value as text.

    Raises:
        ValueError: a text is not a number, `true` or `false`.
    """
    return param_from_text(value) if isinstance(value, str) else value


def param_text(value: ParamValue) -> str:
    """Returns a parameter as text that shows its type: `1` is an int, `1.0` a float, `true` a bool; or `any`."""
    return str(value).lower() if isinstance(value, str) else repr(value).lower()


def param_from_text(text: str) -> ParamValue:
    """Returns the parameter that `param_text` wrote.

    Raises:
        ValueError: `text` is not a number, `true`, `false` or `any`.
    """
    if text == ANY:
        return ANY
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _param_to_json(value: ParamValue) -> ParamValue | str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


class AnySpec(Protocol):
    """The computation of one kernel, of any kind (`kernelgen.spec.graph_kernel.Spec`)."""

    def to_json(self) -> dict[str, Any]: ...


def spec_json(spec: AnySpec) -> str:
    """Returns the spec's canonical JSON: the input of its id's digest, and of an emit step."""
    return canonical_json(spec.to_json())


def _kernel_id(spec: KernelSpec) -> str:
    digest = hashlib.sha256(spec_json(spec).encode()).hexdigest()[:12]
    ne = spec.output.ne
    last = max((i for i in range(4) if ne[i] != 1), default=0)
    head = f"{spec.op}-{'x'.join(map(str, ne[: last + 1]))}-{spec.output.dtype}"
    return f"{head[: MAX_ID - 13]}-{digest}"


def spec_from_ggml(
    number: int,
    words: Sequence[int],
    inputs: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    output: tuple[int, Sequence[int]],
) -> KernelSpec:
    """Returns the spec of a graph node from ggml's own numbers.

    Args:
        number: `enum ggml_op`.
        words: `op_params`, 16 words.
        inputs: (type number, ne, nb) of each source.
        output: (type number, ne) of the result, which is contiguous.

    Raises:
        ValueError: an op or type number is unknown, or a tensor is invalid.
    """
    name = ggml_ops.op_name(number, words)
    op = ggml_ops.op(name)
    return KernelSpec.make(
        name,
        [TensorDesc.make(ne, _type_name(t), nb) for t, ne, nb in inputs],
        TensorDesc.make(output[1], _type_name(output[0])),
        op.decode(words),
    )


def _type_name(number: int) -> str:
    if number not in TYPES_BY_NUMBER:
        raise ValueError(f"unknown ggml type number {number}")
    return TYPES_BY_NUMBER[number].name
