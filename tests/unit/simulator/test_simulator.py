"""The simulator: what must hold whatever is simulated, and what can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bound.problems import playable
from experiments.shared.gains import baseline_plan
from isobatch.cluster.simulator.event_loop import HostCosts
from isobatch.cluster.simulator.simulation import Simulation, World, simulate
from isobatch.cluster.simulator.sustained import run, sustained_per_s
from isobatch.cluster.simulator.table_devices import TableDevices
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import NO_EXITS, PLANNERS
from isobatch.optimizer.pipelines.batch_gain import oracle_per_s
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.search.exact import search
from isobatch.profiles.devices import Link
from isobatch.profiles.lengths import Lengths
from isobatch.profiles.windows import Window
from tests.helpers.simulated_fleet import BLOCKS, FAST, SLO_S, TWO, facts, one_by_one


@pytest.mark.parametrize(
    ("sure_after", "seconds"),
    [
        (0, 0.0005 + 0.001 + 0.0001),  # left at the first ramp
        (1, 0.0005 + 0.0002 + 2 * (0.001 + 0.0001)),  # a launch, and a stop
        (2, 0.0029 + 0.001 + 1e-6 + 0.0005 + 0.002),  # a hop, then no ramp before the end
        (3, 0.0029 + 0.001 + 1e-6 + 0.0005 + 0.002),
    ],
)
def test_a_lone_input_takes_what_the_tables_and_the_link_say(sure_after: int, seconds: float) -> None:
    report = one_by_one(World(TWO, FAST, SLO_S), [sure_after] * 5)
    assert report.good == 5
    assert report.tally.quantile_s(0.5) == pytest.approx(seconds, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(load=st.floats(0.1, 3.0), jitter=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 1000))
def test_every_input_ends_exactly_once(load: float, jitter: float, seed: int) -> None:
    world = World(TWO, FAST, SLO_S, Limits(max_inside=200), jitter)
    report = run(world, load * evaluate(TWO, FAST).goodput_per_s, 600, seed)
    assert report.arrived == report.answered + report.refused + report.expired
    assert report.good <= report.answered
    assert all(0 < fill.share <= 1 for fills in report.fills for fill in fills.values() if fill.launches)


@settings(max_examples=5, deadline=None)
@given(
    load=st.floats(0.3, 2.0), full_share=st.sampled_from([0.0, 0.3]), audited=st.booleans(), seed=st.integers(0, 1000)
)
def test_exits_are_counted_although_some_ask_for_all(load: float, full_share: float, audited: bool, seed: int) -> None:
    random, seconds = np.random.default_rng(seed), 2500 / (load * evaluate(TWO, FAST).goodput_per_s)
    times_s, sure_after = np.sort(random.random(2500)) * seconds, random.choice(BLOCKS, 2500, p=[0.3, 0.2, 0.3, 0.2])
    limits = Limits(max_inside=200, audit_share=0.1 if audited else 0.0)
    world = World(TWO, FAST, SLO_S, limits, 0.3, full_share=full_share)
    simulation = Simulation(world, [(times_s, sure_after)], seconds, seed)
    report, seen = simulation.finish(), simulation.observe()
    assert seen.full / seen.arrivals == pytest.approx(full_share, abs=0.04), "of all that asked, refused or not"
    admitted, others = report.arrived - report.refused, seen.answered + sum(seen.unfinished)
    assert others == admitted if not full_share else 0 < others < admitted
    window = Window(0.0, seconds, 0, seen.exits, unfinished=seen.unfinished)
    for ramp, truth in ((0, 0.7), (1, 0.5)):
        error = 5 * (truth * (1 - truth) / window.known[ramp + 1]) ** 0.5
        assert window.exits.survival[ramp + 1] == pytest.approx(truth, abs=error)


def test_a_run_is_the_same_for_the_same_seed() -> None:
    world = World(TWO, FAST, SLO_S, jitter=0.2)
    rate = 0.9 * evaluate(TWO, FAST).goodput_per_s
    first, again, other = (run(world, rate, 2000, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.tally.good, again.tally.good)
    assert first.fills == again.fills
    assert first.fills != other.fills


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_where_launches_vary_so_much_that_many_are_late_anyway_others_are_answered_all_the_same(load: float) -> None:
    """With this jitter launches take 1.65 times as long on average, and one in fifty eight times as long."""
    world = World(TWO, FAST, 0.02, jitter=1.0)
    most_per_s = evaluate(TWO, FAST).goodput_per_s / 1.65
    report = run(world, load * most_per_s, 6000, seed=0)
    assert report.goodput_per_s > 0.35 * min(load, 1.0) * most_per_s


def test_a_transfer_behind_a_shorter_launch_does_not_keep_devices_idle() -> None:
    """Splits that take turns: the first takes a quarter of the time that the survivors' journey to the second takes."""
    slow_link = replace(FAST, links={("fast", "fast"): Link("fast", "fast", 1e9, 0.010)})
    turns = Plan((Placement("fast", 4, (Split(0, 1, 8, (0,)), Split(1, 4, 8))),))
    rate = 0.8 * 4 * 8 / (0.0005 + 0.0021 + 0.7 * (0.0005 + 0.006))  # of what the devices could compute
    assert run(World(turns, slow_link, SLO_S), rate, 6000, seed=0).good_share >= 0.97


