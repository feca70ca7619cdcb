"""Several launches at once: each input is answered once, whichever thread computes it."""

from collections.abc import Collection
from contextlib import nullcontext
from threading import Barrier, get_ident

import pytest

from cluster.bench.real_device import GROUP, Source
from cluster.bench.report import stream_lines
from cluster.bench.saturated import Saturated, StreamGain
from deployments.dispatch.route import Route, Stage
from profiles.model import Batch, Launched
from tests.helpers.toy_model import Toy

BATCH = 4


def route() -> Route:
    """Two splits that take turns, and keep what they make: here it is for all threads."""
    times = (0.001,) * BATCH
    first = Stage(0, 1, BATCH, GROUP, times, ramps=frozenset({0}), local=True)
    return Route((first, Stage(1, 4, BATCH, GROUP, times, 0.5, frozenset({2}), local=True)))


def source(toy: Toy) -> Source:
    """Half leave at the first ramp."""
    return Source([toy.encode([[block, 1]]) for block in (0, 3)])


class Meeting(Toy):
    """Its first launch ends when another's has begun."""

    def __init__(self, meeting: Barrier) -> None:
        super().__init__()
        self._meeting = meeting
        self.threads: set[int] = set()
        self.inputs: list[int] = []

    def run(self, batch: Batch, stop: int, ramps: Collection[int]) -> Launched:
        if not self.sizes:
            self._meeting.wait(timeout=20)
        self.threads.add(get_ident())
        if batch.cursor == 0:
            self.inputs.append(len(batch))
        return super().run(batch, stop, ramps)


def test_launches_overlap_and_every_input_is_computed_once() -> None:
    meeting = Barrier(2)
    toys = [Meeting(meeting), Meeting(meeting)]
    assert Saturated(route(), toys, nullcontext, source(toys[0])).rate_per_s(42) > 0
    assert sum(sum(toy.inputs) for toy in toys) == 42
    assert len(toys[0].threads | toys[1].threads) == 2
    assert max(max(toy.sizes) for toy in toys) == BATCH


def test_survivors_of_several_launches_are_merged() -> None:
    toy = Toy()
    Saturated(route(), [toy], nullcontext, source(toy)).rate_per_s(64)
    # 16 launches of the first split leave 32 inside: 8 of the second, each from ramp to ramp.
    assert toy.sizes.count(BATCH) == len(toy.sizes) == 16 + 8 * 2


@pytest.mark.parametrize("count", [1, 2])
def test_what_goes_wrong_in_a_thread_is_told(count: int) -> None:
    toy = Toy()
    bad = Source([toy.encode([[0, -1]])])
    with pytest.raises(RuntimeError, match="breaks the toy"):
        Saturated(route(), [toy] * count, nullcontext, bad).rate_per_s(20)


def test_the_gain_is_told_with_both_rates() -> None:
    (line,) = stream_lines([StreamGain(50.0, 2, 15_000.0, 10_000.0)])
    assert line.startswith("2 launches at once, 50 ms: 1.50 x one at a time (15,000 and 10,000 per s")
