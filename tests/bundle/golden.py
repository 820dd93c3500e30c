"""Writes tests/data/bundle-keys.json: specs with the key words and hashes for which Python and C++ must agree.

  PYTHONPATH=tools python tests/bundle/golden.py

The file is the format: a change in it is a change of every bundle, and needs a new format version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernelgen.bundle.key import key, key_hash
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import KernelSpec

PATH = Path(__file__).parents[1] / "data" / "bundle-keys.json"

T = TensorDesc.parse


def specs() -> list[KernelSpec]:
    """Returns one kernel for each mistake that a key can have."""
    make = KernelSpec.make
    f32 = T("(64,4,1,1)/f32")
    return [
        make("relu", [f32], f32),
        # Every type of size 1 to 8, with and without blocks.
        *(make("cpy", [f32, T(f"(256,4,1,1)/{t}")], T(f"(256,4,1,1)/{t}")) for t in ("f16", "bf16", "i8", "i16", "i32", "f64")),
        make("mul_mat", [T("(4096,14336,1,1)/f16"), T("(4096,512,1,1)/f32")], T("(14336,512,1,1)/f32")),
        make("mul_mat", [T("(4096,1024,1,1)/q4_K"), T("(4096,1,1,1)/f32")], T("(1024,1,1,1)/f32"), {"prec": 10}),
        make("mul_mat", [T("(32,7,1,1)/q8_0"), T("(32,1,3,2)/f32")], T("(7,1,3,2)/f32")),
        # A permuted view: strides that are not dense.
        make("cont", [T("(128,512,32,1)/f32/(4,16384,512,8388608)")], T("(128,512,32,1)/f32")),
        # A dimension of one element, for which ggml's stride is arbitrary.
        make("cont", [T("(128,1,32,1)/f16/(2,98,1048576,33554432)")], T("(128,1,32,1)/f16")),
        make("cont", [T("(1,5,1,3)/f32/(8,4,12,20)")], T("(1,5,1,3)/f32")),
        make("sqr", [T("(1,1,1,1)/f32")], T("(1,1,1,1)/f32")),
        # Broadcast by a stride of 0.
        make("cont", [T("(8,8,1,1)/f32/(0,32,256,256)")], T("(8,8,1,1)/f32")),
        # An absent input before one that exists, and absent ones at the end.
        make("soft_max", [f32, None, T("(4,1,1,1)/f32")], f32, {"scale": 0.125}),
        make("soft_max", [f32, None, None], f32, {"scale": 0.125, "max_bias": 8.0}),
        # In place.
        make("set_rows", [T("(64,2,1,1)/f32"), T("(2,1,1,1)/i64"), T("(64,32,1,1)/f16")], T("(64,32,1,1)/f16")),
        make("add", [f32, f32], f32, alias=0),
        make("add", [f32, f32], f32, alias=1),
        # Signed integers, floats and bools in op_params.
        make("rope", [T("(128,32,7,1)/f32"), T("(7,1,1,1)/i32")], T("(128,32,7,1)/f32"),
             {"n_dims": 128, "mode": 2, "freq_base": 500000.0, "beta_slow": -1.5, "n_ctx_orig": 8192}),
        make("clamp", [f32], f32, {"min": float("-inf"), "max": -0.0}),
        make("swiglu", [T("(64,4,1,1)/f32")], T("(32,4,1,1)/f32"), {"swapped": True}),
        make("flash_attn_ext",
             [T("(128,512,32,1)/f32/(4,16384,512,8388608)"), T("(128,4096,8,1)/f16/(2,2048,256,8388608)"),
              T("(128,4096,8,1)/f16/(2,2048,256,8388608)"), T("(4096,512,1,1)/f16")],
             T("(128,32,512,1)/f32"), {"scale": 0.08838834764831845}),
        make("flash_attn_back", [f32], T("(64,4,1,1)/i32"), {"word0": -1}),
        # ggml has no such op: its parameters are a digest.
        make("my_scale", [f32], f32, {"factor": 0.5, "steps": 3, "wrap": True}),
        make("my_scale", [f32], f32),
        # Weights in other layouts.
        make("mul_mat", [T("(4096,1024,1,1)/q4_K:planes"), T("(4096,1,1,1)/f32")], T("(1024,1,1,1)/f32"), {"prec": 10}),
        make("mul_mat", [T("(4096,1024,1,1)/f16:transposed"), T("(4096,1,1,1)/f32")], T("(1024,1,1,1)/f32")),
        # Large numbers.
        make("relu", [T("(4611686018427387904,1,1,1)/i8")], T("(4611686018427387904,1,1,1)/i8")),
    ]  # fmt: skip


def vectors() -> list[dict[str, Any]]:
    """Returns the file's content: id, spec, key (16 hexadecimal digits per word) and hash."""
    return [
        {
            "id": spec.id,
            "spec": json.loads(spec.json),
            "key": [f"{word:016x}" for word in key(spec)],
            "hash": f"{key_hash(key(spec)):016x}",
        }
        for spec in specs()
    ]


if __name__ == "__main__":
    PATH.write_text("[\n" + ",\n".join(json.dumps(v) for v in vectors()) + "\n]\n")
