"""Moves devices between the applications of a fleet while they run. Pure code, as the controller: no Ray, no clock.

Each application keeps its own controller, which plans on its *budget*: the devices that it may use. The arbiter changes
budgets only. An application lends devices that it will probably not need. It keeps its requested goodput, as far as its
own devices sustain that.

A *parked* application has had no inputs for a while, or there are too few devices; others get its devices. With
standby, one replica on a device of another application answers its next inputs, until it has devices again. The two
applications slow each other there. Without standby its replicas end, and its next inputs wait until others start.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from isobatch.cluster.controller.config import ArbiterConfig
from isobatch.cluster.controller.fleet_division import AGAIN_S, Budget, DivisionProblem, Standing, kind_for_one
from isobatch.deployments.front.observed import StandbyReplica
from isobatch.optimizer.fleets.application import PartPlans
from isobatch.profiles.devices import as_text

EARLY = 4  # while the same applications refuse inputs, devices are divided again after a quarter of the time
LOOK_MOVING_S = 0.5  # between two looks while a device changes hands
LOOK_SHARE = 1 / 8  # after 4 s: of the time since the decision, since a giver may be unable to shrink
KEPT_DECISIONS = 20  # decisions that are remembered


@dataclass(frozen=True)
class Grant:
    """A budget, and the reason for it; empty: the budget is the old one. `parked`: all replicas end.

    `device_ids`: where replicas stand by, the devices whose replicas the application uses.
    """

    budget: Budget
    why: str
    device_ids: frozenset[str] | None = None
    parked: bool = False


@dataclass(frozen=True)
class FleetDecision:
    """`budgets`: those of all applications; None: they keep theirs."""

    at_s: float
    why: str
    budgets: Mapping[str, Budget] | None


@dataclass(frozen=True)
class MemberState:
    """The arbiter's facts and decisions about an application."""

    budget: Budget  # the devices that it may use; none of its own while it is parked
    uses: Budget  # the devices that no other application may use, whatever the budgets are
    target: Budget  # its budget by the last decision
    standby: tuple[StandbyReplica, ...] = ()  # its replicas that stand by, as its controller answered last
    device_ids: frozenset[str] | None = None  # the devices that it uses, where replicas stand by
    parked: Grant | None = None  # its grant while it is parked; with standby, `device_ids` has that of its next inputs
    lingering: Grant | None = None  # the last such grant once it is awake, until its plan does without that device
    unsent: bool = False  # the last grant may not have reached it

    def updated_by(self, standing: Standing) -> "MemberState":
        """The record once its controller has answered."""
        updated = replace(self, standby=standing.standby or (), uses=standing.uses)
        if not self.parked:
            return replace(updated, budget=standing.budget)
        if self.unsent:  # its replicas may still run, even if its controller reports none
            return replace(updated, uses=self.uses)
        if not self.has_got(self.parked, standing):
            return replace(updated, uses=_by_kind(max, standing.budget, standing.uses))
        gives = any(count > self.parked.budget[kind] for kind, count in standing.uses.items())
        return updated if gives else replace(updated, uses={})

    def has_got(self, grant: Grant, standing: Standing) -> bool:
        """Whether the controller of a parked application knows this grant."""
        return not self.unsent and standing.budget == grant.budget and standing.parked == grant.parked


@dataclass(frozen=True)
class Situation:
    """The facts whose change is a reason to divide the devices again."""

    at_s: float
    present: Budget
    asleep: frozenset[str]  # the parked applications without inputs
    refusing: frozenset[str] = frozenset()  # the applications that refuse inputs


