"""Kernel libraries: registrations read from source, errors, and imports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernelgen
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters import scan
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library, builtin_library, dependencies, emitters_of
from kernelgen.emitters.loading import load_function
from kernelgen.emitters.scan import registration
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.plan import Plan, Request
from kernelgen.spec.kernel import GraphSpec, KernelSpec, UnnumberedNode, UnnumberedTensor

HEADER = "from kernelgen.emitters import emitter\n"


def library(root: Path, **modules: str) -> Library:
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text)
    return Library("mine", root)


def mistakes(root: Path, text: str) -> list[str]:
    """Returns the errors of a library of one module, without its folder's name."""
    with pytest.raises(KernelgenError) as caught:
        library(root, m=text).scan()
    return [str(d).replace(f"{root}/", "") for d in caught.value.diagnostics]


def test_a_signature_is_read_without_importing(tmp_path: Path) -> None:
    text = HEADER + (
        "raise RuntimeError('imported')\n"
        "@emitter('my_op', layouts=('planes', 'bf16'))\n"
        "def f(x, y=None, *, alpha: float, n: int = 3, fast: bool = False, low: float = -1, out, op, inputs): ...\n"
    )
    (r,) = library(tmp_path, m=text).scan().values()
    assert (r.op, r.module, r.function, r.inputs, r.required, r.line) == ("my_op", "m", "f", ("x", "y"), 1, 4)
    assert [(p.name, p.kind, p.default) for p in r.params] == [
        ("alpha", float, None),
        ("n", int, 3),
        ("fast", bool, False),
        ("low", float, -1.0),
    ]
    assert r.context == ("out", "op", "inputs")
    assert r.layouts == ("planes", "bf16")
    assert r.custom
    assert registration(tmp_path / "m.py", "my_op") == r


def test_the_decorator_is_known_by_any_name(tmp_path: Path) -> None:
    for text, ops in {
        "from kernelgen.emitters import emitter as e\n@e('a')\ndef f(x): ...\n": ["a"],
        "import kernelgen.emitters\n@kernelgen.emitters.emitter('a')\ndef f(x): ...\n": ["a"],
        "from kernelgen import emitters\n@emitters.emitter('a')\ndef f(x): ...\n": ["a"],
        "from blinker import emitter\n@emitter('a')\ndef f(x): ...\n": [],
    }.items():
        assert list(library(tmp_path, m=text).scan()) == ops


