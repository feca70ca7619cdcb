"""The controller: observations go in, decisions come out. Pure code: no Ray, no clock, no threads.

Its driver (`control_loop.py`, for live and for simulated applications) passes observations with their times, rolls out
the plan of a decision, and reports how the roll-out went. Inside a window the controller looks for lost devices,
surprises and refused inputs. At the end of a window, or at such an event, it decides whether another plan is better.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from isobatch.cluster.controller import decide
from isobatch.cluster.controller.available_devices import DeviceRequests, PresentDevices, absent_devices
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.decide import Verdict, exits_alike, is_refusing, lost_devices, served_alike
from isobatch.cluster.controller.knowledge import CostModel, CurrentWindow, Knowledge, PlanningProblem
from isobatch.cluster.controller.promise_keeper import PromiseKeeper, ThresholdChange
from isobatch.cluster.controller.record import COMPLETED, EXPLORATION, THRESHOLDS, Action, Event, Events, NextStep
from isobatch.cluster.controller.sentences import arrivals_text, nearly_all_in_time, shortfall
from isobatch.cluster.controller.snapshot import OverloadRelief, Snapshot
from isobatch.cluster.controller.survival import ExplorationSchedule
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan
from isobatch.profiles.errors import UserError
from isobatch.profiles.windows import History

EARLY = 4  # a window may be closed after this part of its time (a quarter), if there is a reason


class Controller:
    """Decides which plan runs. `running` is the plan at the start; `history` and `events` are read from memory.

    `pinned` is the user's own plan: another plan runs only while devices of the pinned plan are lost, or when forced.
    """

    def __init__(
        self, problem: PlanningProblem, patience: Patience, history: History, events: Events, running: Plan,
        now_s: float, pinned: Plan | None = None, keeper: PromiseKeeper | None = None,
        grow_to: Mapping[str, int] | None = None, budget: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.pinned, self.keeper, self.patience, self.running = pinned, keeper, patience, running
        self.device_requests = DeviceRequests(grow_to or {}, patience.come_within_s, patience.hold_s)
        self.present = PresentDevices(problem.fleet, budget)
        self.known = Knowledge(problem, patience, history, events, running)
        self.record, self.window = self.known.record, CurrentWindow(now_s)
        self._start_over(now_s)
        self.exploring: Event | None = None  # since it, all ramps are open: the next look returns to the plan before it
        self._devices_changed = False  # whether other devices are present or allowed since the last decision
        self._granted = False  # whether an arbiter has granted more devices since then
        # Benched replicas that the last roll-out left beside the plan; after a restart those of the first look.
        self._beside: frozenset[tuple[str, str]] | None = None
        if events.last:
            self._resume(events.last, self.record.last_step or events.last, now_s)

    def _resume(self, last: Event, step: Event, now_s: float) -> None:
        """After a restart: find out how the last roll-out ended."""
        self.device_requests.request(last.requested, self.present.counts, now_s)
        if self.keeper:
            unserved = step.what if step.what in THRESHOLDS and exits_alike(step.before, self.running) else None
            self.keeper.resume(last.worse, self.running, self.record.is_relaxed, unserved)
        if step.what in EXPLORATION and served_alike(self.known.cost_model().with_all_ramps(step.before), self.running):
            self.exploring = step
        else:
            self.record.resume(step, self.running, now_s)
        self._trial = None if self.pinned else self.record.trial(self.running)

    def must_look(self, observed: Observed, now_s: float) -> bool:
        """Whether inputs are refused and a look before the next regular one could help."""
        may_end_exploration = observed.answered >= self.patience.enough_inputs
        return is_refusing(observed) and (may_end_exploration if self.exploring else self._may_relieve(now_s))

    def look(self, observed: Observed, now_s: float) -> NextStep | None:
        """Called at every look inside a window; None: there is no reason to decide yet."""
        if observed.seconds < 0 or now_s < self.window.began_s:  # the clock was set back: this look has no length
            self._start_over(now_s)
            self._trial = None if self.pinned else self.record.trial(self.running)
            return None
        observed = self._add(observed)
        if not self._runs_or_may_start:
            return None
        return (
            self._end_exploration(observed, now_s)
            or self._give_up_late_devices(now_s)
            or self._change_thresholds(observed, now_s)
            or self._judge_trial(now_s)
            or self._relieve_overload(observed, now_s)
            or self._close_window_if_due(now_s)
        )

    def preview(self, now_s: float) -> NextStep:
        """What would be decided now; nothing changes."""
        return self._decide(self.window.observed, now_s, "")

    def force(self, now_s: float) -> NextStep:
        """Close the window and take the best plan, however little it gains. Unless paused, no plan stays pinned."""
        self.pinned = self.pinned if self.record.paused else None
        return self._close(now_s, "forced by a person: ", forced=True)

    def follow(self, plan: Plan, now_s: float) -> None:
        """Note which plan runs. Another plan than expected was rolled out from outside."""
        if self.keeper and not exits_alike(self.running, plan):
            self.keeper.restart()
        before = self.running = replace(self.running, thresholds=plan.thresholds)
        if served_alike(plan, before):
            return
        self.running, self.exploring, self._relief.best = plan, None, None
        self.known.problem = self.known.problem.in_units_of(plan)
        self.window.start(now_s)  # looks under another plan may have other units
        arrived = self.record.arrived_after_all(plan, now_s)
        if not arrived and served_alike(plan, self.known.cost_model().with_all_ramps(before)):
            self._note_open_ramps("all ramps were opened by a call that seemed to have failed", before, now_s)
        elif not arrived:
            self._record("began", "a plan runs that this controller did not roll out", now_s)
        self._trial = None if self.pinned else self.record.trial(plan)

    def redeployed(self, before: "Controller", now_s: float) -> None:
        """Begin after a controller whose application had another configuration; ramps that it had opened are closed."""
        self._record("began", "the application was deployed with another configuration", now_s)
        if before.exploring and not self.exploring and served_alike(before.running, self.running):
            self._note_open_ramps(before.exploring.why, before.exploring.before, now_s)

    def _note_open_ramps(self, why: str, before: Plan, now_s: float) -> None:
        """All ramps are open: the next look returns to the plan before."""
        self.exploring = replace(self._event(now_s), what="looking", why=why, before=before)
        self.record.add(self.exploring)

    def rolled_out(self, step: NextStep, took_s: float | None, now_s: float) -> None:
        assert step.plan, "This is a bug: there was nothing to roll out."
        self._beside = self._benched
        if step.event.what == "stayed":
            return
        if step.event.what in ("rolling out", "rolling back"):  # the window may not have been closed
            self._learn(None, now_s)
        if step.event.what == "rolling back" and self._trial:  # the window belongs to the plan that failed
            self.record.kept_share = self._trial.kept_share
        event, others_leave = step.event, step.event.what in THRESHOLDS or not exits_alike(self.running, step.plan)
        self.running = step.plan
        if self.known.problem.aim.at_expected_rate:
            self._relief.best = None  # the best plan was for other devices
        if self.keeper and others_leave and event.what not in EXPLORATION:  # which leaves thresholds as they are
            self.keeper.restart()
        if event.what == "looking":
            self.exploring = event
        elif event.what in THRESHOLDS:
            self.window.start(now_s)
        elif event.what != "looked":
            self.exploring = None  # ramps that could not be closed after a look are closed by any other plan
            if event.what == "waking":
                self._granted, self.window.parked = False, False
                called_s = event.at_s - self.window.called_for_s  # when its inputs arrived
                took_s = None if self._relief.waits(called_s) else now_s - called_s  # None: not the first attempt
            self.record.complete(event, COMPLETED[event.what], took_s, now_s)
            self._trial = None if self.pinned else self.record.trial(self.running)
            self.window.start(now_s)

    def failed(self, step: NextStep, reason: str, now_s: float, blameless: bool = False, tried: bool = True) -> None:
        """The previous plan runs on. `blameless`: the failure says nothing against the new plan."""
        event, explored = step.event, step.event.what in EXPLORATION
        if explored:  # not again before it is due, but ramps that are still open are closed at the next look
            self._explorations.explored_s, self.exploring = now_s, event if event.what == "looked" else None
        lost = event.what == "rolling back" and blameless  # it may arrive later; until then the worse plan is on trial
        if lost:
            self.record.try_again()
            self._trial = self.record.trial(self.running)
        elif event.what == "rolling back":  # tried once; the previous plan is not to blame
            self._trial, event = None, replace(event, after=None)
        if self.keeper and event.what in THRESHOLDS:
            self.keeper.undo()
            event = replace(event, worse=self.keeper.worse, relaxed=self.keeper.relaxed)
        if event.what in ("rolling out", "waking"):
            self._learn(None, now_s)  # the window may not have been closed
            self._relief.not_before_s = now_s + tried * self.patience.replan_every_s / EARLY
            self._relief.best = None if blameless else self.running  # until the next decision
        what: Action = "stayed" if explored or blameless or event.what in THRESHOLDS else "failed"
        what = event.what if lost or event is self.exploring else what  # so that a controller that restarts goes on
        self.record.complete(event, what, None, now_s, why=f"{event.why}, but {reason}")
        self.window.start(now_s)

    def requests_refused(self, now_s: float) -> None:
        """Ray's autoscaler cannot provide all requested devices, and so rents none of them."""
        self.device_requests.refuse(self.present.counts, now_s)
        self._devices_changed = True  # another plan may be the best on the available devices

    def grant(self, budget: Mapping[str, int], why: str, now_s: float, parked: bool = False) -> None:
        """Plan on these devices of the fleet from now on: the others belong to other applications."""
        self._granted |= self.window.parked and not (parked or self._relief.waits(now_s))
        self.window.park(parked)
        if self.present.limit(budget):
            self._devices_have_changed()
        if why:
            self._record("granted", why, now_s)

    def pause(self, now_s: float, paused: bool = True) -> None:
        """Keep watching, and change nothing until a person resumes."""
        self._record("paused" if paused else "resumed", "requested by a person", now_s)
        self._devices_changed |= not paused  # decisions during a pause left the plan as it was

    @property
    def ramps(self) -> Collection[int]:
        """The ramps that are open in every pipeline of the running plan."""
        return set.intersection(*(set(pipeline.ramps) for pipeline in self.running.pipelines))

    @property
    def requested(self) -> dict[str, int]:
        """The devices to request from Ray's autoscaler."""
        return self.device_requests.beyond_use(self.running.devices(), self.present.counts, self.present.benched)

    def _start_over(self, now_s: float) -> None:
        """Forget what was measured in the present window, and since the last change of plan."""
        self.window.start(now_s)
        self._trial, self._relief = None, OverloadRelief()
        self._explorations = ExplorationSchedule(self.patience, now_s)

    @property
    def _runs_or_may_start(self) -> bool:
        """Whether the application has replicas, or is parked and may start some."""
        may_start = any(self.present.counts.values()) and (self._granted or not self.present.shared)
        parked = self.window.parked and (self.record.paused or not may_start)
        return not (self.window.parking or parked)

    def _end_exploration(self, observed: Observed, now_s: float) -> NextStep | None:
        """Learn from the look with all ramps open, and close them again."""
        if not (began := self.exploring) or self.window.parked:  # the application wakes with a newly chosen plan
            return None
        self.exploring, self._explorations.explored_s = None, now_s
        why = "no input that may leave at a ramp came while all were open"
        if observed.answered:
            before, self._devices_changed = self.known.estimate.survival, True
            self.known.estimate.add_exploration(observed, self.ramps)
            self.window.looks.pop()  # the estimate has counted this look
            off = max(abs(was - now) for was, now in zip(before, self.known.estimate.survival, strict=True))
            why = f"{observed.answered} inputs with all ramps open: the expected survival was off by up to {off:.0%}"
        event = replace(self._event(now_s), number=began.number, what="looked", why=why, before=began.before)
        self.record.add(event)
        return NextStep(began.before, event)

    def _give_up_late_devices(self, now_s: float) -> NextStep | None:
        late = self.device_requests.update(self.present.counts, now_s)
        return self._close(now_s, f"{late}: ") if late else None

    def _change_thresholds(self, observed: Observed, now_s: float) -> NextStep | None:
        """Tighten thresholds where the promise of agreement is broken."""
        if self.keeper and self.record.paused:
            self.keeper.watch(observed)
        elif self.keeper and (change := self.keeper.look(observed, self.running, self.known.cost_model().facts)):
            self._learn(None, now_s)  # or an overload would never show how much less the plan sustains
            return self._with_change(change, now_s)
        return None

    def _judge_trial(self, now_s: float) -> NextStep | None:
        """Return to the previous plan if the new plan turned out worse."""
        if lost_devices(self.running, self.present.counts):
            self._trial = None  # answers on fewer devices do not judge the plan
        if not (trial := self._trial) or trial.seconds < self.patience.replan_every_s / 2:
            return None
        verdict = trial.judge(self.known.promises_per_s, self.patience.least_loss)
        if verdict and verdict.moves and not self.record.paused and not lost_devices(trial.before, self.present.counts):
            self.record.end_trial(trial.number, verdict.gain)
            why, before = f"worse than the previous plan: {verdict.why}", self._with_thresholds(trial.before)
            event = replace(self._event(now_s, trial.observed), what="rolling back", why=why, after=before)
            self.record.add(event)
            return NextStep(before, event)
        if trial.seconds >= self.patience.replan_every_s:
            self.record.end_trial(trial.number, verdict.gain if verdict else None)
            self._trial = None
        return None

    def _relieve_overload(self, observed: Observed, now_s: float) -> NextStep | None:
        """While inputs are refused, the plan of most goodput on these devices runs at once, if it sustains more.

        The window is learned after the roll-out, because learning may take longer than inputs should be refused.
        """
        present, uses = self.present.counts, self.running.devices()
        if not (is_refusing(observed) and self._may_relieve(now_s)) or lost_devices(self.running, present):
            return None
        counts = {kind: uses.get(kind, 0) for kind in present} if self.known.problem.aim.at_expected_rate else present
        if not (proposal := self._relief.propose(self._snapshot(counts, self.window.observed, now_s))):
            return None
        (plan, verdict), self._granted = proposal, False
        event = replace(self._event(now_s, self.window.observed), why=verdict.why, gain_promised=verdict.gain)
        step = self._step(event, plan, verdict)
        self.record.add(step.event)
        return step

    def _close_window_if_due(self, now_s: float) -> NextStep | None:
        """Close the window at its end, or early for a reason."""
        known, looks, age_s = self.known, self.window.looks, now_s - self.window.began_s
        if age_s >= self.patience.replan_every_s * (1 - 1e-9):
            return self._close(now_s)
        early = age_s >= self.patience.replan_every_s / EARLY
        if early and (latest := known.estimate.surprise(looks, self.ramps, self.patience.enough_inputs)):
            return self._close(now_s, "the inputs differ from the forecast: ", latest)
        sized_to_rate = early and known.problem.aim.at_expected_rate
        if sized_to_rate and decide.is_overloaded(looks, known.sustains_per_s(self.running)):
            return self._close(now_s, "more inputs arrive than the running plan sustains: ")
        changed = self._devices_changed and (early or lost_devices(self.running, self.present.counts))
        return self._close(now_s) if self._granted or changed or (early and self.window.parked) else None

    def _add(self, observed: Observed) -> Observed:
        """Add an observation to the window; returns it in the units that plans count."""
        observed, was_parked = observed.counted_in(self.running.length), self.window.parked
        self.window.add(observed)
        self._beside = self._benched if self._beside is None else self._beside
        self._granted |= self.window.parked and not (was_parked or self.present.shared)  # it left its fleet
        if observed.devices and self.present.update(observed.devices, observed.benched):
            self._devices_have_changed()
        if self._trial:
            self._trial.add(observed)
        return observed

    def _devices_have_changed(self) -> None:
        """Granted devices count from when they are present: until then another application holds them."""
        self._devices_changed = True
        self._granted |= self.present.has_granted
        self._relief.best = None

    def _close(self, now_s: float, reason: str = "", latest: Observed | None = None, forced: bool = False) -> NextStep:
        observed = self.window.observed
        if self._learn(latest, now_s):
            keeper = None if forced or self.record.paused else self.keeper
            if keeper and (change := self._loosened(keeper, observed, now_s)):
                return self._with_change(change, now_s)
        self.window.start(now_s)
        step = self._decide(observed, now_s, reason, forced)
        known = None if self.known.problem.aim.at_expected_rate else self._relief.best
        self._relief.best = step.most or known
        self._devices_changed = self._granted = False
        self.device_requests.request(step.event.requested, self.present.counts, now_s)
        self.record.add(step.event)
        return step

    def _learn(self, latest: Observed | None, now_s: float) -> bool:
        """Learn from the window so far; returns whether any input was answered in it."""
        learned = self.known.learn(self.window, self.running, self.ramps, latest)
        if learned and self.known.estimate.surprised:
            self._explorations.surprised_s = now_s
        return learned

    def _loosened(self, keeper: PromiseKeeper, observed: Observed, now_s: float) -> ThresholdChange | None:
        windows = self.record.unchanged_s(now_s) / self.patience.replan_every_s
        tightened, shares = self.record.tightened(now_s), (self.known.estimate.full_share, self.record.kept_share)
        return keeper.window(observed, self.running, self.known.cost_model().facts, windows, tightened, *shares)

    def _with_change(self, change: ThresholdChange, now_s: float) -> NextStep:
        event = replace(self._event(now_s, self.window.observed), what=change.what, why=change.why)
        self.window.start(now_s)
        self.record.add(event)
        plan = replace(self.running, thresholds=change.thresholds)
        return NextStep(None if plan == self.running else plan, event)

    def _with_thresholds(self, plan: Plan) -> Plan:
        """A plan with the thresholds that keep the promise at its ramps."""
        keeper = self.keeper
        return replace(plan, thresholds=keeper.thresholds(plan, self.known.cost_model().facts)) if keeper else plan

    def _decide(self, observed: Observed, now_s: float, reason: str, forced: bool = False) -> NextStep:
        """Decide on the devices that are present, and request those that would be worth it."""
        present = self.present.counts
        if observed.seconds and not lost_devices(self.running, present):  # lost devices are reason enough
            reason = f"{reason}{arrivals_text(observed)}; "
        if self.record.paused:
            return self._decide_with(present, observed, now_s, reason, forced)
        possible = present if decide.is_idle(observed) else self.device_requests.possible(present, now_s)
        wish = step = self._decide_with(possible, observed, now_s, reason, forced)
        wanted = self.device_requests.of_growing_kinds((wish.plan or self.running).devices())
        if absent := absent_devices(wanted, present):
            step = self._decide_with(present, observed, now_s, reason, forced)
            why = f"{step.event.why}; requested from the autoscaler: {absent}: {wish.event.why.removeprefix(reason)}"
            step = replace(step, event=replace(step.event, why=why))
        if step.event.what == "looking":  # requests are decided after that look
            return step
        uses = self.device_requests.of_growing_kinds((step.plan or self.running).devices())
        requested = {kind: max(count, uses[kind]) for kind, count in wanted.items()}
        return replace(step, event=replace(step.event, requested=requested))

    def _decide_with(
        self, counts: Mapping[str, int], observed: Observed, now_s: float, reason: str, forced: bool
    ) -> NextStep:
        snapshot = replace(self._snapshot(counts, observed, now_s), forced=forced)
        event = self._event(now_s, observed)
        try:
            better, verdict = snapshot.decide()
            most = snapshot.most.plan if snapshot.weighs_goodput else None
        except UserError as error:
            return NextStep(None, replace(event, why=f"{reason}no plan is possible: {error}"))
        short = shortfall(self.running, snapshot.running.goodput_per_s, self.known.corrections, self.record.kept_share)
        event = replace(event, why="; ".join(filter(None, (reason + verdict.why, short))), gain_promised=verdict.gain)
        sees_nothing = observed.seconds > 0 and not observed.answered  # all ask for the full network, for instance
        stays_closed = sees_nothing or verdict.must or forced
        if not stays_closed and self._should_explore(verdict, snapshot.cost_model, now_s):
            why = f"{reason}closed ramps are opened for one look, to count the inputs that would leave there"
            opened = snapshot.cost_model.with_all_ramps(self.running)
            return NextStep(opened, replace(event, what="looking", why=why), most)
        step = replace(self._step(event, better, verdict), most=most)
        return replace(step, plan=step.plan or self.running) if self._must_give_back(observed) else step

    def _must_give_back(self, observed: Observed) -> bool:
        """Whether a replica beside the plan is no longer benched. To roll out the same plan again ends it."""
        by_value = self.known.problem.aim.at_expected_rate and not self.record.paused
        is_back = self._beside is not None and not self._beside <= self._benched
        return by_value and is_back and nearly_all_in_time(observed)

    @property
    def _benched(self) -> frozenset[tuple[str, str]]:
        return frozenset(self.window.latest.benched if self.window.latest else ())

    def _step(self, event: Event, better: Plan, verdict: Verdict) -> NextStep:
        if not verdict.moves:
            return NextStep(None, event)
        plan = self._with_thresholds(better)
        change = decide.plan_change(self.running, plan)
        what: Action = "waking" if self.window.parked else "rolling out"
        starts = change.replicas if self.window.parked else change.starts
        return NextStep(plan, replace(event, what=what, after=plan, starts=starts, forced=verdict.must))

    def _snapshot(self, counts: Mapping[str, int], observed: Observed, now_s: float) -> Snapshot:
        return Snapshot(
            self.running, self.pinned, self.known, self.patience, counts, observed, self.window, now_s, self._granted
        )

    def _may_relieve(self, now_s: float) -> bool:
        """Whether the plan of most goodput on these devices may be another one: it is unknown, or does not run."""
        fixed = self.record.paused or self.pinned or self.known.problem.answers_early
        return not fixed and self._relief.may_help(self.running, now_s)

    def _should_explore(self, verdict: Verdict, cost_model: CostModel, now_s: float) -> bool:
        broke = self.keeper and self.keeper.worse > 1.0  # closed ramps still have the thresholds that broke the promise
        is_fixed = self._trial or self.pinned or self.record.paused
        may = not (broke or is_fixed or lost_devices(self.running, self.present.counts))
        return may and self._explorations.is_due(self.running, cost_model.ramp_blocks, now_s, idle=not verdict.moves)

    def _record(self, what: Action, why: str, now_s: float) -> None:
        self.record.add(replace(self._event(now_s), what=what, why=why))

    def _event(self, now_s: float, observed: Observed | None = None) -> Event:
        corrections, requested = self.known.corrections, self.device_requests.counts
        number, plan, keeper = self.record.number, self.running, self.keeper
        event = Event(number, now_s, "stayed", "", plan, corrections=corrections, requested=requested)
        event = replace(event, worse=keeper.worse, relaxed=keeper.relaxed) if keeper else event
        return event.with_figures(observed, self.known.promises_per_s(plan)) if observed else event
