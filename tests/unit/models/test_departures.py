"""Departures are copied to the host once per launch, and only if an input may have left."""

import pytest
import torch

from deployments.exits import Decision
from deployments.models import departures
from deployments.models.departures import Departures


def decision(leaves: list[bool]) -> Decision:
    logits = torch.arange(2.0 * len(leaves)).reshape(-1, 2)
    return Decision(torch.tensor(leaves), logits, torch.zeros(len(leaves), 1))


def test_who_left_where_with_which_answer() -> None:
    leaving = Departures(torch.zeros(3, 1), num_labels=2)
    leaving.note(1, decision([False, True, False]), may_leave=True)
    leaving.note(2, decision([True, True, True]), may_leave=False)
    leaving.note(4, decision([True, True, False]), may_leave=True)
    exits, staying = leaving.finish()
    assert (exits.rows.tolist(), exits.blocks.tolist()) == ([0, 1], [4, 1])
    assert exits.logits.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert staying.tolist() == [2]


def test_nothing_is_copied_where_nobody_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "to_host", lambda tensor: pytest.fail("copied"))
    leaving = Departures(torch.zeros(3, 1), num_labels=2)
    leaving.note(2, decision([True, True, True]), may_leave=False)
    exits, staying = leaving.finish()
    assert (len(exits), staying.tolist()) == (0, [0, 1, 2])
