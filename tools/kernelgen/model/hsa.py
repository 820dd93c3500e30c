"""Reads the configurations of ggml-hsa-gen-kernels, with which ggml's HSA backend compiles kernels for AMD's XDNA ahead of time.

A configuration is a JSON object with the list `kernels`. Each has `kernel_name` (`ggml_op_add`, `ggml_unary_op_relu`), `arch`,
`kernel_source`, `input_tensors`, `output_tensor` and `exported_name`. A tensor is written as in a manifest,
`(ne0,ne1,ne2,ne3)/dtype[/(strides)]`; its strides are bytes, as ggml's `nb`, or elements, as on the tool's own page.

Source of the format: src/ggml-hsa/KERNEL_PREGENERATION.md and ggml-hsa-gen-kernels.py of github.com/ypapadop-amd/ggml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from kernelgen import fileio
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError, did_you_mean
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.manifest import document, kernels
from kernelgen.manifest.document import YamlEntry, YamlNode, short
from kernelgen.manifest.schema import Report, describe
from kernelgen.model.reasons import Reasons
from kernelgen.model.sources import MAX_JSON, read_json
from kernelgen.spec.kernel import KernelSpec

_TEXTS = ("kernel_name", "kernel_source", "arch", "output_tensor", "exported_name")
_KEYS = (*_TEXTS, "input_tensors")
_FREE = ("description", "comment")
"""Keys that the tool ignores, as it does keys that begin with `_`."""

_OPS = {
    **{f"ggml_op_{name}": name for name in ggml_ops.ENUM if name not in ("none", "unary", "glu")},
    **{f"ggml_unary_op_{name}": name for name in ggml_ops.UNARY},
}

_STRIDED = re.compile(r"\s*\(([^()]*)\)\s*/\s*(\w+)\s*/\s*\(([^()]*)\)\s*")


@dataclass(frozen=True, slots=True)
class HsaKernel:
    """A kernel of a configuration, and its `exported_name`."""

    spec: KernelSpec
    name: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The kernels of a configuration.

    Attributes:
        kernels: one for each entry, in the file's order.
        notes: messages about how the file was read.
    """

    kernels: tuple[HsaKernel, ...]
    notes: tuple[str, ...]


def read(path: Path, catalog: Catalog) -> Configuration:
    """Reads a configuration.

    Raises:
        KernelgenError: the file has mistakes; the error lists each with its place.
    """
    file = str(path)
    try:
        data = fileio.read_input(path, MAX_JSON)
    except OSError as error:
        raise KernelgenError(f"can't read '{file}': {error.strerror or error}") from None
    read_json(data, file)
    # The YAML reader keeps the places of values and accepts JSON, except for tabs, which JSON allows between values.
    parsed = document.parse(data.replace(b"\t", b" "), file)
    if parsed.root is None or parsed.problems:
        raise KernelgenError(parsed.problems)
    reader = _Reader(catalog)
    found = reader.read(parsed.root)
    if reader.report.diagnostics:
        raise KernelgenError(sorted(reader.report.diagnostics, key=lambda d: (d.location, d.message)))
    many = "1 tensor has its strides" if reader.in_elements == 1 else f"{reader.in_elements} tensors have their strides"
    notes = (f"{file}: {many} in elements, not in bytes",) if reader.in_elements else ()
    return Configuration(tuple(found), notes)