@pytest.mark.parametrize(
    "source, expected",
    [
        ("@emitter(NAME)\ndef f(x): ...\n", "m.py:2:10: error: op names are string literals, not NAME"),
        ("@emitter('RMS')\ndef f(x): ...\n", "m.py:2:10: error: op names are lower-case identifiers, not 'RMS'"),
        ("@emitter\ndef f(x): ...\n", "m.py:2:2: error: name the ops that 'f' computes: @emitter(\"rms_norm\")"),
        (
            "@emitter('a')\ndef f(*xs): ...\n",
            "m.py:3:8: error: emitter 'f' takes *xs: every input and parameter has a name",
        ),
        (
            "@emitter('a', types='float')\ndef f(x, y): ...\n",
            'm.py:2:2: error: types has an entry for each of 2 inputs, separated by commas, such as types="float, same", not '
            'types="float"',
        ),
        ("@emitter('a')\ndef f(x, y=1): ...\n", "m.py:3:12: error: an optional input's default is None, not 1"),
        ("@emitter('a')\ndef f(x, *, n): ...\n", "m.py:3:13: error: parameter 'n' is annotated as int, float or bool"),
        (
            "@emitter('a')\ndef f(x, *, n: int = 1.5): ...\n",
            "m.py:3:22: error: the default of 'n' is a literal int, not 1.5",
        ),
        (
            "if 1:\n  @emitter('a')\n  def f(x): ...\n",
            "m.py:4:3: error: emitter 'f' is not a plain function at the module's top level",
        ),
        ("def f(:\n", "m.py:2:7: error: not valid Python: invalid syntax"),
        (
            "@emitter('rms_norm')\ndef f(x, y, *, eps: float): ...\n",
            "m.py:3:1: error: ggml's rms_norm has the inputs (src0); emitter 'f' takes (x, y)",
        ),
        (
            "@emitter('rms_norm')\ndef f(x, *, eps: float, epz: float): ...\n",
            "m.py:3:1: error: ggml's rms_norm has no parameter 'epz': did you mean 'eps'? (it has: eps)",
        ),
        (
            "@emitter('rms_norm')\ndef f(x, *, eps: int): ...\n",
            "m.py:3:1: error: parameter 'eps' of ggml's rms_norm is float, not int",
        ),
        (
            "@emitter('rms_norm')\ndef f(x): ...\n",
            "m.py:3:1: error: emitter 'f' lacks parameters of ggml's rms_norm: eps",
        ),
        (
            "@emitter('a', kind='f32')\ndef f(x): ...\n",
            "m.py:2:15: error: @emitter has no keyword 'kind'; it has 'types', 'language', 'targets', 'where' and 'layouts'",
        ),
        (
            "@emitter('a', language='nky')\ndef f(x): ...\n",
            "m.py:2:24: error: unknown language 'nky': did you mean 'nki'? (languages are jax, numpy, nki)",
        ),
        ("@emitter('a', language=L)\ndef f(x): ...\n", "m.py:2:24: error: language: expected a string literal, not L"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, source: str, expected: str) -> None:
    assert mistakes(tmp_path, HEADER + source) == [expected]


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(HEADER + "@emitter('b')\ndef g(*x): ...\n")
    assert len(mistakes(tmp_path, HEADER + "@emitter(A)\ndef f(x, y=2): ...\n")) == 3


def test_the_first_library_wins(tmp_path: Path) -> None:
    mine = library(tmp_path, m=HEADER + "@emitter('relu')\ndef f(x): ...\n")
    assert Catalog([mine, builtin_library()]).find("relu")[0] is mine
    assert Catalog([mine, builtin_library()]).find("silu")[0].name == "kernelgen"
    with pytest.raises(KernelgenError, match=r"no emitter computes op 'rms_nrom': did you mean 'rms_norm'\?"):
        Catalog([mine, builtin_library()]).find("rms_nrom")


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelgenError, match="is not a folder"):
        Library("mine", tmp_path / "none").scan()


def test_dependencies_are_the_module_and_its_helpers(tmp_path: Path) -> None:
    lib = library(
        tmp_path,
        m=HEADER + "import math\nfrom .a import x\nfrom . import b\nfrom kernelgen.kernels.common import f32\n",
        a="from .c import y\n",
        b="from .m import z\n",  # a cycle
        c="",
        unused="",
    )
    names = [p.name for p in dependencies(lib, "m")]
    assert names[0] == "m.py" and set(names) == {"m.py", "a.py", "b.py", "c.py", "common.py"}


def test_builtin_emitters_depend_on_themselves_and_the_shared_helpers() -> None:
    lib = builtin_library()
    assert [p.name for p in dependencies(lib, "rope")] == ["rope.py", "common.py"]


def test_libraries_with_equal_module_names_do_not_meet(tmp_path: Path) -> None:
    values = []
    for name in ("one", "two"):
        root = tmp_path / name
        root.mkdir()
        lib = library(root, m=HEADER + "from .h import V\n@emitter('my_op')\ndef f(x): return V\n", h=f"V = '{name}'\n")
        values.append(load_function(lib, lib.scan()["my_op"])(None))
    assert values == ["one", "two"]


def test_a_changed_helper_is_imported_again(tmp_path: Path) -> None:
    lib = library(tmp_path, m=HEADER + "from .h import V\n@emitter('my_op')\ndef f(x): return V\n", h="V = 1\n")
    r = lib.scan()["my_op"]
    function = load_function(lib, r)
    assert function(None) == 1
    assert load_function(lib, r) is function
    (tmp_path / "h.py").write_text("V = 2\n")
    assert load_function(lib, r)(None) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.py", "m.py"]  # no bytecode is left


def test_the_builtin_library_may_move(tmp_path: Path) -> None:
    """A worker finds the library under another path in every action, and must use the files there."""
    places = []
    for name, value in (("one", 1), ("two", 2)):
        root = tmp_path / name
        root.mkdir()
        text = HEADER + f"@emitter('my_op')\ndef f(x): return {value}\n"
        (root / "m.py").write_text(text)
        lib = Library("kernelgen", root)
        places.append(load_function(lib, registration(root / "m.py", "my_op"))(None))
    real = builtin_library()
    assert load_function(real, real.scan()["relu"]).__name__ == "unary"
    assert places == [1, 2]


def test_an_emitter_that_does_not_import_is_named(tmp_path: Path) -> None:
    lib = library(tmp_path, m=HEADER + "import no_such_module\n@emitter('my_op')\ndef f(x): ...\n")
    said = r"m\.py:2:1: error: can't import the emitter of 'my_op': ModuleNotFoundError.*\n.*install it for the Python"
    with pytest.raises(KernelgenError, match=said):
        load_function(lib, lib.scan()["my_op"])


def test_scanning_imports_no_jax() -> None:
    code = (
        "import sys; from kernelgen.emitters.library import dependencies;"
        "from kernelgen.emitters.library import builtin_library; b = builtin_library();"
        "[dependencies(b, r.module) for r in b.scan().values()];"
        "print([m for m in ('jax', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


EMIT = """
import sys
from kernelgen.steps import worker
tensor = "(4,1,1,1)/f32"
spec = '{"op": "%s", "inputs": ["%s"], "output": "%s", "params": {}, "alias": null}' % (sys.argv[3], tensor, tensor)
words = ["emit", f"--spec={spec}", f"--library={sys.argv[1]}", f"--emitter={sys.argv[2]}", "--output=out.hlo.pb"]
code, said = worker.run(words)
sys.exit(said if code else 0)
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """Returns a folder with links to kernelgen's modules, like one of Bazel's sandboxes."""
    package = Path(kernelgen.__file__).parent
    for file in package.rglob("*.py"):
        link = tmp_path / "tools" / "kernelgen" / file.relative_to(package)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    return tmp_path


def emit_in(folder: Path, library: str, emitter: str, op: str) -> bytes:
    command = [sys.executable, "-P", "-c", EMIT, library, emitter, op]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": "tools"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (folder / "out.hlo.pb").read_bytes()


def test_an_action_reads_its_own_copy_of_the_builtin_kernels(sandbox: Path) -> None:
    kernels = sandbox / "kernels"
    kernels.mkdir()
    for file in builtin_library().root.glob("*.py"):
        (kernels / file.name).symlink_to(file.resolve())
    emitter = sandbox / "mine" / "doubled.py"
    emitter.parent.mkdir()
    emitter.write_text(
        HEADER + "from kernelgen.kernels.common import f32\n@emitter('doubled')\ndef doubled(x): return f32(x) * 2\n"
    )
    before = emit_in(sandbox, "mine", "mine/doubled.py", "doubled")
    own = (kernels / "common.py").read_text()
    (kernels / "common.py").unlink()
    (kernels / "common.py").write_text(own + "\n\ndef f32(x): return x + 1\n")
    assert emit_in(sandbox, "mine", "mine/doubled.py", "doubled") != before


def test_an_emitter_that_imports_no_builtin_helper_needs_none_there(sandbox: Path) -> None:
    (sandbox / "mine").mkdir()
    (sandbox / "mine" / "doubled.py").write_text(HEADER + "@emitter('doubled')\ndef doubled(x): return x * 2\n")
    assert emit_in(sandbox, "mine", "mine/doubled.py", "doubled")


IN_LANGUAGES = {
    "in_jax": HEADER + "@emitter('relu', types='float')\ndef f(x): ...\n",
    "in_numpy": HEADER + "@emitter('relu', types='f32', language='numpy')\ndef g(x): ...\n",
    "in_nki": HEADER + "@emitter('relu', types='f16', language='nki', targets=('trn2', 'trn3'))\ndef h(x): ...\n",
}


def relu(dtype: str) -> KernelSpec:
    tensor = TensorDesc.parse(f"(8,1,1,1)/{dtype}")
    return KernelSpec.make("relu", [tensor], tensor)


@pytest.mark.parametrize(
    "dtype, languages, expected",
    [
        ("f32", (), {"in_jax": ()}),
        ("f32", ("numpy",), {"in_numpy": ("trn1", "trn2")}),
        ("f32", ("nki", "numpy"), {"in_numpy": ("trn1", "trn2")}),  # nki does not take f32
        ("f16", ("nki", "jax"), {"in_jax": ("trn1",), "in_nki": ("trn2",)}),
        ("f16", ("jax", "nki"), {"in_jax": ()}),
    ],
)
def test_the_first_language_that_can_computes_an_op(
    tmp_path: Path, dtype: str, languages: tuple[str, ...], expected: dict[str, tuple[str, ...]]
) -> None:
    catalog = Catalog([library(tmp_path, **IN_LANGUAGES)])
    assert catalog.find("relu")[1].module == "in_jax"
    found = catalog.kernels(relu(dtype), languages, ("trn1", "trn2"))
    assert {kernel.emitter: kernel.targets for kernel in found} == expected
    assert {kernel.spec.id for kernel in found} == {relu(dtype).id}


def test_a_language_without_an_emitter_is_an_error(tmp_path: Path) -> None:
    catalog = Catalog([library(tmp_path, **IN_LANGUAGES)])
    with pytest.raises(KernelgenError, match="no emitter computes op 'relu' in nki for trn1"):
        catalog.kernels(relu("f16"), ("nki",), ("trn1", "trn2"))


def test_emitters_of_one_op_have_different_languages_or_targets_and_modules(tmp_path: Path) -> None:
    other = HEADER + "@emitter('relu', language='nki', targets='trn2')\ndef i(x): ...\n"
    with pytest.raises(
        KernelgenError, match=r"other_nki.py:3:1: error: op 'relu' already has the emitter 'h' at .*in_nki.py:3"
    ):
        library(tmp_path, **IN_LANGUAGES, other_nki=other).scan()
    (tmp_path / "other_nki.py").write_text(other.replace("trn2", "trn1"))
    assert {r.module for r in Library("mine", tmp_path).registrations} == {*IN_LANGUAGES, "other_nki"}
    (tmp_path / "in_jax.py").write_text(IN_LANGUAGES["in_jax"] + "@emitter('relu', language='numpy')\ndef j(x): ...\n")
    with pytest.raises(KernelgenError, match="an op has one emitter in a module"):
        Library("mine", tmp_path).scan()


def test_a_plan_has_a_kernel_in_each_language_that_is_requested(tmp_path: Path) -> None:
    catalog = Catalog([library(tmp_path, **IN_LANGUAGES)])
    configs = tuple(CompileConfig.make(target) for target in ("trn1", "trn2"))
    both = ("trn1", "trn2")
    plan = Plan.merge(
        [
            Request("plain", tuple(catalog.kernels(relu("f16"), (), both)), configs),
            Request("mixed", tuple(catalog.kernels(relu("f16"), ("nki", "jax"), both)), configs),
        ]
    )
    id = relu("f16").id
    assert [(k.id, k.targets) for k in plan.kernels] == [(id, ()), (f"{id}.nki", ("trn2",))]
    assert {b.id: b.kernels for b in plan.bundles} == {
        "mixed_trn1": (id,),
        "mixed_trn2": (f"{id}.nki",),
        "plain_trn1": (id,),
        "plain_trn2": (id,),
    }
    assert Plan.from_json(plan.to_json()) == plan
    twice = (*catalog.kernels(relu("f32"), (), both), *catalog.kernels(relu("f32"), ("numpy",), both))
    with pytest.raises(KernelgenError, match=r"asks for the kernel relu-8-f32-\w+ in jax and in numpy"):
        Plan.merge([Request("both", twice, configs)])


def test_a_graph_kernel_is_composed_of_emitters_in_jax_for_all_targets(tmp_path: Path) -> None:
    tensor = TensorDesc.parse("(8,1,1,1)/f16")
    node = UnnumberedNode("relu", (UnnumberedTensor("x", 0, tensor),), tensor, {}, None, True)
    spec = GraphSpec.make([node])
    mine = library(tmp_path, **IN_LANGUAGES)
    kernel = Catalog([mine]).kernel(spec)
    assert (kernel.emitters, kernel.language, kernel.id) == ((("mine", "in_jax"),), "jax", spec.id)
    others = [(mine, mine.file(module)) for module in ("in_nki", "in_jax", "in_numpy")]
    assert [made.module for _, made in emitters_of(spec, others)] == ["in_jax"]
    with pytest.raises(KernelgenError, match="composed of emitters in jax that name no targets; that of 'relu' is not"):
        emitters_of(spec, [(mine, mine.file("in_numpy"))])
    mine.file("in_jax").write_text(HEADER + "@emitter('relu', targets='trn2')\ndef f(x): ...\n")
    with pytest.raises(KernelgenError, match="no emitter computes op 'relu' in jax for all targets"):
        Catalog([Library("mine", tmp_path)]).kernel(spec)


def test_every_statement_of_a_module_is_read_in_order() -> None:
    source = """\
if a:
    import b
elif c:
    import d
else:
    with e:
        import f
try:
    import g
except h:
    import i
else:
    import j
finally:
    import k
match m:
    case 1:
        import n
class C:
    async def f(self, x=lambda: 1):
        for y in x:
            while y:
                import o
        else:
            import p
"""
    for tree in map(ast.parse, [source, *(file.read_text() for file in builtin_library().root.glob("*.py"))]):
        walked = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        assert sorted(map(id, scan.statements(tree))) == sorted(map(id, walked))
    names = [node.names[0].name for node in scan.statements(ast.parse(source)) if isinstance(node, ast.Import)]
    assert sorted(names) == list("bdfgijknop")
