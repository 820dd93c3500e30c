"""`kernelgen model` on files that list kernels: exports of graphs, recordings, configurations of ggml-hsa-gen-kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kernelgen import cli
from kernelgen.ggml.ops import ANY
from kernelgen.model import graph_ops

from .conftest import ROOT, specs

GRAPH_OPS = ROOT / "tests" / "data" / "graph-ops"
Said = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    return cli.run(["model", *map(str, arguments)])


def refused(said: Said, *arguments: object) -> str:
    """Returns the message of a command that refuses its arguments; checks that it writes nothing."""
    output = Path(str(arguments[-1]))
    assert run(*arguments[:-1], "-o", output) == 2
    assert not output.exists()
    captured = said.readouterr()
    assert captured.out == ""
    return captured.err


# --- exports of graphs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GRAPH_OPS.glob("*.txt")), ids=lambda path: path.stem)
def test_an_export_of_graphs_gives_its_ops(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "listed.yaml"
    assert run(path, "-o", output) == 0
    assert specs(output) == {spec for spec, _, _ in graph_ops.read(path)}


def test_several_exports_give_one_manifest_in_any_order(tmp_path: Path, capsys: Said) -> None:
    paths = sorted(GRAPH_OPS.glob("llama3-8b-f16.*.txt"))
    texts = []
    for given in (paths, paths[::-1]):
        assert run(*given, "-o", tmp_path / "listed.yaml", "--target", "trn2") == 0
        texts.append((tmp_path / "listed.yaml").read_text().partition("kernels:")[2])
    assert texts[0] == texts[1]
    assert specs(tmp_path / "listed.yaml") == {spec for path in paths for spec, _, _ in graph_ops.read(path)}
    assert "\ntargets: [trn2]\n" in (tmp_path / "listed.yaml").read_text()
    said = capsys.readouterr().out
    assert f"{paths[0]}: an export of graphs, 30 ops\n" in said
    assert "\n40 kernels\n" in said


GRAPHS = "\n".join(
    json.dumps(line)
    for line in (
        {
            "format": "neuron-kernelgen graphs",
            "version": 1,
            "model": dict.fromkeys(("name", "architecture"), "x")
            | dict.fromkeys(("parameters", "bytes", "layers", "encoder", "decoder", "recurrent"), 1),
        },
        {
            "sizes": {"n_tokens": 1},
            "context": {"flash_attn": True},
            "tensors": [
                {"op": "none", "type": "f32", "ne": [8, 2, 1, 1], "nb": [4, 32, 64, 64], "name": "a"},
                {
                    "op": "relu",
                    "type": "f32",
                    "ne": [8, 2, 1, 1],
                    "nb": [4, 32, 64, 64],
                    "name": "b",
                    "src": [0],
                    "params": [6],
                },
            ],
        },
    )
)


def test_graphs_that_repeat_themselves_give_groups(tmp_path: Path, capsys: Said) -> None:
    """Three layers of a matrix product and its activation, exported twice, are one group."""
    shape: dict[str, Any] = {"type": "f32", "ne": [8, 1, 1, 1], "nb": [4, 32, 32, 32]}
    matrix = {"type": "f32", "ne": [8, 8, 1, 1], "nb": [4, 32, 256, 256]}
    tensors: list[dict[str, Any]] = [{"name": "x", "op": "none", **shape}]
    for layer in range(3):
        before = len(tensors) - 1
        tensors.append({"name": f"blk.{layer}.w", "op": "none", "role": "weight", **matrix})
        tensors.append({"name": f"product-{layer}", "op": "mul_mat", "src": [before + 1, before], **shape})
        tensors.append({"name": f"l_out-{layer}", "op": "relu", "src": [before + 2], **shape})
    head = GRAPHS.splitlines()[0]
    graph = json.dumps({"sizes": {}, "context": {}, "tensors": tensors})
    path = tmp_path / "recorded.graphs"
    path.write_text(f"{head}\n{graph}\n{graph}\n")
    assert run(path, "--fuse", "layer", "-o", tmp_path / "fused.yaml") == 0
    assert "1 group of nodes as one kernel each: 2 nodes\n" in capsys.readouterr().out
    text = (tmp_path / "fused.yaml").read_text()
    assert "{name: l_out, op: relu, inputs: [product]" in text and "--fuse layer" in text
    assert run(path, "-o", tmp_path / "plain.yaml") == 0
    assert "graphs:" not in (tmp_path / "plain.yaml").read_text()


def test_groups_are_made_of_graphs_alone(tmp_path: Path, capsys: Said) -> None:
    path = write(tmp_path / "kernels.json", hsa(kernel()))
    assert f"--fuse layer: there is no graph in {path}\n" in refused(
        capsys, path, "--fuse", "layer", tmp_path / "m.yaml"
    )


# --- recordings of the backend -----------------------------------------------------------------------------------------------------


def tensor(op: str, *sources: int, params: Sequence[int] = (), **changes: object) -> dict[str, object]:
    shape = {"type": "f32", "ne": [64, 1, 1, 1], "nb": [4, 256, 256, 256]}
    return {"name": op, "op": op, "src": sources, "params": params, **shape, **changes}


def recorded(path: Path, *graphs: tuple[dict[str, bool], list[dict[str, object]]], target: str, lnc: int) -> Path:
    """Writes graphs, each with its context, as the backend does."""
    head = json.loads(GRAPHS.splitlines()[0]) | {"target": target, "lnc": lnc}
    lines = [head, *({"sizes": {}, "context": context, "tensors": tensors} for context, tensors in graphs)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


ONE, TWO, NAN = 0x3F800000, 0x40000000, 0x7FC00000
"""Bits of F32."""

OPS_OF_A_CALL = [
    tensor("none"),
    tensor("scale", 0, params=[TWO]),
    tensor("add", 1, 0),
    tensor("map_custom1", 2),
    tensor("clamp", 2, params=[NAN, ONE]),
    tensor("add", 0, 0, nb=[4, 3, 256, 256], ne=[64, 2, 1, 1]),
    tensor("add", 0, 0, ne=[0, 1, 1, 1]),
]


def test_recordings_become_one_manifest(tmp_path: Path, capsys: Said) -> None:
    one = recorded(tmp_path / "one.graphs", ({}, OPS_OF_A_CALL), ({}, OPS_OF_A_CALL[:3]), target="trn2", lnc=1)
    other = recorded(tmp_path / "other.graphs", ({"piece": True}, OPS_OF_A_CALL[:2]), target="trn1", lnc=1)
    assert run(one, other, "-o", tmp_path / "merged.yaml") == 0
    assert (
        (tmp_path / "merged.yaml").read_text().partition("format: 1")[2]
        == """
