"""The controller of a decoder, in virtual time: what it believes of tokens and texts, and what it changes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.decide import served_alike
from isobatch.cluster.controller.sentences import shortfall
from isobatch.cluster.controller.survival import SurvivalEstimate
from isobatch.cluster.controller.text_planning import DecoderPlanningProblem, text_problem
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.scheduler import DecodingLimits
from isobatch.deployments.decoding.sequences import Splits
from isobatch.deployments.front.observed import Observed, since
from isobatch.optimizer.plan import Plan, Promise
from isobatch.optimizer.text_plans import DecodingFacts, DecodingGoal, DecodingWay, plan_of, terms_of, with_terms
from isobatch.profiles.devices import Device
from isobatch.profiles.text_profile import LaunchSize, save_text_profile
from isobatch.profiles.windows import History
from tests.helpers.paper_application import CPU, PaperApplication, paper_decoder, watched

EASY, HARD = ((1, 0.05), (3, 0.04)), ((1, 0.95), (3, 0.9))
GOAL = DecodingGoal(ttft_s=0.5, tpot_s=0.1, kv_megabytes=1, texts=5)
LAUNCHES_COUNT = LaunchSize(launches=3e-3, blocks=1e-3)  # so a cut costs, where tokens go on
MADE_UP = paper_decoder(LAUNCHES_COUNT, EASY, prompt=4, output=4)

PROFILE = replace(MADE_UP, tables=(replace(MADE_UP.tables[0], residents=4),))


def way(cut: int, launches: int = 1, residents: int = 4) -> Plan:
    return plan_of(DecodingWay(cut, launches, residents, 64), DecodingFacts(PROFILE, CPU), GOAL, 1)


def question(running: Plan, goal: DecodingGoal = GOAL) -> DecoderPlanningProblem:
    return DecoderPlanningProblem(PROFILE, (CPU,), goal, running)


def test_a_plan_follows_tokens_that_go_on_more_often() -> None:
    """What was cut for tokens that leave early is cut no more, and sustains what comes; nobody is lost meanwhile."""
    plan = way(2, launches=8)
    problem = question(plan)
    hard = problem.cost_model((1.0, 1.0, 0.95, 0.95, *[0.9] * 4), Corrections())
    sustained = [hard.score(each).goodput_per_s for each in (plan, way(8))]
    assert sustained[1] > 1.15 * sustained[0]
    rate = sum(sustained) / 2 / PROFILE.workload.output
    app = PaperApplication(problem, plan, rate)
    loop = app.loop(replan_every_s=4.0, enough_inputs=50)
    quiet = asyncio.run(watched(app, loop, 4.0, 1.0))
    assert quiet.in_time > 0.97 * quiet.arrivals
    assert len(app.running.splits) == 2
    app.becomes(survival=HARD)
    asyncio.run(watched(app, loop, 4.0, 1.0))
    assert len(app.running.splits) == 1, [event.why for event in loop.controller.record.events.all]
    assert loop.controller.known.estimate.survival[2] > 0.8
    assert loop.controller.known.estimate.inputs_per_text == pytest.approx(PROFILE.workload.output, rel=0.2)
    app.run(1.0)  # what has waited is written
    before = app.seen()
    app.run(3.0)
    after = since(app.seen(), before)
    assert after.in_time > 0.9 * after.arrivals
    assert sum(after.exits) == pytest.approx(3.0 * rate * PROFILE.workload.output, rel=0.25)


def test_texts_are_believed_to_be_as_those_that_come() -> None:
    plan = way(2)
    problem = question(plan).updated_by(Observed(0.0, 1.0, 0, 0, (), lengths=((4, 10),) * 19))
    assert problem.lengths == (), "a handful tells nothing"
    problem = problem.updated_by(seen := Observed(0.0, 1.0, 0, 0, (), lengths=((4, 10), (8, 30)) * 10))
    workload = problem.with_text_length(40.0).cost_model((1.0,) * 8, Corrections()).profile.workload
    assert (workload.prompt, workload.output) == (6, 40)
    assert set(workload.outputs) == {20, 60}
    longest = problem.with_text_length(10_000.0).cost_model((1.0,) * 8, Corrections()).profile.workload
    assert set(longest.outputs) == {92, 88}, "no more than there is memory for"
    unlimited = question(with_terms(plan, max_context=None)).updated_by(seen)
    best = unlimited.with_text_length(10_000.0).best((1.0,) * 8, Corrections(), {})
    assert (best.num_blocks, terms_of(best).max_context) == (8, None), "nor where no plan limits them"


@pytest.mark.parametrize("text", [(8, 100), (120, 8), (127, 1)])
def test_a_text_that_fills_the_memory_does_not_rule_out_all_plans(text: tuple[int, int]) -> None:
    """Replicas serve it: there is memory for 128 tokens. Plans leave 32 of them free."""
    plan = way(2)
    assert terms_of(plan).max_context == 128
    seen = Observed(0.0, 1.0, 0, 0, (), lengths=(*((4, 10),) * 19, text))
    problem = question(plan).updated_by(seen)
    assert problem.lengths == (*((4, 10),) * 19, (min(text[0], 95), min(text[1], max(1, 96 - text[0]))))
    assert problem.with_text_length(20.0).best((1.0,) * 8, Corrections(), {}).num_blocks == 8
    of_t5 = replace(problem, profile=replace(PROFILE, has_encoder=True)).updated_by(seen)
    assert of_t5.lengths[-1] == (min(text[0], 32), min(text[1], 31)), "memory for the prompt and for the answer"
    assert of_t5.best((1.0,) * 8, Corrections(), {}).num_blocks == 8


def test_a_plan_that_sustains_fewer_tokens_than_it_promised_falls_short() -> None:
    """Its promise counts tokens for the controller, and texts for the planner."""
    plan = with_terms(replace(way(2), promise=Promise(25.0, 0.5, 0.1, 0.0)), tokens_per_s=100.0)
    assert not shortfall(plan, 99.0, Corrections(), kept_share=1.0)
    assert not shortfall(replace(plan, promise=None), 50.0, Corrections(), 1.0), "only an estimate"
    why = "tokens leave at later blocks, or texts are longer, than the plan expects"
    assert shortfall(plan, 50.0, Corrections(), 1.0) == f"the plan promised 100/s and sustains 50/s: {why}"


def test_only_texts_that_have_ended_tell_how_long_texts_are() -> None:
    """In a short window most tokens are of texts that began before it, or go on after it."""
    estimate = SurvivalEstimate(History(None), question(way(2)).prior, (1, 3))
    estimate.close(Observed(0.0, 1.0, 1000, 1000, (0, 900, 0, 0, 0, 0, 0, 100), texts=20, ended=400), (1,))
    assert estimate.inputs_per_text == pytest.approx(20.0, rel=0.01)
    estimate.close(Observed(1.0, 1.0, 1000, 1000, (0, 900, 0, 0, 0, 0, 0, 100)), (1,))
    assert estimate.inputs_per_text == pytest.approx(20.0, rel=0.01), "none has ended: nothing is known anew"


def test_all_ramps_are_opened_by_a_cut_behind_each() -> None:
    problem = question(way(8))
    opened = problem.cost_model((1.0,) * 8, Corrections()).with_all_ramps(way(8))
    assert [(split.start, split.ramps) for split in opened.splits] == [(0, (1,)), (2, (3,)), (4, ())]
    assert terms_of(opened).exits == "recompute"
    off = question(uncut := with_terms(way(8), exits="off"), replace(GOAL, exits="off"))
    opened = off.cost_model((1.0,) * 8, Corrections()).with_all_ramps(uncut)
    assert served_alike(opened, uncut), "there is none to open"


def test_a_plan_without_a_cut_is_cut_once_tokens_leave_early(tmp_path: Path) -> None:
    save_text_profile(PROFILE, tmp_path / "profile.json")
    config = DecoderConfig(model="", profile=str(tmp_path / "profile.json")).with_plan(way(8))
    best = text_problem(config, way(8)).best((1.0, 1.0, 0.05, 0.05, *[0.04] * 4), Corrections(), {})
    assert (len(best.splits), terms_of(best).exits) == (2, "recompute")


def test_what_a_running_replica_cannot_change_stays() -> None:
    plan = way(2)
    problem = question(replace(plan, decoding=replace(terms_of(plan), kv_megabytes=1, max_context=96)))
    terms = terms_of(problem.best(problem.prior.survival, Corrections(), {}))
    assert (terms.kv_megabytes, terms.max_context) == (1, 96)
    config = DecoderConfig(model="", kv_megabytes=7, max_residents=3, replicas=2, ttft_ms=5.0)
    led = config.switched_to(plan)
    assert (led.kv_megabytes, led.replicas, led.ttft_ms) == (7, 2, 5.0)
    assert (led.max_residents, led.cuts, led.exits) == (4, (2,), "recompute")


def test_devices_that_cannot_keep_the_limits_any_more_keep_their_pipeline() -> None:
    """A running decoder follows only plans for all of its devices."""
    slow = Device("slow", 2, 16 * 10**9, 0.1)
    tables = (PROFILE.tables[0], replace(PROFILE.tables[0], kind="slow", price_s=LaunchSize(launches=1.0)))
    beside = plan_of(DecodingWay(4, 1, 2, 64), DecodingFacts(replace(PROFILE, tables=tables), slow), GOAL, 2)
    running = replace(way(2), beside=(beside,))
    problem = DecoderPlanningProblem(replace(PROFILE, tables=tables), (CPU, slow), GOAL, running)
    best = problem.best((1.0,) * 8, Corrections(), {})
    assert best.devices() == running.devices() == {"cpu": 1, "slow": 2}
    assert best.beside == (beside,)


@pytest.mark.parametrize("exits", ["recompute", "verified", "project", "off"])
def test_a_configuration_is_led_by_the_plan_that_it_amounts_to(exits: str) -> None:
    config = DecoderConfig.model_validate({"model": "", "exits": exits, "deep_share": 0.25, "max_residents": 8})
    cut, limits = config.splits((3,), 8), config.limits()
    plan = config.as_plan(cut, limits, "cpu")
    led = config.switched_to(plan)
    assert (led.splits(led.cuts or (), 8), led.limits().deep_share) == (cut, 0.25 if exits != "off" else 1.0)
    assert replace(led.limits(), deep_share=0.25) == limits
    assert isinstance(cut, Splits)
    assert isinstance(limits, DecodingLimits)
