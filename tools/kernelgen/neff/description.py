"""The description that a NEFF contains, and checks that it is the requested NEFF.

The header of a real NEFF contains neither compiler nor target. Both are in its payload, and so are its tensors:

    info.json                 `tool_version`: the compiler's version
    kelf-0.json               `target`: the device's name (`container.DEVICES`); `graphs`: one for each physical core
    sgNN/def.json             `var`: the inputs and outputs of a core, with sizes in bytes
    sgNN/tensor_map.json      their types and shapes

A simulated NEFF has the same members. neuronx-cc 2.0 to 2.24 write this form (docs/reference/compilers.md). This module does
not read the device's code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.neff import container
from kernelgen.neff.container import DEVICES, Header, NeffTensor

FEATURES = {
    0x4: "custom ops",
    0x100: "bound check of indirect copies",
    0x200: "DMA descriptors of higher dimensions",
    0xC00: "logical cores",
}
"""Bits of the header's `feature_bits`, by their names in `def.json`. 0x1000, 0x8000 and 0x200000 occur without a name."""

# XLA's names of the types that NEFFs name as NumPy does.
_TYPES = {
    **{"uint8": "u8", "int8": "s8", "uint16": "u16", "int16": "s16", "uint32": "u32", "int32": "s32"},
    **{"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"},
    **{"float8_e5m2": "f8e5m2", "float8_e4m3fn": "f8e4m3fn", "float8_e4m3": "f8e4m3", "float8_e3m4": "f8e3m4"},
}
_USAGES = {"input": "in", "output": "out"}


@dataclass(frozen=True, slots=True)
class NeffDescription:
    """The description in a NEFF.

    Attributes:
        header: its header.
        compiler: the compiler's version; for a simulated NEFF the simulator's identity.
        device: the device's name.
        cores: names of the physical cores' programs.
        tensors: inputs, then outputs, by name. Inputs that the compiler found irrelevant are missing. The description does not
            record which output shares an input's memory.
    """

    header: Header
    compiler: str
    device: str
    cores: tuple[str, ...]
    tensors: tuple[NeffTensor, ...]

    @property
    def identity(self) -> str:
        """Its compiler, in the form of `Compiler.identity`."""
        return self.compiler if self.header.simulated else f"neuronx-cc {self.compiler}"

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that it may be for."""
        return tuple(target for target, device in DEVICES.items() if device == self.device)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the runtime must support; bits without a name as a number."""
        named = [name for bits, name in FEATURES.items() if self.header.feature_bits & bits == bits]
        left = self.header.feature_bits & ~sum(bits for bits in FEATURES if self.header.feature_bits & bits == bits)
        return (*named, *([hex(left)] if left else []))