def test_pipelines_side_by_side_serve_what_they_sustain_together() -> None:
    mixed = facts(fast=2, slow=2)
    plan = baseline_plan(NO_EXITS, mixed, Objective(fixed_batch=8))
    report = run(World(plan, mixed, SLO_S), 0.95 * evaluate(plan, mixed).goodput_per_s, 8000, seed=0)
    by_kind = zip(plan.pipelines, report.fills, strict=True)
    inputs = {pipeline.placements[0].kind: fills[0].inputs for pipeline, fills in by_kind}
    fast, slow = inputs["fast"], inputs["slow"]
    assert fast > slow > 0.1 * fast
    assert report.good_share >= 0.98


@pytest.mark.filterwarnings("error::isobatch.profiles.latency.ExtrapolationWarning")
def test_no_table_is_read_beyond_its_largest_batch_though_another_kind_has_larger_ones() -> None:
    mixed = facts(fast=1, slow=1)
    fast, slow = mixed.tables
    mixed = replace(mixed, tables=(fast, replace(slow, batch_sizes=(1, 4))))
    other = Plan((Placement("slow", 1, (Split(0, BLOCKS, 4),)),))
    plan = Plan((Placement("fast", 1, (Split(0, BLOCKS, 8),)),), beside=(other,))
    report = run(World(plan, mixed, SLO_S), 0.9 * evaluate(plan, mixed).goodput_per_s, 500, seed=0)
    assert all(fills[0].launches for fills in report.fills)


def test_a_launch_that_shadows_joined_runs_to_its_end() -> None:
    """The first input's shadow waits before the second split, and joins the second input, which leaves on the way."""
    splits = Split(0, 2, 8, (1,)), Split(2, 4, 8, (2,))
    audited = Limits(audit_share=1.0, audit_cost=1.0)
    report = one_by_one(World(Plan((Placement("fast", 1, splits),)), FAST, SLO_S, audited), [1, 2], gap_s=0.01)
    assert {cursor for _, _, cursor, _, _ in report.tally.launched} == {0, 2}
    assert sum(report.tally.audited) == 2


def test_a_plan_may_change_on_the_way_and_what_happened_is_observed_window_by_window() -> None:
    whole = Plan((Placement("fast", 4, (Split(0, 4, 8, (0, 1)),)),))
    rate = 0.5 * evaluate(TWO, FAST).goodput_per_s
    times_s = np.arange(0, 3, 1 / rate)
    simulation = Simulation(World(TWO, FAST, SLO_S), [(times_s, np.resize([0, 1, 2, 3], len(times_s)))], seconds=3.0)
    seen = []
    for second in (1, 2, 3):
        simulation.run_until(second)
        seen.append(simulation.observe())
        simulation.follow(whole if second == 1 else TWO)
    assert simulation.finish().good == len(times_s)
    assert [each.seconds for each in seen] == [1, 1, 1]
    assert [each.holds_inputs for each in (*seen, simulation.observe())] == [True, True, True, False]
    assert sum(each.arrivals for each in seen) == len(times_s)
    starts = [{launched.start for launched in each.launches} for each in seen]
    assert starts[0] == {0, 2}
    assert 0 in starts[1]
    for each in seen:
        assert each.in_time == each.answered == pytest.approx(rate, rel=0.1)
        assert sum(each.latencies.values()) == each.answered
        assert each.devices == {"fast": 4}
    assert seen[0].exits == pytest.approx([0, rate / 2, 0, rate / 2], rel=0.1, abs=rate / 2)