name: merged
targets: [trn1, trn2]
description: "Kernels that one.graphs, other.graphs list"
compiler: {lnc: 1}

kernels:
  - op: add  # add
    inputs: ["(64,1,1,1)/f32", "(64,1,1,1)/f32"]
    output: "(64,1,1,1)/f32"
  - op: scale  # scale
    inputs: ["(64,1,1,1)/f32"]
    output: "(64,1,1,1)/f32"
    params: {s: 2.0}

# No kernel can be built for these; they run on the CPU.
# clamp: clamp: min: expected a number, not 'nan'
#   clamp: (64,1,1,1)/f32 -> (64,1,1,1)/f32
# map_custom1: map_custom1: no emitter for this op
#   map_custom1: (64,1,1,1)/f32 -> (64,1,1,1)/f32
"""
    )
    said = capsys.readouterr().out
    assert f"{one}: left out 1 nodes that no kernel can compute\n" in said
    assert "no kernel: map_custom1: no emitter for this op\n" in said


def test_a_recording_with_samplers_has_kernels_for_any_numbers(tmp_path: Path) -> None:
    """llama.cpp calls supports_op with a probe's nodes, and no call may have them."""
    graphs = (
        ({}, OPS_OF_A_CALL[:2]),
        ({"probe": True}, [tensor("none"), tensor("argmax", 0, type="i32", ne=[1, 1, 1, 1])]),
    )
    path = recorded(tmp_path / "samplers.graphs", *graphs, target="trn1", lnc=1)
    assert run(path, "-o", tmp_path / "m.yaml") == 0
    assert {(spec.op, *dict(spec.params).values()) for spec in specs(tmp_path / "m.yaml")} == {
        ("argmax",),
        ("scale", ANY, ANY),
    }


# --- ggml-hsa-gen-kernels ----------------------------------------------------------------------------------------------------------


def hsa(*kernels: object, **more: object) -> dict[str, object]:
    return {"description": "some kernels", "kernels": list(kernels), **more}


def kernel(name: str = "ggml_op_add", **changes: object) -> dict[str, object]:
    two = name in ("ggml_op_add", "ggml_op_sub", "ggml_op_mul", "ggml_op_div")
    return {
        "kernel_name": name,
        "kernel_source": "binary_ops.py" if two else "unary_ops.py",
        "arch": "aie2",
        "input_tensors": ["(1024,2,1,1)/f32"] * (1 + two),
        "output_tensor": "(1024,2,1,1)/f32",
        "exported_name": f"{name}_f32",
        **changes,
    }