@dataclass
class Arbiter:
    """`look` is called every few seconds, and returns the budgets to send.

    A device is given in two steps: the giver's budget shrinks, and once the giver's plan does without the device, the
    taker's budget grows. So no two plans ever use the same device, except for that of a parked application.
    """

    config: ArbiterConfig
    decisions: list[FleetDecision] = field(default_factory=list)
    _members: dict[str, MemberState] = field(default_factory=dict)  # by application, once its controller has answered
    _last: Situation | None = None  # at the last decision, or at the first look
    _why: str = ""  # devices move
    _moving_s: float = 0.0  # since the last decision that moved devices
    _plans: dict[str, PartPlans] = field(default_factory=dict)  # of the last decision, by application
    _kinds: dict[str, tuple[object, str]] = field(default_factory=dict)  # the answers of `kind_for_one`, by application

    def look(self, standings: Mapping[str, Standing], present: Budget, now_s: float) -> dict[str, Grant]:
        """`standings` of the applications whose controllers answer. Others and paused ones keep their devices."""
        of_fleet = partial(_by_kind, max, self.config.nothing)
        standings = {name: replace(each, budget=of_fleet(each.budget)) for name, each in standings.items()}
        first = {name: MemberState(each.budget, each.uses, target=each.budget) for name, each in standings.items()}
        known = self._members if self._last else first
        self._members = self._members | {name: known[name].updated_by(each) for name, each in standings.items()}
        if len(self._members) < len(self.config.applications):
            return {}  # some controllers have not answered yet: their devices are unknown
        standings = {name: each for name, each in standings.items() if not each.paused}
        self._divide(standings, present, now_s)
        self._moving_s = now_s - max((each.at_s for each in self.decisions if each.budgets), default=now_s)
        return self._grants(standings, present)

    def send_again(self, names: Collection[str]) -> None:
        """The last grants to these applications did not arrive, or not completely: the next look repeats them."""
        self._members |= {name: replace(self._members[name], unsent=True) for name in names}

    @property
    def budgets(self) -> dict[str, Budget]:
        """By application, as far as they are known."""
        return {name: each.budget for name, each in self._members.items()}

    @property
    def parked(self) -> frozenset[str]:
        """Applications without a device of their own."""
        return frozenset(name for name, each in self._members.items() if each.parked)

    @property
    def asleep(self) -> frozenset[str]:
        """The parked applications that had no inputs at the last decision."""
        return self._last.asleep if self._last else frozenset()

    @property
    def is_moving(self) -> bool:
        """Whether a device changes hands."""
        return any(each.target != each.budget for each in self._members.values())

    @property
    def look_again_s(self) -> float:
        """After this time the next look is due."""
        every_s = self.config.look_every_s
        return min(max(LOOK_MOVING_S, LOOK_SHARE * self._moving_s), every_s) if self.is_moving else every_s

    def _divide(self, standings: Mapping[str, Standing], present: Budget, now_s: float) -> None:
        """Park applications without inputs, and decide on all devices if there is a reason."""
        after_s = {each.name: each.park_after_s or inf for each in self.config.applications}
        quiet = {name for name, each in standings.items() if each.quiet_s >= after_s[name]}
        self._park(standings, present, quiet, () if self._last else self._parked_before(standings, present))
        self._last = self._last or Situation(now_s, dict(present), self.parked)
        unknown = {name for name in self.asleep if name not in standings or not standings[name].had_inputs}
        asleep = self.parked & (quiet | unknown)
        awake = {name: each for name, each in standings.items() if name not in asleep}
        refusing = frozenset(name for name, each in awake.items() if each.refuses)
        now, is_quick = Situation(now_s, dict(present), asleep, refusing), all(e.starts_quickly for e in awake.values())
        if reason := self._reason(self._last, now, AGAIN_S if is_quick else self.config.replan_every_s / EARLY):
            self._last = now
            self._decide(reason, awake, now)

    def _parked_before(self, standings: Mapping[str, Standing], present: Budget) -> list[str]:
        """Applications that an earlier arbiter had parked.

        They have no replicas or, with standby, their one device also belongs to another application.
        """
        parked = [name for name, each in standings.items() if each.parked]
        if min(_without(present, [has for name, has in self.budgets.items() if name not in parked]).values()) >= 0:
            return parked
        may = [each.name for each in self.config.applications if each.park_after_s]
        stand_by = {name for name, each in standings.items() if each.standby is not None}
        return parked + [name for name in may if name in stand_by and sum(self.budgets[name].values()) == 1]

    def _park(
        self, standings: Mapping[str, Standing], present: Budget, quiet: Collection[str], others: Collection[str]
    ) -> None:
        """Park these applications. One that is parked and has lost its device gets another one."""
        nothing = self.config.nothing
        for name, each in standings.items():
            parked = self._members[name].parked
            lost = parked and any(count > present[kind] for kind, count in parked.budget.items())
            if not lost and (parked or name not in (*quiet, *others)):
                continue
            ends = each.standby is None or each.parked
            kind = "" if ends else self._kind_for_one(name, each, present)
            if ends or kind:
                why = f"{name} is parked" + f": no inputs for {each.quiet_s:.0f} s" * (name in quiet)
                grant = Grant(nothing | ({kind: 1} if kind else {}), why, parked=ends)
                member = replace(self._members[name], budget=nothing, target=nothing, device_ids=None)
                self._members[name] = replace(member, parked=grant, lingering=None).updated_by(each)

    def _kind_for_one(self, name: str, standing: Standing, present: Budget) -> str:
        """As `kind_for_one`, which takes long, once for each network, objective and set of devices."""
        question = standing.facts, standing.objective, dict(present)
        if name not in self._kinds or self._kinds[name][0] != question:
            self._kinds[name] = question, kind_for_one(*question)
        return self._kinds[name][1]

    def _reason(self, last: Situation, now: Situation, again_s: float) -> str:
        """Why the devices are divided again now; empty: they are not. `again_s`: while the same refuse inputs."""
        age_s = now.at_s - last.at_s
        more = {kind: now.present[kind] - count for kind, count in last.present.items()}
        if any(more.values()):
            moved = ((abs(by), kind, "arrived" if by > 0 else "are gone") for kind, by in more.items() if by)
            return ", ".join(f"{count} {kind} {what}" for count, kind, what in moved)
        if now.asleep != last.asleep:
            changes = {"no inputs arrive": now.asleep - last.asleep, "inputs arrive again": last.asleep - now.asleep}
            return ", ".join(f"{what} for {', '.join(sorted(names))}" for what, names in changes.items() if names)
        if now.refusing and (age_s >= again_s or now.refusing - last.refusing):
            return f"inputs of {', '.join(sorted(now.refusing))} are refused"
        return "by the forecast" if not 0 <= age_s < self.config.replan_every_s else ""  # negative: the clock was set

    def _decide(self, reason: str, standings: Mapping[str, Standing], now: Situation) -> None:
        held, problem = self._problem(standings, now)
        targets, better = held, problem.better(held) if problem.plans else None
        if better is None:
            decision = FleetDecision(now.at_s, f"{reason}: no other division is worth its changes", None)
        elif circle := in_circle(self.budgets, held | better[0], now.present):
            why = f"{' and '.join(sorted(circle))} would wait for each other's devices, so all keep theirs"
            decision = FleetDecision(now.at_s, f"{reason}: {why}", None)
        else:
            budgets, why = better
            targets, self._why = held | budgets, f"{reason}: {why}"
            changes = [_change(name, held[name], budgets[name]) for name in budgets]
            decision = FleetDecision(now.at_s, "; ".join([self._why, *filter(None, changes)]), targets)
        self._members = {name: replace(each, target=targets[name]) for name, each in self._members.items()}
        # A controller that only has no devices keeps the plan that runs, on devices that others should get.
        left = [name for name in standings if any(held[name].values()) and not any(targets[name].values())]
        self._park(standings, now.present, (), left)
        moved = [each for each in self.decisions if each.budgets]  # many others would push these out
        self.decisions = [*moved, decision][-KEPT_DECISIONS:]

    def _problem(self, standings: Mapping[str, Standing], now: Situation) -> tuple[dict[str, Budget], DivisionProblem]:
        """The devices that each application holds, and the division of those that may move.

        An application without a possible plan keeps its devices, since its controller could not free them.
        """
        leads = standings.keys() | self.parked - now.asleep  # parked ones get devices even while they do not answer
        held = {name: each.target if name in leads else each.budget for name, each in self._members.items()}
        silent = [(held[name], each) for name, each in self._members.items() if name not in standings]
        absent = [has if each.parked else _by_kind(max, has, each.uses) for has, each in silent]
        problem = DivisionProblem.of(self.config, standings, _without(now.present, absent), self._plans)
        self._plans |= {each.application.name: each for each in problem.plans}
        able = {each.application.name: standings[each.application.name] for each in problem.plans}
        return (held, problem) if len(able) == len(standings) else self._problem(able, now)

    def _grants(self, standings: Mapping[str, Standing], present: Budget) -> dict[str, Grant]:
        """Budgets shrink at once, and grow by devices that no budget and no plan has any longer.

        An application that moves to other devices only keeps its own until some of these are free: with none, its
        controller would keep its plan, and with standby it would stop. A parked application gets all its devices at
        once: some of them may not be enough for its network.
        """
        free = _without(present, [_by_kind(max, each.budget, each.uses) for each in self._members.values()])
        grants = dict[str, Grant]()
        for name, standing in standings.items():
            member = self._members[name]
            shrunk = _by_kind(min, member.budget, member.target)
            taken = {kind: max(0, min(free[kind], member.target[kind] - count)) for kind, count in shrunk.items()}
            budget = {kind: count + taken[kind] for kind, count in shrunk.items()}
            if any(member.target.values()) and not any(budget.values()):
                budget = dict(member.budget)
            device_ids = self._chosen(name, budget)
            has_ids = device_ids is not None or not member.standby
            complete = any(budget.values()) and budget == member.target and has_ids
            if member.parked and not complete:
                self._members[name], grant = _grant_parked(member, member.parked, standing)
            else:
                free, why = _without(free, [taken]), f"{_change(name, member.budget, budget)}: {self._why}"
                self._members[name], grant = _grant_awake(member, standing, Grant(budget, why, device_ids))
            grants |= {name: grant} if grant else {}
        return grants

    def _chosen(self, name: str, budget: Budget) -> frozenset[str] | None:
        """Which devices an application uses of those where its replicas stand by: those that it has, and free ones.

        Others are free once no application may use them, nor still does. Until there are enough for its first choice,
        an application uses every device.
        """
        member = self._members[name]
        if not member.standby:
            return member.device_ids
        has, taken = member.device_ids or frozenset(), set[str]()
        for other, each in self._members.items():
            if other != name and each.device_ids is not None:
                taken |= each.device_ids | {replica.device_id for replica in each.standby if replica.is_used}
        chosen = list[str]()
        for kind, count in budget.items():
            ids = [each.device_id for each in member.standby if each.kind == kind]
            ids = [id_ for id_ in ids if id_ in has or id_ not in taken]
            chosen += sorted(ids, key=lambda id_: (id_ not in has, id_))[:count]
        enough = member.device_ids is not None or len(chosen) == sum(budget.values())
        return frozenset(chosen) if enough else None