def test_survivors_of_a_local_placement_do_not_travel() -> None:
    splits = (Split(0, 2, 8, (1,)), Split(2, 4, 8))
    local, sent = (
        one_by_one(World(Plan((Placement("fast", 1, splits, local=local),)), FAST, SLO_S), [3] * 5)
        for local in (True, False)
    )
    hop_s = 0.001 + 1e-6
    assert sent.tally.quantile_s(0.5) - local.tally.quantile_s(0.5) == pytest.approx(hop_s, rel=0.1)


@pytest.mark.parametrize("system", PLANNERS)
@pytest.mark.parametrize("batch", [1, 8])
def test_nothing_beats_the_oracle(system: str, batch: int) -> None:
    plan = baseline_plan(system, FAST, Objective(fixed_batch=batch))
    bound = oracle_per_s(FAST, SLO_S, batch)
    assert evaluate(plan, FAST).goodput_per_s <= bound
    assert sustained_per_s(plan, FAST, SLO_S, inputs=600, slos=5) <= bound


def test_the_oracle_is_what_can_be_worked_out_by_hand() -> None:
    each_s = 2.4 * 0.002 / 8  # 1 + 0.7 + 0.5 + 0.2 blocks per input, at batch 8
    assert oracle_per_s(FAST, SLO_S, 8) == pytest.approx(4 / each_s)
    alone = replace(FAST, survival=(1.0,) * BLOCKS)
    assert oracle_per_s(alone, SLO_S, 1) == pytest.approx(4 / 0.004)


def test_what_the_planner_promises_is_sustained() -> None:
    plan = baseline_plan(NO_EXITS, FAST, Objective(fixed_batch=8))
    promised_per_s = evaluate(plan, FAST).goodput_per_s
    assert sustained_per_s(plan, FAST, SLO_S, inputs=2000, slos=10) == pytest.approx(promised_per_s, rel=0.1)


@pytest.mark.parametrize("seed", [1, 7])
def test_answers_with_few_inputs_take_what_the_planner_says(seed: int) -> None:
    """One in a hundred goes as far, and meets as many others, as the planner counts on."""
    problem = playable(seed)
    world, result = problem
    plan = search(world, replace(result, slo_s=None), gap=0.05)
    score = evaluate(plan, world)
    for load in (0.01, 0.1, 0.4):
        rate = load * score.goodput_per_s
        slowest_s = run(World(plan, world, 1000.0), rate, 1500, seed).tally.quantile_s(0.99)
        assert 0.5 < slowest_s / score.answer_s(rate) < 2


def test_a_run_that_is_too_short_to_show_an_overload_decides_nothing() -> None:
    """One device, one input at a time: what 10 SLOs let pass, 100 SLOs do not."""
    one = facts(fast=1)
    plan = Plan((Placement("fast", 1, (Split(0, BLOCKS, 1),)),))
    short, long = (sustained_per_s(plan, one, SLO_S, inputs=100, slos=slos) for slos in (10, 100))
    assert long < 0.99 * short
    assert long < 1.01 * evaluate(plan, one).goodput_per_s


def test_a_device_with_short_launches_does_not_wait_for_orders_under_load() -> None:
    """Orders take half as long as launches, and are sent while the launch before computes."""
    ways = {way: replace(link, turn_s=0.001) for way, link in FAST.links.items()}
    plan = Plan((Placement("fast", 1, (Split(0, 2, 8), Split(2, 4, 8)), local=True),))
    at_once, later = (
        sustained_per_s(plan, replace(FAST, links=links), SLO_S, inputs=2000, slos=10) for links in (FAST.links, ways)
    )
    assert later > 0.97 * at_once


def test_a_lone_input_waits_for_an_order_at_each_split_of_a_local_placement() -> None:
    """Unless a host plays what the front takes to say which is next."""
    ways = {way: replace(link, turn_s=0.003) for way, link in FAST.links.items()}
    slow = replace(FAST, links=ways)
    plan = Plan((Placement("fast", 1, (Split(0, 2, 8), Split(2, 4, 8)), local=True),))
    without, turning, hosted = (
        one_by_one(World(plan, *world), [3] * 5).tally.quantile_s(0.5)
        for world in ((FAST, SLO_S), (slow, SLO_S), (slow, SLO_S, Limits(), 0.0, HostCosts()))
    )
    assert turning == pytest.approx(without + 2 * 0.003, rel=0.01)
    assert hosted == pytest.approx(without, rel=0.01)


