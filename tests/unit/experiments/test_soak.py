"""What the soak counts as right and as growing, and when a server has recovered, without a server."""

import numpy as np
import pytest

from experiments.replan.changes import Change, figures
from experiments.replan.timeline import timeline
from experiments.soak.traffic import SoakRequest
from experiments.soak.watch import slope_of
from isobatch.cluster.load.generator import WRONG, LoadRecord
from isobatch.cluster.load.http_connection import BROKEN


def test_a_slope_that_is_there_is_seen_and_noise_is_none() -> None:
    chance, times_s = np.random.default_rng(0), np.arange(0.0, 600.0, 2.0)
    noise = chance.normal(0.0, 1.0, len(times_s))
    assert slope_of(times_s.tolist(), (times_s / 60 + noise).tolist()).grows
    errors = [slope_of(times_s.tolist(), chance.normal(0.0, 1.0, len(times_s)).tolist()) for _ in range(200)]
    assert sum(slope.grows for slope in errors) < 20, "about 2.5 % of them by chance"


def test_samples_that_follow_each_other_count_as_fewer() -> None:
    """A walk at random goes nowhere, but a line through it has a slope."""
    chance, times_s = np.random.default_rng(1), np.arange(0.0, 600.0, 2.0).tolist()
    walks = [chance.normal(0.0, 1.0, len(times_s)).cumsum() for _ in range(200)]
    grown = [slope_of(times_s, walk.tolist()) for walk in walks]
    simple = sum(slope.per_hour > 2 * slope.error / 10 for slope in grown)  # ten times less, as if each counted fully
    assert sum(slope.grows for slope in grown) < 0.8 * simple


@pytest.mark.parametrize(
    ("expected", "status", "answer", "outcome"),
    [
        (200, 200, b"x", "answered"),
        (200, 200, b"y", "wrong"),
        (200, 503, b"", "refused"),
        (200, 504, b"", "expired"),
        (200, 500, b"", "failed"),
        (200, 404, b"", "wrong"),
        (200, 0, b"", "lost"),
        (404, 404, b"x", "told_wrong"),
        (404, 200, b"x", "wrong"),
    ],
)
def test_an_answer_is_judged(expected: int, status: int, answer: bytes, outcome: str) -> None:
    assert SoakRequest("one", b"", expected, lambda answer: answer == b"x").outcome(status, answer) == outcome


RATE, SECONDS = 100, 30


def record(late_from_s: float = 0.0, late_until_s: float = 0.0) -> LoadRecord:
    """Each is answered after 50 ms, but those that are due in between only after two seconds."""
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
    asked = timeline(record(10.0, 11.5), slo_ms=1000, by_due=True)
    assert asked.recovered_s(10.0, 20.0, 0.9 * RATE) == pytest.approx(1.5, abs=0.2)


def test_wrong_and_failed_are_told_apart() -> None:
    seen = record()
    seen.status[[7, 8, 9]] = WRONG, BROKEN, 503
    found = figures(seen, [Change("cut moved", 5.0, 5.1, 0.0)])
    assert (found["wrong"], found["failed"], found["unanswered"]) == (1, 2, 1)