def _grant_awake(member: MemberState, standing: Standing, new: Grant) -> tuple[MemberState, Grant | None]:
    """An application with devices of its own: its record, and its grant unless it has got that before."""
    member = replace(member, parked=None, lingering=member.parked or member.lingering)
    lent = member.lingering.budget.items() if member.lingering else ()
    if member.lingering and not any(count and not new.budget[kind] and standing.uses.get(kind) for kind, count in lent):
        member = replace(member, lingering=None, unsent=True)
    same, starts = new.budget == member.budget, standing.parked and not any(standing.uses.values())
    if same and new.device_ids == member.device_ids and not member.unsent and not starts:
        return member, None
    # It has the old budget, too, until its controller answers with the smaller one.
    budget = _by_kind(max, member.budget, new.budget)
    left = (member.lingering and member.lingering.device_ids) or frozenset()
    after = replace(member, budget=budget, device_ids=new.device_ids, unsent=False)
    ids = None if new.device_ids is None else new.device_ids | left
    return after, replace(new, why="" if same else new.why, device_ids=ids)


def _grant_parked(member: MemberState, before: Grant, standing: Standing) -> tuple[MemberState, Grant | None]:
    """The same for a parked application. With standby, it has a device that another application may have, too."""
    replicas = [each for each in member.standby if before.budget[each.kind]]
    ids = [each.device_id for each in sorted(replicas, key=lambda each: (not each.is_used, each.device_id))]
    kept = (before.device_ids or frozenset()).intersection(ids)
    grant = replace(before, device_ids=kept or frozenset(ids[:1]) or None)
    if grant == before and member.has_got(grant, standing):
        return member, None
    why = "" if standing.budget == grant.budget else grant.why
    return replace(member, parked=grant, unsent=False), replace(grant, why=why)


