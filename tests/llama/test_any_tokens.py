"""A sample of the checks of `bazel run //tools/llama_cpp:any_tokens`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path

import any_tokens
import harness
import pytest
import random_llama

QWEN3 = any_tokens.MODELS[1]

NUMBERS = (1, 16)
"""Numbers of tokens that have kernels."""

LINE = (
    "1 shared-3 0:7:1:last 2:0:30:odd nmse=2.000e-07 nll=5.5 nll_cpu=5.25 rows=16 changed=1,3 graphs=2 device=86 "
    "cpu=ADD*2,GET_ROWS*3"
)


@pytest.fixture(scope="module")
def sweep(programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory) -> any_tokens.Sweep:
    folder = tmp_path_factory.mktemp("qwen3")
    return any_tokens.Sweep(programs, QWEN3, folder, n_tokens=NUMBERS, n_ctx=1024, less_ctx=512)


def test_calls_agree_with_the_cpu(sweep: any_tokens.Sweep) -> None:
    """Calls of any number of tokens at any depth, a text in odd batches, several sequences, and contexts in turn."""
    pairs = [(depth, n) for depth in (0, 250, 510) for n in (1, 2, 9, 15, 16, 17, 33)]
    grid, text, *several = sweep.calls(pairs, (7, 13), [1], window=64, rounds=4)
    for found in (grid, text, *several):
        print(found.row())
        assert found.ok
        assert found.calls >= 4
    assert grid.rows == sum(n for _, n in pairs)
    assert text.rows == 2 * 2 * 31
    assert 2 < sweep.perplexity < 2000
    assert "kernels for other numbers of tokens were launched" in sweep.log


@pytest.mark.long
def test_calls_of_two_threads_agree_with_the_cpu(sweep: any_tokens.Sweep) -> None:
    found = sweep.threads([1], rounds=6)
    print(found.row())
    assert found.ok
    assert found.calls == 12


def grouped_in(
    sweep: any_tokens.Sweep, model: any_tokens.RandomModel, n_ctx: int, depths: tuple[int, ...], least: float = 0.9
) -> tuple[int, int, int]:
    """Returns the ops that ran in groups, the launches of groups, and all launches, of calls at some depths of a cache
    of `n_ctx` cells.

    Checks that results agree with the CPU and that no op runs on the CPU.
    """
    numbers = sweep.numbers
    pairs = [(depth, n) for depth in depths for n in (1, 9)]
    return grouped(
        sweep, list(any_tokens.grid(model, pairs, n_ctx=n_ctx, n_ubatch=max(numbers), numbers=numbers)), least
    )


def grouped(
    sweep: any_tokens.Sweep, script: list[str], least: float, options: tuple[str, ...] = ()
) -> tuple[int, int, int]:
    """Returns the same numbers for the calls of a script; checks that at least the part `least` of all ops is in groups."""
    calls = sweep.run(script, options=options)
    assert max(call.nmse for call in calls) < any_tokens.LIMIT_CPU
    assert all(set(call.cpu) <= any_tokens.ON_THE_CPU and not call.changed for call in calls)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in sweep.log
    found = re.search(r"(\d+) ops ran in groups, in (\d+) launches", sweep.log)
    assert found, sweep.log
    assert int(found[1]) > least * sum(call.device for call in calls)
    return int(found[1]), int(found[2]), sum(map(int, re.findall(r"core \d+: (\d+) launches", sweep.log)))


def test_one_bundle_serves_contexts_of_any_length(programs: harness.Programs, tmp_path: Path) -> None:
    """Caches with as many cells as kernels have, with more, and with a number between: layers are groups in each."""
    model = dataclasses.replace(QWEN3, layers=2)
    more = ("--n-kv", "256,512,1024")
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=None, fuse="layer", more=more)
    assert len({grouped_in(sweep, model, n_ctx, (0, 200)) for n_ctx in (256, 768, 131072)}) == 1
    assert len({grouped_in(sweep, model, n_ctx, (600,)) for n_ctx in (768, 4096)}) == 1


@pytest.mark.long
def test_kernels_of_slices_serve_contexts_of_any_length(programs: harness.Programs, tmp_path: Path) -> None:
    """Each of two cores has the cache of its own heads (-sm tensor)."""
    split = ("--n-kv", "256,1024,8192", "--split-mode", "tensor", "--devices", "2")
    sweep = any_tokens.Sweep(programs, QWEN3, tmp_path, n_tokens=NUMBERS, n_ctx=None, fuse="layer", more=split)
    sweep.environment |= {"NEURON_RT_NUM_CORES": "2", "GGML_NO_BACKTRACE": "1"}
    launches = {}
    for n_ctx in (4096, 256, 1000, 5120):
        script = list(any_tokens.grid(QWEN3, [(0, 9), (200, 1)], n_ctx=n_ctx, n_ubatch=16, numbers=NUMBERS))
        launches[n_ctx] = grouped(sweep, script, 0.6, ("-sm", "tensor"))
    assert len(set(launches.values())) == 1, launches


OF_EACH_KIND = {
    "window": any_tokens.RandomModel("gemma3", window=True),
    "window-and-sinks": any_tokens.RandomModel("gpt-oss", window=True),
    "q8_0": dataclasses.replace(QWEN3, cache="q8_0", layers=4),
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "buffers"), [*((kind, "device") for kind in OF_EACH_KIND), ("window", "host")])
def test_caches_of_each_kind_are_served_at_any_length(
    programs: harness.Programs, tmp_path: Path, kind: str, buffers: str
) -> None:
    """One bundle takes as many launches in each context as in one of 4,096 cells; four sequences that share a cache
    also run.
    """
    model = OF_EACH_KIND[kind]
    least = 0.0  # calls that fill a cache have no output, and a group of two layers may end after it
    more = ("--n-kv", "256,1024,8192")
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=None, fuse="layer", more=more)
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    for depths, lengths in (((0, 200), (4096, 256, 1000, 5120, 8200)), ((900,), (4096, 1000, 5120))):
        launches = {n_ctx: grouped_in(sweep, model, n_ctx, depths, least) for n_ctx in lengths}
        assert len(set(launches.values())) == 1, launches
    for n_ctx in (256, 1000, 5120):
        grouped(sweep, list(any_tokens.several(1, model, "shared", n_ubatch=16, n_ctx=n_ctx, rounds=4)), least)


@pytest.mark.long
@pytest.mark.parametrize(
    ("n_ctx", "n_kv", "buffers"),
    [
        (768, "256", "device"),
        (1200, "256,512", "device"),
        (1200, "256,512", "host"),
    ],
)
def test_each_sequence_with_a_cache_of_its_own_has_layers_as_groups(
    programs: harness.Programs, tmp_path: Path, n_ctx: int, n_kv: str, buffers: str
) -> None:
    """Kernels for one sequence compute it: they bind its cells from their begin, and row numbers count from there."""
    model = dataclasses.replace(QWEN3, layers=3)
    more = ("--n-kv", n_kv, "--n-seq-max", "3")
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=None, fuse="layer", more=more)
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    begin = f"context one n_ctx={n_ctx} n_batch=32 n_ubatch=16 n_seq_max=3 kv_unified=0 {model.options}"
    launches = []
    for seq in range(3):
        alone = [f"decode {seq}:{at}:{n}:all" for at, n in ((0, 16), (16, 9), (25, 1), (26, 30))]
        launches.append(grouped(sweep, [begin, *alone, "end one"], 0.9))
    assert len(set(launches)) == 1, launches
    assert "have a cache each" not in sweep.log
    several = ("0:0:3:all 2:0:5:all", "2:5:1:all", "1:0:9:all", "0:3:1:all 1:9:1:all 2:6:1:all")
    grouped(sweep, [begin, *(f"decode {parts}" for parts in several), "end one"], 0.1)
    assert launches_of_steps(sweep, begin, (9, 30, 5)) == {4}


def launches_of_steps(sweep: any_tokens.Sweep, begin: str, depths: tuple[int, int, int]) -> set[int]:
    """Returns the numbers of launches of calls that each generate a token of two or three sequences of a context;
    checks that all are launches of groups.
    """
    fill = [f"decode {seq}:{at}:{min(16, n - at)}:last" for seq, n in enumerate(depths) for at in range(0, n, 16)]
    before = grouped(sweep, [begin, *fill, "end one"], 0.0)
    found = set()
    for seqs, steps in (((0, 1, 2), 3), ((1, 2), 2), ((0, 1), 1)):
        calls = ["decode " + " ".join(f"{seq}:{depths[seq] + i}:1:all" for seq in seqs) for i in range(steps)]
        ops, launches, all_launches = (
            after - number
            for after, number in zip(grouped(sweep, [begin, *fill, *calls, "end one"], 0.0), before, strict=True)
        )
        assert ops > 0 and launches == all_launches
        found.add(launches // steps)
        assert launches % steps == 0
    return found


@pytest.mark.long
@pytest.mark.parametrize("buffers", ["device", "host"])
@pytest.mark.parametrize("kind", ["f16", "window", "window-and-sinks", "q8_0"])
def test_a_token_of_each_of_several_sequences_is_a_launch_for_each_layer(
    programs: harness.Programs, tmp_path: Path, kind: str, buffers: str
) -> None:
    """They take as many launches as one sequence: in caches of each kind, and with more cells in use than the short
    kernels have.
    """
    model = OF_EACH_KIND.get(kind, dataclasses.replace(QWEN3, layers=3))
    more = ("--n-kv", "256,1024", "--n-seq-max", "3")
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=None, fuse="layer", more=more)
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    for n_ctx, depths in ((768, (9, 30, 5)), (3072, (9, 30, 5)), (3072, (300, 20, 600))):
        begin = f"context one n_ctx={n_ctx} n_batch=32 n_ubatch=16 n_seq_max=3 kv_unified=0 {model.options}"
        assert len(launches_of_steps(sweep, begin, depths)) == 1


IN_TURN = (
    "0:0:3:all 1:0:3:last",  # prompts
    "1:3:2:all 2:0:2:none",
    "0:3:5:all 1:5:5:odd 2:2:5:last",  # drafts under verification, and prompts that continue
    "1:10:8:last 2:7:8:last",
    "0:8:4:none 1:18:4:none",
    "0:12:1:all 1:22:1:none 2:15:1:all",
    "0:13:6:odd 1:23:6:last",
)
"""Calls with equal numbers of tokens for each of several sequences."""


@pytest.mark.parametrize(
    ("kind", "buffers", "launches"),
    [
        ("f16", "device", 28),
        pytest.param("f16", "host", 28, marks=pytest.mark.long),
        pytest.param("q8_0", "device", 35, marks=pytest.mark.long),
        pytest.param("window-and-sinks", "device", 20, marks=pytest.mark.long),
    ],
)
def test_several_tokens_of_each_of_several_sequences_are_a_launch_for_each_layer(
    programs: harness.Programs, tmp_path: Path, kind: str, buffers: str, launches: int
) -> None:
    """Kernels for more tokens of each compute them in as many launches as one sequence: one per layer, and one more.

    The model with a window takes one launch less for the call without outputs.
    """
    model = OF_EACH_KIND.get(kind, dataclasses.replace(QWEN3, layers=3))
    more = ("--n-kv", "256", "--n-seq-max", "3")
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=None, fuse="layer", more=more)
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    begin = f"context one n_ctx=768 n_batch=32 n_ubatch=16 n_seq_max=3 kv_unified=0 {model.options}"
    _, _, found = grouped(sweep, [begin, *(f"decode {parts}" for parts in IN_TURN), "end one"], 0.95)
    assert found == launches


ONE_AFTER_ANOTHER = ("2:0:3:all", "1:0:16:last", "1:16:9:odd", "0:0:1:all", "1:25:1:all")
"""Calls with tokens of one of several sequences."""


@pytest.mark.parametrize(
    ("flash_attn", "fuse", "n_kv", "buffers"),
    [
        ("off", "layer", "256", "device"),
        pytest.param("off", "layer", "256,512", "host", marks=pytest.mark.long),
        pytest.param("off", "none", "256", "device", marks=pytest.mark.long),
        pytest.param("on", "layer", "256", "device", marks=pytest.mark.long),
    ],
)
def test_sequences_with_a_cache_each_have_layers_as_groups_for_one_context(
    programs: harness.Programs, tmp_path: Path, flash_attn: str, fuse: str, n_kv: str, buffers: str
) -> None:
    """Each sequence alone, and all together, take as many launches as a single one. Without groups, kernels for one
    sequence compute the nodes.
    """
    model = dataclasses.replace(QWEN3, layers=3)
    n_ctx = 3 * int(n_kv.split(",")[-1])
    more = ("--n-kv", n_kv, "--n-seq-max", "3", "--flash-attn", flash_attn)
    sweep = any_tokens.Sweep(
        programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=n_ctx, less_ctx=n_ctx, fuse=fuse, more=more
    )
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    flash = f"flash_attn={int(flash_attn == 'on')}"
    begin = f"context one n_ctx={n_ctx} n_batch=32 n_ubatch=16 n_seq_max=3 kv_unified=0 {flash} {model.options}"
    calls = (*IN_TURN, "end one", begin, *ONE_AFTER_ANOTHER)
    script = [begin, *(line if ":" not in line else f"decode {line}" for line in calls), "end one"]
    if fuse == "none":
        found = sweep.run(script)
        assert max(call.nmse for call in found) < any_tokens.LIMIT_CPU
        assert all(set(call.cpu) <= any_tokens.ON_THE_CPU for call in found)
        assert " 0 ops ran on the CPU instead of a NeuronCore" in sweep.log
    else:
        _, _, launches = grouped(sweep, script, 0.95)
        assert launches == (len(IN_TURN) + len(ONE_AFTER_ANOTHER)) * (model.layers + 1)


@pytest.mark.long
def test_a_cache_of_131072_cells_is_filled_to_its_end(
    programs: harness.Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op runs on the CPU, and logits are right where the cache passes 32,768 and 65,536 cells, and in its last
    cells.

    The CPU fills the cache first, and the device restores that state.
    """
    size = random_llama.Size(n_embd=32, n_head=1, n_head_kv=1, n_ff=64, n_layer=1, n_ctx=131072)
    monkeypatch.setattr(any_tokens, "SMALL", size)
    model = dataclasses.replace(any_tokens.MODELS[0], layers=1)
    more = ("--n-kv", "4096,32768,65536,131072")
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=None, fuse="layer", more=more)
    script = [f"context one n_ctx=131072 n_batch=16 n_ubatch=16 cpu_n_ubatch=256 {model.options}"]
    numbers = (9, 9, 1, 1, 16, 1)  # tokens of the calls; the second call passes the limit
    begin = [131072 - sum(numbers) if limit == 131072 else limit - 13 for limit in (32768, 65536, 131072)]
    for depth in begin:
        script.append(f"fill 0 {depth}")
        script += [f"decode 0:{depth + sum(numbers[:i])}:{n}:all" for i, n in enumerate(numbers)]
    ops, launches, all_launches = grouped(sweep, [*script, "end one"], 0.95)
    assert launches == all_launches == len(begin) * len(numbers)
    assert ops > 20 * launches


