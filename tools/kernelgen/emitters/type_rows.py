"""The language of `@emitter(types=…)`: the combinations of types that an op's inputs may have.

A text has one entry per input, separated by commas: one or several of ggml's type names and of the groups in
`kernelgen.ggml.types.GROUPS`, or `same`, the first input's type. It expands to rows in which the types of one input do not depend
on another input.
"""

from __future__ import annotations

from kernelgen.errors import did_you_mean
from kernelgen.ggml.types import GROUPS, TYPES

SAME = "same"

Row = tuple[tuple[str, ...], ...]
"""The names of each input's allowed types."""


def read(text: str, n_inputs: int) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Returns the rows of a text, and its problems; one of both is empty.

    Expands `same`: the result has a row for each of the first input's types.

    Args:
        text: for example `f32, f16 same`.
        n_inputs: number of the emitter's inputs.
    """
    if not n_inputs and not text:
        return ((),), ()
    columns = [entry.split() for entry in text.split(",")]
    if len(columns) != n_inputs or not all(columns):
        example = ", ".join([*["float"][:n_inputs], *[SAME] * (n_inputs - 1)])
        rule = f"types has an entry for each of {n_inputs} inputs, separated by commas"
        return (), (f'{rule}, such as types="{example}", not types="{text}"',)
    known = [*TYPES, *GROUPS, SAME]
    unknown = [word for column in columns for word in column if word not in known]
    if unknown:
        return (), tuple(f"unknown type '{word}'{did_you_mean(word, known)} in types '{text}'" for word in unknown)
    if SAME in columns[0]:
        return (), (f"'{SAME}' is the first input's type: it can't be that of '{text}'",)
    expanded = [[t for word in column for t in GROUPS.get(word, (word,))] for column in columns]
    firsts = [[t] for t in expanded[0]] if any(SAME in column for column in columns) else [expanded[0]]
    rows: list[Row] = []
    for first in firsts:
        rest = [dict.fromkeys(first[0] if t == SAME else t for t in column) for column in expanded[1:]]
        rows.append((tuple(dict.fromkeys(first)), *map(tuple, rest)))
    return tuple(rows), ()
