"""What a keeper of a promise does where it knows little."""

from dataclasses import replace

import pytest

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.promise_keeper import PromiseKeeper, ThresholdChange
from isobatch.cluster.controller.record import Event, Events, NextStep
from isobatch.cluster.controller.survival import with_all_ramps
from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed
from isobatch.optimizer import evaluate
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exits import survival_after
from isobatch.profiles.windows import History
from tests.helpers.exit_tables import exit_table
from tests.helpers.fluid_application import MEDIUM, batches, first_plan, question

EVIDENCE = Evidence(exit_table(0, count=2000), exit_table(1, count=1000), "agreement", 0.03, 0.95)
PREPARED = dict(EVIDENCE.thresholds(EVIDENCE.prepared, range(3)))
TUNED = replace(with_all_ramps(first_plan(question()), range(3)), thresholds=tuple(PREPARED.items()))
FACTS = question().facts(MEDIUM, Corrections())


def keeper(**terms: object) -> PromiseKeeper:
    return PromiseKeeper(**{"agreement": 0.95, "evidence": EVIDENCE, "prepared": PREPARED, **terms})  # type: ignore[arg-type]


def test_a_window_in_which_all_inputs_ask_for_the_full_network_loosens_no_threshold() -> None:
    kept = keeper()
    kept.resume(8.0, TUNED)
    for exits, full, change in (((0, 0, 0, 0), 6000, None), ((0, 0, 0, 6000), 0, "loosened")):
        seen = Observed(0.0, 120.0, 6000, 6000, exits, full=full)
        change_now = kept.window(seen, TUNED, FACTS, windows=99.0, tightened=0)
        assert (change_now and change_now.what) == change


def test_what_audits_showed_before_a_clock_was_set_back_is_not_recent_for_hours() -> None:
    kept, exits = keeper(), (2500, 0, 0, 2500)
    broken = Observed(10_000.0, 5.0, 5000, 5000, exits, audited=(500, 0, 0, 0), missed=(200, 0, 0, 0))
    assert kept.look(broken, TUNED, FACTS)
    assert kept.recent(10_005.0).state == "broken"
    kept.restart()
    kept.watch(Observed(6400.0, 5.0, 5000, 5000, exits))
    assert kept.recent(6405.0).state == "not watched"
    before = kept.worse
    assert kept.look(replace(broken, started_s=7100.0), TUNED, FACTS)
    assert kept.worse == pytest.approx(1.25 * before), "the promise did not break again within ten minutes"


@pytest.mark.parametrize("evidence", [EVIDENCE, None])
def test_thresholds_that_ran_before_the_controller_began_are_given_up_where_they_may_break_the_promise(
    evidence: Evidence | None,
) -> None:
    """As after a change of the controller's fields, when it knows nothing of them. Without a table they stay."""
    kept, usual, changes = keeper(evidence=evidence), (2000, 1500, 1000, 500), list[ThresholdChange | None]()
    for look, exits in enumerate([*[usual] * 10, *[(1700, 1400, 1100, 800)] * 2]):
        changes.append(kept.look(Observed(5.0 * look, 5.0, 5000, 5000, exits), TUNED, FACTS))
    assert {(each.what, each.thresholds) for each in changes if each} == ({("tightened", ())} if evidence else set())
    unwatched = keeper(evidence=evidence, strict=True)
    first, last = (unwatched.look(Observed(at_s, 5.0, 5000, 5000, usual), TUNED, FACTS) for at_s in (0.0, 600.0))
    assert first is None
    assert (last and (last.what, last.thresholds)) == (("recovered", ()) if evidence else None)


def test_what_a_plan_sustained_in_an_overload_is_learned_when_thresholds_give_way() -> None:
    """Or they would recover and give way for ever where the cost model promises too much."""
    kept = keeper(under_load=0.8)
    controller = Controller(question(), Patience(), History(None), Events(None), TUNED, 0.0, keeper=kept)
    launches = {LaunchShape("v100", 0, 4, 8): LaunchTimes(10, 4 * 5.0)}
    for look in (1, 2):
        exits = (0, 0, 0, 1000)
        seen = Observed(5.0 * look - 5.0, 5.0, 2000, 1000, exits, launches, {"v100": 4}, refused=1000)
        step = controller.look(seen, 5.0 * look)
    assert step
    assert step.event.what == "gave way"
    assert controller.record.kept_share < 1.0