@pytest.mark.long
@pytest.mark.parametrize("buffers", ["device", "host"])
def test_contexts_between_lengths_of_kernels_are_served_to_their_ends(
    programs: harness.Programs, tmp_path: Path, buffers: str
) -> None:
    model = dataclasses.replace(QWEN3, layers=4)
    more = ("--n-kv", "256,512,1024,2048,4096,8192")
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=(1, 16, 256), n_ctx=None, fuse="layer", more=more)
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    launches = {}
    for n_ctx in (256, 512, 768, 1280, 5120):
        depths = tuple(depth for depth in (0, 240, 500, 750, 1260, 5100) if depth + 9 <= n_ctx)
        launches[n_ctx] = grouped_in(sweep, model, n_ctx, depths)
        if n_ctx == 1280:
            assert grouped_in(sweep, model, 5120, depths) == launches[n_ctx]


@pytest.mark.long
def test_layers_are_computed_in_pieces_where_attention_is_causal(programs: harness.Programs, tmp_path: Path) -> None:
    """Calls have more tokens than kernels. If each token attends to all others, layers are computed node by node."""
    model = dataclasses.replace(QWEN3, layers=4)
    sweep = any_tokens.Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=512, less_ctx=256, fuse="layer")
    in_order = "their group is for fewer tokens, and earlier tokens read what later ones write"
    grouped = []
    for causal, parts in ((1, ("0:0:40:last", "0:40:33:last", "0:73:17:last")), (0, ("0:0:40:last", "0:40:33:last"))):
        sizes = f"n_ctx=512 n_batch=64 n_ubatch=64 causal={causal}"
        calls = sweep.run([f"context one {sizes} {model.options}", *(f"decode {part}" for part in parts)])
        assert len(calls) == len(parts)
        assert max(call.nmse for call in calls) < any_tokens.LIMIT_CPU
        assert (in_order in sweep.log) == (not causal), sweep.log
        found = re.search(r"(\d+) ops ran in groups", sweep.log)
        grouped.append(int(found[1]) / sum(call.device for call in calls) if found else 0.0)
    assert grouped[0] > 0.5 > grouped[1], grouped