UNARY = "abs sgn neg step tanh elu relu sigmoid gelu gelu_quick silu hardswish hardsigmoid exp gelu_erf"
OPS = {
    **{f"ggml_op_{name}": name for name in "add sub mul div".split()},
    **{f"ggml_unary_op_{name}": name for name in UNARY.split()},
}
MATRICES = {
    "input_tensors": ["(768,1024,1,1)/bf16", "(768,16,1,1)/f32"],
    "output_tensor": "(1024,16,1,1)/f32",
    "kernel_source": "mul_mat.py",
}


def write(path: Path, value: object, indent: int | str | None = 4) -> Path:
    path.write_text(json.dumps(value, indent=indent))
    return path


@pytest.mark.parametrize("indent", [None, 4, "\t"])
def test_every_op_that_ggml_hsa_gen_kernels_lists_gives_its_kernel(
    indent: int | str | None, tmp_path: Path, capsys: Said
) -> None:
    path = write(tmp_path / "kernels.json", hsa(*map(kernel, OPS), kernel("ggml_op_mul_mat", **MATRICES)), indent)
    assert run(path, "-o", tmp_path / "m.yaml") == 0
    assert "no kernel" not in capsys.readouterr().out
    found = {spec.op: spec for spec in specs(tmp_path / "m.yaml")}
    assert set(found) == {*OPS.values(), "mul_mat"}
    assert str(found["relu"].output) == "(1024,2,1,1)/f32"
    assert "  - op: relu  # ggml_unary_op_relu_f32\n" in (tmp_path / "m.yaml").read_text()


def test_strides_are_bytes_or_elements(tmp_path: Path, capsys: Said) -> None:
    wanted = "(64,8,1,1)/f16/(2,256,2048,2048)"
    for strides, noted in (("(2,256,2048,2048)", False), ("(1,128,1024,1024)", True), ("(1, 128,7,7)", True)):
        tensors = [f"(64,8,1,1)/f16/{strides}", "(64,8,1,1)/f16"]
        value = hsa(kernel(input_tensors=tensors, output_tensor="(64,8,1,1)/f16"))
        assert run(write(tmp_path / "kernels.json", value), "-o", tmp_path / "m.yaml") == 0
        (spec,) = specs(tmp_path / "m.yaml")
        assert list(map(str, spec.inputs)) == [wanted, "(64,8,1,1)/f16"]
        assert ("1 tensor has its strides in elements, not in bytes" in capsys.readouterr().out) is noted


def test_a_type_without_an_emitter_is_a_comment(tmp_path: Path, capsys: Said) -> None:
    tensors = {"input_tensors": ["(64,1,1,1)/i8"], "output_tensor": "(64,1,1,1)/i8"}
    value = hsa(kernel("ggml_unary_op_relu", **tensors), kernel())
    assert run(write(tmp_path / "kernels.json", value), "-o", tmp_path / "m.yaml") == 0
    assert "no kernel: relu: no emitter for these types: i8\n" in capsys.readouterr().out
    assert {spec.op for spec in specs(tmp_path / "m.yaml")} == {"add"}
    path = write(tmp_path / "kernels.json", hsa(kernel("ggml_unary_op_relu", **tensors)))
    assert "no kernel can be built for what is listed" in refused(capsys, path, tmp_path / "none.yaml")


