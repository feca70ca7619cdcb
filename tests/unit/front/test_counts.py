"""The counts of a front, the differences between two readings, and what several fronts observed together."""

import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.answers import Answer, Step
from isobatch.deployments.front.counts import BUSY_S, MOST_SHAPES, Counts, Launches, together
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.in_process import InProcess
from isobatch.deployments.front.messages import FrontState, Usage
from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed, latency_bin, merged, since
from isobatch.deployments.front.open_inference.protocol import statistics
from isobatch.deployments.front.proxy import Burden, ProxyLimit, Refusals
from isobatch.deployments.front.service import Content, Service
from isobatch.deployments.front.stats import export_now, stats_of
from isobatch.deployments.metrics import FRONT, MetricSeries
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.profiles.agreement import WATCHED_S, recent_agreement
from tests.helpers.clock import Clock
from tests.helpers.scraping import NotedMetrics


def test_two_readers_each_get_their_own_differences() -> None:
    times = iter([0.0, 4.0, 5.0, 8.0, 9.0])
    counts = Counts({"r1": "v100", "r2": "k80"}, lambda: next(times))
    counts.launch_ended("r1", 0, 2, 8, 0.05)
    first = counts.observed(2)
    counts.launch_ended("r2", 0, 2, 8, 0.1)
    counts.input_left(1, 0.1, in_time=True)
    news = since(counts.observed(2), first)
    assert counts.observations == together([counts]).observations == 2
    assert (news.started_s, news.seconds, news.exits) == (5.0, 4.0, (0, 1))
    assert news.launches == {LaunchShape("k80", 0, 2, 8): LaunchTimes(1, 0.1)}
    assert first.launches == {LaunchShape("v100", 0, 2, 8): LaunchTimes(1, 0.05)}


class Name(str):
    """A text that can be seen to end."""


def another_replica_computes(counts: Counts) -> None:
    counts.launch_ended(f"from {counts.clock()}", 0, 2, 8, 0.05)


@pytest.mark.parametrize("look", [lambda counts: counts.observed(2), Counts.busy_s, another_replica_computes])
def test_replicas_that_have_gone_are_forgotten(look: Callable[[Counts], object]) -> None:
    counts = Counts({}, clock := Clock(100.0))
    counts.launch_ended(gone := Name("gone"), 0, 2, 8, 0.05)
    known = weakref.ref(gone)
    del gone
    look(counts)
    assert known()
    clock.now_s += BUSY_S
    look(counts)
    assert not known()


def test_launches_of_earlier_plans_are_forgotten_some_day() -> None:
    counts = Counts({"r": "v100"}, lambda: 0.0)
    for start in (0, *range(MOST_SHAPES), 0):
        counts.launch_ended("r", start, start + 1, 8, 0.05)
    counts.launch_ended("r", MOST_SHAPES, MOST_SHAPES + 1, 8, 0.05)
    launches = counts.observed(2).launches
    assert len(launches) == MOST_SHAPES
    assert launches[LaunchShape("v100", 0, 1, 8)].times == 3
    assert LaunchShape("v100", 1, 2, 8) not in launches, "the one that came back longest ago"


def test_a_request_that_is_refused_unread_counts_a_limited_number_of_inputs() -> None:
    """Ten inputs of a weight of 30 each came before; then one says that it weighs 1,000 times as much."""
    counts = Counts({}, lambda: 0.0)
    counts.inputs_arrived(10, 300)
    counts.refused_unread(weight=60, most=32, waits=True)
    assert (counts.arrivals, counts.arrived_weight) == (12, 360)
    counts.refused_unread(weight=30_000, most=32, waits=True)
    assert (counts.arrivals, counts.arrived_weight) == (12 + 32, 360 + 32 * 30)