def test_lines_are_read_as_the_program_prints_them() -> None:
    call = any_tokens.CallResult.read(LINE)
    assert (call.script, call.context, call.parts) == (1, "shared-3", "0:7:1:last 2:0:30:odd")
    assert (call.nmse, call.nll, call.nll_cpu, call.rows) == (2e-7, 5.5, 5.25, 16)
    assert (call.changed, call.graphs, call.device, call.cpu) == (("1", "3"), 2, 86, {"ADD": 2, "GET_ROWS": 3})
    found = any_tokens.SweepResult("")
    found.add(call)
    assert (found.changed, found.elsewhere) == (2, {"ADD": 2, "GET_ROWS": 1})
    with pytest.raises(RuntimeError, match="calls: 'else'"):
        any_tokens.CallResult.read("else")


def test_what_misses_a_limit_is_not_ok() -> None:
    good = any_tokens.SweepResult("", calls=1, rows=1, device=1)
    assert good.ok
    for change in (
        {"calls": 0},
        {"rows": 0},
        {"device": 0},
        {"cpu": 2e-3},
        {"cpu": float("nan")},
        {"exact": 2e-6},
        {"cpu": None},
        {"perplexity": 2e-3},
        {"changed": 1},
        {"elsewhere": Counter(ADD=1)},
    ):
        assert not dataclasses.replace(good, **change).ok  # type: ignore[arg-type]
    good.add(any_tokens.CallResult.read(LINE.replace("nmse=2.000e-07", "nmse=-nan")))
    good.add(any_tokens.CallResult.read(LINE))
    assert good.cpu is not None and math.isnan(good.cpu)