def test_every_mistake_is_located(tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "kernels.json"
    path.write_text("""\
{
  "kernels": [
    {
      "kernel_name": "ggml_op_addd",
      "kernel_source": "binary_ops.py",
      "arch": "aie2",
      "input_tensors": ["(1024,1,1,1)/f32", "(1024,1,1,1)/f32"],
      "output_tensor": "(1024,1,1,1)/f32",
      "exported_name": "one"
    },
    {
      "kernel_name": "ggml_op_add",
      "kernel_sourc": "binary_ops.py",
      "arch": 2,
      "input_tensors": "(1024,1,1,1)/f32",
      "exported_name": "two"
    },
    {
      "kernel_name": "ggml_op_mul_mat",
      "kernel_source": "mul_mat.py",
      "arch": "aie2",
      "input_tensors": ["(1024,768,1,1)/bf16", "(768,1024,1,1)/bf16"],
      "output_tensor": "(768,1024)/float32",
      "exported_name": "three"
    },
    [],
    {
      "kernel_name": "ggml_op_mul_mat",
      "kernel_source": "mul_mat.py",
      "arch": "aie2",
      "input_tensors": ["(1024,768,1,1)/bf16", "(768,1024,1,1)/bf16"],
      "output_tensor": "(768,1024,1,1)/f32",
      "exported_name": "four"
    }
  ]
}
""")
    said = refused(capsys, path, tmp_path / "m.yaml")
    assert re.findall(rf"^{re.escape(str(path))}:(\d+:\d+: error: .*)$", said, re.MULTILINE) == [
        "4:22: error: unknown kernel 'ggml_op_addd': did you mean 'ggml_op_add'?",
        "11:5: error: the kernel: key 'output_tensor' is missing",
        "13:7: error: unknown key 'kernel_sourc': did you mean 'kernel_source'?",
        "14:15: error: arch: expected text, not '2'",
        "15:24: error: input_tensors: expected a list, not '(1024,1,1,1)/f32'",
        "23:24: error: a tensor has four dimensions, not 2: '(768,1024)/float32'",
        "26:5: error: the kernel: expected a mapping, not a list",
        "31:48: error: the inner dimensions differ: ne0 of src0 is 1024, ne0 of src1 is 768",
    ]


# --- files that are refused -------------------------------------------------------------------------------------------

LISTS: list[tuple[object, str]] = [
    (hsa(), ":3:16: error: kernels: expected a list of kernels, not a list"),
    (
        hsa(kernel(), kernel(output_tensor="(64,1,1,1)/f32", input_tensors=["(64,1,1,1)/f32"] * 2)),
        "is already defined for aie2",
    ),
    (hsa(kernel("ggml_op_clamp")), "op 'clamp' needs the parameters 'min', 'max'"),
    (hsa(kernel("ggml_op_map_custom1")), "no emitter for op 'map_custom1'"),
    (hsa(kernel(input_tensors=["(1024,2,1,1)/f33"] * 2)), "unknown dtype 'f33'"),
    (hsa(kernel(input_tensors=["(1024,2,1,1)/f32"])), "add has 2 inputs (src0, src1), not 1"),
    ({"kernel": []}, "nor 'model_type', as a model's config.json: did you mean 'kernels'?"),
    ([kernel()], ":1:1: error: expected an object, not a list"),
]
BYTES = [
    (b"", " is nothing that kernelgen model takes\n    it takes a GGUF file, "),
    (b"hello\n", " is nothing that kernelgen model takes\n"),
    (b'{"kernels": [}', ":1:14: error: not JSON: Expecting value"),
    (b'{\n"kernels": "\xff"}', ":2:1: error: not JSON: byte 0xff is not UTF-8"),
    (b'{"kernels": ' + b"[" * 40 + b"]" * 40 + b"}", ": error: nested deeper than 32 levels"),
    (b'{"kernels": [], "kernels": []}', ": error: key 'kernels' is already defined, on line 1"),
    (b"2 0 4096 1 1 1 16 0\n", ":1:20: error: the line ends where word 1 of op_params is expected"),
    (b"format: 2\n", " is nothing that kernelgen model takes\n"),
]


@pytest.mark.parametrize(
    ("data", "message"), [*((json.dumps(value, indent=4).encode(), message) for value, message in LISTS), *BYTES]
)
def test_other_files_are_refused(data: bytes, message: str, tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    assert message in refused(capsys, path, tmp_path / "m.yaml")


def test_options_of_models_are_refused_for_lists(tmp_path: Path, capsys: Said) -> None:
    path = write(tmp_path / "kernels.json", hsa(kernel()))
    for options in (("--n-ctx", "512"), ("--fuse", "auto")):
        said = refused(capsys, path, *options, tmp_path / "m.yaml")
        name = "--fuse auto" if options[0] == "--fuse" else options[0]
        assert said == f"error: {name} is for models, and {path} is a configuration of ggml-hsa-gen-kernels\n"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    said = refused(capsys, path, tmp_path / "model.gguf", tmp_path / "m.yaml")
    assert said == "error: a model has a manifest of its own: name one source\n"


def test_layouts_of_weights_are_the_manifests(tmp_path: Path) -> None:
    """`--weights` becomes a key of the manifest; it applies to weights, not to the heads of a cache."""
    path = GRAPH_OPS / "llama3-8b-f16.no-flash-attn.txt"
    assert run(path, "-o", tmp_path / "m.yaml", "--weights", "planes", "--weights", "transposed") == 0
    assert "\nweights: [planes, transposed]\n" in (tmp_path / "m.yaml").read_text()
    products = [spec for spec in specs(tmp_path / "m.yaml") if spec.op == "mul_mat"]
    assert {
        (str(spec.inputs[0]).count(":transposed"), spec.inputs[0].ne[2]) for spec in products if spec.inputs[0]
    } == {
        (1, 1),
        (0, 8),
    }
