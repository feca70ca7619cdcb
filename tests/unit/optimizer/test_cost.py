"""The beliefs, one by one, and what evaluate() makes of them on a plan that can be computed by hand."""

from dataclasses import replace

import pytest

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable

# Two blocks of 1 ms, whatever the batch; a ramp of 0.5 ms behind the first; 0.25 ms per launch.
TABLE = LatencyTable(
    "a", (1, 8), ((1e-3, 1e-3), (1e-3, 1e-3)), ((5e-4, 0.0),) * 2, 2.5e-4, (1000, 0), (60, 60), "by hand"
)
FACTS = Problem((1.0, 0.5), (TABLE,), (Device("a", 4, 200, 2.0),), {("a", "a"): Link("a", "a", 1e6, 0.0)})


def plan(*splits: Split, replicas: int = 1) -> Plan:
    return Plan((Placement("a", replicas, splits),))


def test_a_batch_that_keeps_its_size() -> None:
    score = evaluate(plan(Split(0, 2, 4), replicas=2), FACTS)
    assert score.goodput_per_s == pytest.approx(2 * 4 / 2.25e-3)
    assert score.cost_per_hour == 4.0
    assert score.latency_s == pytest.approx(2.25e-3 + (3 + 4) / score.goodput_per_s)
    assert score.splits[0].survivors == 0.0


def test_a_batch_that_shrinks_does_not_run_what_nobody_reaches() -> None:
    """One input of two leaves: with batches of one, the second block is launched half the time."""
    (split,) = evaluate(plan(Split(0, 2, 1, (0,))), FACTS).splits
    assert split.launch_s == pytest.approx(2.5e-4 + 1e-3 + 5e-4 + 0.5 * (2.5e-4 + 1e-3))
    assert split.felt_s == pytest.approx(2.5e-4 + 1e-3 + 5e-4 + 2.5e-4 + 1e-3)  # but whoever stays waits for it


def test_constant_batch_halves_the_launches_of_the_second_split() -> None:
    score = evaluate(plan(Split(0, 1, 8, (0,)), Split(1, 2, 8)), FACTS)
    first, second = score.splits
    assert first.load_s == pytest.approx((2.5e-4 + 1.5e-3) / 8)
    # Eight hidden states of 1000 bytes take 8 ms on this link, longer than the launch: they set the pace.
    assert second.load_s == pytest.approx(0.5 * 8e-3 / 8)
    assert second.transfer_s == pytest.approx(8e-3)
    assert first.busy + second.busy == pytest.approx(1.0)
    assert second.fill_s == pytest.approx(7 / 0.5 / score.goodput_per_s)


def test_a_local_placement_hands_nothing_over_and_answers_within_a_round() -> None:
    """A round is 16 arrivals: two launches of the first split, one of the second, on whichever replica."""
    splits = (Split(0, 1, 8, (0,)), Split(1, 2, 8))
    score = evaluate(Plan((Placement("a", 2, splits, local=True),)), FACTS)
    round_s = 2 * (2.5e-4 + 1.5e-3) + 2.5e-4 + 1e-3
    assert score.goodput_per_s == pytest.approx(2 * 16 / round_s)
    assert score.splits[1].transfer_s == 0.0
    assert score.latency_s == pytest.approx(round_s + (7 + 8) / score.goodput_per_s)


def test_in_a_local_placement_the_next_order_arrives_while_a_launch_runs() -> None:
    """Launches take 1.25 and 1.75 ms; a shorter one would wait for its order, and that of a lone input does wait."""
    splits = (Split(0, 1, 8, (0,)), Split(1, 2, 8))
    local, apart = Plan((Placement("a", 2, splits, local=True),)), plan(*splits, replicas=2)
    at_once, soon, late = (
        replace(FACTS, links={("a", "a"): Link("a", "a", 1e6, 0.0, turn_s=turn_s)}) for turn_s in (0.0, 1e-3, 4e-3)
    )
    quick, score = evaluate(local, at_once), evaluate(local, soon)
    assert (score.goodput_per_s, score.latency_s) == (quick.goodput_per_s, quick.latency_s)
    assert score.answer_s(0.0) == pytest.approx(quick.answer_s(0.0) + 2 * 1e-3)
    assert evaluate(local, late).goodput_per_s == pytest.approx(2 * 16 / (3 * 4e-3))
    assert evaluate(apart, late) == evaluate(apart, at_once)