def test_requests_refused_by_a_proxy_count_like_the_others() -> None:
    """Each request has had three inputs so far."""
    counts = Counts({}, lambda: 0.0)
    for _ in range(300):
        counts.inputs_arrived(3, 30)
    counts.refused_outside(20)
    seen = counts.observed(1)
    assert (seen.arrivals, seen.refused) == (900 + 60, 60)
    assert (seen.arrived_weight, seen.refused_weight) == (pytest.approx(9000 + 600, abs=2), pytest.approx(600, abs=2))
    assert counts.outcomes["refused"] == 20


OPEN = Route((Stage(0, 4, 1, "a", (0.001,), ramps=frozenset({0, 2})),))
CLOSED = Route((Stage(0, 4, 1, "a", (0.001,)),))
TIGHT = Route(OPEN.stages, thresholds=((0, 0.99), (2, 0.99)))


def audited(counts: Counts, audits: int, missed: int = 0) -> None:
    """So many inputs left at a ramp and were audited, as many ran to the end."""
    counts.exits.update({0: audits, 3: audits})
    counts.audited[0] += audits
    counts.missed[0] += missed


def test_answers_that_could_not_disagree_do_not_count_as_agreement() -> None:
    """Twenty audits, then all ramps are closed, and ten thousand further inputs are answered."""
    clock = Clock(1000.0)
    counts, before = Counts({}, clock), Counts({}, clock)
    for each in (counts, before):
        each.end_windows(OPEN)
        audited(each, 20, missed=1)
    counts.end_windows(CLOSED)
    for _ in range(10_000):
        counts.input_left(3, 0.1, in_time=True, weight=7, could_disagree=False)
    agreement = before.agreement(4)
    assert agreement
    assert agreement.low < 0.95
    assert counts.agreement(4) == together([counts]).agreement(4) == agreement
    assert recent_agreement([counts.watched(CLOSED)], clock()).agreement == agreement
    seen, earlier = counts.observed(4), before.observed(4)
    assert seen.audits.agreement() == earlier.audits.agreement() == agreement
    assert (sum(seen.exits), seen.certain, seen.counted_in(70).certain) == (10_040, 10_000, 1_000)
    assert seen.counted_in(70).audits == seen.audits, "promises are about inputs, not about tokens"
    assert since(seen, earlier).audits.agreement() is None
    assert merged([earlier, since(seen, earlier)]).audits.agreement() == agreement


def test_audits_that_end_after_the_ramps_were_closed_count_with_their_answers() -> None:
    clock = Clock(1000.0)
    counts = Counts({}, clock)
    counts.end_windows(OPEN)
    counts.exits.update({0: 200, 3: 200})
    clock.now_s += 7.0
    counts.end_windows(CLOSED)
    for number in range(200):
        counts.audit_ended(0, agrees=number % 10 > 0)
    seen = recent_agreement([counts.watched(CLOSED)], clock()).agreement
    assert seen == counts.agreement(4)
    assert seen
    assert seen.share == pytest.approx(0.95)


def test_recent_agreement_restarts_with_other_thresholds_but_not_with_other_ramps() -> None:
    clock = Clock(1000.0)
    counts = Counts({}, clock)
    calls = []
    for route in (OPEN, CLOSED, OPEN, TIGHT, TIGHT):
        counts.end_windows(route)
        audited(counts, 10)
        clock.now_s += 1.0
        seen = recent_agreement([counts.watched(route)], clock()).agreement
        calls.append(seen.audits if seen else 0)
    assert calls == [10, 20, 30, 10, 20]


