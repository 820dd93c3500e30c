"""Kernels that manifests name by their source: the result of an entry, and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelgen import manifest
from kernelgen.bundle.key import fnv1a, key
from kernelgen.cli.frame import run
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.errors import KernelgenError
from kernelgen.hlo import execute
from kernelgen.lowering.emission import emit
from kernelgen.manifest.differentiable import operator
from kernelgen.neff.container import tensors_of
from kernelgen.plan import Plan
from kernelgen.spec.arrays import ArrayDesc
from kernelgen.spec.kernel import SourceSpec, Spec

KERNELS = {
    "scan.py": """\
import os
import numpy as np
from .start import START

SCALE = float(os.environ.get("SCALE", "1"))
HOME = "HOME" in os.environ

def scan(x, *, axis=0, order=(), label=None):
    assert isinstance(order, tuple)
    if HOME or "HOME" in os.environ:
        raise RuntimeError("it reads this machine's environment")
    return np.cumsum(x, axis=axis) * SCALE + START, np.max(x, axis=axis)

def put(x, y):
    x[1:2] = y
    return x[0:1] + 1

def same(x):
    return x
""",
    "start.py": "START = 3.0\n",
    "plain.py": """\
import jax.numpy as jnp

def bits(x, y):
    return x ^ y, y.astype(jnp.float32)

def deep(x):
    return x[0, 0, 0, 0, 0] + 1

def one(x):
    return x.astype(jnp.float32).sum()

def swapped(x, y):
    return y + 1, x + 1
""",
    "tile.py": """\
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=t)
    return out
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "k").mkdir()
    for name, text in KERNELS.items():
        (tmp_path / "k" / name).write_text(text)
    return tmp_path


def plan(folder: Path, entries: str, targets: str = "trn1") -> tuple[Plan, Catalog]:
    path = folder / "m.yaml"
    path.write_text(f"format: 1\nname: m\ntargets: [{targets}]\nkernels:\n{entries}")
    catalog = Catalog([builtin_library()])
    return Plan.merge(manifest.load([path], catalog)), catalog


def emitted(folder: Path, entries: str) -> tuple[SourceSpec, bytes]:
    made, catalog = plan(folder, entries)
    (kernel,) = made.kernels
    assert isinstance(kernel.spec, SourceSpec)
    assert Plan.from_json(made.to_json()) == made and Spec.from_json(kernel.spec.to_json()) == kernel.spec
    return kernel.spec, emit(catalog.emitters(kernel), kernel.spec, targets=kernel.targets).hlo


