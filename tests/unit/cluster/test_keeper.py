"""A promise that breaks is noticed and mended; one that holds is left alone."""

import asyncio
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.core import Controller, NextStep
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.promise_keeper import LOOSENED, PromiseKeeper, ThresholdChange
from isobatch.cluster.controller.record import KEEP_EVENTS, Event, Events
from isobatch.cluster.controller.survival import with_all_ramps
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.counts import AUDIT_WINDOW_S, Counts
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan
from isobatch.profiles.agreement import recent_agreement
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.windows import History
from tests.helpers.exit_tables import exit_table
from tests.helpers.fluid_application import MEDIUM, Fluid, first_plan, question

LOOK_S, SHARE, PROMISED = 5.0, 0.02, 0.95
EVIDENCE = Evidence(exit_table(0, count=6000), exit_table(1, count=3000), "agreement", 0.03, 0.95)
PREPARED = dict(EVIDENCE.thresholds(EVIDENCE.prepared, range(3)))
ASKED = question()
FACTS = ASKED.facts(MEDIUM, Corrections())
NOW = exit_table(2, count=20_000)


@cache
def leaving(chosen: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where the inputs leave with these candidates, and whether they then get another answer than the full network's.

    It is remembered, as it is asked look by look.
    """
    places = NOW.places(np.array(chosen))
    return places, NOW.answers(places) != NOW.labels[-1]


class Served:
    """Inputs drawn from a table, `misfits` of which are such as leave too early with the checkpoint's thresholds."""

    def __init__(self, keeper: PromiseKeeper, rate_per_s: float = 1000.0, seed: int = 0) -> None:
        self.keeper, self.rate_per_s, self.now_s = keeper, rate_per_s, 0.0
        self.plan: Plan = with_all_ramps(first_plan(ASKED), range(3))
        self.changes: list[tuple[float, ThresholdChange]] = []
        self.served = 1.0  # the share that is answered in time
        self.share = SHARE
        self._random, self._changed_s, self._window = np.random.default_rng(seed), 0.0, list[Observed]()
        _, off = leaving(tuple(EVIDENCE.prepared))
        self._misfits, self._others = np.flatnonzero(off), np.flatnonzero(~off)
        self.usual = len(self._misfits) / NOW.num_inputs

    def _leaving(self) -> tuple[np.ndarray, np.ndarray]:
        return leaving(tuple(EVIDENCE.nearest(PREPARED | dict(self.plan.thresholds))))

    def disagreement(self, misfits: float) -> float:
        _, off = self._leaving()
        return float(misfits * off[self._misfits].mean() + (1 - misfits) * off[self._others].mean())

    def run(self, seconds: float, misfits: float | None = None) -> list[ThresholdChange]:
        before = len(self.changes)
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            seen = self._seen(self.usual if misfits is None else misfits)
            self._window.append(seen)
            self._follow(self.keeper.look(seen, self.plan, FACTS))
            if len(self._window) == 24:
                windows = (self.now_s - self._changed_s) / 120
                tightened = sum(change.what == "tightened" for _, change in self.changes)
                self._follow(self.keeper.window(self._window[-1], self.plan, FACTS, windows, tightened))
                self._window = []
        return [change for _, change in self.changes[before:]]

    def _follow(self, change: ThresholdChange | None) -> None:
        if change:
            self.changes.append((self.now_s, change))
            self.plan, self._changed_s = replace(self.plan, thresholds=change.thresholds), self.now_s
            self.keeper.restart()

    def _seen(self, misfits: float) -> Observed:
        count = int(self.rate_per_s * LOOK_S)
        is_misfit = self._random.uniform(size=count) < misfits
        rows = np.where(is_misfit, self._random.choice(self._misfits, count), self._random.choice(self._others, count))
        places, off = self._leaving()
        audited = (self._random.uniform(size=count) < self.share) & (places[rows] < 3)
        counts = [np.bincount(places[some], minlength=4) for some in (rows, rows[audited], rows[audited & off[rows]])]
        exits, of_audited, missed = (tuple(each.tolist()) for each in counts)
        in_time = round(self.served * count)
        return Observed(self.now_s - LOOK_S, LOOK_S, count, in_time, exits, audited=of_audited, missed=missed)


def keeper(**terms: object) -> PromiseKeeper:
    fields = {"agreement": PROMISED, "evidence": EVIDENCE, "prepared": PREPARED, **terms}
    return PromiseKeeper(**fields, least_gain=9.0)  # type: ignore[arg-type]


def test_a_promise_that_holds_is_left_alone() -> None:
    served = Served(keeper())
    assert served.disagreement(served.usual) < 0.6 * (1 - PROMISED)
    assert served.run(3600) == []


@pytest.mark.parametrize("seed", range(3))
def test_thresholds_tighten_within_half_a_minute_and_then_the_promise_holds(seed: int) -> None:
    served = Served(keeper(), seed=seed)
    served.run(600)
    (change, *_) = served.run(30, misfits=0.25)
    assert change.what == "tightened"
    assert "broken" in change.why
    served.run(300, misfits=0.25)
    assert served.disagreement(0.25) <= 1 - PROMISED


def test_thresholds_loosen_on_trial_when_the_inputs_are_as_before_and_do_not_flap() -> None:
    served = Served(keeper())
    served.run(300, misfits=0.25)
    tight = served.disagreement(served.usual)
    changes = served.run(3600)
    assert {change.what for change in changes} == {"loosened"}
    assert served.plan.thresholds == ()
    assert served.disagreement(served.usual) > tight
    assert len(served.run(3600, misfits=0.07)) <= 8


def test_thresholds_that_were_tuned_do_not_return_after_they_broke_the_promise() -> None:
    served = Served(kept := keeper())
    kept.tuned = True
    (change, *_) = served.run(300, misfits=0.25)
    assert (change.what, kept.tuned) == ("tightened", False)
    served.run(3600)
    assert served.plan.thresholds == (), "these are the checkpoint's own"


def test_strict_thresholds_are_not_given_up_under_load_while_no_audit_ends() -> None:
    served = Served(keeper(strict=True, under_load=0.8))
    served.run(60)
    served.served, served.share = 0.5, 0.0
    served.run(1800)
    assert [change.what for _, change in served.changes] == ["gave way", "recovered"]


def test_a_promise_that_is_finer_than_the_exit_table_lets_nobody_leave_early() -> None:
    few = Evidence(exit_table(0, count=6000), exit_table(1, count=400), "agreement", 0.03, 0.95)
    served = Served(keeper(agreement=0.9995, evidence=few))
    served.run(600)
    assert served.changes[0][1].what == "tightened"
    assert served.disagreement(0.25) == 0


def test_where_no_threshold_keeps_the_promise_nobody_leaves_early_and_not_for_longer_than_it_takes() -> None:
    """Inputs that are wrong where the table is sure: a fifth of those who leave, however strict the thresholds."""
    kept, plan, used = keeper(), with_all_ramps(first_plan(ASKED), range(3)), list[dict[int, float]]()
    strictest = dict(EVIDENCE.thresholds(EVIDENCE.shape.strictest, range(3)))
    exits, audited, missed = (2500, 0, 0, 2500), (50, 0, 0, 0), (10, 0, 0, 0)
    for look in range(1, 61):
        seen = Observed(look * LOOK_S, LOOK_S, 5000, 5000, exits, audited=audited, missed=missed)
        if change := kept.look(seen, plan, FACTS):
            used.append(dict(change.thresholds))
            plan = replace(plan, thresholds=change.thresholds)
            kept.restart()
    assert strictest in used[:3]
    assert used[-1] == strictest
    kept.worse /= LOOSENED**6  # trials
    assert dict(kept.thresholds(plan, FACTS)) != strictest


def test_without_an_exit_table_it_says_so_and_changes_nothing() -> None:
    served = Served(keeper(evidence=None))
    served.plan = TUNED  # thresholds from before the table was lost
    (change, *_) = served.run(60, misfits=0.25)
    assert (change.what, change.thresholds) == ("stayed", TUNED.thresholds)
    assert "no exit table" in change.why


def test_a_crowd_is_given_way_to_and_only_where_that_is_asked_for() -> None:
    crowded = Served(keeper(under_load=0.8))
    crowded.served = 0.6
    (change, *_) = crowded.run(20)
    assert change.what == "gave way"
    assert crowded.disagreement(crowded.usual) > 0.03
    crowded.served, crowded.rate_per_s = 1.0, 50.0
    assert [change.what for change in crowded.run(240)] == ["recovered"]
    assert crowded.plan.thresholds == ()
    patient = Served(keeper())
    patient.served = 0.6
    assert patient.run(600) == []


def test_a_crowd_is_not_over_while_plans_sustain_too_little_of_what_the_cost_model_says() -> None:
    crowded, seen = keeper(under_load=0.8), Observed(0.0, 120.0, 6000, 6000, (3000, 0, 0, 3000))
    crowded.resume(1.0, TUNED, relaxed=True)
    assert crowded.window(seen, TUNED, FACTS, windows=0.0, tightened=0, kept_share=0.01) is None
    late = replace(seen, in_time=5000)
    assert crowded.window(late, TUNED, FACTS, windows=0.0, tightened=0) is None
    change = crowded.window(replace(late, excused=1000), TUNED, FACTS, windows=0.0, tightened=0)
    assert getattr(change, "what", "") == "recovered", "the others failed, or their clients left"


def test_thresholds_for_the_plan_s_own_ramps_are_used_where_they_gain_and_the_promise_is_watched() -> None:
    eager = PromiseKeeper(PROMISED, EVIDENCE, PREPARED, least_gain=1e-6)
    served = Served(eager)
    one_ramp = replace(served.plan, placements=tuple(_only(each, 1) for each in served.plan.placements))
    served.plan = one_ramp
    changes = served.run(600)
    assert [change.what for change in changes] == ["tuned"]
    assert [ramp for ramp, _ in served.plan.thresholds] == [1]
    assert served.disagreement(served.usual) <= 1 - PROMISED


def test_a_look_behind_closed_ramps_forgets_nothing_of_what_audits_told_of_the_plan() -> None:
    kept, plan = keeper(), first_plan(ASKED)
    controller = Controller(ASKED, Patience(), History(None), Events(None), plan, 0.0, keeper=kept)
    exits, audited, missed = (2500, 0, 0, 2500), (100, 0, 0, 0), (1, 0, 0, 0)
    kept.look(Observed(0.0, LOOK_S, 5000, 5000, exits, audited=audited, missed=missed), plan, FACTS)
    for number, (what, ran) in enumerate((("looking", with_all_ramps(plan, range(3))), ("looked", plan)), 1):
        controller.rolled_out(NextStep(ran, Event(number, LOOK_S, what, "", plan)), 0.1, LOOK_S)
        assert kept.recent(LOOK_S).agreement
    controller.rolled_out(NextStep(plan, Event(3, LOOK_S, "tightened", "", plan)), 0.1, LOOK_S)
    assert not kept.recent(LOOK_S).agreement


TUNED = replace(with_all_ramps(first_plan(ASKED), range(3)), thresholds=tuple(PREPARED.items()))
USUAL, HARDER = (2000, 1500, 1000, 500), (1700, 1400, 1100, 800)


def looks(
    kept: PromiseKeeper, exits: tuple[int, ...], start_s: float, count: int, missed: int = 0
) -> list[ThresholdChange | None]:
    """What it says to looks at inputs that leave so, on a plan with thresholds of its own."""
    audits, misses = (*(each // 10 for each in exits[:-1]), 0), (missed, 0, 0, 0)
    ends_s = [start_s + LOOK_S * number for number in range(count)]
    return [
        kept.look(Observed(at_s, LOOK_S, 5000, 5000, exits, audited=audits, missed=misses), TUNED, FACTS)
        for at_s in ends_s
    ]


def tuned_keeper() -> PromiseKeeper:
    kept = PromiseKeeper(PROMISED, EVIDENCE, PREPARED, least_gain=-1.0)
    kept.resume(1.0, TUNED)
    return kept


def test_inputs_under_way_are_no_crowd() -> None:
    kept = keeper(under_load=0.8)
    for number, (arrivals, in_time) in enumerate(((10, 9), (12, 10), (14, 12))):
        seen = Observed(number * LOOK_S, LOOK_S, arrivals, in_time, (0, 0, 0, in_time))
        assert kept.look(seen, TUNED, FACTS) is None


def test_thresholds_for_the_plan_are_given_up_where_inputs_leave_elsewhere_before_audits_tell_anything() -> None:
    kept = tuned_keeper()
    assert not any(looks(kept, USUAL, 0.0, 100))
    first, second = looks(kept, HARDER, 500.0, 2)
    change = first or second
    assert (change.what, change.thresholds) == ("tightened", ())
    assert "inputs run" in change.why
    kept.restart()
    window = Observed(0.0, LOOK_S, 5000, 5000, HARDER)
    for start_s, again in ((520.0, False), (1200.0, True)):  # they are doubted for ten minutes
        assert not any(looks(kept, HARDER, start_s, 12))
        change = kept.window(replace(window, started_s=start_s + 60), TUNED, FACTS, windows=20.0, tightened=1)
        assert (change is not None and change.what == "tuned") == again


def _only(placement, ramp):  # type: ignore[no-untyped-def]
    splits = tuple(
        replace(split, ramps=tuple(each for each in split.ramps if each == ramp)) for split in placement.splits
    )
    return replace(placement, splits=splits)


class Audited(Fluid):
    """A look at it shows fifty audits, and what a test says."""

    missed, in_time = 0, 5000

    async def observe(self, devices: bool = True) -> Observed:
        audited, missed, exits = (50, 0, 0, 0), (self.missed, 0, 0, 0), (2500, 0, 0, 2500)
        self.now_s += LOOK_S
        return Observed(self.now_s - LOOK_S, LOOK_S, 5000, self.in_time, exits, audited=audited, missed=missed)


def led(kept: PromiseKeeper, app: Audited | None = None, events: Events | None = None) -> tuple[Audited, ControlLoop]:
    app = app or Audited(ASKED, with_all_ramps(first_plan(ASKED), range(3)))
    terms = Patience(least_gain=9.0, look_every_s=0.1)
    controller = Controller(ASKED, terms, History(None), events or Events(None), app.running, app.now_s, keeper=kept)
    return app, ControlLoop(app, controller, lambda: app.now_s, lambda: 0.0, report=lambda event: None)


def looked(loop: ControlLoop, count: int) -> list[Event]:
    """What was decided in so many looks."""
    first = loop.controller.record.number

    async def steps() -> None:
        for _ in range(count):
            await loop.step()

    asyncio.run(steps())
    return [event for event in loop.controller.record.events.all if event.number >= first]


def stance(kept: PromiseKeeper) -> tuple[float, bool, bool]:
    return kept.worse, kept.relaxed, kept.tuned


def test_while_paused_thresholds_stay_and_are_remembered_as_they_are() -> None:
    kept = keeper(under_load=0.8)
    app, loop = led(kept)
    app.missed = 40
    assert [event.what for event in looked(loop, 1)] == ["tightened"]
    tight, before = app.running.thresholds, stance(kept)
    asyncio.run(loop.pause(True))
    for app.missed, app.in_time in ((0, 1000), (40, 5000), (0, 5000)):  # a crowd, a broken promise, one that is kept
        assert {event.what for event in looked(loop, 60)} == {"stayed"}
        assert (app.running.thresholds, stance(kept)) == (tight, before)
    assert kept.recent(app.now_s).agreement, "audits are watched meanwhile"
    asyncio.run(loop.pause(False))
    assert "loosened" in {event.what for event in looked(loop, 100)}
    assert kept.worse < before[0]


def test_thresholds_that_could_not_be_rolled_out_are_not_believed() -> None:
    kept = keeper(under_load=0.8)
    app, loop = led(kept)
    app.missed, app.fails = 40, lambda plan: True
    (event,) = looked(loop, 1)
    assert (event.what, event.worse, stance(kept)) == ("stayed", 1.0, (1.0, False, False))
    assert "but a replica did not start" in event.why
    app.missed, app.in_time = 0, 1000
    (event,) = looked(loop, 2)
    assert ("agreement of 80 % is enough" in event.why, stance(kept)) == (True, (1.0, False, False))
    app.fails = lambda plan: False
    (event,) = looked(loop, 2)
    assert (event.what, stance(kept)) == ("gave way", (1.0, True, False))


@pytest.mark.parametrize(("missed", "in_time", "what"), [(40, 5000, "tightened"), (0, 1000, "gave way")])
def test_thresholds_that_a_controller_had_not_rolled_out_when_it_ended_are_rolled_out_by_the_next(
    missed: int, in_time: int, what: str
) -> None:
    app, loop = led(keeper(under_load=0.8))
    app.missed, app.in_time, rolls_out = missed, in_time, app.roll_out

    async def killed(plan: Plan) -> None:
        raise KeyboardInterrupt

    app.roll_out = killed
    with pytest.raises(KeyboardInterrupt):
        looked(loop, 2)
    app.missed, app.in_time, app.roll_out = 0, 5000, rolls_out
    again, known = keeper(under_load=0.8), loop.controller.record.events
    assert [event.what for event in looked(led(again, app, known)[1], 2)] == [what]
    assert app.running.thresholds == again.thresholds(app.running, FACTS) != ()
    assert stance(again) == stance(loop.controller.keeper)


def test_a_controller_that_restarts_in_a_crowd_lets_thresholds_recover() -> None:
    app, loop = led(keeper(under_load=0.8))
    app.in_time = 1000
    assert [event.what for event in looked(loop, 2)] == ["gave way"]
    again, events = keeper(under_load=0.8), loop.controller.record.events
    Controller(ASKED, Patience(), History(None), events, app.running, app.now_s, keeper=again)
    assert stance(again) == (1.0, True, False)


def test_a_restart_after_another_configuration_or_many_decisions_lets_thresholds_recover() -> None:
    app, before = led(keeper(under_load=0.8))
    app.in_time = 1000
    assert [event.what for event in looked(before, 2)] == ["gave way"]
    _, after = led(keeper(under_load=0.8), app)
    after.continue_from(before)
    record = before.controller.record
    for _ in range(KEEP_EVENTS):
        record.add(replace(record.events.last, number=record.number, what="stayed"))
    for each in (after, before):
        again, events = keeper(under_load=0.8), each.controller.record.events
        Controller(ASKED, Patience(), History(None), events, app.running, app.now_s, keeper=again)
        assert stance(again) == (1.0, True, False)


def test_the_next_configuration_keeps_to_what_audits_showed_of_thresholds_that_still_apply() -> None:
    app, before = led(keeper())
    app.missed = 40
    assert [event.what for event in looked(before, 1)] == ["tightened"]
    again = keeper()
    _, after = led(again, app)
    after.continue_from(before)
    assert again.worse == before.controller.keeper.worse > 1.0
    assert after.controller.record.events.last.worse == again.worse
    app.running = replace(app.running, thresholds=())  # another plan was deployed
    anew = keeper()
    led(anew, app)[1].continue_from(after)
    assert stance(anew) == (1.0, False, False)


def test_the_next_configuration_keeps_to_what_audits_showed_though_no_ramp_is_open() -> None:
    app, before = led(keeper())
    app.missed = 40
    assert [event.what for event in looked(before, 1)] == ["tightened"]
    app.running = replace(with_all_ramps(app.running, ()), thresholds=())
    before.controller.follow(app.running, app.now_s)
    again = keeper()
    led(again, app)[1].continue_from(before)
    assert again.worse == before.controller.keeper.worse > 1.0


# What the fronts tell of a promise is what the controller says of it, look for look.

FEWER = Evidence(exit_table(0, count=2000), exit_table(1, count=1000), "agreement", 0.03, 0.95)
STAGE = Stage(0, 4, 1, "a", (0.001,), ramps=frozenset(range(3)))
AUDITS = (40, 20, 10, 0)
leaves = st.sampled_from([(400, 300, 200, 100), (340, 280, 220, 160), (0, 0, 0, 1000)])
stretches = st.tuples(leaves, st.integers(1, 30), st.sampled_from([0, 1, 2, 4, 8, 20]))


@settings(max_examples=15, deadline=None)
@given(st.lists(stretches, min_size=1, max_size=6))
@example([((400, 300, 200, 100), 2, 8), ((0, 0, 0, 1000), 3, 0)])  # inputs are doubted while much is in the purse
def test_a_front_says_broken_whenever_the_controller_does(played: list[tuple[tuple[int, ...], int, int]]) -> None:
    """Inputs that leave so, for so many looks, in each of which so many audits miss."""
    prepared = dict(FEWER.thresholds(FEWER.prepared, range(3)))
    kept, plan, now_s = keeper(evidence=FEWER, prepared=prepared), with_all_ramps(first_plan(ASKED), range(3)), 0.0
    counts, route = Counts({}, lambda: now_s), Route((STAGE,))
    counts.promised = PROMISED
    for exits, looks, missed in played:
        for _ in range(looks):
            counts.end_windows(route)
            for counted, more in ((counts.exits, exits), (counts.audited, AUDITS), (counts.missed, (missed, 0, 0, 0))):
                counted.update(dict(enumerate(more)))
            now_s += AUDIT_WINDOW_S
            seen = Observed(
                now_s - AUDIT_WINDOW_S, AUDIT_WINDOW_S, 1000, 1000, exits, audited=AUDITS, missed=(missed, 0, 0, 0)
            )
            change = kept.look(seen, plan, FACTS)
            state = recent_agreement([counts.watched(route)], now_s, PROMISED).state
            assert state == kept.recent(now_s).state
            if change and "broken" in change.why:
                assert state == "broken"
            if change and change.thresholds != plan.thresholds:
                plan, route = replace(plan, thresholds=change.thresholds), Route((STAGE,), thresholds=change.thresholds)
                kept.restart()
