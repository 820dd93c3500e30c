"""Reads the configurations of ggml-hsa-gen-kernels, with which ggml's HSA backend compiles kernels for AMD's XDNA ahead of time.

A configuration is a JSON object with the list `kernels`. Each has `kernel_name` (`ggml_op_add`, `ggml_unary_op_relu`), `arch`,
`kernel_source`, `input_tensors`, `output_tensor` and `exported_name`. A tensor is written as in a manifest,
`(ne0,ne1,ne2,ne3)/dtype[/(strides)]`; its strides are bytes, as ggml's `nb`, or elements, as on the tool's own page.

Source of the format: src/ggml-hsa/KERNEL_PREGENERATION.md and ggml-hsa-gen-kernels.py of github.com/ypapadop-amd/ggml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from msgspec import Meta, Struct

from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError, did_you_mean
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.manifest import document, kernels
from kernelgen.manifest.document import Report, YamlNode, short
from kernelgen.manifest.reading import describe, read
from kernelgen.model.reasons import Reasons
from kernelgen.model.sources import read_json
from kernelgen.spec.kernel import KernelSpec

_FREE = ("description", "comment")
"""Keys that the tool ignores, as it does keys that begin with `_`."""

_Text = Annotated[str, Meta(pattern=r"\S", extra_json_schema={"patternErrorMessage": "text"})]

_OPS = {
    **{f"ggml_op_{name}": name for name in ggml_ops.ENUM if name not in ("none", "unary", "glu")},
    **{f"ggml_unary_op_{name}": name for name in ggml_ops.UNARY},
}

_STRIDED = re.compile(r"\s*\(([^()]*)\)\s*/\s*(\w+)\s*/\s*\(([^()]*)\)\s*")


class HsaEntry(Struct, forbid_unknown_fields=True):
    """An entry of `kernels`.

    Attributes:
        kernel_name: such as ggml_op_add or ggml_unary_op_relu
        kernel_source: the kernel's Python file
        arch: the device
        input_tensors: a list of tensors
        output_tensor: a tensor
        exported_name: the name that the backend asks for
    """

    kernel_name: _Text
    kernel_source: _Text
    arch: _Text
    input_tensors: list[_Text]
    output_tensor: _Text
    exported_name: _Text


def read_kernels(path: Path, catalog: Catalog) -> tuple[list[tuple[KernelSpec, str]], tuple[str, ...]]:
    """Returns each kernel of a configuration with its `exported_name`, and messages about how the file was read.

    Raises:
        KernelgenError: the file has mistakes; the error lists each with its place.
    """
    file = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KernelgenError(f"can't read '{file}': {error.strerror or error}") from None
    read_json(data, file)
    # The YAML reader keeps the places of values and accepts JSON, except for tabs, which JSON allows between values.
    reader = _Reader(catalog)
    root = document.parse(data.replace(b"\t", b" "), file, reader.report)
    found = [] if root is None else reader.kernels(root)
    if reader.report.diagnostics:
        raise KernelgenError(sorted(reader.report.diagnostics, key=lambda d: (d.location, d.message)))
    many = "1 tensor has its strides" if reader.in_elements == 1 else f"{reader.in_elements} tensors have their strides"
    notes = (f"{file}: {many} in elements, not in bytes",) if reader.in_elements else ()
    return found, notes


class _Reader:
    def __init__(self, catalog: Catalog) -> None:
        self.report = Report()
        self.in_elements = 0
        self._catalog = catalog
        self._reasons = Reasons(catalog)
        self._exported: dict[tuple[str, str], tuple[KernelSpec, YamlNode]] = {}

    def kernels(self, root: YamlNode) -> list[tuple[KernelSpec, str]]:
        listed = root.get("kernels")
        if listed is None or listed.kind != "seq" or not listed.value:
            self.report.fail(
                listed or root, f"kernels: expected a list of kernels, not {describe(listed) if listed else 'nothing'}"
            )
            return []
        return [kernel for entry in listed.value if (kernel := self._kernel(entry)) is not None]

    def _kernel(self, node: YamlNode) -> tuple[KernelSpec, str] | None:
        if node.kind == "map":
            node.value = {k: item for k, item in node.value.items() if k not in _FREE and not k.startswith("_")}
        entry = read(node, HsaEntry, "the kernel", self.report)
        if entry is None:
            return None
        name = node.at("kernel_name")
        op = _OPS.get(entry.kernel_name.strip())
        if op is None:
            near = did_you_mean(name.text, _OPS)
            hint = "names are ggml_op_add, ggml_unary_op_relu, …"
            self.report.fail(name, f"unknown kernel '{short(name.text)}'{near}", hint)
            return None
        spec = self._spec(node, _scalar(name, op), node.at("input_tensors"))
        return None if spec is None else self._named(node, entry, spec)

    def _spec(self, entry: YamlNode, op: YamlNode, inputs: YamlNode) -> KernelSpec | None:
        """Returns the kernel, checked like an entry of a manifest."""
        listed = YamlNode("seq", [self._tensor(item) for item in inputs.value], "", inputs.file, _mark(inputs))
        result = self._tensor(entry.at("output_tensor"))
        spec = self._of_other_types(op.text, [item.text for item in listed.value], result.text)
        if spec is not None:
            return spec
        made = YamlNode("map", {"op": op, "inputs": listed, "output": result}, "", entry.file, _mark(entry))
        expanded, _ = kernels.expand(made, kernels.Context(self._catalog, self.report))
        found = expanded[0].spec if expanded else None
        assert found is None or isinstance(found, KernelSpec)
        return found

    def _of_other_types(self, op: str, inputs: Sequence[str], output: str) -> KernelSpec | None:
        """Returns a kernel whose types the op's emitter lacks, or None. It can't be built, but it is not a mistake."""
        try:
            spec = KernelSpec.make(op, map(TensorDesc.parse, inputs), TensorDesc.parse(output))
        except ValueError:
            return None
        return spec if op in self._catalog.by_op and self._reasons.of_types(spec) else None

    def _tensor(self, node: YamlNode) -> YamlNode:
        """Returns a tensor with its strides in bytes.

        If a stride is not a multiple of an element's size, such as 1, all strides are in elements.
        """
        match = _STRIDED.fullmatch(node.text)
        if match is None or match[2] not in TYPES or TYPES[match[2]].quantized:
            return node
        size = TYPES[match[2]].size
        ne, nb = (figures.split(",") for figures in (match[1], match[3]))
        if len(ne) != 4 or len(nb) != 4 or not all(re.fullmatch(r"\s*[0-9]{1,18}\s*", n, re.ASCII) for n in (*ne, *nb)):
            return node  # parsing it as a tensor reports the mistake
        if all(int(b) % size == 0 for n, b in zip(ne, nb, strict=True) if int(n) > 1):
            return node
        self.in_elements += 1
        strides = ",".join(str(int(b) * size) for b in nb)
        return _scalar(node, f"({match[1]})/{match[2]}/({strides})")

    def _named(self, node: YamlNode, entry: HsaEntry, spec: KernelSpec) -> tuple[KernelSpec, str] | None:
        name = node.at("exported_name")
        first, where = self._exported.setdefault((entry.arch, name.text), (spec, name))
        if first != spec:
            message = f"kernel '{short(name.text)}' is already defined for {short(entry.arch)}, with other content"
            self.report.fail(name, message, f"the first is at {where.location}")
            return None
        return spec, name.text


def _scalar(at: YamlNode, text: str) -> YamlNode:
    """Returns a scalar with the place of a node."""
    return YamlNode("scalar", text, text, at.file, _mark(at))


def _mark(node: YamlNode) -> SimpleNamespace:
    return SimpleNamespace(line=node.line - 1, column=node.column - 1)