@pytest.mark.parametrize(("local", "batches"), [(True, 3 * 8 + 2 * 4), (False, 8 + 2 * 4)])
def test_inputs_between_splits_take_room(local: bool, batches: int) -> None:
    splits = (Split(0, 1, 8, (0,)), Split(1, 2, 4))
    plan, room = Plan((Placement("a", 1, splits, local=local),)), 120 + batches * 1000
    assert not evaluate(plan, FACTS.with_devices((Device("a", 1, room, 2.0),))).broken
    (line,) = evaluate(plan, FACTS.with_devices((Device("a", 1, room - 1, 2.0),))).broken
    assert f"{batches / 1e6:.3g} GB of it inputs between splits" in line


def test_pipelines_side_by_side_share_a_rate_by_what_they_sustain() -> None:
    pipeline = plan(Split(0, 2, 4))
    score = evaluate(replace(pipeline, beside=(plan(Split(0, 2, 4), replicas=2),)), FACTS)
    assert score.latency_s == pytest.approx(max(each.latency_s for each in score.pipelines))
    one, two = score.pipelines
    assert score.answer_s(300.0) == pytest.approx(max(one.answer_s(100.0), two.answer_s(200.0)))


def test_a_lone_input_waits_for_nobody_and_others_cost_time_as_load_grows() -> None:
    """Two links of 8 ms for a full batch; a lone input sends 1000 bytes in 1 ms, and computes as long as a batch."""
    score = evaluate(plan(Split(0, 1, 8, (0,)), Split(1, 2, 8)), FACTS)
    alone_s = 2.5e-4 + 1.5e-3 + 1e-3 + 2.5e-4 + 1e-3
    assert score.answer_s(0.0) == pytest.approx(alone_s)
    assert score.answer_s(score.goodput_per_s / 4) == pytest.approx(0.75 * alone_s + 0.25 * score.latency_s)
    assert score.answer_s(score.goodput_per_s) == score.answer_s(1e9) == pytest.approx(score.latency_s)


def test_what_a_plan_breaks_is_named() -> None:
    tight = Objective(slo_s=1e-3, goodput_per_s=1e6, cost_per_hour=1.0)
    few = FACTS.with_devices((Device("a", 1, 100, 2.0),))
    broken = " | ".join(evaluate(plan(Split(0, 2, 4), replicas=3), few, tight).broken)
    for sentence in (
        "3 a are used, the fleet has 1",
        "GB are placed",
        "latency",
        "goodput",
        "$6 per hour is over the $1",
    ):
        assert sentence in broken


def test_a_ramp_that_does_not_exist_is_named() -> None:
    bare = replace(FACTS, tables=(replace(TABLE, ramp_s=((0.0, 0.0),) * 2),)).surviving((1.0, 1.0))
    assert "ramp 0 is active" in evaluate(plan(Split(0, 2, 4, (0,))), bare).broken[0]


def test_plans_that_do_not_fit_the_facts_are_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="covers 1 blocks, the network has 2"):
        evaluate(plan(Split(0, 1, 4)), FACTS)
    with pytest.raises(UserError, match="'b', the fleet has a"):
        evaluate(Plan((Placement("b", 1, (Split(0, 2, 4),)),)), FACTS)
    with pytest.raises(UserError, match="no link"):
        evaluate(plan(Split(0, 1, 4), Split(1, 2, 4)), replace(FACTS, links={}))
