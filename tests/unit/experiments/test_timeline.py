"""Goodput by the second around changes of an application, from a made-up record."""

from math import inf

import numpy as np
import pytest

from experiments.chaos.run import Struck, rounds_of
from experiments.replan.changes import Change, figures
from experiments.replan.timeline import timeline
from isobatch.cluster.load.generator import BROKEN, WRONG, LoadRecord

RATE, SECONDS = 100, 30


def record(late_from_s: float = 0.0, late_until_s: float = 0.0) -> LoadRecord:
    """Requests are answered after 50 ms, those that are due between these times after two seconds."""
    due_s = np.arange(RATE * SECONDS) / RATE
    late = (due_s >= late_from_s) & (due_s < late_until_s)
    return LoadRecord(due_s, due_s, due_s, due_s + np.where(late, 2.0, 0.05), np.full(len(due_s), 200), due_s)


def test_a_gap_shows_where_it_is_and_nowhere_else() -> None:
    times = timeline(record(10.0, 11.5), slo_ms=1000)
    assert times.during((10.0, 11.0)).min() == 0
    assert times.outside((9.5, 12.0)).min() == pytest.approx(RATE, abs=1)


def test_recovery_ends_when_goodput_is_back_for_good() -> None:
    times = timeline(record(10.0, 11.5), slo_ms=1000)
    assert times.recovered_s(10.0, 20.0, 0.9 * RATE) == pytest.approx(1.55, abs=0.2)
    assert times.recovered_s(15.0, 20.0, 0.9 * RATE) == 0
    drawn = timeline(record(10.0, 11.5), slo_ms=1000, by_due=True)
    assert drawn.recovered_s(10.0, 20.0, 0.9 * RATE) == pytest.approx(1.5, abs=0.2)


def test_recovery_is_infinite_while_goodput_is_not_back() -> None:
    times = timeline(record(10.0, 25.0), slo_ms=1000, by_due=True)
    assert times.recovered_s(10.0, 20.0, 0.9 * RATE) == inf


def test_every_status_counts_after_a_fault() -> None:
    seen = record()
    seen.status[[1000, 1001, 1002, 1003]] = 404, 500, 503, BROKEN
    (each,) = rounds_of(seen, [Struck("a front is killed", 5.0, 20.0)], set())
    assert (each.failed, each.refused, each.lost) == (2, 1, 1)


def test_wrong_and_failed_are_told_apart() -> None:
    seen = record()
    seen.status[[7, 8, 9]] = WRONG, BROKEN, 503
    result = figures(seen, [Change("cut moved", 5.0, 5.1, 0.0)])
    assert (result["wrong"], result["failed"]) == (1, 2)
