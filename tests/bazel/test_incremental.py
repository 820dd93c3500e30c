"""A change rebuilds what it changes and nothing else."""

from __future__ import annotations

import incremental


def test_every_change_runs_exactly_the_actions_it_must() -> None:
    rows = list(incremental.run(incremental.SMALL))
    counts = {r.change: (r.emits, r.compiles) for r in rows}
    assert counts == {r.change: (r.want_emits, r.want_compiles) for r in rows}
    assert len(rows) == 8
    # A count that is 0 because nothing was planned would prove nothing.
    cold, rope = rows[0], next(r for r in rows if "rope" in r.change)
    assert cold.want_emits > 20
    assert 0 < rope.want_emits < cold.want_emits
