"""How the soak judges answers and growth, without a server."""

import numpy as np
import pytest

from experiments.soak.traffic import SoakRequest
from experiments.soak.watch import slope_of


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
        (404, 404, b"x", "refused_as_wrong"),
        (404, 200, b"x", "wrong"),
    ],
)
def test_an_answer_is_judged(expected: int, status: int, answer: bytes, outcome: str) -> None:
    assert SoakRequest("one", b"", expected, lambda answer: answer == b"x").outcome(status, answer) == outcome
