"""ggml's tensor types: name, number, block size and bytes per block (`type_traits` in ggml.c, `enum ggml_type` in ggml.h).

The numbers are part of the GGUF file format and so never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type.

    Attributes:
        name: ggml's `type_name`, as in manifests (`f16`, `q4_K`).
        number: the value in `enum ggml_type`.
        block: elements per block; 1 for types that are not quantized.
        size: bytes per block.
    """

    name: str
    number: int
    block: int
    size: int

    @property
    def quantized(self) -> bool:
        return self.block > 1


_TABLE = """
f32 0 1 4      f16 1 1 2      q4_0 2 32 18    q4_1 3 32 20     q5_0 6 32 22     q5_1 7 32 24     q8_0 8 32 34
q8_1 9 32 36   q2_K 10 256 84 q3_K 11 256 110 q4_K 12 256 144  q5_K 13 256 176  q6_K 14 256 210  q8_K 15 256 292
iq2_xxs 16 256 66  iq2_xs 17 256 74  iq3_xxs 18 256 98  iq1_s 19 256 50  iq4_nl 20 32 18  iq3_s 21 256 110
iq2_s 22 256 82    iq4_xs 23 256 136 i8 24 1 1  i16 25 1 2  i32 26 1 4  i64 27 1 8  f64 28 1 8  iq1_m 29 256 56
bf16 30 1 2    tq1_0 34 256 54  tq2_0 35 256 66  mxfp4 39 32 17  nvfp4 40 64 36  q1_0 41 128 18  q2_0 42 64 18
"""


def _parse(table: str) -> dict[str, GgmlType]:
    words = table.split()
    rows = (words[i : i + 4] for i in range(0, len(words), 4))
    return {name: GgmlType(name, int(number), int(block), int(size)) for name, number, block, size in rows}


TYPES = MappingProxyType(_parse(_TABLE))
"""Every type by name."""

TYPES_BY_NUMBER = MappingProxyType({t.number: t for t in TYPES.values()})

GROUPS = MappingProxyType(
    {
        "any": tuple(TYPES),
        "float": ("f32", "f16", "bf16"),
        "number": ("f32", "f16", "bf16", "i8", "i16", "i32"),
        "quantized": tuple(name for name, t in TYPES.items() if t.quantized and name not in ("q8_1", "q8_K")),
        "quantizable": (
            *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"),
            *("tq1_0", "tq2_0", "mxfp4", "nvfp4", "q1_0", "q2_0"),
        ),
    }
)
"""Names of groups of types, for registrations of emitters.

`quantized` are the block formats that kernels read: all except the two for ggml's own intermediate results. `quantizable` are the
formats that they write.
"""

ALIASES = MappingProxyType(
    {
        "float32": "f32",
        "float": "f32",
        "fp32": "f32",
        "float16": "f16",
        "half": "f16",
        "fp16": "f16",
        "bfloat16": "bf16",
        "int8": "i8",
        "int16": "i16",
        "int32": "i32",
        "int": "i32",
        "int64": "i64",
        "float64": "f64",
        "double": "f64",
        **{name.lower(): name for name in TYPES if name != name.lower()},
    }
)
"""Names of these types in other tools; used only to suggest ggml's name in an error."""
