"""Departures are copied to the host once per launch, and only if an input may have left."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.exits import Decision
from isobatch.deployments.models import departures
from isobatch.deployments.models.departures import Departures


def decision(leaves: list[bool]) -> Decision:
    logits = torch.arange(2.0 * len(leaves)).reshape(-1, 2)
    return Decision(torch.tensor(leaves), logits, torch.zeros(len(leaves), 1))


@given(
    flags=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), max_size=4), closed=st.booleans(),
    kept=st.sets(st.integers(0, 5)), seed=st.integers(0, 9),
)  # fmt: skip
def test_an_input_leaves_at_the_first_ramp_that_lets_it_go_and_a_kept_one_is_reported_at_the_last(
    flags: list[list[bool]], closed: bool, kept: set[int], seed: int
) -> None:
    """Ramp by ramp and input by input, as the rule is worded."""
    torch.manual_seed(seed)
    answers = torch.rand(len(flags) + closed, 6, 3)
    leaving = Departures(torch.zeros(6, 0), 3, np.array(sorted(kept), np.int64))
    for block, leaves in enumerate(flags):
        leaving.note(block, Decision(torch.tensor(leaves), answers[block], leaving.memory), may_leave=True)
    if closed:
        leaving.close(len(flags), answers[-1])
    left: dict[int, int] = {}
    for block, leaves in enumerate([*flags, *([[True] * 6] if closed else [])]):
        left |= {row: block for row in range(6) if leaves[row] and (row not in left or row in kept)}
    exits, staying = leaving.finish()
    assert dict(zip(exits.rows.tolist(), exits.blocks.tolist(), strict=True)) == left
    assert exits.rows.tolist() == sorted(left)
    assert all((exits.logits[place] == answers[left[row], row].numpy()).all() for place, row in enumerate(exits.rows))
    assert staying.tolist() == sorted({*range(6)} - {*left} | kept)


def test_nothing_is_copied_where_nobody_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "to_host", lambda tensor: pytest.fail("copied"))
    leaving = Departures(torch.zeros(3, 1), num_labels=2)
    leaving.note(2, decision([True, True, True]), may_leave=False)
    exits, staying = leaving.finish()
    assert (len(exits), staying.tolist()) == (0, [0, 1, 2])
