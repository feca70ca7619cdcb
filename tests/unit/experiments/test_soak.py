"""What the soak counts as right and as growing, without a server."""

import asyncio
import json
import os
import random

import numpy as np
import pytest

from experiments.soak.traffic import SoakRequest, Traffic
from experiments.soak.watch import LEAST_SAMPLES, Slope, Watch, slope_of


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


def test_a_slope_may_be_surely_there_and_small() -> None:
    slope = Slope(per_hour=5.0, error=1.0)
    assert (slope.grows, slope.grows_by(2.9), slope.grows_by(3.1)) == (True, True, False)


def test_who_lived_too_short_does_not_tell() -> None:
    watch = Watch()
    for second in range(60):
        watch.look(float(second))
    assert watch.lives(settled_s=30.0)
    assert not watch.lives(settled_s=60.0)


def test_a_process_is_one_by_whatever_names_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers wait under other names, and show another one while they do something else."""
    names = iter(["idle"] * 10 + ["split"] * 20 + ["spl"] + ["split"] * 20 + ["v100"] * 10)
    monkeypatch.setattr("experiments.soak.watch._name", lambda process: next(names))
    monkeypatch.setattr("experiments.soak.watch.descendants", lambda process: [])
    watch = Watch()
    for second in range(61):
        watch.look(float(second))
    (life,) = watch.lives()
    assert (life.name, life.samples) == ("split", 41), "61, less the third in which it settles"


def test_clients_ask_no_more_often_than_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(("127.0.0.1", 1), 1, lambda: 0.0, most_per_s=200.0)

    async def answered(*_: object) -> tuple[int, bytes]:
        return 503, b""

    async def asked_for_half_a_second() -> None:
        clients = asyncio.create_task(traffic.run(20))
        await asyncio.sleep(0.5)
        traffic.stop()
        await clients

    monkeypatch.setattr(traffic, "_until_answered", answered)
    monkeypatch.setattr("experiments.soak.traffic.PAUSE_S", 0.0)
    asyncio.run(asked_for_half_a_second())
    assert 20 < traffic.requests <= 200, "200 a second; the first 20 come at once"


def test_this_process_has_memory_handles_and_threads() -> None:
    watch = Watch()
    for second in range(2 * LEAST_SAMPLES):
        watch.look(float(second))
    (life,) = [life for life in watch.lives() if life.process == os.getpid()]
    assert (life.name, min(life.quarters_mib) > 1, life.handles.per_hour) == ("load", True, 0.0)


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


@pytest.mark.parametrize(("share", "deepest"), [(0.0, 1), (1.0, 7)])
def test_inputs_are_as_hard_as_they_should_be(share: float, deepest: int) -> None:
    traffic, chance = Traffic(("127.0.0.1", 1), 1, lambda: share), random.Random(0)
    for _ in range(50):
        body = traffic._many(chance).what.partition(b"\r\n\r\n")[2]
        depths = [each["exit_block"] for each in json.loads(body)["inputs"]]
        assert max(depths) <= deepest
        assert share == 0.0 or min(depths) == deepest
