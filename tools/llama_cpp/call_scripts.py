"""Scripts for the program `calls`: one sequence at any depth, a text, several sequences, and contexts in turn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from call_models import RandomModel

N_TOKENS = (1, 8, 32, 128, 512)
"""The numbers of tokens for which there are kernels, as in the ready manifests."""

N_CTX = 2816

N_UBATCH = 512
MOST = 513


def fill(before: int, depth: int, numbers: Sequence[int] = N_TOKENS) -> Iterator[str]:
    """Yields calls of these numbers of tokens that fill the cache."""
    while before < depth:
        n = max(n for n in numbers if n <= depth - before)
        yield f"decode 0:{before}:{n}:none"
        before += n


def grid(
    model: RandomModel,
    pairs: Iterable[tuple[int, int]],
    *,
    n_ctx: int = N_CTX,
    n_ubatch: int = N_UBATCH,
    cpu: bool = True,
    numbers: Sequence[int] = N_TOKENS,
) -> Iterator[str]:
    """Yields the calls of pairs of a depth and a number of tokens, ascending in depth; each call leaves the cache unchanged.

    Calls of `numbers` of tokens fill the cache.
    """
    yield f"context grid n_ctx={n_ctx} n_batch={max(n_ubatch, MOST)} n_ubatch={n_ubatch} {model.options} cpu={int(cpu)}"
    before = 0
    for depth, n in pairs:
        if depth > before:
            yield from fill(before, depth, numbers)
            before = depth
            if model.window:
                yield "save 0"
        yield f"decode 0:{depth}:{n}:all"
        # Tokens that were in the window before the call may be overwritten.
        yield "restore 0" if model.window and depth else f"forget 0 {depth} -1"
    yield "end grid"


def text_of(model: RandomModel, batch: int, windows: int, window: int, n_ctx: int) -> Iterator[str]:
    """Yields the calls of llama-perplexity: windows over a text; the tokens of each window's second half count."""
    sizes = f"n_ctx={n_ctx} n_batch={batch} n_ubatch={batch} n_seq_max={windows} kv_unified=1"
    yield f"context text-{batch} {sizes} {model.options}"
    for seq in range(windows):  # sequences begin at different places in the text
        for pos in range(0, window - 1, batch):
            yield f"decode {seq}:{pos}:{min(batch, window - 1 - pos)}:{window // 2}"
        yield f"forget {seq} 0 -1"
    yield f"end text-{batch}"


def several(
    seed: int,
    model: RandomModel,
    name: str,
    *,
    unified: bool = True,
    rounds: int = 24,
    n_ubatch: int = N_UBATCH,
    n_ctx: int = N_CTX,
) -> Iterator[str]:
    """Yields calls for four sequences, as a server makes them.

    Each call has the next token of each generating sequence, and a part of the prompt of each other sequence. Sequences
    end and restart, some with a copy of another sequence.
    """
    rng = random.Random(seed)
    longest = min(120, n_ctx // 4 // 3)  # three prompts fit into a sequence's own cache
    n_ubatch = rng.choice((n_ubatch // 8, n_ubatch // 5, n_ubatch))
    sizes = f"n_ctx={n_ctx} n_batch={4 * longest} n_ubatch={n_ubatch} n_seq_max=4 kv_unified={int(unified)}"
    yield f"context {name} {sizes} {model.options}"
    lengths = [0] * 4
    for _ in range(rounds):
        parts = []
        for seq in rng.sample(range(4), rng.randint(1, 4)):
            if lengths[seq] > 2 * longest or (lengths[seq] and rng.random() < 0.08):
                yield f"forget {seq} 0 -1"
                lengths[seq] = 0
                other = rng.randrange(4)
                taken = any(part.startswith(f"{other}:") for part in parts)
                if other != seq and lengths[other] and not taken and not model.window and rng.random() < 0.5:
                    # separate caches can only share whole sequences
                    lengths[seq] = rng.randint(1, lengths[other]) if unified else lengths[other]
                    yield f"copy {other} {seq} 0 {lengths[seq] if unified else -1}"
            elif lengths[seq] > 4 and not model.window and rng.random() < 0.1:
                lengths[seq] -= rng.randint(1, 3)
                yield f"forget {seq} {lengths[seq]} -1"
            n = 1 if lengths[seq] and rng.random() < 0.6 else rng.randint(1, longest)
            parts.append(f"{seq}:{lengths[seq]}:{n}:{rng.choice(('last', 'last', 'odd', 'all'))}")
            lengths[seq] += n
        yield "decode " + " ".join(parts)
    yield f"end {name}"


def in_turn(
    seed: int, model: RandomModel, name: str, sizes: Sequence[int], *, rounds: int, n_ubatch: int
) -> Iterator[str]:
    """Yields calls of two contexts of different sizes, one after the other."""
    rng = random.Random(seed)
    lengths = {f"{name}-left": 0, f"{name}-right": 0}
    for context, n_ctx in zip(lengths, sizes, strict=True):
        yield f"context {context} n_ctx={n_ctx} n_batch=512 n_ubatch={n_ubatch} {model.options}"
    for _ in range(rounds):
        for context in rng.sample(sorted(lengths), 2):
            n = rng.choice((1, 1, rng.randint(2, 60)))
            yield f"use {context}"
            yield f"decode 0:{lengths[context]}:{n}:all"
            lengths[context] += n
    for context in lengths:
        yield f"end {context}"
