"""`kernelgen forecast`: how long a call of a model takes, from its graph and a manifest's kernels."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import headers
import pytest

from kernelgen import cli, manifest
from kernelgen.dispatch import chips
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.forecast import fusion, memory, weights
from kernelgen.forecast.products import DEQUANTIZE, of_product
from kernelgen.forecast.work import Work, of_hlo
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import F8_TILES, FIELDS, stored_bytes
from kernelgen.lowering import emission
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.spec.kernel import GraphSpec, KernelSpec

from .conftest import Derive

Said = pytest.CaptureFixture[str]


def forecast(model: Path, exporter: Exporter, *options: str) -> list[str]:
    """Returns the command for a model and the manifest derived beside it."""
    where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]
    return ["forecast", str(model.with_name("derived.yaml")), "--model", str(model), *where, *options]


def test_a_report_names_kernels_by_layers_and_inputs_by_tensors(
    derive: Derive, exporter: Exporter, tmp_path: Path
) -> None:
    file = headers.write(headers.gemma2(n_layer=4), tmp_path / "model.gguf")
    options = ["--n-kv", "256,1024", "--n-ubatch", "64", "--n-tokens", "1,64"]
    derive(file, *options, "--fuse", "layer")
    where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]
    command = ["report", str(tmp_path / "derived.yaml"), "--model", str(file), "--target", "trn1", *options, *where]
    assert cli.run([*command, "-o", str(tmp_path / "report.html")]) == 0
    numbers = json.loads((tmp_path / "report.json").read_text())
    titles = {kernel["title"]: kernel for kernel in numbers["kernels"]}
    assert {title for title, kernel in titles.items() if kernel["per_token"]} == {
        "embd to inp_scaled, 1 token",
        "layers 0, 2, sliding, 1 token, 512 cells",
        "layer 1, 1 token, 1,024 cells",
        "layer 3, 1 token, 1,024 cells",
        "norm to result_output",
    }
    assert titles["layer 1, 1 token, 1,024 cells"]["per_token"] == 1
    assert any(re.fullmatch("l_out.*: n_tokens 64, n_kv.*", title) for title in titles)
    sliding = titles["layers 0, 2, sliding, 1 token, 512 cells"]
    page = (tmp_path / "report.kernels" / f"{sliding['id']}.html").read_text()
    assert "<td>attn_q.weight</td><td>input" in page and "<td>cache_k</td><td>input" in page
    assert numbers["settings"]["n_ctx"] == "any; 1,024 for these calls"
    assert numbers["weights"] == {"": ["f16"]}


def test_a_call_takes_its_launches_and_what_goes_over_the_host(
    derive: Derive, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    options = ["--n-ctx", "512", "--n-tokens", "1,64"]
    derive(file, *options)
    command = forecast(file, exporter, *options, "--n-kv", "256")
    capsys.readouterr()
    found = {}
    for target, waited in (("trn1", False), ("trn1", True), ("trn2", False)):
        assert cli.run([*command, "--json", "--target", target, *(["--waited"] if waited else [])]) == 0
        found[target, waited] = json.loads(capsys.readouterr().out)
    one, many = found["trn1", False]
    assert (one["n_tokens"], one["n_kv"], many["n_tokens"]) == (1, 256, 64)
    assert one["nodes_without_kernel"] == 0 and one["launches"] == sum(k["count"] for k in one["kernels"]) > 20
    assert one["ms"] == pytest.approx(sum(one["parts_ms"].values()))
    assert one["ms"] == pytest.approx(sum(k["count"] * k["us"] for k in one["kernels"]) / 1e3 + one["parts_ms"]["host"])
    # each launch is waited for instead of queued
    more = found["trn1", True][0]["ms"] - one["ms"]
    assert more == pytest.approx(one["launches"] * 125 / 1e3, rel=0.01)
    assert many["ms"] > one["ms"] and many["tokens_per_s"] > one["tokens_per_s"]
    launch = chips.of("trn2").by("launch_us", "queued")
    assert found["trn2", False][0]["parts_ms"]["launch"] == pytest.approx(one["launches"] * launch / 1e3)
    assert cli.run(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 token, 256 cells, trn1 with LNC 1: ") and "modelled, not measured" in said
    assert f"  {one['launches']} launches, and " in said
    assert cli.run([*command, "--target", "trn1", "--lnc", "2"]) == 2
    assert "--lnc 2: trn1 has 1" in capsys.readouterr().err


def test_nodes_without_a_kernel_are_counted_and_said(
    derive: Derive, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    derive(file, "--n-ctx", "512", "--n-tokens", "1")
    text = (tmp_path / "derived.yaml").read_text()
    first = text.index("  - op: rms_norm")
    (tmp_path / "derived.yaml").write_text(text[:first] + text[text.index("  - op:", first + 5) :])
    capsys.readouterr()
    assert cli.run(forecast(file, exporter, "--n-ctx", "512", "--n-tokens", "1")) == 0
    assert " nodes have no kernel; the time that the CPU takes for them is not in it" in capsys.readouterr().out


def test_kernels_of_one_core_are_divided_over_several_with_the_memory_of_each(
    derive: Derive, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    options = ["--n-ctx", "512", "--n-tokens", "1"]
    derive(file, *options)
    command = forecast(file, exporter, *options, "--n-kv", "256")
    capsys.readouterr()

    def of(cores: int, *more: str) -> dict[str, Any]:
        assert cli.run([*command, "--json", "--cores", str(cores), *more]) == 0
        (one,) = json.loads(capsys.readouterr().out)
        assert (one["cores"], one["built"]) == (cores, cores == 1)
        assert one["ms"] == pytest.approx(sum(one["parts_ms"].values()))
        assert one["memory"]["fits"] and one["memory"]["device"] == 16 << 30
        return dict(one)

    found = {cores: of(cores) for cores in (1, 2, 4)}
    assert found[2]["parts_ms"]["launch"] == found[1]["parts_ms"]["launch"]
    for part in ("memory", "tensor", "vector", "scalar"):
        assert found[2]["alone_ms"][part] == pytest.approx(found[1]["alone_ms"][part] / 2, rel=0.05), part
    for part in ("weights", "cache"):
        assert found[2]["memory"][part] == -(-found[1]["memory"][part] // 2) > 0
    # Two sums per layer on the two cores of a chip. With more cores a barrier is added: one for a queue, otherwise one
    # per launch.
    layers, chip = 2, chips.of("trn1")
    n_bytes = 4 * headers.SMALL["n_embd"]
    of_two = 2 * layers * (chip.number("all_reduce_us") / 1e3 + n_bytes / chip.number("all_reduce_gb_per_s") / 1e6)
    barrier = chip.at("collectives_us", 4) / 1e3
    assert found[1]["parts_ms"]["reductions"] == 0
    assert found[2]["parts_ms"]["reductions"] == pytest.approx(of_two)
    assert found[4]["parts_ms"]["reductions"] == pytest.approx(of_two + barrier)
    waited = of(4, "--waited")
    assert waited["parts_ms"]["reductions"] == pytest.approx(of_two + waited["launches"] * barrier)
    assert cli.run([*command, "--cores", "2"]) == 0
    said = capsys.readouterr().out
    assert "the work of each kernel divided by 2 cores: --split-mode tensor has the kernels of slices" in said
    assert "GiB of a core: fits" in said


def test_memory_has_the_weights_of_the_device_in_their_layout_and_the_cache(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    settings = Settings((512,), 512, 1, (1,), (1,), None, "f16", "f16", (True,), False, False, "Q8_0")
    ((_, _, graph),) = exporter.graphs(file, settings, [DecodeCall(512, 1, 1, 1, 256)])
    roots = graph.roots.values()
    held = {root.name: root.shape for root in roots if root.weight and root.name != "token_embd.weight"}
    cache = [root.shape for root in roots if root.name.startswith("cache_")]
    assert len(cache) == 4
    found = memory.of_graph(graph, chips.of("trn1"), 1)
    assert found.weights == sum(shape.storage_bytes for shape in held.values())
    assert found.cache == sum(shape.storage_bytes for shape in cache)
    quantized = [shape for shape in held.values() if shape.dtype == "q8_0"]
    for some in (quantized, [one for one in quantized if one.ne == quantized[0].ne]):
        elements = sum(prod(shape.ne) for shape in some)
        wide = memory.of_graph(graph, chips.of("trn1"), 1, {TensorDesc.make(one.ne, one.dtype) for one in some})
        assert wide.weights - found.weights == 2 * elements - elements // 32 * 34 > 0
        if some == quantized:
            (choice,) = weights.choose(graph, [chips.of("trn1")])
            assert choice.options["bf16"].memory == wide
    tiled = memory.of_graph(
        graph, chips.of("trn1"), 1, {TensorDesc.make(one.ne, one.dtype).in_layout(F8_TILES) for one in quantized}
    )
    # the codes of whole tiles of columns and the scales, or the size in ggml's order if that is larger
    codes = sum(max(one.storage_bytes, stored_bytes(F8_TILES, "q8_0", one.ne)) for one in quantized)
    assert tiled.weights - found.weights == codes - sum(one.storage_bytes for one in quantized)
    small = memory.Memory(found.weights, found.cache, found.weights + found.cache - 1)
    assert found.fits and not small.fits
    assert (
        memory.of_graph(graph, chips.of("trn2"), 1).device == 2 * memory.of_graph(graph, chips.of("trn2", 1), 1).device
    )


def test_kernels_without_a_model_have_a_line_each(tmp_path: Path, capsys: Said) -> None:
    path = str(tmp_path / "few.yaml")
    ops = [("silu", ["64,8"], "64,8"), ("add", ["64,8", "64,8"], "64,8"), ("mul_mat", ["64,32", "64,8"], "32,8")]
    entries = [
        {"op": op, "inputs": [f"({i},1,1)/f32" for i in inputs], "output": f"({out},1,1)/f32"}
        for op, inputs, out in ops
    ]
    Path(path).write_text(json.dumps({"format": 1, "name": "few", "targets": ["trn1", "trn2"], "kernels": entries}))
    assert cli.run(["forecast", path, "--json", "--target", "trn2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["modelled"], found["target"], found["lnc"]) == (True, "trn2", 2) and found["without_hlo"] == []
    times = [one["us"] for one in found["kernels"]]
    launch = chips.of("trn2").by("launch_us", "queued")
    assert len(times) == 3 and times == sorted(times, reverse=True) and all(t > launch for t in times)
    assert cli.run(["forecast", path]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == "µs of a launch, trn1 with LNC 1; modelled, not measured"
    assert len(lines) == len(times) and all(": launch 15.0, " in line for line in lines)
    assert cli.run(["forecast", path, "--cores", "2"]) == 2
    assert "--cores is for --model: kernels alone are forecast as they are" in capsys.readouterr().err


def test_a_kernel_whose_emitter_refuses_it_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        'from kernelgen.emitters import emitter\n\n\n@emitter("mine")\ndef mine(x):\n    raise ValueError("not today")\n'
    )
    tensor = "(64,8,1,1)/f32"
    entries = [{"op": op, "inputs": [tensor], "output": tensor} for op in ("silu", "mine")]
    path = tmp_path / "few.yaml"
    path.write_text(json.dumps({"format": 1, "name": "few", "targets": ["trn1"], "kernels": entries}))
    assert cli.run(["forecast", str(path), "--kernels", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [len(found[key]) for key in ("kernels", "without_hlo")] == [1, 1]
    assert "warning: the forecast leaves out a kernel" in said.err and "ValueError: not today" in said.err


RunModel = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_model(exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunModel:
    """Returns a function that writes auto.yaml of a model with a large layer, and returns status, output and messages."""
    file = headers.write(headers.qwen3(n_embd=2048, n_ff=8192), tmp_path / "model.gguf")
    where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries), "--n-ctx", "256"]

    def run(*more: str) -> tuple[int, str, str]:
        (tmp_path / "auto.yaml").unlink(missing_ok=True)
        code = cli.run(["model", str(file), "-o", str(tmp_path / "auto.yaml"), "--n-tokens", "1", *where, *more])
        return (code, *capsys.readouterr())

    return run


def with_memory(monkeypatch: pytest.MonkeyPatch, target: str, more: int) -> None:
    """Limits a target's memory to `more` bytes beside the weights in ggml's order, the cache and the room for programs."""
    of_graph = memory.of_graph

    def small(graph: Graph, chip: chips.Chip, cores: int, widened: Collection[TensorDesc] = ()) -> memory.Memory:
        found = of_graph(graph, chip, cores, widened)
        held = found.weights + found.cache + more
        return replace(found, device=held * weights.ROOM // (weights.ROOM - 1) + 1) if chip.target == target else found

    monkeypatch.setattr(weights, "of_graph", small)


def test_each_target_has_the_layouts_that_products_are_quickest_with_of_those_that_fit(
    run_model: RunModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "auto.yaml"

    def chosen(target: str, said: str) -> str:
        (line,) = [line for line in said.splitlines() if target in line.partition(": weights ")[0].split(", ")]
        assert all(f"{layouts} " in line for layouts in ("as ggml has them", "bf16"))
        assert line.endswith("modelled, not measured")
        return line.partition(": weights ")[2].partition(", by a forecast of the products of 1 token by weights")[0]

    monkeypatch.setitem(sys.modules, "jax", None)  # planning imports no JAX
    both = ["--ftype", "Q4_K_M", "--target", "trn1", "--target", "trn2"]
    code, said, _ = run_model(*both)
    assert code == 0 and {chosen(target, said) for target in ("trn1", "trn2")} == {"bf16"}
    text = output.read_text()
    assert "\nweights: [bf16]\n" in text and "--weights" not in text
    assert run_model(*both, "--weights", "auto")[0] == 0 and output.read_text() == text
    # there is nothing to dequantize
    code, said, _ = run_model("--ftype", "F16", "--target", "trn1")
    assert code == 0 and "forecast" not in said and "\nweights:" not in output.read_text()
    # trn1 has room for the weights in ggml's order, and trn2 for all layouts
    with_memory(monkeypatch, "trn1", 0)
    code, said, _ = run_model(*both)
    assert code == 0 and (chosen("trn1", said), chosen("trn2", said)) == ("as ggml has them", "bf16")
    assert "fits over 4 cores" in said
    assert "\nweights:\n  trn1: []\n  trn2: [bf16]\n" in output.read_text()
    (request,) = manifest.load([output], Catalog([builtin_library()]))
    layouts = {
        target: {
            t.layout for k in request.kernels_for(target) if isinstance(k.spec, KernelSpec) for t in k.spec.inputs if t
        }
        for target in ("trn1", "trn2")
    }
    assert layouts == {"trn1": {""}, "trn2": {"", "bf16"}}
    # with a little more memory, the weights that gain most get the layout
    with_memory(monkeypatch, "trn1", 24 << 20)
    code, said, _ = run_model(*both)
    assert code == 0 and chosen("trn1", said) == "bf16 for 4 of 8 shapes and types"
    (line,) = re.findall(r"\n  trn1: (.*)\n", output.read_text())
    # q6_K costs more to dequantize and grows less; then come the weights that still fit
    named = [f"(2048,{n},1,1)/{t}" for n, t in ((128, "q6_K"), (256, "q6_K"), (512, "q4_K"))]
    assert json.loads(line.removeprefix("[{bf16: ").removesuffix("}]")) == [*named, "(8192,2048,1,1)/q6_K"]


def test_weights_are_as_they_are_named(run_model: RunModel, tmp_path: Path) -> None:
    output = tmp_path / "auto.yaml"
    code, said, _ = run_model("--ftype", "Q8_0", "--weights", "none")
    assert code == 0 and "forecast" not in said
    assert "\nweights:" not in output.read_text() and "--weights none" in output.read_text()
    code, said, _ = run_model("--ftype", "Q8_0", "--weights", "bf16")
    assert code == 0 and "forecast" not in said
    assert "\nweights: [bf16]\n" in output.read_text() and "--weights bf16" in output.read_text()


def fusions(said: str) -> dict[str, str]:
    """Returns the choice that the command printed for each target."""
    lines = [line.split(": fuse ") for line in said.splitlines() if ": fuse " in line]
    return {target: text for targets, text in lines for target in targets.split(", ")}


def launches(exporter: Exporter, file: Path, options: list[str], target: str, capsys: Said) -> tuple[int, float]:
    """Returns the launches and milliseconds that `kernelgen forecast` computes for a token with derived.yaml."""
    capsys.readouterr()
    assert cli.run(forecast(file, exporter, *options, "--n-kv", "256", "--target", target, "--json")) == 0
    (one,) = json.loads(capsys.readouterr().out)
    return one["launches"], one["ms"]


def test_each_target_has_the_groups_that_a_token_is_quickest_with_of_those_that_can_be_compiled(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    file = headers.write(headers.qwen3(n_embd=4096, n_ff=14336, n_layer=12), tmp_path / "model.gguf")
    output = tmp_path / "derived.yaml"
    where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]
    options = ["--n-ctx", "256", "--n-tokens", "1"]
    both = ["--target", "trn1", "--target", "trn2"]

    def run(*more: str) -> dict[str, str]:
        assert cli.run(["model", str(file), "-o", str(output), *where, *options, *more]) == 0
        return fusions(capsys.readouterr().out)

    def groups(target: str) -> dict[int, str]:
        (request,) = manifest.load([output], Catalog([builtin_library()]))
        specs = [kernel.spec for kernel in request.kernels_for(target)]
        return {len(spec.nodes): spec.id for spec in specs if isinstance(spec, GraphSpec)}

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "jax", None)  # planning imports no JAX
        said = run("--fuse", "auto", *both)
    assert "--fuse auto" in output.read_text().replace(" \\\n#     ", "")
    names = {target: text.partition(",")[0] for target, text in said.items()}
    assert names == {"trn1": "layer", "trn2": "step"}, said
    for text in said.values():
        assert ", by a forecast of the launches and products by weights of 1 token on one core: " in text
        assert text.endswith("; modelled, not measured") and all(f" {name} " in text for name in fusion.FUSES)
    layers = max(groups("trn1"))
    assert max(groups("trn2")) > 2 * layers
    # A group of both targets is in the file once; each target's groups are those of the chosen `--fuse`.
    auto = {target: groups(target) for target in names}
    shared = set(auto["trn1"].values()) & set(auto["trn2"].values())
    assert output.read_text().count("\n    targets: [") == sum(map(len, auto.values())) - 2 * len(shared)
    for target, name in names.items():
        assert run("--fuse", name, "--target", target) == {}
        assert groups(target) == auto[target]
        count, ms = launches(exporter, file, options, target, capsys)
        (told,) = re.findall(rf" {name} ([0-9.]+) ms \(([0-9]+) launch", said[target])
        assert (int(told[1]), float(told[0])) == (count, pytest.approx(ms, rel=0.1))
    # limits of a kernel, of a compile's memory, and of all compiles
    for name, value, why in (
        ("MAX_INSTRUCTIONS", 100_000, "left out: a kernel of 0.3 million instructions"),
        ("COMPILE_GIB", 2, "left out: a compile takes "),
        ("COMPILE_HOURS", 0.03, "left out: compiles take "),
    ):
        with monkeypatch.context() as smaller:
            smaller.setattr(fusion, name, value)
            limited = run("--fuse", "auto", *both)["trn2"]
        assert limited.partition(",")[0] in ("layer", "layers:2", "layers:4") and why in limited, name


def test_products_take_what_is_counted_of_their_kernels() -> None:
    """The estimate of a product equals the count of its kernel's HLO for each type and layout; activations and results
    add little, and the same in each layout.
    """
    catalog = Catalog([builtin_library()])

    def counted(op: str, layout: str, *tensors: TensorDesc) -> Work:
        weight, *rest, output = tensors
        spec = KernelSpec.make(op, [weight.in_layout(layout), *rest], output)
        with contextlib.redirect_stdout(sys.stderr):
            return of_hlo(emission.emit(catalog.emitters(catalog.kernel(spec)), spec).hlo, 24 << 20)

    assert set(DEQUANTIZE) == set(FIELDS)
    ids = [TensorDesc.parse(text) for text in ("(512,1,1,1)/f32", "(2,1,1,1)/i32", "(256,2,1,1)/f32")]
    for dtype in (*FIELDS, "f16", "f32"):
        rows = 300 if dtype == "q6_K" else 1
        dense = [
            TensorDesc.parse(f"({ne})/{t}")
            for ne, t in (("512,256,1,1", dtype), (f"512,{rows},1,1", "f32"), (f"256,{rows},1,1", "f32"))
        ]
        experts = [TensorDesc.parse(f"(512,256,4,1)/{dtype}"), *ids]
        for op, tensors in (("mul_mat", dense), ("mul_mat_id", experts)):
            plain, wide = (
                (counted(op, layout, *tensors), of_product(op, tensors[0].in_layout(layout), tensors[-1]))
                for layout in (("", "bf16") if dtype in FIELDS else ("", ""))
            )
            for known, said in (plain, wide):
                assert (known.columns, known.columns_many) == (said.columns, said.columns_many), (op, dtype)
                activations = Counter({4 * 512: 4 * 512 * rows} if op == "mul_mat" and rows > 1 else {})
                assert known.narrow == said.narrow + activations and said.narrow, (op, dtype)
                assert known.read == pytest.approx(said.read, abs=512 * rows * 4 + 4096), (op, dtype)
            for name in ("vector", "vector_two", "either", "scalar", "elements"):
                gains = [getattr(one[i], name) for i in (0, 1) for one in (plain, wide)]
                assert gains[0] - gains[1] == pytest.approx(gains[2] - gains[3], abs=1e-6), (op, dtype, name)
