"""XLA's `HloModuleProto`, limited to the parts that this project reads or changes.

Only the fields listed below are declared. protobuf keeps the bytes of unknown fields, so constants, convolution windows and later
additions to XLA pass through unchanged. Field numbers are from the public `xla/service/hlo.proto` and `xla/xla_data.proto`;
protobuf never reuses one.

This module handles only the wire format; `canonicalize` and `lint` handle the content.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

INPUT_NAMES = "neff_input_names"
"""The frontend attribute with the names of the parameters' tensors in the NEFF."""
OUTPUT_NAMES = "neff_output_names"
"""The root's frontend attribute with the names of the results' tensors, joined by commas."""
MUST_ALIAS_SUFFIX = ".must_alias_input"
"""Suffix of the NEFF tensor name of a parameter that a result overwrites."""

_PACKAGE = "kernelgen.hlo"

# Message → "type name number" per line, `*` for repeated. On the wire a map is a repeated message of key and value.
_SCHEMA: dict[str, str] = {
    "Layout": "*int64 minor_to_major 1",
    "Shape": """
        int32 element_type 2
        *int64 dimensions 3
        *Shape tuple_shapes 4
        Layout layout 5
        *bool is_dynamic_dimension 6
    """,
    "ProgramShape": """
        *Shape parameters 1
        Shape result 2
        *string parameter_names 3
    """,
    "Attribute": """
        string key 1
        string value 2
    """,
    "FrontendAttributes": "*Attribute map 1",
    "ResultAccuracy": "int32 mode 1",
    "Literal": """
        Shape shape 1
        *uint64 u64s 7
    """,
    "Instruction": """
        string name 1
        string opcode 2
        Shape shape 3
        bytes metadata 7
        Literal literal 8
        int64 parameter_number 9
        int64 tuple_index 13
        int64 channel_id 26
        string custom_call_target 28
        int64 id 35
        *int64 operand_ids 36
        *int64 control_predecessor_ids 37
        *int64 called_computation_ids 38
        bytes sharding 40
        bytes backend_config 43
        bool custom_call_has_side_effect 65
        FrontendAttributes frontend_attributes 68
        bytes statistics_viz 82
        bytes original_value 88
        ResultAccuracy result_accuracy 91
    """,
    "Computation": """
        string name 1
        *Instruction instructions 2
        ProgramShape program_shape 4
        int64 id 5
        int64 root_id 6
        string execution_thread 8
    """,
    "AliasEntry": """
        *int64 output_shape_index 1
        int64 parameter_number 2
        *int64 parameter_shape_index 3
        int32 kind 4
    """,
    "InputOutputAlias": "*AliasEntry entries 1",
    "Module": """
        string name 1
        string entry_computation_name 2
        *Computation computations 3
        ProgramShape host_program_shape 4
        int64 id 5
        int64 entry_computation_id 6
        bytes schedule 7
        InputOutputAlias input_output_alias 8
        *bytes cross_program_prefetches 10
        bool is_dynamic 11
        bytes spmd_output_sharding 12
        *bytes profile_info 13
        *bytes spmd_parameters_shardings 14
        bytes device_assignment 15
        bool use_auto_spmd_partitioning 16
        bytes stack_frame_index 17
        bytes buffer_donor 18
        FrontendAttributes frontend_attributes 19
    """,
}

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint64": _FIELD.TYPE_UINT64,
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}

MUST_ALIAS = 2
"""`kind` of an input_output_alias entry."""

ELEMENT_TYPES = MappingProxyType(
    {
        1: "pred",
        2: "s8",
        3: "s16",
        4: "s32",
        5: "s64",
        6: "u8",
        7: "u16",
        8: "u32",
        9: "u64",
        10: "f16",
        11: "f32",
        12: "f64",
        13: "tuple",
        14: "opaque",
        15: "c64",
        16: "bf16",
        17: "token",
        18: "c128",
        19: "f8e5m2",
        20: "f8e4m3fn",
        21: "s4",
        22: "u4",
        23: "f8e4m3b11fnuz",
        24: "f8e5m2fnuz",
        25: "f8e4m3fnuz",
        26: "s2",
        27: "u2",
        28: "f8e4m3",
        29: "f8e3m4",
        30: "s1",
        31: "u1",
        32: "f4e2m1fn",
        33: "f8e8m0fnu",
    }
)
"""XLA's element types by number, with their names in HLO text."""


def module_class(more: Mapping[str, str] | None = None) -> type[Any]:
    """Returns the class of the module message.

    Args:
        more: fields to declare besides this module's, by message and in the same form. Declared and undeclared fields are
            serialized at different positions, so modules whose bytes matter use the class without extra fields.
    """
    file = descriptor_pb2.FileDescriptorProto(name="kernelgen/hlo.proto", package=_PACKAGE, syntax="proto3")
    more = more or {}
    for message in (*_SCHEMA, *(more.keys() - _SCHEMA.keys())):
        m = file.message_type.add(name=message)
        fields = _SCHEMA.get(message, "") + "\n" + more.get(message, "")
        for line in filter(None, map(str.strip, fields.splitlines())):
            kind, name, number = line.split()
            field = m.field.add(name=name, number=int(number))
            field.label = _FIELD.LABEL_REPEATED if kind.startswith("*") else _FIELD.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = _FIELD.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Module"))


_Module = module_class()


def parse(data: bytes, kind: type[Any] = _Module) -> Any:
    """Parses the module message in `data`.

    Args:
        data: the bytes.
        kind: the message's class.

    Raises:
        ValueError: `data` is not a serialized `HloModuleProto` with an entry computation.
    """
    module = kind()
    try:
        module.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"not a serialized HloModuleProto: {error}") from None
    if not any(c.id == module.entry_computation_id for c in module.computations):
        raise ValueError("not a serialized HloModuleProto: it has no entry computation")
    return module


def serialize(module: Any) -> bytes:
    """Returns the module's bytes; equal messages give equal bytes."""
    return bytes(module.SerializeToString(deterministic=True))


def computations(module: Any) -> dict[int, Any]:
    """Returns the module's computations by id."""
    return {c.id: c for c in module.computations}


def entry(module: Any) -> Any:
    """Returns the entry computation."""
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def parameters(computation: Any) -> list[Any]:
    """Returns a computation's parameters by number."""
    return sorted((i for i in computation.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number)


def result_shapes(module: Any) -> list[Any]:
    """Returns the shape of each result of a module."""
    computation = entry(module)
    root = next(i for i in computation.instructions if i.id == computation.root_id).shape
    return list(root.tuple_shapes) or [root]


def shape_text(shape: Any) -> str:
    """Returns a shape in HLO text form, without layouts: `f32[512,4096]`, or `(f32[2], s32[])` for a tuple."""
    name = ELEMENT_TYPES.get(shape.element_type, f"type{shape.element_type}")
    if name == "tuple":
        return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
    dynamic = [*shape.is_dynamic_dimension, *[False] * len(shape.dimensions)]
    return f"{name}[{','.join(('<=' if d else '') + str(n) for n, d in zip(shape.dimensions, dynamic, strict=False))}]"
