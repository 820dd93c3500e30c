"""`kernelgen forecast`: what a call of a model takes, from its graph and the kernels of a manifest."""

from __future__ import annotations

import json
from pathlib import Path

import headers
import pytest

from kernelgen import cli
from kernelgen.dispatch import chips
from kernelgen.model.exporter import Exporter

from .conftest import Derive


def test_a_call_takes_its_launches_and_what_goes_over_the_host(
    derive: Derive, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    options = ["--n-ctx", "512", "--n-tokens", "1,64"]
    derive(file, *options)
    where = ["--model", str(file), "--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]
    command = ["forecast", str(tmp_path / "derived.yaml"), *where, *options, "--n-kv", "256"]
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
    where = ["--model", str(file), "--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]
    capsys.readouterr()
    assert cli.run(["forecast", str(tmp_path / "derived.yaml"), *where, "--n-ctx", "512", "--n-tokens", "1"]) == 0
    assert " nodes have no kernel; the time that the CPU takes for them is not in it" in capsys.readouterr().out
