"""`kernelgen build` with the double of neuronx-cc: which kernels are compiled, with which settings, and how failures
are reported.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen import cli
from kernelgen import manifest as manifests
from kernelgen.bundle import describe
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.neff import container
from kernelgen.spec.kernel import GraphSpec

pytestmark = pytest.mark.usefixtures("kept_workers")

Install = Callable[..., Path]
Build = Callable[..., tuple[int, str, str]]

DEVICES = Path(__file__).resolve().parents[2] / "manifests" / "devices"


@pytest.fixture
def build(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Build:
    """Installs the double with some behaviour and builds two kernels with it; returns (exit status, stdout, stderr)."""
    manifest = tmp_path / "two.yaml"
    tensor = '"(8,4,1,1)/f32"'
    manifest.write_text(
        "format: 1\nname: two\ntargets: [trn1]\nkernels:\n"
        + "".join(f"  - {{op: {op}, inputs: [{tensor}], output: {tensor}}}\n" for op in ("relu", "silu"))
    )

    def build(*more: str, **manners: object) -> tuple[int, str, str]:
        program = install("sdk", record=str(tmp_path / "record"), **manners)
        monkeypatch.setenv("NEURON_SDK", str(program.parent.parent))
        capsys.readouterr()
        code = cli.run(["build", str(manifest), "-o", str(tmp_path / "out"), "-j", "2", *more])
        out, err = capsys.readouterr()
        return code, out, err

    return build


def compiles(folder: Path) -> list[list[str]]:
    calls = [json.loads(line)["arguments"] for line in (folder / "record").read_text().splitlines()]
    return [call for call in calls if call[0] == "compile"]


def test_the_sdk_is_taken_where_it_is_installed(build: Build, tmp_path: Path) -> None:
    code, out, err = build()
    assert code == 0, err
    assert "2 built (2 compiled, 0 up to date), 0 failed" in out
    assert err.startswith("compiling with neuronx-cc 2.24.5133.0+58f8de22\n")
    index = json.loads((tmp_path / "out/two_trn1/index.json").read_text())
    assert index["simulated"] is False
    for kernel in index["kernels"]:
        header = container.read_header((tmp_path / "out/two_trn1" / kernel["neff"]).read_bytes())
        assert not header.simulated
    assert len(compiles(tmp_path)) == 2


def test_what_the_sdk_compiled_is_not_compiled_again_by_the_same_version(build: Build, tmp_path: Path) -> None:
    build()
    code, out, _ = build()
    assert code == 0 and "(0 compiled, 2 up to date)" in out
    code, out, _ = build(version="NeuronX Compiler version 2.11.0.1+abc")
    assert code == 0 and "(2 compiled, 0 up to date)" in out
    code, out, _ = build("--compiler", "simulator")
    assert code == 0 and "(2 compiled, 0 up to date)" in out
    assert len(compiles(tmp_path)) == 4


def test_a_neff_of_the_sdk_is_judged_by_the_digest_that_was_recorded(build: Build, tmp_path: Path) -> None:
    """The algorithm of its own hash is unknown, and two compiles never have equal bytes."""
    build()
    one, two = sorted((tmp_path / "out/.kernelgen/neff").glob("*.neff"))
    data = one.read_bytes()
    assert container.payload_digest(data, container.read_header(data)) is None
    one.write_bytes(data[:-3] + b"\1\1\1")
    before = two.read_bytes()
    code, _, err = build()
    assert code == 1 and "its SHA-256 differs" in err and not one.exists()
    code, out, _ = build()
    assert code == 0 and "(1 compiled, 1 up to date)" in out
    assert one.read_bytes() != data and two.read_bytes() == before


def test_a_failure_of_the_sdk_is_shown_and_is_never_a_result(build: Build, tmp_path: Path) -> None:
    ways: list[dict[str, object]] = [
        {"exit": 1, "output": "none"},
        {"output": "none"},
        {"exit": 1},
        {"output": "garbage"},
        {"exit": 70, "output": "error"},
    ]
    for manners in ways:
        code, out, err = build(print="the reason", **manners)
        assert code == 1, manners
        assert "0 built (0 compiled, 0 up to date), 2 failed" in out, manners
        assert err.count("FAILED: ") == 2 and "the reason" in err, manners
        assert not (tmp_path / "out/two_trn1.kernels.gguf").exists(), manners
    code, out, _ = build()
    assert code == 0 and "2 built (2 compiled" in out


@pytest.mark.parametrize(
    "manners, reason",
    [
        ({"target": "trn2"}, "compiled for cayman (trn2), not for trn1 (sunda)"),
        ({"rename": {"output0": "other"}}, "it has no output output0, which its HLO has"),
    ],
)
def test_a_neff_of_something_else_is_in_no_bundle_and_no_cache(
    build: Build, tmp_path: Path, manners: dict[str, object], reason: str
) -> None:
    shared = ("--cache", str(tmp_path / "cache"))
    code, out, err = build(*shared, **manners)
    assert code == 1 and "2 failed" in out
    assert f"neuronx-cc's NEFF is not used: {reason}" in err
    assert not (tmp_path / "out/two_trn1.kernels.gguf").exists()
    assert not list((tmp_path / "cache").glob("*.neff"))
    code, out, err = build(*shared, drop=["input0"])
    assert code == 0 and "2 built (2 compiled" in out, "the compiler drops inputs that do not matter"


def test_a_hanging_sdk_is_stopped_at_the_time_limit(build: Build) -> None:
    begun = time.monotonic()
    code, out, err = build("--timeout", "2", hang=True)
    assert code == 1 and "2 failed" in out
    assert "still running after 2 s, and was stopped" in err
    assert time.monotonic() - begun < 60


SIZED = """\
format: 1
name: sized
targets: [trn1]
sizes: {n: [1, 8]}
compiler: {model_type: transformer}
kernels:
  - {op: relu, inputs: ["(8,${n},1,1)/f32"], output: "(8,${n},1,1)/f32"}