PROVEN = replace(EVIDENCE, test=exit_table(1, count=50_000))  # by so many rows that thresholds lose nearly all of it


def proven_keeper(under_load: float) -> PromiseKeeper:
    prepared = dict(PROVEN.thresholds(PROVEN.prepared, range(3)))
    return keeper(agreement=0.97, evidence=PROVEN, prepared=prepared, under_load=under_load)


@pytest.mark.parametrize(("under_load", "gives_way"), [(0.96, False), (0.9, True)])
def test_thresholds_give_way_only_where_more_inputs_leave_then(under_load: float, gives_way: bool) -> None:
    """New thresholds aim at half of the loss that is allowed."""
    kept, plan = proven_keeper(under_load), replace(TUNED, thresholds=())
    for at_s in (0.0, 5.0):
        change = kept.look(Observed(at_s, 5.0, 5000, 1000, (0, 0, 0, 1000), refused=4000), plan, FACTS)
    assert (change is not None, kept.relaxed) == (gives_way, gives_way)


def test_a_crowd_is_over_once_the_plan_sustains_the_arrivals_with_the_thresholds_that_return() -> None:
    kept, plan = proven_keeper(0.9), replace(TUNED, thresholds=())
    kept.resume(1.0, plan, relaxed=True)
    relaxed = replace(plan, thresholds=kept.thresholds(plan, FACTS))
    now, then = PROVEN.survival(PROVEN.nearest(dict(relaxed.thresholds))), PROVEN.survival(PROVEN.prepared)
    sustained = evaluate(plan, FACTS.surviving(survival_after(FACTS.survival, now, then))).goodput_per_s
    for per_s, over in ((1.01 * sustained, False), (0.99 * sustained, True)):
        arrivals = int(120 * per_s)
        change = kept.window(Observed(0.0, 120.0, arrivals, arrivals, (0, 0, 0, arrivals)), relaxed, FACTS, 0.0, 0)
        assert (change is not None) == over
    assert change
    assert (change.what, change.thresholds) == ("recovered", ())


def test_a_plan_at_whose_ramps_inputs_leave_as_before_forgets_no_audits() -> None:
    """In a fleet such plans may follow each other sooner than audits show that a promise is broken."""
    kept, smaller = keeper(), batches(TUNED, 4)
    controller = Controller(question(), Patience(), History(None), Events(None), TUNED, 0.0, keeper=kept)
    kept.watch(Observed(0.0, 5.0, 5000, 5000, (2500, 0, 0, 2500), audited=(100, 0, 0, 0), missed=(1, 0, 0, 0)))
    for number, plan in enumerate((smaller, replace(smaller, thresholds=())), 1):
        controller.rolled_out(NextStep(plan, Event(number, 5.0, "rolling out", "", TUNED, plan)), 0.1, 5.0)
        assert bool(kept.recent(5.0).agreement) == (plan == smaller)


def test_a_plan_that_others_rolled_out_forgets_audits_of_the_ramps_before() -> None:
    """Such as one that arrives after its roll-out seemed to have failed: its depths are no change of the inputs."""
    kept, both = keeper(), replace(TUNED, beside=(first_plan(question()),))
    controller = Controller(question(v100=8), Patience(), History(None), Events(None), TUNED, 0.0, keeper=kept)
    for plan, stays in ((batches(TUNED, 4), True), (both, False), (both, True)):
        kept.watch(Observed(0.0, 5.0, 5000, 5000, (2500, 0, 0, 2500), audited=(100, 0, 0, 0), missed=(1, 0, 0, 0)))
        controller.follow(plan, 5.0)
        assert bool(kept.recent(5.0).agreement) == stays
