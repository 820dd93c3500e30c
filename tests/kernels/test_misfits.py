"""Tensors and parameters that do not fit an op are refused, with what the op allows."""

from __future__ import annotations

import ast

import pytest

from kernelgen.ggml import shapes
from kernelgen.ggml.ops import OPS
from kernelgen.ggml.tensor import TensorDesc

MISFITS = """\
conv_2d (3,2,4,7)/f32 (9,8,5,2)/f32 -> (7,7,7,2)/f32 => ne2 of src1 is that of the kernel, 4, not 5
conv_2d (3,2,5,7)/f32 (2,8,5,2)/f32 -> (1,7,7,2)/f32 => src1 is too small for the kernel along W
conv_2d (3,2,5,7)/f32 (9,8,5,2)/f32 -> (7,7,7,2)/f32 s0=0 => s0 is at least 1, not 0
im2col (3,2,5,7)/f32 (9,8,5,2)/f32 -> (30,7,6,2)/f32 is_2D=True => the result of im2col is (30,7,7,2)
im2col (3,5,7,1)/f32 (9,5,2,3)/f32 -> (15,7,2,1)/f32 => ne3 of src1 is 1, not 3
im2col_back (30,7,6,2)/f32 (3,2,5,7)/f32 -> (9,8,5,2)/f32 is_2D=True => src0 is im2col's result
im2col_3d (3,2,2,6)/f32 (5,4,3,1)/f32 -> (24,3,5,8)/f32 IC=2 => ne3 of src1 is at least IC, 2, not 1
col2im_1d (15,7,1,1)/f32 -> (1,4,1,1)/f32 oc=4 => ne0 of src0 is a multiple of oc = 4, not 15
col2im_1d (15,2,1,1)/f32 -> (1,5,1,1)/f32 oc=5 p0=2 => nothing is left of 4 elements
conv_3d (1,1,1,6)/f32 (5,4,3,4)/f32 -> (5,4,3,6)/f32 c=2 n=2 oc=2 => c * oc, 4, not 6
conv_transpose_1d (3,4,2,1)/f32 (5,2,1,1)/f32 -> (7,4,1,1)/f32 p0=1 => p0 = 0 only, not 1
conv_2d_dw (3,2,2,5)/f32 (9,8,5,2)/f32 -> (7,7,5,2)/f32 => ne2 of the kernel is 1, not 2
set (8,1,1,1)/f32 (4,1,1,1)/f32 -> (8,1,1,1)/f32 offset=20 => ends at byte 36, beyond the 32 bytes
acc (8,1,1,1)/f32 (4,1,1,1)/f32 -> (8,1,1,1)/f32 offset=2 => a multiple of the element's 4 bytes
concat (8,2,1,1)/f32 (8,1,1,1)/f16 -> (8,3,1,1)/f32 dim=1 => the type of src0, f32, not f16
concat (8,2,1,1)/f32 (9,1,1,1)/f32 -> (8,3,1,1)/f32 dim=1 => ne0 of src1 is that of src0, 8
repeat (3,1,1,1)/f32 -> (8,1,1,1)/f32 => its ne0 = 3 does not divide 8
arange -> (9,1,1,1)/f32 start=0.0 stop=8.0 step=1.0 => is (8,1,1,1)/f32, not (9,1,1,1)/f32
arange -> (9,1,1,1)/f32 start=0.0 stop=1e+30 step=1.0 => more than 2^31 elements
arange -> (9,1,1,1)/f32 start=0.0 stop=0.0 step=1.0 => stop is larger than start
top_k (4,1,1,1)/f32 -> (5,1,1,1)/i32 => has some of src0's
repeat_back (8,1,1,1)/f32 -> (3,1,1,1)/f32 => its ne0 = 3 does not divide 8
get_rows_back (8,2,1,1)/f32 (3,1,1,1)/i32 -> (8,9,1,1)/f32 => at most one index per row
solve_tri (8,8,1,1)/f32 (3,7,1,1)/f32 -> (3,7,1,1)/f32 => ne1 of src1 is that of src0, 8
upscale (5,4,3,2)/f16 -> (5,4,3,2)/f32 => src0 of upscale is f32, not f16
pad (5,4,3,2)/f32 -> (5,4,3,2)/f32 lp1=-4 => nothing is left of ne1 = 4
pad (32,4,3,2)/q8_0 -> (32,4,3,2)/q8_0 => a quantized tensor can't be padded: q8_0
pad_reflect_1d (5,4,3,2)/f32 -> (10,4,3,2)/f32 p1=5 => p1 is less than ne0 = 5, not 5
roll (5,4,3,2)/f32 -> (5,4,3,2)/f32 shift1=-4 => shift1 is less than ne1 = 4 to either side, not -4
win_part (3,7,5,1)/f32 -> (3,3,3,6)/f32 npx=2 npy=2 w=3 => 7 elements make 3 windows of 3, not 2
win_unpart (3,3,3,5)/f32 -> (3,7,5,1)/f32 w=3 => an image of 7 by 5 has 6 windows, src0 5
get_rel_pos (3,4,1,1)/f16 -> (3,2,2,1)/f16 => src0 has a row per distance, 2 * n - 1, not 4
timestep_embedding (3,1,1,1)/f32 -> (4,3,1,1)/f32 dim=5 => is (5,3,1,1)/f32, not (4,3,1,1)/f32"""


@pytest.mark.parametrize("line", MISFITS.splitlines())
def test_misfits_are_named(line: str) -> None:
    kernel, _, message = line.partition(" => ")
    op, *inputs = kernel.partition(" -> ")[0].split()
    output, *params = kernel.partition("-> ")[2].split()
    region = dict.fromkeys(("nb1", "nb2", "nb3"), 32) if op in ("set", "acc") else {}
    named = {name: ast.literal_eval(value) for name, _, value in (param.partition("=") for param in params)}
    tensors = [TensorDesc.parse(t) for t in inputs]
    problems = shapes.check(op, tensors, TensorDesc.parse(output), OPS[op].with_defaults(region | named))
    assert len(problems) == 1 and message in problems[0].message