graphs:
  - fallback: false
    inputs: {x: "(8,${n},1,1)/f32"}
    nodes:
      - {name: a, op: relu, inputs: [x], output: "(8,${n},1,1)/f32"}
      - {name: b, op: silu, inputs: [a], output: "(8,${n},1,1)/f32"}
    outputs: [b]
"""


def test_settings_of_some_kernels_compile_these_and_no_others(build: Build, tmp_path: Path) -> None:
    manifest = tmp_path / "two.yaml"

    def compiled(text: str) -> tuple[list[str], set[str]]:
        """Builds a manifest; returns the ops of the compiled kernels, `graph` for a group, and the --optlevels."""
        (tmp_path / "record").write_text("")
        manifest.write_text(text)
        code, _, err = build()
        assert code == 0, err
        calls = compiles(tmp_path)
        ops = sorted(re.findall(r"^\[\S+\] compile (\w+)-", err, re.MULTILINE))
        assert len(calls) == len(ops)
        return ops, {call[call.index("--optlevel") + 1] for call in calls}

    assert compiled(SIZED) == (["graph", "graph", "relu", "relu"], {"2"})
    prefill = SIZED.replace("transformer}", "transformer, cases: [{when: n > 1, optlevel: 1}]}")
    assert compiled(prefill) == (["graph", "relu"], {"1"})
    assert compiled(prefill.replace("optlevel: 1", "optlevel: 1, auto_cast: none")) == ([], set())
    own = prefill.replace("graphs:\n  - ", "graphs:\n  - compiler: {optlevel: 3}\n    ")
    assert compiled(own) == (["graph", "graph"], {"3"})
    index = json.loads((tmp_path / "out/sized_trn1/index.json").read_text())
    levels = {k["id"]: k["flags"][k["flags"].index("--optlevel") + 1] for k in index["kernels"] if "flags" in k}
    assert sorted((kernel.partition("-")[0], level) for kernel, level in levels.items()) == [
        *[("graph", "3")] * 2,
        ("relu", "1"),
    ]
    assert cli.run(["inspect", "--check", str(tmp_path / "out/sized_trn1.kernels.gguf")]) == 0


@pytest.mark.long
def test_bundles_of_a_model_over_several_cores_are_built_whole(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Emitted, linted, compiled by the double with the settings of each kernel, and read again."""
    path = DEVICES / "llama_3_8b_f16_2_devices.yaml"
    target = "trn1"
    (request,) = manifests.load([path], Catalog([builtin_library()]))
    wanted = {kernel.id: kernel.spec for kernel in request.kernels_for(target)}
    program = install("sdk", record=str(tmp_path / "record"))
    monkeypatch.setenv("NEURON_SDK", str(program.parent.parent))
    words = ["-o", str(tmp_path / "out"), "--target", target, "--compiler", "neuronx-cc", "--memory", "99999"]
    code = cli.run(["build", str(path), *words])
    out, err = capsys.readouterr()
    assert code == 0 and "warning" not in err, err
    assert f"{len(wanted)} built ({len(wanted)} compiled, 0 up to date), 0 failed" in out
    found = describe.describe(tmp_path / "out" / f"{path.stem}_{target}", check=True)
    assert {kernel["id"] for kernel in found["kernels"]} == set(wanted)
    assert (found["simulated"], found["lnc"]) == (False, 1)
    groups = [spec for spec in wanted.values() if isinstance(spec, GraphSpec)]
    assert max(sum(node.op == "all_reduce" for node in spec.nodes) for spec in groups) == 4  # two per layer
    models = Counter(command[command.index("--model-type") + 1] for command in compiles(tmp_path))
    assert models == {"transformer": len(groups), "generic": len(wanted) - len(groups)}


def test_the_logs_of_compiles_are_on_the_kernels_pages(build: Build, tmp_path: Path) -> None:
    assert build(print="estimated <cost> 7")[0] == 0
    bundle, pack = tmp_path / "out" / "two_trn1", tmp_path / "out" / "two_trn1.kernels.gguf"
    logs = sorted((tmp_path / "out" / ".kernelgen" / "neff").glob("*.log"))
    assert len(logs) == 2 and all("estimated <cost> 7" in log.read_text() for log in logs)

    def pages(bundle: Path, *more: str) -> list[str]:
        assert cli.run(["report", str(bundle), "-o", str(tmp_path / "a.html"), *more]) == 0
        return [path.read_text() for path in sorted((tmp_path / "a.kernels").iterdir())]

    assert [page.count("estimated &lt;cost&gt; 7\n") for page in pages(bundle)] == [1, 1]
    assert all("Compiler status PASS" in page for page in pages(pack))
    moved = bundle.rename(tmp_path / "moved")
    assert ["The compile's log" in page for page in pages(moved)] == [False, False]
    assert all("The compile's log" in page for page in pages(moved, "--logs", str(tmp_path / "out")))
    assert all("The compile's log" in page for page in pages(moved, "--logs", str(logs[0].parent)))


def test_what_a_compiler_prints_is_not_in_bundles(build: Build, tmp_path: Path) -> None:
    assert build(steady=True, print="one")[0] == 0
    pack = (tmp_path / "out" / "two_trn1.kernels.gguf").read_bytes()
    for path in (tmp_path / "out" / ".kernelgen" / "neff").glob("*.neff"):
        path.unlink()
    assert build(steady=True, print="two")[0] == 0
    assert len(compiles(tmp_path)) == 4 and (tmp_path / "out" / "two_trn1.kernels.gguf").read_bytes() == pack
