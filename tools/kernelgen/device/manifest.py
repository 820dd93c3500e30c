"""The manifest of `kernelgen doctor --device`: a small kernel of each family, a layer, and probes."""

from __future__ import annotations

from pathlib import Path

from kernelgen.targets import TARGETS

KERNELS = Path(__file__).parent / "kernels"
"""The folder of the probes' emitters: `--kernels` of a build of the manifest."""

DIVISOR = 6284
"""The divisor of `probe_divide`: not a power of two. Others measured r * 6284 / 6284 for r up to 32: 23 results were r - 1."""

PARTS = (2, 1, 1)
"""Sizes of the parts of the last axis in `probe_split`, in quarters."""

RUNS = (512, 2048, 8192)
"""Lengths in bytes of the runs that the DMA of a `probe_copy` reads."""

COPIED = 8 << 20
"""Bytes that a `probe_copy` writes."""

GAP = 64
"""Bytes between two runs."""

_DOCUMENTED = ", ".join(target.name for target in TARGETS.values() if not target.experimental)


def _copy(run: int) -> str:
    rows = COPIED // run
    return f'  - {{op: probe_copy, inputs: ["({(run + GAP) // 2},{rows},1,1)/f16"], output: "({run // 2},{rows},1,1)/f16"}}'


MANIFEST = f"""\
# What `kernelgen doctor --device` executes: a small kernel of each family, a layer, and probes.
format: 1
name: doctor
targets: [{_DOCUMENTED}]
kernels:
  - {{op: add, inputs: ["(256,4,1,1)/f32", "(256,4,1,1)/f32"], output: "(256,4,1,1)/f32"}}
  - {{op: mul_mat, inputs: ["(256,128,1,1)/f16", "(256,4,1,1)/f32"], output: "(128,4,1,1)/f32"}}
  - {{op: mul_mat, inputs: ["(256,128,1,1)/q8_0", "(256,4,1,1)/f32"], output: "(128,4,1,1)/f32"}}
  - {{op: rms_norm, inputs: ["(256,4,1,1)/f32"], output: "(256,4,1,1)/f32", params: {{eps: 1.0e-5}}}}
  - op: rope
    inputs: ["(64,4,4,1)/f32", "(4,1,1,1)/i32"]
    output: "(64,4,4,1)/f32"
    params: {{n_ctx_orig: 256, n_dims: 64}}
  - {{op: swiglu, inputs: ["(256,4,1,1)/f32", "(256,4,1,1)/f32"], output: "(256,4,1,1)/f32"}}
  - {{op: get_rows, inputs: ["(256,64,1,1)/f16", "(4,1,1,1)/i32"], output: "(256,4,1,1)/f32"}}
  - {{op: set_rows, inputs: ["(256,4,1,1)/f32", "(4,1,1,1)/i64", "(256,64,1,1)/f16"], output: "(256,64,1,1)/f16"}}
  - op: flash_attn_ext
    inputs:
      - "(64,4,4,1)/f32/(4,1024,256,4096)"
      - "(64,256,2,1)/f16/(2,256,128,65536)"
      - "(64,256,2,1)/f16/(2,256,128,65536)"
      - "(256,4,1,1)/f16"
    output: "(64,4,4,1)/f32"
    params: {{prec: 10, scale: 0.125}}
  # One row, which is written in another form than several, and two.
  - {{op: get_rows, inputs: ["(512,1024,1,1)/f16", "(1,1,1,1)/i32"], output: "(512,1,1,1)/f32"}}
  - {{op: get_rows, inputs: ["(512,1024,1,1)/f16", "(2,1,1,1)/i32"], output: "(512,2,1,1)/f32"}}
  # What compilers were seen to get wrong without a message.
  - {{op: probe_divide, inputs: ["(512,4,1,1)/i32"], output: "(512,4,1,1)/i32"}}
  - {{op: probe_round, inputs: ["(512,4,1,1)/f32"], output: "(512,4,1,1)/f32"}}
  - {{op: probe_split, inputs: ["(4096,4,1,1)/f32"], output: "(4096,4,1,1)/f32"}}
  # Two cores.
  - {{op: all_reduce, inputs: ["(256,4,1,1)/f32"], output: "(256,4,1,1)/f32", params: {{n_devices: 2}}}}
  # DMA.
{chr(10).join(map(_copy, RUNS))}
graphs:
  - name: one_row
    inputs: {{x: "(512,1,1,1)/f32", scale: "(512,1,1,1)/f32", rows: "(1,1,1,1)/i64", table: "(512,1024,1,1)/f16"}}
    nodes:
      - {{name: scaled, op: mul, inputs: [x, scale], output: "(512,1,1,1)/f32"}}
      - {{name: written, op: set_rows, inputs: [scaled, rows, table], output: table}}
    outputs: []
  - name: two_rows
    inputs: {{x: "(512,2,1,1)/f32", scale: "(512,1,1,1)/f32", rows: "(2,1,1,1)/i64", table: "(512,1024,1,1)/f16"}}
    nodes:
      - {{name: scaled, op: mul, inputs: [x, scale], output: "(512,2,1,1)/f32"}}
      - {{name: written, op: set_rows, inputs: [scaled, rows, table], output: table}}
    outputs: []
  - name: layer
    inputs:
      x: "(256,4,1,1)/f32"
      scale: "(256,1,1,1)/f32"
      positions: "(4,1,1,1)/i32"
      rows: "(4,1,1,1)/i64"
      k_cache: "(128,256,1,1)/f16"
      v_cache: "(128,256,1,1)/f16"
      mask: "(256,4,1,1)/f16"
      wq: "(256,256,1,1)/f16"
      wk: "(256,128,1,1)/f16"
      wv: "(256,128,1,1)/f16"
      wo: "(256,256,1,1)/f16"
      gate: "(256,512,1,1)/f16"
      up: "(256,512,1,1)/f16"
      down: "(512,256,1,1)/f16"
    nodes:
      - {{name: norm, op: rms_norm, inputs: [x], output: "(256,4,1,1)/f32", params: {{eps: 1.0e-5}}}}
      - {{name: scaled, op: mul, inputs: [norm, scale], output: "(256,4,1,1)/f32"}}
      - {{name: q, op: mul_mat, inputs: [wq, scaled], output: "(256,4,1,1)/f32"}}
      - {{name: k, op: mul_mat, inputs: [wk, scaled], output: "(128,4,1,1)/f32"}}
      - {{name: v, op: mul_mat, inputs: [wv, scaled], output: "(128,4,1,1)/f32"}}
      - name: q_rope
        op: rope
        inputs: ["q (64,4,4,1)/f32", positions]
        output: "(64,4,4,1)/f32"
        params: {{n_ctx_orig: 256, n_dims: 64}}
      - name: k_rope
        op: rope
        inputs: ["k (64,2,4,1)/f32", positions]
        output: "(64,2,4,1)/f32"
        params: {{n_ctx_orig: 256, n_dims: 64}}
      - {{name: k_set, op: set_rows, inputs: ["k_rope (128,4,1,1)/f32", rows, k_cache], output: k_cache}}
      - {{name: v_set, op: set_rows, inputs: [v, rows, v_cache], output: v_cache}}
      - name: attention
        op: flash_attn_ext
        inputs:
          - "q_rope (64,4,4,1)/f32/(4,1024,256,4096)"
          - "k_set (64,256,2,1)/f16/(2,256,128,65536)"
          - "v_set (64,256,2,1)/f16/(2,256,128,65536)"
          - mask
        output: "(64,4,4,1)/f32"
        params: {{prec: 10, scale: 0.125}}
      - {{name: o, op: mul_mat, inputs: [wo, "attention (256,4,1,1)/f32"], output: "(256,4,1,1)/f32"}}
      - {{name: added, op: add, inputs: [o, x], output: "(256,4,1,1)/f32"}}
      - {{name: norm2, op: rms_norm, inputs: [added], output: "(256,4,1,1)/f32", params: {{eps: 1.0e-5}}}}
      - {{name: g, op: mul_mat, inputs: [gate, norm2], output: "(512,4,1,1)/f32"}}
      - {{name: u, op: mul_mat, inputs: [up, norm2], output: "(512,4,1,1)/f32"}}
      - {{name: act, op: swiglu, inputs: [g, u], output: "(512,4,1,1)/f32"}}
      - {{name: d, op: mul_mat, inputs: [down, act], output: "(256,4,1,1)/f32"}}
      - {{name: y, op: add, inputs: [d, added], output: "(256,4,1,1)/f32"}}
    outputs: [y]
"""
