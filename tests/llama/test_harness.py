"""How the harness builds kernels and reads the programs' output: it reports no failure as a success."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import calls
import harness
import llama_programs
import program_cases
import pytest

from kernelgen import cli

RELU = '{op: "relu", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'
NONSENSE = '{op: "nonsense", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'
COPY = '{op: "cpy", inputs: ["(32,1,1,1)/f32", "(32,1,1,1)/iq1_s"], output: "(32,1,1,1)/iq1_s"}'


def test_what_no_emitter_takes_is_left_out_with_the_reason(neuron_target: str, tmp_path: Path) -> None:
    kernels, request, refused = harness.builder().read([RELU, NONSENSE, COPY])
    assert set(kernels) == {RELU}
    assert "unknown op 'nonsense'" in refused[NONSENSE] and "iq1_s" in refused[COPY]
    assert request
    pack = harness.builder().pack(request, tmp_path)
    assert (pack.kernels, pack.refused, pack.failed) == (1, {}, {})


def test_kernels_are_those_that_kernelgen_builds(neuron_target: str, tmp_path: Path) -> None:
    """Without the compile whose result is discarded, the NEFF's bytes are the same."""
    manifest = tmp_path / "group.yaml"
    manifest.write_text(f"format: 1\nname: group\ntargets: [{neuron_target}]\nkernels:\n  - {RELU}\n")
    harness.build_manifest(manifest, tmp_path / "here")
    assert cli.run(["build", str(manifest), "--compiler", "simulator", "-o", str(tmp_path / "there")]) == 0
    name = f"group_{neuron_target}.kernels.gguf"
    assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_what_ran_is_counted_over_all_processes() -> None:
    log = """\
ggml-neuron: 3 ops ran on NeuronCores: 1 ADD, 2 MUL_MAT
ggml-neuron: 2 ops ran in groups, in 1 launches, 2.0 ops each
ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore
"""
    assert harness.ran(log + log) == harness.Ran(Counter(ADD=2, MUL_MAT=4), grouped=4, launches=2)
    lost = "ggml-neuron: 1 ops ran on the CPU instead of a NeuronCore: 1 CPY\n"
    assert harness.ran(lost).cpu == Counter(CPY=1)


LINE = (
    "1 shared-3 0:7:1:last 2:0:30:odd nmse=2.000e-07 nll=5.5 nll_cpu=5.25 rows=16 changed=1,3 graphs=2 device=86 "
    "cpu=ADD*2,GET_ROWS*3"
)


def test_a_call_that_misses_a_limit_is_not_ok() -> None:
    good = calls.SweepResult("", calls=1, rows=1, device=1)
    assert good.ok
    call = calls.CallResult.read(LINE)
    result = replace(good, elsewhere=Counter())
    result.add(call)
    assert (result.changed, result.elsewhere, result.ok) == (2, {"ADD": 2, "GET_ROWS": 1}, False)
    result.add(calls.CallResult.read(LINE.replace("nmse=2.000e-07", "nmse=-nan")))
    result.add(call)
    assert result.cpu is not None and math.isnan(result.cpu)
    for change in ({"rows": 0}, {"cpu": math.nan}, {"exact": 2e-6}, {"cpu": None}, {"perplexity": 2e-3}):
        assert not replace(good, **change).ok  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="calls: 'else'"):
        calls.CallResult.read("else")
    split = calls.Compared(("a", 2, "step"), errors={"shift": 1e-7}, rows=1)
    assert split.ok
    for name, value in (("errors", {"shift": math.nan}), ("cpu", 2e-3), ("texts", 1), ("touched", 1), ("rows", 0)):
        assert not replace(split, **{name: value}).ok


CALLBACK = """\
common_debug_cb_eval:                   norm-0 = (f32)   RMS_NORM(embd{4, 1, 1, 1}, }) = {4, 1, 1, 1}
            [      0.7869,      -0.8546,    ...,      -inf,       1.0000  ],
    sum = 0.932300
common_debug_cb_eval:                    y-0 = (f32)        MUL(norm-0{4, 1, 1, 1}, w{4, 1, 1, 1}}) = {4, 1, 1, 1}
            [      2.0000,      3.0000  ],
    sum = 5.000000
"""


def test_results_of_programs_are_distinguished() -> None:
    read, compare = program_cases.tensors, llama_programs.compare
    assert list(read(CALLBACK)) == ["0 norm-0 RMS_NORM", "1 y-0 MUL"]
    for value, error in (
        ("2.0000", 0.0),
        ("2.0001", 0.0),  # the last decimal in the output
        ("2.1000", pytest.approx(0.01 / 13, rel=1e-3)),
        ("nan", math.inf),
    ):
        assert compare(read(CALLBACK.replace("2.0000", value)), read(CALLBACK))[0] == error
    assert compare(read(CALLBACK.replace("y-0", "z-0")), read(CALLBACK))[0] == math.inf
    assert program_cases.perplexities("[1]585.2146,[2]597.5405,") == {"chunk 1": 585.2146, "chunk 2": 597.5405}
    texts = program_cases.Case("", "").read
    assert texts("abc\nllama_completion: saving final output to session file '/x'\n") == {"text 0": "abc"}
    assert program_cases._ANSWER("> abcdef\nOne\n\n[ Prompt: 1.0 t/s | Generation: 2.0 t/s ]\n\n\nExiting...\n") == {
        "text 0": "One"
    }
    assert not program_cases.answers_of_pictures("One\nOne\n"), "no picture was seen"
