"""Several fronts are reported as one; a group that any of them misses is missing."""

import time
from dataclasses import replace

import pytest

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.answers import Answer, Step
from isobatch.deployments.front.counts import Counts, together
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.in_process import InProcess
from isobatch.deployments.front.messages import FrontState, Usage
from isobatch.deployments.front.open_inference.protocol import statistics
from isobatch.deployments.front.service import Content, Service
from isobatch.deployments.front.stats import FrontSeries, stats_of
from isobatch.deployments.metrics import FRONT, MetricSeries
from isobatch.deployments.replica.local_workers import LocalWorkers
from tests.helpers.scraping import NotedMetrics

ROUTE = Route((Stage(0, 2, 4, "front", (0.001,) * 4), Stage(2, 4, 4, "back", (0.001,) * 4)))


def front(blocks: list[int], took_s: list[float], inside: int = 0, back: int = 1) -> FrontState:
    """It answered inputs that left after these blocks in that time, each in a launch of its own."""
    counts = Counts()
    for block, seconds in zip(blocks, took_s, strict=True):
        counts.launch_began("front", 0, 1, 1, 4)
        counts.input_left(block, seconds, in_time=True)
        counts.request_answered([Answer(0, 1.0, block, (Step(0, 1.0, 2.0),))], seconds)
    return FrontState(counts, ROUTE, inside, {("back", 2): inside}, {"front": 2, "back": back}, Usage(1.0, 50.0))


def test_counts_add_up_and_quantiles_are_of_all_answers() -> None:
    slow, fast = front([3] * 10, [0.9] * 10, inside=2), front([0] * 30, [0.01] * 30, inside=1)
    for stats in (stats_of([slow, fast]), stats_of([fast, slow])):
        assert stats["requests"]["answered"] == 40
        assert (stats["inside"], stats["waiting"], stats["splits"][1]["waiting"]) == (3, 3, 3)
        assert stats["latency_ms"] == {"p50": 10.0, "p95": 900.0, "p99": 900.0}
        assert stats["survival"] == [1.0, 0.25, 0.25, 0.25]
        assert (stats["splits"][0]["launches"], stats["splits"][0]["fill"]) == (40, 0.25)
        assert len(stats["fronts"]) == 2
    assert together([slow.counts, fast.counts]).buckets == [0, 0, 0, 30, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0]
    assert slow.counts.exits.total() == 10, "what a front counts stays its own"


def test_a_parked_application_is_ready_without_replicas() -> None:
    assert front([], [], back=0).missing == ["back"]
    assert replace(front([], [], back=0), parked=True).missing == []


@pytest.mark.parametrize(("missed", "state"), [(0, "kept"), (40, "broken")])
def test_metrics_have_the_recent_agreement_and_that_since_the_start(missed: int, state: str) -> None:
    now_s, noted = 0.0, NotedMetrics()
    counts = Counts({}, lambda: now_s)
    counts.promised = 0.99
    driver = Driver(Dispatcher(ROUTE, {"front": ["f"], "back": ["b"]}), LocalWorkers({}), time.perf_counter, counts)
    series = FrontSeries(MetricSeries(FRONT, noted))
    for off in (0, missed):
        counts.end_windows(ROUTE)
        counts.exits.update({0: 400, 3: 400})
        counts.audited[0] += 400
        counts.missed[0] += off
        series.update(driver, None)
        now_s += 1000.0
    told = noted.told["isobatch_disagreement_lately"]["mean",]
    assert told == pytest.approx(missed / 800)
    assert noted.told["isobatch_disagreement"]["mean",] == pytest.approx(missed / 1600)
    assert {key for (key,), value in noted.told["isobatch_promise"].items() if value} == {state}
    series.update(driver, None)
    bounds = noted.told["isobatch_disagreement_lately"]
    assert (bounds["low",], bounds["high",]) == (0.0, 1.0), "ten minutes later nothing is known"
    assert {key for (key,), value in noted.told["isobatch_promise"].items() if value} == {"not watched"}


async def test_the_service_sums_all_fronts_and_reports_missing_replicas_of_any() -> None:
    other = front([1], [0.5], back=0)

    class OneOfTwo(InProcess):
        async def others(self) -> list[FrontState]:
            return [other]

    config = AppConfig(model="/models/toy", loader="tests.helpers.toy_model:load", slo_ms=60_000)
    service = Service(config, time.perf_counter, OneOfTwo(config))
    await service.open()
    await service.answer(service.register("", 0, {}), lambda: Content(service.encoded([3, 5]), list))
    assert (await service.stats())["requests"]["answered"] == 2
    assert await service.missing() == ["back"]
    (model,) = (await statistics(service))["model_stats"]
    assert model["inference_stats"]["success"]["count"] == 2
    await service.close()