def in_circle(budgets: Mapping[str, Budget], targets: Mapping[str, Budget], present: Budget) -> set[str]:
    """The applications that move to other devices only, and may wait for each other's for ever.

    None of these gives a device before it has another one. The others give theirs in any case.

    >>> one, other = {"a100": 1, "t4": 0}, {"a100": 0, "t4": 1}
    >>> sorted(in_circle({"a": one, "b": other}, {"a": other, "b": one}, {"a100": 1, "t4": 1}))
    ['a', 'b']
    >>> in_circle({"a": one, "b": other}, {"a": other, "b": one}, {"a100": 2, "t4": 1})
    set()
    """

    def moves(has: Budget, target: Budget) -> bool:
        return any(has.values()) and any(target.values()) and not any(_by_kind(min, has, target).values())

    waiting = {name for name, has in budgets.items() if moves(has, targets[name])}
    while True:
        left = _without(present, [*targets.values(), *(budgets[name] for name in waiting)])
        gets = {name for name in waiting if any(count > max(0, -left[kind]) for kind, count in targets[name].items())}
        if not gets:
            return waiting
        waiting -= gets


def _change(name: str, before: Budget, after: Budget) -> str:
    """
    >>> _change("reviews", {"v100": 2, "k80": 1}, {"v100": 1, "k80": 3})
    'reviews gives 1 v100 and gets 2 k80'
    """
    gives = as_text({kind: count - after[kind] for kind, count in before.items()})
    gets = as_text({kind: after[kind] - count for kind, count in before.items()})
    parts = [f"gives {gives}"] * bool(gives) + [f"gets {gets}"] * bool(gets)
    return f"{name} {' and '.join(parts)}" if parts else ""


def _by_kind(choose: Callable[[int, int], int], one: Budget, other: Budget) -> dict[str, int]:
    return {kind: choose(count, other.get(kind, 0)) for kind, count in one.items()}


def _without(devices: Budget, budgets: Sequence[Budget]) -> dict[str, int]:
    return {kind: count - sum(each.get(kind, 0) for each in budgets) for kind, count in devices.items()}