TEXTS = replace(FAST, length=10)


def test_a_text_takes_what_the_table_says_of_its_tokens() -> None:
    """A batch of 8 takes twice as long as one of 1, so every 10 tokens more take a seventh of that."""
    times_s, tokens = np.arange(3.0), np.array([10, 80, 45])
    for number in range(3):
        one = (times_s[:1], np.array([0]), tokens[[number]])
        report = simulate(World(TWO, TEXTS, SLO_S), [one], seconds=1.0)
        seconds = 0.0005 + 0.001 * (1 + (tokens[number] / 10 - 1) / 7) + 0.0001
        assert report.tally.quantile_s(0.5) == pytest.approx(seconds, rel=0.01)
        assert (report.tally.arrived_weight, report.tally.good_weight) == (tokens[number], tokens[number])


def test_texts_of_many_lengths_fill_their_launches_and_promises_to_them_are_kept() -> None:
    rate, lengths = 1.6 * evaluate(TWO, TEXTS).goodput_per_s, Lengths((2, 4, 6, 8, 30))
    tokens = run(World(TWO, replace(TEXTS, lengths=lengths), SLO_S), rate, 6000, 1)
    assert tokens.arrived == tokens.answered + tokens.refused + tokens.expired
    assert tokens.expired <= 0.005 * tokens.arrived
    assert all(0.5 < fill.share <= 1.1 for fills in tokens.fills for fill in fills.values() if fill.launches > 50)


class _Benching(Dispatcher):
    def benched(self, now_s: float) -> list[str]:
        return ["k80/2/0"]


def test_a_benched_replica_on_a_shared_device_is_one_of_its_kind() -> None:
    fleet, plan = facts(**{"k80/2": 4}), Plan((Placement("k80/2", 2, (Split(0, BLOCKS, 8),)),))
    simulation = Simulation(World(plan, fleet, SLO_S), [], 1.0, dispatcher=_Benching)
    assert simulation.observe().devices == {"k80/2": 3}
    devices = TableDevices(plan, fleet, 0.0, np.random.default_rng(0))
    devices.follow(plan, benched=["k80/2/0"])
    assert devices.groups() == {"0-k80/2": ["k80/2/1", "k80/2/2", "k80/2/0"]}


# What serving costs beside the devices

PLAIN = World(TWO, FAST, SLO_S)
HOST = HostCosts(request_s=0.001, launch_s=0.002, request_way_s=0.003, launch_way_s=0.004, turn_s=0.0005)


@pytest.mark.parametrize(("sure_after", "launches"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_a_lone_request_pays_once_and_for_each_of_its_launches(sure_after: int, launches: int) -> None:
    plain, hosted = (one_by_one(world, [sure_after] * 5) for world in (PLAIN, replace(PLAIN, host=HOST)))
    more_s = hosted.tally.quantile_s(0.5) - plain.tally.quantile_s(0.5)
    believed_s = 0.001 * (launches - 1)  # of a hand-over, by the links: what was measured takes its place
    assert more_s == pytest.approx(0.001 + 0.003 + launches * (0.002 + 0.004 + HOST.turn_s) - believed_s, rel=0.05)


def test_a_front_is_a_bottleneck_and_two_are_half_of_one() -> None:
    """A request takes 1 ms of a front: 1,000 a second go through one, whatever the devices could do."""
    host = HostCosts(request_s=0.001)
    inputs = [(np.arange(0, 1, 1 / 1500), np.zeros(1500, np.int64))]
    plain, one, two = (
        simulate(world, inputs, 1.0)
        for world in (PLAIN, replace(PLAIN, host=host), replace(PLAIN, host=host, fronts=2))
    )
    assert plain.good == two.good == 1500
    assert one.good < 1200
    assert one.tally.quantile_s(0.99) > 0.2


@pytest.mark.parametrize("rate", [300.0, 3000.0])
def test_every_input_still_ends_exactly_once(rate: float) -> None:
    """Also where the front cannot even refuse as fast as they come."""
    report = run(replace(PLAIN, host=HOST), rate, 3000, seed=3)
    assert report.arrived == report.answered + report.refused + report.expired
    assert report.answered > (2900 if rate < 1000 else 0)