def test_a_drift_shows_within_half_a_minute_and_for_ten_minutes_at_any_interval() -> None:
    """After half an hour in which all was well, which the agreement since the start still tells of."""
    clock = Clock(1000.0)
    fronts = [Counts({}, clock) for _ in range(2)]
    for counts in fronts:
        counts.promised = 0.99

    def run(seconds: int, missed: int, route: Route) -> Counter[str]:
        states: Counter[str] = Counter()
        for _ in range(seconds // 5):
            for counts in fronts:
                counts.end_windows(route)
                audited(counts, 50, missed)
            clock.now_s += 5.0
            states[recent_agreement([counts.watched(route) for counts in fronts], clock(), 0.99).state] += 5
        return states

    assert run(1800, 0, OPEN).keys() <= {"not watched", "kept"}
    assert run(30, 5, OPEN)["broken"] >= 20
    since_start = together(fronts).agreement(4)
    assert since_start
    assert since_start.verdict(0.99) == "kept"
    assert run(int(WATCHED_S) - 10, 0, TIGHT).keys() == {"broken"}, "thresholds are tighter at once"
    assert run(300, 0, TIGHT)["kept"] >= 270


counts = st.integers(0, 1000)


@st.composite
def observations(draw):
    launches = draw(
        st.dictionaries(
            st.builds(LaunchShape, st.just("a"), counts, counts, counts),
            st.builds(LaunchTimes, counts, counts, counts, counts),
        )
    )
    latencies = Counter(latency_bin(s) for s in draw(st.lists(st.floats(0, 10))))
    start, seconds, exits = draw(counts), draw(st.integers(1, 100)), draw(st.lists(counts, min_size=2, max_size=2))
    return Observed(start, seconds, draw(counts), draw(counts), tuple(exits), launches, {"a": start}, latencies)


@given(st.lists(observations(), min_size=1, max_size=5))
def test_fronts_may_be_merged_one_by_one_or_all_at_once(parts):
    assert reduce(lambda one, other: merged([one, other]), parts) == merged(parts)


@given(st.lists(st.floats(1e-4, 100), min_size=1))
def test_quantiles_are_good_to_five_percent(seconds):
    seen = Observed(0, 1, 0, 0, (), latencies=Counter(map(latency_bin, seconds)))
    assert seen.quantile_s(1.0) == pytest.approx(max(seconds), rel=0.051)
    assert Observed(0, 1, 0, 0, ()).quantile_s(0.5) is None


# What several fronts report as one

ROUTE = Route((Stage(0, 2, 4, "front", (0.001,) * 4), Stage(2, 4, 4, "back", (0.001,) * 4)))


def front(blocks: list[int], took_s: list[float], inside: int = 0, back: int = 1) -> FrontState:
    """It answered inputs that left after these blocks in that time, each in a launch of its own."""
    counts = Counts()
    for block, seconds in zip(blocks, took_s, strict=True):
        counts.launch_began("front", 0, 1, 1, 4)
        counts.input_left(block, seconds, in_time=True)
        counts.answers_known([Answer(0, 1.0, block, (Step(0, 1.0, 2.0),))], seconds)
        counts.outcomes["answered"] += 1
    return FrontState(
        counts, ROUTE, inside, {("back", 2): inside}, {"front": ["f1", "f2"], "back": ["b"] * back}, Usage(1.0, 50.0)
    )


def test_counts_add_up_and_quantiles_are_of_all_answers() -> None:
    slow, fast = front([3] * 10, [0.9] * 10, inside=2), front([0] * 30, [0.01] * 30, inside=1)
    for stats in (stats_of([slow, fast]), stats_of([fast, slow])):
        assert stats["requests"]["answered"] == 40
        assert (stats["inside"], stats["waiting"], stats["splits"][1]["waiting"]) == (3, 3, 3)
        assert stats["latency_ms"] == {"p50": 10.0, "p95": 900.0, "p99": 900.0}
        assert stats["survival"] == [1.0, 0.25, 0.25, 0.25]
        assert (stats["splits"][0]["launches"], stats["splits"][0]["fill"]) == (40, 0.25)
        assert len(stats["fronts"]) == 2
    assert slow.counts.exits.total() == 10, "what a front counts stays its own"


def test_the_fill_of_the_latest_launches_shows_after_a_million() -> None:
    """Readers compute it from two statistics, as `isobatch status` and the page do."""
    counts = Counts()
    counts.launches["front", 0] = Launches(1_000_000, 3_000_000, 3_000_000, 4_000_000)
    looks = list[tuple[int, float]]()
    for _ in range(2):
        (split, _) = stats_of([FrontState(counts, ROUTE, 0, {}, {}, Usage(1.0, 50.0))])["splits"]
        looks.append((split["launches"], split["fill"]))
        for _ in range(100):
            counts.launch_began("front", 0, 1, 1, 4)
    (before, fill_before), (after, fill_after) = looks
    assert (after * fill_after - before * fill_before) / (after - before) == pytest.approx(0.25, abs=1e-3)


def test_launches_from_before_the_clock_was_set_back_are_forgotten() -> None:
    counts = Counts({"r1": "v100"}, clock := Clock(10_000.0))
    for passed_s in (0.5, 0.5, 0.5, -3600.0):
        clock.now_s += passed_s
        counts.launch_ended("r1", 0, 2, 8, 0.5)
    assert counts.busy_s() == {"r1": ("v100", pytest.approx(0.5))}


def test_a_replica_that_computed_before_the_clock_was_set_back_is_not_busy() -> None:
    counts = Counts({"r1": "v100"}, clock := Clock(10_000.0))
    counts.launch_ended("r1", 0, 2, 8, 0.5)
    clock.now_s -= 3600.0
    assert counts.busy_s() == {}


def test_recent_agreement_is_that_of_ten_minutes_again_after_the_clock_was_set_back() -> None:
    clock = Clock(10_000.0)
    counts = Counts({}, clock)

    def recent() -> int | None:
        seen = recent_agreement([counts.watched(OPEN)], clock()).agreement
        return seen.audits if seen else None

    counts.end_windows(OPEN)
    audited(counts, 10)
    clock.now_s += 7.0
    assert recent() == 10
    clock.now_s -= 3600.0
    counts.end_windows(OPEN)
    audited(counts, 20)
    assert recent() == 20
    clock.now_s += 601.0
    counts.end_windows(OPEN)
    audited(counts, 30)
    assert recent() == 50
    clock.now_s += 10.0
    assert recent() == 30


def test_a_parked_application_is_ready_without_replicas() -> None:
    assert front([], [], back=0).missing == ["back"]
    assert replace(front([], [], back=0), parked=True).missing == []
    dispatcher, noted = Dispatcher(ROUTE, {"front": ["f"], "back": ["b"]}), NotedMetrics()
    driver = Driver(dispatcher, LocalWorkers({}), time.perf_counter, Counts({}, lambda: 0.0))
    series = MetricSeries(FRONT, noted)
    for wakes_in_s, replicas, parked in ((1.0, 0, 1), (None, 0, 0)):
        dispatcher.reroute(ROUTE, dict.fromkeys(dispatcher.replicas(), ()), wakes_in_s)
        export_now(series, driver, None)
        assert (noted.told["isobatch_replicas"]["back",], noted.told["isobatch_parked"][()]) == (replicas, parked)


@pytest.mark.parametrize(("missed", "state"), [(0, "kept"), (40, "broken")])
def test_metrics_have_the_recent_agreement_and_that_since_the_start(missed: int, state: str) -> None:
    now_s, noted = 0.0, NotedMetrics()
    counts = Counts({}, lambda: now_s)
    counts.promised = 0.99
    driver = Driver(Dispatcher(ROUTE, {"front": ["f"], "back": ["b"]}), LocalWorkers({}), time.perf_counter, counts)
    series = MetricSeries(FRONT, noted)
    for off in (0, missed):
        counts.end_windows(ROUTE)
        counts.exits.update({0: 400, 3: 400})
        counts.audited[0] += 400
        counts.missed[0] += off
        export_now(series, driver, None)
        now_s += 1000.0
    latest = noted.told["isobatch_disagreement_lately"]["mean",]
    assert latest == pytest.approx(missed / 800)
    assert noted.told["isobatch_disagreement"]["mean",] == pytest.approx(missed / 1600)
    assert {key for (key,), value in noted.told["isobatch_promise"].items() if value} == {state}
    export_now(series, driver, None)
    bounds = noted.told["isobatch_disagreement_lately"]
    assert (bounds["low",], bounds["high",]) == (0.0, 1.0), "ten minutes later nothing is known"
    assert {key for (key,), value in noted.told["isobatch_promise"].items() if value} == {"not watched"}


def test_metrics_have_the_requests_that_a_proxy_refuses_without_another_question() -> None:
    noted, refusals = NotedMetrics(), Refusals()
    driver = Driver(Dispatcher(ROUTE, {"front": ["f"], "back": ["b"]}), LocalWorkers({}), time.perf_counter)
    driver.proxies.watch(ProxyLimit(Path("none"), lambda: Burden(0, 0, 0), list, refusals=refusals))
    refusals.add("front", 0)
    refusals.add("front", 7)
    export_now(MetricSeries(FRONT, noted), driver, None)
    assert noted.told["isobatch_requests"]["refused",] == 7
    assert noted.told["isobatch_arrived_inputs"][()] == 7


def test_a_reply_is_read_though_haproxy_ended_in_the_middle_of_it() -> None:
    refusals = Refusals()
    for last in ("app,r1,0,0,0,127.0.0.1:3", "app,r1,0"):
        refusals.read(f"# pxname,svname,hrsp_5xx,eresp,bck,addr\napp,BACKEND,7,0,0,\n{last}", ["app/r1"])
    assert refusals.total == 0


async def test_the_service_sums_all_fronts_and_reports_missing_replicas_of_any() -> None:
    other = front([1], [0.5], back=0)

    class OneOfTwo(InProcess):
        async def others(self) -> list[FrontState]:
            return [other]

    config = AppConfig(model="/models/toy", loader="tests.helpers.toy_model:load", slo_ms=60_000)
    service = Service(config, time.perf_counter, OneOfTwo(config))
    await service.open()
    with service.counted():
        await service.answer(service.register("", 0, {}), lambda: Content(service.encoded([3, 5]), list))
    assert (await service.stats())["requests"]["answered"] == 2
    assert await service.missing() == ["back"]
    (model,) = (await statistics(service))["model_stats"]
    assert model["inference_stats"]["success"]["count"] == 2
    await service.close()


def test_observations_of_several_windows_add_up() -> None:
    shape = LaunchShape("v100", 0, 2, 8)
    early = Observed(0, 5, 10, 8, (6, 3), {shape: LaunchTimes(2, 0.5)}, {"v100": 2})
    late = Observed(5, 5, 4, 4, (1, 3, 1), {shape: LaunchTimes(1, 0.2)}, {"v100": 1})
    both = merged([early, late])
    assert (both.seconds, both.arrivals, both.in_time, both.exits) == (10, 14, 12, (7, 6, 1))
    assert both.devices == {"v100": 1}
    assert both.launches[shape] == LaunchTimes(times=3, seconds=0.7, followed=0, between_s=0.0)


def test_observations_during_which_the_clock_was_set_back_have_no_length_together_either() -> None:
    parts = [Observed(995.0, 1.0, 9, 9, ()), Observed(996.0, 1.0, 9, 9, ()), Observed(997.0, -59.0, 9, 9, ())]
    assert merged(parts).seconds < 0


def test_the_difference_of_two_observations() -> None:
    first, second = Observed(0, 5, 10, 8, (6, 3)), Observed(0, 7, 14, 11, (7, 6))
    between = since(second, first)
    assert (between.started_s, between.seconds) == (5, 2)
    assert (between.arrivals, between.in_time, between.exits) == (4, 3, (1, 3))


def test_texts_count_in_the_tokens_of_the_plan() -> None:
    texts = Observed(0, 1, 2, 1, (1, 1), arrived_weight=90, in_time_weight=30, exit_weights=(30, 60))
    inputs = texts.counted_in(30)
    assert (inputs.arrivals, inputs.in_time, inputs.exits, inputs.tokens_per_text) == (3, 1, (1, 2), 45.0)


def test_a_quantile_of_the_latencies_is_right_to_five_percent() -> None:
    latencies = Counter(map(latency_bin, (0.010, 0.100)))
    assert Observed(0, 1, 2, 2, (2,), latencies=latencies).quantile_s(0.99) == pytest.approx(0.1, rel=0.05)
