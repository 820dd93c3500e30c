"""Calls of any number of tokens at any depth, in caches of each kind, with few kernels: logits are those of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import calls
import harness
import pytest
import random_llama
from calls import QWEN3, Model, Sweep

NUMBERS = (1, 16)
"""Numbers of tokens that have kernels."""
LAYERED = QWEN3.with_layers(3)


@pytest.fixture(scope="module")
def sweep(programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return Sweep(programs, QWEN3, tmp_path_factory.mktemp("qwen3"), n_tokens=NUMBERS, n_ctx=1024, less_ctx=512)


def test_calls_agree_with_the_cpu(sweep: Sweep) -> None:
    """Calls of any number of tokens at any depth, a text in odd batches, several sequences, and contexts in turn."""
    pairs = [(depth, n) for depth in (0, 250, 510) for n in (1, 2, 9, 15, 16, 17, 33)]
    results = sweep.calls(pairs, (7, 13), [1], window=64, rounds=4)
    for result in results:
        print(result.row())
        assert result.ok
        assert result.calls >= 4
    assert results[0].rows == sum(n for _, n in pairs)
    assert results[1].rows == 2 * 2 * 31
    assert 2 < sweep.perplexity < 2000
    assert harness.ran(sweep.log).padded > 0


@pytest.mark.long
def test_calls_of_two_threads_agree_with_the_cpu(sweep: Sweep) -> None:
    result = sweep.threads([1], rounds=6)
    print(result.row())
    assert result.ok
    assert result.calls == 12


@pytest.mark.long
def test_calls_agree_with_exact_kernels(sweep: Sweep) -> None:
    result = sweep.exact([(0, 9), (250, 17)])
    print(result.row())
    assert result.ok


def in_groups(sweep: Sweep, script: Sequence[str], least: float, *options: str) -> tuple[int, int, int]:
    """Returns the ops that ran in groups, the launches of groups, and all launches, of the calls of a script.

    Checks that results agree with the CPU, that no op runs on the CPU, and that at least the part `least` of all ops is
    in groups.
    """
    results = sweep.run(script, options=options)
    assert max(call.nmse for call in results) < calls.LIMIT_CPU
    assert all(set(call.cpu) <= harness.ON_THE_CPU and not call.changed for call in results)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in sweep.log
    ran = harness.ran(sweep.log)
    assert ran.grouped > least * sum(call.device for call in results)
    return ran.grouped, ran.launches, ran.all_launches


def at_depths(sweep: Sweep, n_ctx: int, depths: Sequence[int], least: float = 0.9) -> tuple[int, int, int]:
    """Returns the same for calls of 1 and 9 tokens at some depths of a cache of `n_ctx` cells."""
    pairs = [(depth, n) for depth in depths for n in (1, 9)]
    return in_groups(sweep, list(calls.grid(sweep.model, pairs, n_ctx=n_ctx, numbers=sweep.numbers)), least)


def layers(programs: harness.Programs, model: Model, folder: Path, *more: str, buffers: str = "device") -> Sweep:
    """Returns a sweep with layers as groups, for caches of any length."""
    sweep = Sweep(programs, model, folder, *more, n_tokens=NUMBERS, n_ctx=None, fuse="layer")
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    return sweep


def test_one_bundle_serves_contexts_of_any_length(programs: harness.Programs, tmp_path: Path) -> None:
    """Caches with as many cells as kernels have, with more, and with a number between: layers are groups in each."""
    sweep = layers(programs, QWEN3.with_layers(2), tmp_path, "--n-kv", "256,512,1024")
    assert len({at_depths(sweep, n_ctx, (0, 200)) for n_ctx in (256, 768, 131072)}) == 1
    assert len({at_depths(sweep, n_ctx, (600,)) for n_ctx in (768, 4096)}) == 1


@pytest.mark.long
def test_kernels_of_slices_serve_contexts_of_any_length(programs: harness.Programs, tmp_path: Path) -> None:
    """Each of two cores has the cache of its own heads (-sm tensor)."""
    more = ("--n-kv", "256,1024,8192", "--split-mode", "tensor", "--devices", "2")
    sweep = layers(programs, QWEN3, tmp_path, *more)
    sweep.environment |= {"NEURON_RT_NUM_CORES": "2", "GGML_NO_BACKTRACE": "1"}
    launches = {}
    for n_ctx in (4096, 256, 1000, 5120):
        script = list(calls.grid(QWEN3, [(0, 9), (200, 1)], n_ctx=n_ctx, numbers=NUMBERS))
        launches[n_ctx] = in_groups(sweep, script, 0.6, "-sm", "tensor")
    assert len(set(launches.values())) == 1, launches


KINDS = {
    "f16": LAYERED,
    "window": Model("gemma3", window=True),
    "window-and-sinks": Model("gpt-oss", window=True),
    "q8_0": replace(QWEN3.with_layers(4), cache="q8_0"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "buffers"),
    [("window", "device"), ("window-and-sinks", "device"), ("q8_0", "device"), ("window", "host")],
)
def test_caches_of_each_kind_are_served_at_any_length(
    programs: harness.Programs, tmp_path: Path, kind: str, buffers: str
) -> None:
    """One bundle takes as many launches in each context as in one of 4,096 cells; four sequences that share a cache
    also run.
    """
    least = 0.0  # calls that fill a cache have no output, and a group of two layers may end after it
    sweep = layers(programs, KINDS[kind], tmp_path, "--n-kv", "256,1024,8192", buffers=buffers)
    for depths, lengths in (((0, 200), (4096, 256, 1000, 5120, 8200)), ((900,), (4096, 1000, 5120))):
        launches = {n_ctx: at_depths(sweep, n_ctx, depths, least) for n_ctx in lengths}
        assert len(set(launches.values())) == 1, launches
    for n_ctx in (256, 1000, 5120):
        in_groups(sweep, list(calls.several(1, KINDS[kind], "shared", n_ubatch=16, n_ctx=n_ctx, rounds=4)), least)


def own_caches(model: Model, n_ctx: int, *options: str) -> str:
    """Returns the line for a context of three sequences with a cache each."""
    words = (
        "context one",
        f"n_ctx={n_ctx}",
        "n_batch=32 n_ubatch=16 n_seq_max=3 kv_unified=0",
        *options,
        model.options,
    )
    return " ".join(words)


@pytest.mark.long
@pytest.mark.parametrize(
    ("n_ctx", "n_kv", "buffers"), [(768, "256", "device"), (1200, "256,512", "device"), (1200, "256,512", "host")]
)
def test_each_sequence_with_a_cache_of_its_own_has_layers_as_groups(
    programs: harness.Programs, tmp_path: Path, n_ctx: int, n_kv: str, buffers: str
) -> None:
    """Kernels for one sequence compute it: they bind its cells from their begin, and row numbers count from there."""
    sweep = layers(programs, LAYERED, tmp_path, "--n-kv", n_kv, "--n-seq-max", "3", buffers=buffers)
    begin = own_caches(LAYERED, n_ctx)
    launches = []
    for seq in range(3):
        alone = [f"decode {seq}:{at}:{n}:all" for at, n in ((0, 16), (16, 9), (25, 1), (26, 30))]
        launches.append(in_groups(sweep, [begin, *alone], 0.9))
    assert len(set(launches)) == 1, launches
    assert "have a cache each" not in sweep.log
    several = ("0:0:3:all 2:0:5:all", "2:5:1:all", "1:0:9:all", "0:3:1:all 1:9:1:all 2:6:1:all")
    in_groups(sweep, [begin, *(f"decode {parts}" for parts in several)], 0.1)
    assert launches_of_steps(sweep, begin, (9, 30, 5)) == {4}


def launches_of_steps(sweep: Sweep, begin: str, depths: tuple[int, int, int]) -> set[int]:
    """Returns the numbers of launches of calls that each generate a token of two or three sequences of a context;
    checks that all are launches of groups.
    """
    fill = [f"decode {seq}:{at}:{min(16, n - at)}:last" for seq, n in enumerate(depths) for at in range(0, n, 16)]
    before = in_groups(sweep, [begin, *fill], 0.0)
    found = set()
    for seqs, steps in (((0, 1, 2), 3), ((1, 2), 2), ((0, 1), 1)):
        script = ["decode " + " ".join(f"{seq}:{depths[seq] + i}:1:all" for seq in seqs) for i in range(steps)]
        after = in_groups(sweep, [begin, *fill, *script], 0.0)
        ops, launches, all_launches = (b - a for a, b in zip(before, after, strict=True))
        assert ops > 0 and launches == all_launches
        assert launches % steps == 0
        found.add(launches // steps)
    return found


@pytest.mark.long
@pytest.mark.parametrize("buffers", ["device", "host"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_token_of_each_of_several_sequences_is_a_launch_for_each_layer(
    programs: harness.Programs, tmp_path: Path, kind: str, buffers: str
) -> None:
    """They take as many launches as one sequence: in caches of each kind, and with more cells in use than the short
    kernels have.
    """
    sweep = layers(programs, KINDS[kind], tmp_path, "--n-kv", "256,1024", "--n-seq-max", "3", buffers=buffers)
    for n_ctx, depths in ((768, (9, 30, 5)), (3072, (9, 30, 5)), (3072, (300, 20, 600))):
        assert len(launches_of_steps(sweep, own_caches(KINDS[kind], n_ctx), depths)) == 1


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
ONE_AFTER_ANOTHER = ("2:0:3:all", "1:0:16:last", "1:16:9:odd", "0:0:1:all", "1:25:1:all")
"""Calls with tokens of one of several sequences."""


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
    sweep = layers(programs, KINDS[kind], tmp_path, "--n-kv", "256", "--n-seq-max", "3", buffers=buffers)
    script = [own_caches(KINDS[kind], 768), *(f"decode {parts}" for parts in IN_TURN)]
    *_, all_launches = in_groups(sweep, script, 0.95)
    assert all_launches == launches


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
    n_ctx = 3 * int(n_kv.split(",")[-1])
    more = ("--n-kv", n_kv, "--n-seq-max", "3", "--flash-attn", flash_attn)
    sweep = Sweep(programs, LAYERED, tmp_path, *more, n_tokens=NUMBERS, n_ctx=n_ctx, less_ctx=n_ctx, fuse=fuse)
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    begin = own_caches(LAYERED, n_ctx, f"flash_attn={int(flash_attn == 'on')}")
    script = [begin, *(f"decode {parts}" for parts in IN_TURN), "end one"]
    script += [begin, *(f"decode {parts}" for parts in ONE_AFTER_ANOTHER)]
    *_, all_launches = in_groups(sweep, script, 0.95 if fuse == "layer" else -1)
    if fuse == "layer":
        assert all_launches == (len(IN_TURN) + len(ONE_AFTER_ANOTHER)) * (3 + 1)


@pytest.mark.long
def test_a_cache_of_131072_cells_is_filled_to_its_end(programs: harness.Programs, tmp_path: Path) -> None:
    """No op runs on the CPU, and logits are right where the cache passes 32,768 and 65,536 cells, and in its last
    cells.

    The CPU fills the cache first, and the device restores that state.
    """
    size = random_llama.Size(n_embd=32, n_head=1, n_head_kv=1, n_ff=64, n_layer=1, n_ctx=131072)
    sweep = layers(programs, Model("llama", size), tmp_path, "--n-kv", "4096,32768,65536,131072")
    script = [f"context one n_ctx=131072 n_batch=16 n_ubatch=16 cpu_n_ubatch=256 {sweep.model.options}"]
    numbers = (9, 9, 1, 1, 16, 1)  # tokens of the calls; the second call passes the limit
    begin = [131072 - sum(numbers) if limit == 131072 else limit - 13 for limit in (32768, 65536, 131072)]
    for depth in begin:
        script.append(f"fill 0 {depth}")
        script += [f"decode 0:{depth + sum(numbers[:i])}:{n}:all" for i, n in enumerate(numbers)]
    ops, launches, all_launches = in_groups(sweep, script, 0.95)
    assert launches == all_launches == len(begin) * len(numbers)
    assert ops > 20 * launches


@pytest.mark.long
@pytest.mark.parametrize("buffers", ["device", "host"])
def test_contexts_between_lengths_of_kernels_are_served_to_their_ends(
    programs: harness.Programs, tmp_path: Path, buffers: str
) -> None:
    more, numbers = ("--n-kv", "256,512,1024,2048,4096,8192"), (1, 16, 256)
    sweep = Sweep(programs, QWEN3.with_layers(4), tmp_path, *more, n_tokens=numbers, n_ctx=None, fuse="layer")
    sweep.environment["GGML_NEURON_BUFFERS"] = buffers
    launches = {}
    for n_ctx in (256, 512, 768, 1280, 5120):
        depths = [depth for depth in (0, 240, 500, 750, 1260, 5100) if depth + 9 <= n_ctx]
        launches[n_ctx] = at_depths(sweep, n_ctx, depths)
        if n_ctx == 1280:
            assert at_depths(sweep, 5120, depths) == launches[n_ctx]


@pytest.mark.long
def test_layers_are_computed_in_pieces_where_attention_is_causal(programs: harness.Programs, tmp_path: Path) -> None:
    """Calls have more tokens than kernels. If each token attends to all others, layers are computed node by node."""
    model = QWEN3.with_layers(4)
    sweep = Sweep(programs, model, tmp_path, n_tokens=NUMBERS, n_ctx=512, less_ctx=256, fuse="layer")
    in_order = "their group is for fewer tokens, and earlier tokens read what later ones write"
    shares = []
    for causal, parts in ((1, ("0:0:40:last", "0:40:33:last", "0:73:17:last")), (0, ("0:0:40:last", "0:40:33:last"))):
        sizes = f"n_ctx=512 n_batch=64 n_ubatch=64 causal={causal}"
        results = sweep.run([f"context one {sizes} {model.options}", *(f"decode {part}" for part in parts)])
        assert len(results) == len(parts)
        assert max(call.nmse for call in results) < calls.LIMIT_CPU
        assert (in_order in sweep.log) == (not causal), sweep.log
        shares.append(harness.ran(sweep.log).grouped / sum(call.device for call in results))
    assert shares[0] > 0.5 > shares[1], shares
