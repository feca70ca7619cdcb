"""Decoders in virtual time: arithmetic, choices and promises against the scheduler that serves."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from isobatch.cluster.load.prompts import summed
from isobatch.cluster.simulator.text_choice import cheapest_kept, choose_plan, saturated, sustains, trial_at
from isobatch.cluster.simulator.text_simulation import TextArrival, simulate_texts
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.optimizer.text_plans import (
    DecodingFacts,
    DecodingGoal,
    DecodingWay,
    expected_pace,
    plan_of,
    shares_of,
    tokens_per_s,
)
from isobatch.profiles.devices import Device, fleet
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import DecoderProfile, LaunchSize
from tests.helpers.paper_application import BOTH, CPU, WEIGHTS_BIND, paper_decoder

WIDE = DecodingGoal(ttft_s=1e6, tpot_s=1e6)
T4 = Device("t4", 1, 16 * 10**9, 0.5)
GOAL = DecodingGoal(ttft_s=0.5, tpot_s=0.01, kv_megabytes=2, texts=60)


def at_once(count: int, prompt: int, output: int) -> list[TextArrival]:
    return [TextArrival(0.0, prompt, output)] * count


@pytest.mark.parametrize("price_s", [WEIGHTS_BIND, BOTH, LaunchSize(blocks=1e-5, rows=1e-4)])
@pytest.mark.parametrize("way", [DecodingWay(8, 1, 32, 256), DecodingWay(2, 3, 32, 256), DecodingWay(4, 2, 16, 256)])
def test_a_replica_that_is_never_idle_writes_what_arithmetic_expects(price_s: LaunchSize, way: DecodingWay) -> None:
    facts = DecodingFacts(paper_decoder(price_s, ((1, 0.3), (3, 0.2)), prompt=2, output=32), CPU)
    config = DecoderConfig(model="", max_waiting=10**6)
    run = simulate_texts(plan_of(way, facts, WIDE, 1), facts.profile, at_once(3 * way.residents, 2, 40), config=config)
    assert summed(run.texts, slo_ms=1.0).tokens_per_s == pytest.approx(expected_pace(facts, way).tokens_per_s, rel=0.15)


def test_a_text_waits_from_when_it_is_due_and_not_from_the_end_of_the_launch_that_runs() -> None:
    """The second is due soon after the first launch begins, and its own would end too late."""
    facts = DecodingFacts(paper_decoder(LaunchSize(launches=1.0), (), prompt=2, output=5), CPU)
    plan = plan_of(DecodingWay(8, 1, 2, 256), facts, DecodingGoal(ttft_s=1.5, tpot_s=10.0), 1)
    for due_s, status in ((0.1, 429), (0.9, 200)):
        run = simulate_texts(plan, facts.profile, [TextArrival(0.0, 2, 5), TextArrival(due_s, 2, 5)])
        assert [text.status for text in run.texts] == [200, status]


def test_a_promise_is_kept_for_other_texts() -> None:
    profile = paper_decoder(survival=((1, 0.3), (3, 0.2)), prompt=4, output=8)
    result = choose_plan(profile, [CPU], GOAL)
    whole = replace(GOAL, share_in_time=0.0, texts=200)  # no run is given up
    run = trial_at(result.plan, profile, 0.97 * result.plan.promise.goodput_per_s, whole, seed=7)
    # Of 200 texts or more, 1 % may be late; chance adds 3 standard deviations.
    assert min(run.run.ttft_kept, run.run.tpot_kept) >= 0.99 - 3 * (0.01 / 200) ** 0.5
    assert summed(run.run.texts, slo_ms=1.0).tokens_per_s >= 0.9 * result.plan.decoding.tokens_per_s
    assert result.plan.promise.gap == pytest.approx(result.ceiling_per_s / result.plan.decoding.tokens_per_s - 1)
    assert result.plan.promise.gap > 0


def test_of_hundreds_of_devices_a_few_are_simulated() -> None:
    """The promise of each is the same, and so is the share of each kind."""
    profile = paper_decoder(survival=((1, 0.3),), prompt=4, output=8)
    profile = replace(profile, tables=(*profile.tables, replace(profile.tables[0], kind="t4")))
    few, many = (choose_plan(profile, [replace(CPU, count=each), replace(T4, count=4)], GOAL) for each in (12, 196))
    assert len(many.run.texts) <= 1.1 * len(few.run.texts)
    promised = [each.plan.promise.goodput_per_s / sum(each.plan.devices().values()) for each in (few, many)]
    assert promised[1] == pytest.approx(promised[0], rel=0.05)
    assert sustains(many.plan, profile, GOAL) == pytest.approx(many.plan.promise.goodput_per_s, rel=0.05)


def test_a_plan_promises_no_more_tokens_than_the_front_passes_on() -> None:
    profile = paper_decoder(survival=((1, 0.3),), prompt=4, output=8)
    free = tokens_per_s(choose_plan(profile, [CPU], GOAL).plan)
    token_s = 2 / free  # so that one front takes more time for a token than the replica
    slow = replace(profile, tables=(replace(profile.tables[0], front_s=token_s),))
    assert tokens_per_s(choose_plan(slow, [CPU], GOAL).plan) <= 1 / token_s < free
    with pytest.raises(UserError, match="one front can pass on the tokens of"):
        choose_plan(slow, [CPU], replace(GOAL, texts_per_s=1 / token_s))


def test_a_run_is_given_up_once_it_cannot_keep_the_limits() -> None:
    """And no other one: whether the limits are kept is the same."""
    profile = paper_decoder(survival=((1, 0.3),), prompt=4, output=8)
    goal = replace(GOAL, ttft_s=0.02)
    plan = plan_of(DecodingWay(2, 2, 8, 64), DecodingFacts(profile, CPU), goal, 1)
    most = saturated(plan, profile, 60)
    for rate in (0.6 * most, 0.95 * most, 1.5 * most):
        trial = trial_at(plan, profile, rate, goal)
        whole = trial_at(plan, profile, rate, replace(goal, share_in_time=0.0))
        assert trial.keeps(goal) == whole.keeps(goal)
        assert trial == whole or trial.run.given_up
    assert trial.run.given_up
    assert len(trial.run.texts) < len(whole.run.texts)


def test_texts_that_end_one_by_one_are_as_many_per_second_in_a_short_run_as_in_a_long_one() -> None:
    profile = paper_decoder(survival=((1, 0.3),), prompt=4, output=40)
    plan = plan_of(DecodingWay(2, 3, 32, 64), DecodingFacts(profile, CPU), WIDE, 1)
    assert saturated(plan, profile, 60) == pytest.approx(saturated(plan, profile, 500), rel=0.03)


@pytest.mark.parametrize("too_long", [1, 9])
def test_texts_that_the_network_cannot_read_do_not_change_how_many_others_a_busy_replica_writes(too_long: int) -> None:
    profile = paper_decoder(survival=((1, 0.3),), prompt=4, output=8)
    workload = replace(profile.workload, prompts=(4, *[300] * too_long), outputs=(8,) * (1 + too_long))
    alone, beside = (
        replace(profile, workload=each) for each in (replace(workload, prompts=(4,), outputs=(8,)), workload)
    )
    plan = plan_of(DecodingWay(2, 3, 32, 64), DecodingFacts(profile, CPU), WIDE, 1)
    assert saturated(plan, beside, 60) == pytest.approx(saturated(plan, alone, 60))


def two_kinds() -> DecoderProfile:
    """On the one, launches take four times as long as on the other, and have a price of their own."""
    profile = paper_decoder(survival=((1, 0.3),), prompt=4, output=8)
    slow = LaunchSize(launches=8e-4, blocks=8e-4, rows=4e-5, heads=4e-4, asked=2e-5)
    return replace(profile, tables=(*profile.tables, replace(profile.tables[0], kind="t4", price_s=slow)))


SLOW = Device("t4", 2, 16 * 10**9, 0.05)
LOOSE = replace(GOAL, tpot_s=0.05, texts=40)


def test_all_kinds_of_devices_write_side_by_side() -> None:
    """Each cut and filled in its own way, and each with its share of the texts: together they keep their sum."""
    profile = two_kinds()
    result = choose_plan(profile, [CPU, SLOW], LOOSE)
    alone = [choose_plan(profile, [each], LOOSE).plan for each in (CPU, SLOW)]
    assert result.plan.devices() == {"cpu": 1, "t4": 2}
    assert [each.placements[0].kind for each in result.plan.pipelines] == ["cpu", "t4"]
    kept = [each.promise.goodput_per_s for each in alone]
    assert result.plan.promise.goodput_per_s == pytest.approx(sum(kept), rel=0.1)
    assert result.plan.promise.cost_per_hour == CPU.price_per_hour + 2 * SLOW.price_per_hour
    assert tokens_per_s(result.plan) <= result.ceiling_per_s
    assert tokens_per_s(result.plan) == pytest.approx(result.plan.promise.goodput_per_s * profile.workload.output)
    shares = shares_of(result.plan)
    assert shares[0] / sum(shares) == pytest.approx(kept[0] / sum(kept), rel=0.1)


def test_the_cheapest_devices_of_several_kinds_sustain_a_rate() -> None:
    profile = two_kinds()
    fast, slow = (
        choose_plan(profile, [replace(each, count=1)], LOOSE).plan.promise.goodput_per_s for each in (CPU, SLOW)
    )
    for rate, devices in ((0.8 * slow, {"t4": 1}), (fast + 0.5 * slow, {"cpu": 1, "t4": 1})):
        result = choose_plan(profile, [CPU, SLOW], replace(LOOSE, texts_per_s=rate))
        assert result.plan.devices() == devices
        assert result.plan.promise.goodput_per_s == rate
    clouds = [replace(each, count=10**6) for each in (CPU, SLOW, replace(SLOW, kind="p100", price_per_hour=9.0))]
    clouds_profile = replace(profile, tables=(*profile.tables, replace(profile.tables[1], kind="p100")))
    goal = replace(LOOSE, texts_per_s=0.8 * slow)
    assert choose_plan(clouds_profile, clouds, goal).plan.devices() == {"t4": 1}, "in the time for a few devices"
    many = choose_plan(clouds_profile, clouds, replace(LOOSE, texts=20, texts_per_s=150 * slow)).plan
    assert many.promise.cost_per_hour < 1.1 * 150 * SLOW.price_per_hour
    with pytest.raises(UserError, match="1 cpu, 2 t4 sustain about"):
        choose_plan(profile, [CPU, SLOW], replace(LOOSE, texts_per_s=2 * (fast + 2 * slow)))


@pytest.mark.parametrize("rate", [5.0, 60.0, 200.0, 300.0])
@pytest.mark.parametrize("first", [0, 700])
def test_the_cheapest_devices_are_chosen_in_few_trials(rate: float, first: int) -> None:
    """Of 2,197 combinations, which nobody would wait for. The largest sustains 204."""
    tried, prices, per_s = list[tuple[int, ...]](), np.array([3.0, 1.7, 0.9]), np.array([9.0, 5.0, 3.0])

    def kept(counts: Sequence[int]) -> Sequence[int] | None:
        tried.append(tuple(counts))
        return counts if per_s @ counts >= rate else None

    possible = sorted(product(range(13), repeat=3), key=lambda counts: float(prices @ counts))
    best = next((counts for counts in possible if per_s @ counts >= rate), None)
    chosen = cheapest_kept(possible, lambda counts: (float(prices @ counts), sum(counts)), kept, first)
    assert (chosen is None) == (best is None)
    if chosen and best:
        assert prices @ chosen == pytest.approx(prices @ best)
    assert len(tried) == len(set(tried)) < 120


def test_of_free_devices_no_more_are_chosen_than_are_needed() -> None:
    def kept(counts: Sequence[int]) -> Sequence[int] | None:
        return counts if counts >= (4,) else None

    assert cheapest_kept([(count,) for count in range(9)], lambda counts: (0.0, sum(counts)), kept, 3) == (4,)


@pytest.mark.parametrize(
    ("devices", "goal", "sentence"),
    [
        ("cpu=0", GOAL, "there are no devices to plan for"),
        ("cpu=1", DecodingGoal(1.0, 1e-5), "TPOT of 0.01 ms: even alone, tokens of a text take"),
        ("cpu=1", DecodingGoal(1e-4, 1.0), "TTFT of 0.1 ms: even alone, a text begins after"),
        ("cpu=1", DecodingGoal(texts_per_s=1e5, texts=20, kv_megabytes=1), r"1e\+05 texts per second: 1 cpu sustain"),
        ("cpu=1", DecodingGoal(kv_megabytes=0), "the longest text needs"),
    ],
)
def test_what_binds_is_named(devices: str, goal: DecodingGoal, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        choose_plan(paper_decoder(), fleet(devices), goal)


def test_what_a_front_would_refuse_is_refused() -> None:
    facts = DecodingFacts(paper_decoder(), CPU)
    texts = [TextArrival(0.0, 8, 8), TextArrival(0.1, 250, 30)]
    run = simulate_texts(plan_of(DecodingWay(8, 1, 4, 64), facts, WIDE, 1), facts.profile, texts)
    assert [text.status for text in run.texts] == [200, 400]


def test_every_replica_writes_and_the_same_seed_writes_the_same() -> None:
    facts = DecodingFacts(paper_decoder(), CPU)
    texts = [TextArrival(float(at), 8, 16) for at in np.linspace(0, 0.1, 60)]
    one, two = (simulate_texts(plan_of(DecodingWay(2, 2, 4, 64), facts, WIDE, n), facts.profile, texts) for n in (1, 3))
    assert sum(text.tokens for text in two.texts) == 60 * 16
    one_per_s, two_per_s = (summed(each.texts, slo_ms=1.0).tokens_per_s for each in (one, two))
    assert two_per_s > 1.5 * one_per_s
    assert two == simulate_texts(plan_of(DecodingWay(2, 2, 4, 64), facts, WIDE, 3), facts.profile, texts)