def test_numpy_with_helpers_static_arguments_and_an_environment_of_its_own(folder: Path) -> None:
    entry = """\
  - source: k/scan.py:scan
    inputs: ["f32[4,3,5]"]
    outputs: ["f32[4,3,5]", "f32[4,5]"]
    params: {axis: 1, order: [0, 2, 1], label: null}
    env: {SCALE: 2}
"""
    spec, hlo = emitted(folder, entry)
    assert spec.id.startswith("scan-4x3x5-f32-") and key(spec) == (fnv1a(b"source"), 4, fnv1a(b"scan"))
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    sums, largest = execute.run(hlo, [x])
    np.testing.assert_allclose(sums, np.cumsum(x, axis=1) * 2 + 3, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(largest, x.max(axis=1))
    # The same file in another environment is another kernel; an edit of an imported file changes the kernel.
    other, hlo = emitted(folder, entry.replace("SCALE: 2", "SCALE: 5"))
    assert other.id != spec.id
    np.testing.assert_allclose(execute.run(hlo, [x])[0], np.cumsum(x, axis=1) * 5 + 3, rtol=1e-5, atol=1e-5)
    (folder / "k" / "start.py").write_text("START = 7.0\n")
    again, hlo = emitted(folder, entry)
    assert again == spec
    np.testing.assert_allclose(execute.run(hlo, [x])[0], np.cumsum(x, axis=1) * 2 + 7, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("entry", "tensors"),
    [
        (
            'k/plain.py:bits, inputs: ["u32[6]", "u32[6]"], outputs: ["u32[6]", "f32[6]"]',
            "input0: u32[6]; input1: u32[6]; output0: u32[6]; output1: f32[6]",
        ),
        (
            'k/plain.py:deep, inputs: ["f16[2,1,2,1,2,3]"], outputs: ["f16[3]"]',
            "input0: f16[2,1,2,1,2,3]; output0: f16[3]",
        ),
        ('k/plain.py:one, inputs: ["f8e4m3fn[2,2]"], outputs: ["f32[]"]', "input0: f8e4m3fn[2,2]; output0: f32[]"),
        ('k/plain.py:one, inputs: ["(4,2,1,1)/i16"], outputs: ["f32[]"]', "input0: s16[1,1,2,4]; output0: f32[]"),
        (
            'k/plain.py:swapped, inputs: ["u8[2]", "u8[2]"], outputs: ["u8[2]", "u8[2]"], alias: {0: 1}',
            "input0: u8[2]; input1.must_alias_input: u8[2]; "
            "output0: u8[2] in place of input1.must_alias_input; output1: u8[2]",
        ),
        (
            'k/scan.py:put, inputs: ["f32[4,2]", "f32[1,2]"], outputs: ["f32[1,2]"]',
            "input0.must_alias_input: f32[4,2]; input1: f32[1,2]; output0: f32[1,2]; "
            "input0.updated: f32[4,2] in place of input0.must_alias_input",
        ),
        ('k/tile.py:double, inputs: ["f32[128,64]"], outputs: ["f32[128,64]"]', "input0: f32[128,64]; output0: f32[128,64]"),
    ],
)  # fmt: skip
def test_what_the_runtime_binds(folder: Path, entry: str, tensors: str) -> None:
    _, hlo = emitted(folder, f"  - {{source: {entry}}}\n")
    assert "; ".join(map(str, tensors_of(hlo))) == tensors


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("k/scan.py:scam, inputs: [], outputs: ['f32[2]']", "there is no 'scam': did you mean 'scan'?"),
        ("k/scan.py, inputs: [], outputs: ['f32[2]']", "expected a function of a file, 'FILE.py:FUNCTION', not"),
        ("/k/scan.py:scan, inputs: [], outputs: ['f32[2]']", "is not relative to the manifest's folder"),
        ("k/scan.py:scan, inputs: ['f31[2]'], outputs: ['f32[2]']", "unknown dtype 'f31': it is one of f32, "),
        ("k/scan.py:scan, inputs: ['f32[0]'], outputs: ['f32[2]']", "dimensions are positive, not 0"),
        ("k/scan.py:scan, inputs: ['(256,1,1,1)/q4_K'], outputs: ['f32[2]']", "is of plain numbers, not q4_K"),
        ("k/scan.py:scan, inputs: ['(2,2,1,1)/f32/(4,16,32,32)'], outputs: ['f32[2]']", "has no gaps"),
        ("k/scan.py:scan, inputs: ['f32[2]'], output: 'f32[2]'", "unknown key 'output': did you mean 'outputs'?"),
        ("k/scan.py:scan, inputs: ['f32[2]']", "key 'outputs' is missing"),
        ("k/scan.py:scan, inputs: ['f32[2]'], outputs: ['f32[3]'], alias: 0", "output 0 is f32[3] and input 0 f32[2]"),
        ("k/scan.py:scan, inputs: ['f32[2]'], outputs: ['f32[2]'], alias: {4: 0}", "there is no output 4"),
        ("k/scan.py:scan, inputs: [], outputs: ['f32[2]'], name: a b", "'a b' is not a name that a program can ask for"),
        ("k/scan.py:scan, inputs: [], outputs: ['f32[2]'], grid: [0]", "grid: expected a number of programs, not '0'"),
        ("k/scan.py:scan, inputs: ['f32[${n}]'], outputs: ['f32[2]'], batch: {n: [1, 2]}", "two kernels are named 'scan'"),
        ("k/scan.py:scan, op: relu, inputs: [], outputs: ['f32[2]']", "unknown key 'op'"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_entry_is_reported_with_its_place(folder: Path, entry: str, message: str) -> None:
    with pytest.raises(KernelgenError) as caught:
        plan(folder, f"  - {{source: {entry}}}\n")
    (found, *_) = caught.value.diagnostics
    assert message in found.message and found.location is not None and found.location.line == 5


def test_what_the_function_does_not_do_is_reported_when_it_is_emitted(folder: Path) -> None:
    two = "inputs: ['f32[4,2]', 'f32[1,2]']"
    for entry, message in {
        "k/scan.py:scan, inputs: ['f32[2]'], outputs: ['f32[2]']": "returns 2 results, and 1 are declared",
        f"k/scan.py:put, {two}, outputs: ['f32[2]']": "and the manifest says float32[2]",
        f"k/scan.py:put, {two}, outputs: ['f32[1,2]'], params: {{z: 1}}": "unexpected keyword argument 'z'",
        f"k/plain.py:swapped, {two}, outputs: ['f32[2]'], params: {{x: 1}}": "multiple values for argument 'x'",
    }.items():
        made, catalog = plan(folder, f"  - {{source: {entry}}}\n")
        with pytest.raises(KernelgenError) as caught:
            emit(catalog.emitters(made.kernels[0]), made.kernels[0].spec)
        assert message in str(caught.value) and made.kernels[0].spec.id in str(caught.value)


def test_a_name_that_is_not_a_function_is_reported(folder: Path) -> None:
    (folder / "k" / "named.py").write_text(
        "import numpy as np\nSCALE = 2.0\nclass Scaled:\n    def __call__(self, x):\n        return x\nscaled = Scaled()\n"
    )
    for name, what in {
        "np": "a module",
        "SCALE": "of type float",
        "Scaled": "a class",
        "scaled": "of type Scaled",
    }.items():
        made, catalog = plan(folder, f"  - {{source: k/named.py:{name}, inputs: ['f32[2]'], outputs: ['f32[2]']}}\n")
        with pytest.raises(KernelgenError) as caught:
            emit(catalog.emitters(made.kernels[0]), made.kernels[0].spec)
        (found,) = caught.value.diagnostics
        assert found.message == f"'{name}' is {what}, not a function" and found.location is not None


def test_two_manifests_may_name_files_of_the_same_path(tmp_path: Path) -> None:
    catalog = Catalog([builtin_library()])
    paths = []
    for name, factor in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f.py").write_text(f"def {name}(x):\n    return x * {factor}\n")
        entry = f"{{source: 'f.py:{name}', inputs: ['f32[2]'], outputs: ['f32[2]']}}"
        paths.append(tmp_path / f"{name}/m.yaml")
        paths[-1].write_text(f"format: 1\nname: {name}\ntargets: [trn1]\nkernels: [{entry}]\n")
    made = Plan.merge(manifest.load(paths, catalog))
    for kernel, wanted in zip(made.kernels, (2, 3), strict=True):
        hlo = emit(catalog.emitters(kernel), kernel.spec).hlo
        assert execute.run(hlo, [np.ones(2, np.float32)])[0].tolist() == [wanted] * 2
    # Two files with the same path relative to their manifests are two kernels with one id.
    (tmp_path / "b" / "f.py").write_text("def a(x):\n    return x\n")
    paths[1].write_text(paths[1].read_text().replace("f.py:b", "f.py:a"))
    with pytest.raises(KernelgenError, match="is named by two files"):
        manifest.load(paths, Catalog([builtin_library()]))


def test_arrays_are_written_in_one_way() -> None:
    texts: dict[str, Any] = {
        "f32[2,3]": "f32[2,3]",
        " float32 [ 2 , 3 ] ": "f32[2,3]",
        "s8[]": "i8[]",
        "bool[1]": "pred[1]",
    }
    assert {text: str(ArrayDesc.parse(text)) for text in texts} == texts
    assert str(ArrayDesc.parse("(2500,2,150,1)/f32")) == "f32[1,150,2,2500]"


FLASH = """\
import nki
import nki.isa as nisa
import nki.language as nl


def _tile(x):
    t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x)
    return t


@nki.jit
def squares(x, y):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    a, b = _tile(x), _tile(y)
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=nl.multiply)
    nisa.tensor_tensor(dst=a, data1=a, data2=b, op=nl.multiply)
    nisa.dma_copy(dst=out, src=a)
    return out


@nki.jit
def squares_back(x, y, dout):
    dx = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dy = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    a, b, d = _tile(x), _tile(y), _tile(dout)
    nisa.tensor_tensor(dst=b, data1=b, data2=a, op=nl.multiply)
    nisa.tensor_tensor(dst=b, data1=b, data2=d, op=nl.multiply)
    nisa.tensor_scalar(dst=b, data=b, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=dx, src=b)
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=nl.multiply)
    nisa.tensor_tensor(dst=a, data1=a, data2=d, op=nl.multiply)
    nisa.dma_copy(dst=dy, src=a)
    return dx, dy
"""


def test_a_backward_kernel_gives_what_differentiating_the_interpreted_kernel_gives(folder: Path) -> None:
    import jax

    (folder / "k" / "squares.py").write_text(FLASH)
    arrays = 'inputs: ["f32[128,8]", "f32[128,8]"], outputs: ["f32[128,8]"]'
    entry = f"  - {{source: k/squares.py:squares, {arrays}"
    plan(folder, f"{entry}}}\n{entry}, name: own, vjp: k/squares.py:squares_back}}\n")
    rng = np.random.default_rng(0)
    x, y, weights = (rng.normal(size=(128, 8)).astype(np.float32) for _ in range(3))

    def gradients(name):
        kernel = operator(folder / "m.yaml", name)
        return jax.grad(lambda *a: (kernel(*a)[0] * weights).sum(), (0, 1))(x, y)

    grads = [gradients(name) for name in ("squares", "own")]
    for by_itself, by_the_kernel, wanted in zip(*grads, (2 * x * y * weights, x * x * weights), strict=True):
        np.testing.assert_allclose(by_itself, wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(by_the_kernel, by_itself, rtol=1e-5, atol=1e-6)
    # The gradients of `own` come from its backward kernel.
    (folder / "k" / "squares.py").write_text(FLASH.replace("operand0=2.0", "operand0=4.0"))
    wrong = jax.grad(lambda a: (operator(folder / "m.yaml", "own")(a, y)[0] * weights).sum())(x)
    np.testing.assert_allclose(wrong, 4 * x * y * weights, rtol=1e-5, atol=1e-6)
    with pytest.raises(KernelgenError, match="has no kernel that is named 'square': did you mean 'squares'"):
        operator(folder / "m.yaml", "square")


def test_check_says_which_kernels_differ_and_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "k" / "refs.py").write_text(
        "import numpy as np\ndef right(x, y):\n    return y + 1, x + 1\n"
        "def wrong(x, y):\n    y[0] = 5\n    return y + 1, x + 1\ndef few(x, y):\n    return y\n"
        "def fails(x, y):\n    return x / None\ndef texts(x, y):\n    return np.array(['a'] * 4), x\n"
    )
    (folder / "k" / "squares.py").write_text(FLASH.replace("operand0=2.0", "operand0=4.0"))
    arrays = 'inputs: ["u8[4]", "u8[4]"], outputs: ["u8[4]", "u8[4]"]'
    entries = [
        f"  - {{source: k/plain.py:swapped, name: {name}, {arrays}, check: {{reference: k/refs.py:{name}}}}}"
        for name in ("right", "wrong", "few", "fails", "texts")
    ]
    two = 'inputs: ["f32[128,8]", "f32[128,8]"], outputs: ["f32[128,8]"]'
    entries.append(f"  - {{source: k/squares.py:squares, {two}, vjp: k/squares.py:squares_back}}")
    plan(folder, "\n".join(entries))
    assert run(["check", str(folder / "m.yaml")]) == 1
    printed = re.sub(r"-4-u8-\w+|-128x8-f32-\w+", "", capsys.readouterr().out)
    assert re.sub(r"(by up to|first \[0, 0\]:) .*", r"\1 …", printed).splitlines() == [
        "fails: differs",
        f"    error: {folder}/k/refs.py:fails: TypeError: unsupported operand type(s) for /: 'int' and 'NoneType'",
        "few: differs",
        "    the reference returns 1 results, and the kernel 2",
        "right: ok",
        "squares.vjp: differs",
        "    output0: 1024 of 1024 differ, by up to …",
        "texts: differs",
        f"    error: {folder}/k/refs.py:texts: result 0 is an array of <U1, not of numbers",
        "wrong: differs",
        "    output0: 1 of 4 differ, by up to …",
        "1 ok, 5 different, 1 without a reference",
    ]
    assert run(["check", str(folder / "m.yaml"), "--only", "right"]) == 0
    (folder / "m.yaml").write_text(
        f"format: 1\nname: m\ntargets: [trn1]\nkernels:\n  - {{source: k/plain.py:swapped, {arrays}}}\n"
    )
    assert run(["check", str(folder / "m.yaml")]) == 2


NAMED = {
    "jax": """\
def apply(factor, y, *, x, shift=0.0):
    return x * factor - y + shift
""",
    "numpy": """\
import numpy as np

def apply(factor, y, *, x, shift=0.0):
    return np.subtract(x * factor, y) + shift
""",
    "nki": """\
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def apply(factor, y, *, x, shift=0.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    a, b = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf) for _ in range(2))
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=y)
    nisa.tensor_scalar(dst=a, data=a, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=shift)
    nisa.tensor_tensor(dst=a, data1=a, data2=b, op=nl.subtract)
    nisa.dma_copy(dst=out, src=a)
    return out
""",
    "older": """\
import neuronxcc.nki.language as nl

def apply(factor, y, x, out, shift=0.0):
    nl.store(out, nl.subtract(nl.add(nl.multiply(nl.load(x), factor), shift), nl.load(y)))
""",
}
ENTRY = """\
  - source: k/apply.py:apply
    inputs: ["f32[8,4]", "f32[8,4]"]
    outputs: ["f32[8,4]"]
    params: {factor: 3.0, shift: 0.5}
    arguments: [x, y]
"""


@pytest.mark.parametrize("language", sorted(NAMED))
def test_inputs_may_be_passed_by_name(folder: Path, language: str) -> None:
    (folder / "k" / "apply.py").write_text(NAMED[language])
    spec, hlo = emitted(folder, ENTRY)
    x, y = (np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32) for i in range(2))
    (found,) = execute.run(hlo, [x, y])
    np.testing.assert_allclose(found, x * 3 - y + 0.5, rtol=1e-5, atol=1e-5)
    other, hlo = emitted(folder, ENTRY.replace("[x, y]", "[y, x]"))
    assert other.id != spec.id
    (found,) = execute.run(hlo, [x, y])
    np.testing.assert_allclose(found, y * 3 - x + 0.5, rtol=1e-5, atol=1e-5)


def test_names_of_inputs_that_say_nothing_clear_are_refused(folder: Path) -> None:
    (folder / "k" / "apply.py").write_text(NAMED["nki"])
    for old, new, said in (
        ("[x, y]", "[x]", "arguments: 1 names, and there are 2 inputs: each has one"),
        ("[x, y]", "[x, factor]", "'factor' is an input and one of the params"),
        ("[x, y]", "[x, 'a b']", "an argument's name: letters, digits and '_'"),
        ("[x, y]\n", "[x, y]\n    lowering: native\n", "'native' receives its inputs by position"),
    ):
        with pytest.raises(KernelgenError, match=re.escape(said)):
            plan(folder, ENTRY.replace(old, new))
    with pytest.raises(KernelgenError, match=r"apply\.py:5:1: error: err_arguments: apply: missing a required .* 'y'"):
        emitted(folder, ENTRY.replace("[x, y]", "[x, z]"))