def describe(data: bytes, *, source: str = "NEFF") -> NeffDescription:
    """Returns a NEFF's description, after reading its payload to the end.

    Args:
        data: the NEFF.
        source: its name in errors.

    Raises:
        KernelgenError: not a NEFF, damaged, or of an unknown form.
    """
    header = container.read_header(data, source=source)

    def wanted(name: str) -> bool:
        return name in (container.INFO_MEMBER, container.KELF_MEMBER) or name.endswith(
            (f"/{container.DEFINITION}", f"/{container.TENSOR_MAP}")
        )

    files = container.unpack(data, source=source, only=wanted)

    def member(name: str) -> dict[str, Any]:
        if name not in files:
            raise KernelgenError(f"{source}: damaged NEFF, or of an unknown form: it has no {name}")
        try:
            value = json.loads(files[name])
        except ValueError as error:
            raise KernelgenError(f"{source}: damaged NEFF: {name} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise KernelgenError(f"{source}: damaged NEFF: {name} is not an object")
        return value

    try:
        compiler, kelf = member(container.INFO_MEMBER)["tool_version"], member(container.KELF_MEMBER)
        device, graphs = kelf["target"], [(graph["name"], graph["definition"]) for graph in kelf["graphs"]]
        if not all(isinstance(text, str) for text in (compiler, device, *sum(graphs, ()))) or not graphs:
            raise ValueError("its compiler, its target or its graphs are not text, or missing")
        found: dict[str, NeffTensor] = {}
        for _, definition in graphs:
            types = member(f"{definition.rpartition('/')[0]}/{container.TENSOR_MAP}")
            for tensor in _tensors(member(definition)["var"], types):
                known = found.setdefault(tensor.name, tensor)
                if (known.usage, known.size) != (tensor.usage, tensor.size):
                    raise ValueError(f"its cores disagree about {tensor.name}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise KernelgenError(f"{source}: damaged NEFF, or of an unknown form: {what}") from None
    tensors = sorted(found.values(), key=lambda tensor: tensor.usage == "out")
    return NeffDescription(header, compiler, device, tuple(name for name, _ in graphs), tuple(tensors))


def _tensors(variables: dict[str, Any], types: dict[str, Any]) -> list[NeffTensor]:
    """Returns the inputs and outputs among a core's variables, in their order."""
    made = []
    for name, variable in variables.items():
        if variable["type"] in _USAGES:
            size, dtype, shape = variable["size"], types[name]["dtype"], types[name]["tf_shape"]
            if not all(isinstance(n, int) for n in (size, *shape)) or not isinstance(dtype, str):
                raise ValueError(f"the size, the type or the shape of {name} cannot be read")
            made.append(NeffTensor(name, _USAGES[variable["type"]], _TYPES.get(dtype, dtype), tuple(shape), size))
    return made


def check(
    said: NeffDescription, expected: Sequence[NeffTensor], target: str, lnc: int, *, source: str = "NEFF"
) -> None:
    """Raises if a NEFF is not the expected one.

    Inputs may be missing, because the compiler drops irrelevant ones. Types and shapes may differ at equal size: a device has no
    64-bit integers and no bools.

    Args:
        said: its description.
        expected: the tensors of its HLO (`container.tensors_of`).
        target: neuronx-cc's `--target`.
        lnc: physical cores of a logical core.
        source: its name in errors.

    Raises:
        KernelgenError: lists all differences.
    """
    mistakes = [*_wrong_device(said, target, lnc), *_wrong_tensors(said, expected)]
    if mistakes:
        raise KernelgenError([Diagnostic(f"{source}: {text}") for text in mistakes])


def check_device(said: NeffDescription, target: str, lnc: int, *, source: str = "NEFF") -> None:
    """Raises if a NEFF is for another device than expected; see `check`.

    Raises:
        KernelgenError: lists all differences.
    """
    mistakes = _wrong_device(said, target, lnc)
    if mistakes:
        raise KernelgenError([Diagnostic(f"{source}: {text}") for text in mistakes])


def _wrong_device(said: NeffDescription, target: str, lnc: int) -> list[str]:
    mistakes = []
    if said.device != DEVICES.get(target):
        what = f"{said.device} ({', '.join(said.targets) or 'no target that is known'})"
        mistakes.append(f"compiled for {what}, not for {target} ({DEVICES.get(target, 'unknown')})")
    if (said.header.lnc_size, len(said.cores)) != (lnc, lnc):
        cores = f"{said.header.lnc_size} physical cores, with code for {len(said.cores)}"
        mistakes.append(f"compiled for logical cores of {cores}; expected {lnc}")
    return mistakes


def _wrong_tensors(said: NeffDescription, expected: Sequence[NeffTensor]) -> list[str]:
    mistakes = []
    wanted = {(tensor.name, tensor.usage): tensor for tensor in expected}
    labels = {"in": "input", "out": "output"}
    for tensor in said.tensors:
        of_hlo = wanted.get((tensor.name, tensor.usage))
        if of_hlo is None:
            mistakes.append(f"it has an {labels[tensor.usage]} {tensor.name}, which its HLO lacks")
        elif of_hlo.size != tensor.size:
            mistakes.append(
                f"its {labels[tensor.usage]} {tensor.name} has {tensor.size} bytes; its HLO's {of_hlo}, {of_hlo.size}"
            )
    there = {tensor.name for tensor in said.tensors if tensor.usage == "out"}
    mistakes += [
        f"it has no output {tensor.name}, which its HLO has"
        for tensor in expected
        if tensor.usage == "out" and tensor.name not in there
    ]
    return mistakes
