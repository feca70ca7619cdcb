"""Survival is unbiased, whatever else is sent, refused, abandoned or late meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from math import sqrt
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.cluster.controller.survival import SurvivalEstimate
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.counts import Counts
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order, Stayed
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.windows import History, Window
from tests.helpers.toy_model import BLOCKS, Toy

REPLICAS = {"front": ["f0", "f1"], "back": ["b0"]}
LAUNCH_S, SLO_S = 0.001, 1.0
HURRIED_S, PATIENCE_S = 0.01, 0.02  # the time that some requests have, and after which some clients leave on average
REQUESTS, WAVE = 240, 40
SURE = 5.0  # standard errors: chance does not go so far in as many examples as are drawn here


@dataclass(frozen=True)
class Mixture:
    """Shares of what is sent: `leaving` of the inputs at each block, the rest of the requests."""

    leaving: tuple[int, ...] = (5, 3, 2, 2)
    full: float = 0.0
    abandoned: float = 0.0
    hurried: float = 0.0
    failing: float = 0.0  # of the launches
    audited: float = 0.0
    answers_early: bool = False
    max_inside: int = 1000
    ramps: tuple[int, ...] = (0, 1, 2)

    @property
    def route(self) -> Route:
        ramps, times = frozenset(self.ramps), (LAUNCH_S,) * 8
        first = Stage(0, 2, 8, "front", times, ramps=ramps & {0, 1})
        return Route((first, Stage(2, BLOCKS, 8, "back", times, ramps=ramps & {2})))

    @property
    def limits(self) -> Limits:
        early = self.answers_early
        return Limits(
            self.max_inside, audit_share=self.audited, audit_cost=1.0, answers_early=early, probe_every_s=0.01
        )


class InTurns:
    """Replicas that compute in the event loop, at the test's own time; some launches fail. Clients leave meanwhile."""

    def __init__(self, failing: float, random: Random) -> None:
        self.now_s = 0.0
        self.leaving: list[tuple[float, asyncio.Future[list[Answer]]]] = []
        self._failing, self._random, self._replica = failing, random, SplitReplica(Toy())
        self._turn = asyncio.Lock()

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        for reply in self._replica.run(order):
            async with self._turn:
                await self._pass(LAUNCH_S * self._random.uniform(0.5, 2.0))
                if self._random.random() < self._failing:
                    raise RuntimeError("a launch failed")
                yield reply

    async def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        for _, result in [each for each in self.leaving if each[0] <= self.now_s]:
            result.cancel()
        self.leaving = [each for each in self.leaving if each[0] > self.now_s]
        for _ in range(5):  # so that the front hears of it before it hears of the launch
            await asyncio.sleep(0)

    def suspect(self, replica: str) -> None: ...

    def drop(self, address: str, key: str) -> None:
        self._replica.holdings.drop([key])

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Sent:
    """What came of a mixture: what was counted, and where the inputs that were let in would have left."""

    seen: Observed
    inputs: int
    others: list[int]  # the blocks after which those are sure that did not ask for the whole network
    full: int

    @property
    def truth(self) -> list[float]:
        return [sum(block >= cut for block in self.others) / max(1, len(self.others)) for cut in range(BLOCKS)]


async def send(mixture: Mixture, seed: int) -> Sent:
    random = Random(seed)
    workers = InTurns(mixture.failing, random)
    counts = Counts(clock=lambda: workers.now_s)
    chance = Random(seed + 1).random
    dispatcher = Dispatcher(mixture.route, REPLICAS, mixture.limits, chance)
    driver = Driver(dispatcher, workers, lambda: workers.now_s, counts)
    others, in_full, inputs = list[int](), 0, 0
    for _ in range(REQUESTS // WAVE):
        tasks = dict[asyncio.Future[list[Answer]], tuple[list[int], bool]]()
        for _ in range(WAVE):
            blocks = random.choices(range(BLOCKS), mixture.leaving, k=random.randint(1, 3))
            full, within_s = random.random() < mixture.full, HURRIED_S if random.random() < mixture.hurried else SLO_S
            packed = pack(Toy().encode([[block, 1] for block in blocks]))
            task = asyncio.ensure_future(driver.answer(packed, within_s, full))
            tasks[task] = blocks, full
            inputs += len(blocks)
            in_full += len(blocks) if full else 0
            if random.random() < mixture.abandoned:
                workers.leaving.append((workers.now_s + random.expovariate(1 / PATIENCE_S), task))
        await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for (blocks, full), each in zip(tasks.values(), outcomes, strict=True):
            if isinstance(each, RefusedError) and each.status == 503:
                continue
            others += [] if full else blocks
    await driver.close()
    return Sent(counts.observed(BLOCKS), inputs, others, in_full)


def window_of(sent: Sent, ramps: tuple[int, ...]) -> Window:
    """As the controller keeps it."""
    history = History(None)
    SurvivalEstimate(history, ExitProfile((1.0, 0.75, 0.5, 0.25)), (0, 1, 2)).close(sent.seen, ramps)
    return history.windows[-1]


shares = st.sampled_from((0.0, 0.1, 0.3))


@settings(max_examples=10, deadline=None)
@given(
    mixture=st.builds(
        Mixture,
        leaving=st.tuples(*[st.integers(0, 5)] * 3, st.integers(1, 5)),
        full=st.sampled_from((0.0, 0.2, 0.5)),
        abandoned=shares,
        hurried=shares,
        failing=shares,
        audited=st.sampled_from((0.0, 0.1, 1.0)),
        answers_early=st.booleans(),
        max_inside=st.sampled_from((30, 1000)),
        ramps=st.sampled_from(((0, 1, 2), (1, 2), (0, 2), (1,), ())),
    ),
    seed=st.integers(0, 2**32),
)
def test_survival_is_unbiased_under_any_traffic(mixture: Mixture, seed: int) -> None:
    sent = asyncio.run(send(mixture, seed))
    seen, window = sent.seen, window_of(sent, mixture.ramps)
    assert (seen.arrivals, seen.full) == (sent.inputs, sent.full), "refused inputs asked, too"
    assert seen.answered + sum(seen.unfinished) == len(sent.others), "each input counts once"
    for ramp in mixture.ramps:
        inputs = float(window.known[ramp + 1])
        if inputs < 1:
            continue
        share, result = sent.truth[ramp + 1], window.entered[ramp + 1] / inputs
        error = SURE * sqrt(share * (1 - share) / inputs) + 1 / inputs if sum(seen.unfinished) else 1e-9
        assert result == pytest.approx(share, abs=error), (ramp, sent.truth, window)