class _Reader:
    def __init__(self, catalog: Catalog) -> None:
        self.report = Report()
        self.in_elements = 0
        self._catalog = catalog
        self._reasons = Reasons(catalog)
        self._exported: dict[tuple[str, str], tuple[KernelSpec, YamlNode]] = {}

    def read(self, root: YamlNode) -> list[HsaKernel]:
        listed = root.get("kernels")
        if listed is None or listed.kind != "seq" or not listed.value:
            self.report.fail(
                listed or root, f"kernels: expected a list of kernels, not {describe(listed) if listed else 'nothing'}"
            )
            return []
        return [kernel for entry in listed.value if (kernel := self._kernel(entry)) is not None]

    def _kernel(self, entry: YamlNode) -> HsaKernel | None:
        if entry.kind != "map":
            self.report.fail(entry, f"a kernel is a mapping, not {describe(entry)}")
            return None
        before = len(self.report.diagnostics)
        self._check_keys(entry)
        for key in _TEXTS:
            self._check_text(entry.get(key), key)
        inputs = entry.get("input_tensors")
        if inputs is not None and self._check_list(inputs):
            for i, item in enumerate(inputs.value):
                self._check_text(item, f"input_tensors[{i}]")
        op = self._op(entry.get("kernel_name"))
        if len(self.report.diagnostics) > before or op is None or inputs is None:
            return None
        spec = self._spec(entry, op, inputs)
        return None if spec is None else self._named(entry, spec)

    def _check_keys(self, entry: YamlNode) -> None:
        missing = [key for key in _KEYS if key not in entry.value]
        for key, item in entry.value.items():
            if key in _KEYS or key in _FREE or key.startswith("_"):
                continue
            near = did_you_mean(key, missing)
            if near:
                missing.remove(near.split("'")[1])
            self.report.fail(item.key, f"unknown key '{short(key)}'{near}", f"a kernel has {', '.join(_KEYS)}")
        if missing:
            self.report.fail(entry, "the kernel has no '" + "', '".join(missing) + "'")

    def _check_list(self, node: YamlNode) -> bool:
        return node.kind == "seq" or self.report.fail(
            node, f"input_tensors: expected a list of tensors, not {describe(node)}"
        )

    def _check_text(self, node: YamlNode | None, key: str) -> None:
        if node is not None and (node.kind != "scalar" or not isinstance(node.value, str) or not node.value.strip()):
            self.report.fail(node, f"{key}: expected text, not {describe(node)}")

    def _op(self, node: YamlNode | None) -> YamlNode | None:
        """Returns the op's name at the place of the kernel's name."""
        if node is None or id(node) in self.report.wrong:
            return None
        op = _OPS.get(node.text.strip())
        if op is None:
            near = did_you_mean(node.text, _OPS)
            self.report.fail(
                node, f"unknown kernel '{short(node.text)}'{near}", "names are ggml_op_add, ggml_unary_op_relu, …"
            )
            return None
        return _scalar(node, op)

    def _spec(self, entry: YamlNode, op: YamlNode, inputs: YamlNode) -> KernelSpec | None:
        """Returns the kernel, checked like an entry of a manifest."""
        output = entry.get("output_tensor")
        assert output is not None
        listed = YamlNode("seq", [self._tensor(item) for item in inputs.value], "", inputs.file, _mark(inputs))
        result = self._tensor(output)
        spec = self._of_other_types(op.text, [item.text for item in listed.value], result.text)
        if spec is not None:
            return spec
        made = YamlNode("map", {}, "", entry.file, _mark(entry))
        for key, node in (("op", op), ("inputs", listed), ("output", result)):
            made.value[key] = YamlEntry(_scalar(node, key), node)
        expanded, _ = kernels.expand(made, self._catalog, self.report)
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

    def _named(self, entry: YamlNode, spec: KernelSpec) -> HsaKernel | None:
        name, arch = entry.get("exported_name"), entry.get("arch")
        assert name is not None
        assert arch is not None
        first, where = self._exported.setdefault((arch.text, name.text), (spec, name))
        if first != spec:
            message = f"kernel '{short(name.text)}' is already defined for {short(arch.text)}, with other content"
            self.report.fail(name, message, f"the first is at {where.location}")
            return None
        return HsaKernel(spec, name.text)


def _scalar(at: YamlNode, text: str) -> YamlNode:
    """Returns a scalar with the place of a node."""
    return YamlNode("scalar", text, text, at.file, _mark(at))


def _mark(node: YamlNode) -> SimpleNamespace:
    return SimpleNamespace(line=node.line - 1, column=node.column - 1)
