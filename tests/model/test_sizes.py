"""The calls of a model, and the calls whose graphs are exported."""

from __future__ import annotations

from dataclasses import replace

from kernelgen.model import sizes
from kernelgen.model.sizes import DecodeCall, Settings

BASE = Settings(
    n_ctx=(1000,),
    n_ubatch=512,
    n_seq_max=1,
    n_tokens=(1, 300),
    n_outputs=None,
    n_kv=None,
    type_k="f16",
    type_v="f16",
    flash_attn=(True, False),
    kv_unified=False,
    swa_full=False,
)


def lengths(settings: Settings, n_seqs: int = 1) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for call in sizes.requested_calls(settings, n_seqs):
        found.setdefault(call.n_tokens, set()).add(call.n_kv)
    return found


def test_attention_that_reads_on_needs_few_lengths() -> None:
    alone = replace(BASE, n_ctx=(3000,))
    assert lengths(alone) == {1: {0, 256, 512, 1024, 2048, 3072}, 300: {0, 512, 1024, 2048, 3072}}
    assert lengths(replace(alone, n_ctx=(1024,)))[1] == {0, 256, 512, 1024}


def test_a_cache_is_at_least_as_long_as_what_is_put_into_it() -> None:
    assert lengths(BASE) == {1: {0, 256, 512, 1024}, 300: {0, 512, 1024}}
    assert lengths(replace(BASE, n_kv=(768,))) == {1: {768}, 300: {768}}  # the first call has another length


def test_sequences_have_a_cache_each_and_equally_many_tokens() -> None:
    two = replace(BASE, n_seq_max=2)
    assert (two.cells(1000), two.all_cells(1000)) == (512, 1024)
    assert lengths(two, 2) == {300: {0, 256, 512}}
    assert replace(two, kv_unified=True).cells(1000) == 1024
    assert lengths(replace(two, kv_unified=True), 2) == {300: {0, 512, 1024}}
    # attention does not read past a cache that the next sequence's cache follows
    long = replace(two, n_ctx=(4000,))
    assert lengths(long, 2)[300] == {0, *range(256, 2049, 256)}
    assert lengths(long)[300] == {0, 512, 1024, 2048}


def test_few_numbers_of_tokens_end_with_the_most_of_a_call() -> None:
    assert sizes.few(512) == (1, 8, 32, 128, 512)
    assert sizes.few(2048) == (1, 8, 32, 128, 512, 2048)
    assert sizes.few(100) == (1, 8, 32, 100)
    assert sizes.few(1) == (1,)
    assert replace(BASE, n_ctx=(256, 300)).most_tokens == 512
    assert replace(BASE, n_ctx=(200,)).most_tokens == 256
    assert replace(BASE, n_ubatch=64).most_tokens == 64


def test_outputs_are_one_and_all_or_what_is_requested() -> None:
    def outputs(settings: Settings) -> set[tuple[int, int]]:
        return {(call.n_tokens, call.n_outputs) for call in sizes.requested_calls(settings, 1)}

    assert outputs(BASE) == {(1, 1), (300, 1), (300, 300)}
    assert outputs(replace(BASE, n_outputs=(1, 2, 400))) == {(1, 1), (300, 1), (300, 2)}
    assert outputs(replace(BASE, n_outputs=(0, 1))) == {(1, 0), (1, 1), (300, 0), (300, 1)}


def test_slices_are_computed_without_outputs_for_a_call_of_the_most_tokens() -> None:
    def without(settings: Settings) -> set[int]:
        calls = {*sizes.requested_calls(settings, 1), *sizes.looked_at(settings, 1)}
        return {call.n_tokens for call in calls if not call.n_outputs}

    split = replace(BASE, devices=(2,), n_tokens=(1, 300, 512))
    assert without(split) == {22, 37, 512}
    assert without(replace(split, n_ubatch=30, n_tokens=(1, 30))) == {22, 30}
    assert not without(replace(split, n_tokens=(1,), n_ubatch=1))
    assert not without(replace(split, devices=(1,)))
    assert without(replace(split, devices=(1,), grouped=True)) == {22, 37, 512}


def test_what_is_looked_at_has_every_number_of_tokens_and_others_beside() -> None:
    calls = sizes.looked_at(BASE, 1)
    asked = set(sizes.requested_calls(BASE, 1))
    assert {(c.n_tokens, c.n_outputs) for c in asked} <= {(c.n_tokens, c.n_outputs) for c in calls}
    assert {c.n_tokens for c in calls} - {c.n_tokens for c in asked} == {22, 37}
    assert len(calls) == len(set(calls))
    assert all(c.n_tokens <= 64 for c in sizes.looked_at(replace(BASE, n_ubatch=30, n_tokens=(1, 30)), 1))
    assert DecodeCall(1000, 1, 1, 1, 0) in calls


def test_a_context_of_its_own_for_each_n_ctx() -> None:
    two = replace(BASE, n_ctx=(256, 512), n_tokens=(1, 300))
    found = {(c.n_ctx, c.n_tokens, c.n_kv) for c in sizes.requested_calls(two, 1) if c.n_kv}
    assert found == {(256, 1, 256), (512, 1, 256), (512, 1, 512), (512, 300, 512)}


def test_groups_of_several_sequences_are_for_one_token_of_each_for_those_of_one_launch_and_for_a_full_call() -> None:
    four = replace(BASE, n_seq_max=4, n_ubatch=512, any_ctx=True, n_ctx=(4096,))
    assert [four.tokens_in_turn(n) for n in (2, 3, 4)] == [(2, 128, 512), (3, 126, 510), (4, 128, 512)]
    assert replace(four, n_ubatch=16).tokens_in_turn(3) == (3, 15)
    assert replace(four, n_ubatch=1).tokens_in_turn(2) == ()
    assert not replace(four, kv_unified=True).in_turn(2)
    assert {call.n_tokens for call in sizes.requested_calls(replace(four, n_tokens=(1, 8)), 3)} == {3, 126, 510}
