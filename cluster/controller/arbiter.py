"""Moves devices between the applications of a fleet while they run. Pure code, as the controller: no Ray, no clock.

Each application keeps its own controller, which plans on its *budget*: the devices that it may use. The arbiter changes
budgets only. An application lends devices that it is not expected to need. It never has less than it needs of what its
own devices sustain.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from isobatch.cluster.controller.config import ArbiterConfig, MemberTerms
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.decide import is_refusing
from isobatch.cluster.controller.snapshot import Snapshot
from isobatch.deployments.front.observed import StandbyReplica
from isobatch.optimizer import Objective, Problem
from isobatch.optimizer.fleets.application import (
    SOMETHING,
    FleetApplication,
    FleetGoal,
    KindCounts,
    PartPlans,
    value_of,
)
from isobatch.optimizer.fleets.division import best_division, part_plans
from isobatch.profiles.devices import Device, as_text
from isobatch.profiles.errors import UserError

RESERVE = 0.1  # the share of the expected rate that an application shall sustain beyond it
LEAST_ASKED = 0.01  # the share of the fleet's goodput that an application without inputs asks for
QUICK_S = 2.0  # a replica that starts within this time returns so soon that present rates count, not forecasts
EARLY = 4  # while the same applications go on to refuse inputs, devices are divided after this part of the time
AGAIN_S = 5.0  # the same where replicas start so soon: a division is expected to stay for no longer
MOVING_S = 0.5  # between two looks while a device changes hands
KEEP = 20  # decisions that are remembered
Budget = Mapping[str, int]  # devices by kind


@dataclass(frozen=True)
class Standing:
    """What an application's controller reports to the arbiter.

    `facts` are its network, with the expected survival and the corrected tables. `uses` are the devices of the plan
    that runs, or of the one that is rolled out, whichever are more. `kept`: the share of estimated goodput that plans
    reach under load.
    """

    facts: Problem
    objective: Objective
    expected_per_s: float
    kept: float
    budget: Budget
    uses: Budget
    refuses: bool  # inputs, in the last look
    paused: bool = False  # by a person, so that its plan stays
    start_s: float = 0.0  # that a replica takes to start
    arrivals_per_s: float = 0.0  # in the present window, as the next
    goodput_per_s: float = 0.0
    standby: tuple[StandbyReplica, ...] = ()

    @classmethod
    def of(cls, controller: Controller, rolled_out: Budget, now_s: float) -> "Standing":
        """`rolled_out`: the devices of the plan that is being rolled out."""
        known, window, present = controller.known, controller.window, controller.present
        running, observed = controller.running.devices(), window.observed
        snapshot = Snapshot(
            controller.running, None, known, controller.patience, present.counts, observed, now_s, window.rush_per_s
        )
        return cls(
            facts=known.cost_model().facts.for_plan(controller.running).given,
            objective=known.problem.objective,
            expected_per_s=(
                window.recent_per_s if is_quick(known.record.start_s) else snapshot.demand.for_rate(RESERVE, 1.0)
            ),
            kept=known.record.kept_share,
            budget=present.budget,
            uses={kind: max(running.get(kind, 0), rolled_out.get(kind, 0)) for kind in present.budget},
            refuses=window.latest is not None and is_refusing(window.latest),
            paused=controller.record.paused,
            start_s=known.record.start_s,
            arrivals_per_s=observed.arrivals_per_s,
            goodput_per_s=observed.goodput_per_s,
            standby=window.latest.standby if window.latest else (),
        )


@dataclass(frozen=True)
class Grant:
    """A new budget, and why; "": it is the old one. `device_ids`: those that are used, where replicas stand by."""

    budget: Budget
    why: str
    device_ids: frozenset[str] | None = None


@dataclass(frozen=True)
class FleetDecision:
    """`budgets` of all applications; None: those stay that they have."""

    at_s: float
    why: str
    budgets: Mapping[str, Budget] | None


@dataclass
class Arbiter:
    """`look` is called every few seconds, and returns the budgets to send.

    A device is given in two steps: the giver's budget shrinks, and once the giver's plan does without the device, the
    taker's budget grows. So no two plans ever use the same device.
    """

    config: ArbiterConfig
    decisions: list[FleetDecision] = field(default_factory=list)
    budgets: dict[str, Budget] = field(default_factory=dict)  # by application, as far as they are known
    _uses: dict[str, Budget] = field(default_factory=dict)  # the devices that each used when it answered last
    _ids: dict[str, frozenset[str]] = field(default_factory=dict)  # of devices, where replicas stand by
    _standby: dict[str, tuple[StandbyReplica, ...]] = field(default_factory=dict)  # as each answered last
    _aims: dict[str, Budget] = field(default_factory=dict)  # the budgets of the last decision
    _plans: dict[str, PartPlans] = field(default_factory=dict)  # that were made for the last decision
    _unsent: set[str] = field(default_factory=set)  # the applications to which the last grant did not get
    _why: str = ""
    _decided_s: float | None = None
    _refusing: frozenset[str] = frozenset()  # the applications that refused inputs at the last decision
    _present: Budget = field(default_factory=dict)  # the devices of the last decision

    def look(self, standings: Mapping[str, Standing], present: Budget, now_s: float) -> dict[str, Grant]:
        """`standings` of the applications whose controllers answer. Others and paused ones keep what they have."""
        self.budgets |= {name: _both(max, self.config.nothing, each.budget) for name, each in standings.items()}
        self._uses |= {name: each.uses for name, each in standings.items()}
        self._standby |= {name: each.standby for name, each in standings.items()}
        if len(self.budgets) < len(self.config.applications):
            return {}  # since the start some have not answered: it is unknown what they hold
        standings = {name: each for name, each in standings.items() if not each.paused}
        if self._decided_s is None:
            self._decided_s, self._present, self._aims = now_s, dict(present), dict(self.budgets)
        if reason := self._reason(standings, present, now_s):
            self._decided_s, self._present, self._refusing = now_s, dict(present), _refusing(standings)
            self._decide(reason, standings, present, now_s)
        return dict(self._grants(standings, present))

    def send_again(self, names: Collection[str]) -> None:
        """The last grants to these applications did not arrive, or not completely: the next look repeats them."""
        self._unsent.update(names)

    @property
    def is_moving(self) -> bool:
        """Whether a device changes hands."""
        return self._aims != self.budgets

    @property
    def look_again_s(self) -> float:
        """After this time the next look is due."""
        return min(MOVING_S, self.config.look_every_s) if self.is_moving else self.config.look_every_s

    def _reason(self, standings: Mapping[str, Standing], present: Budget, now_s: float) -> str:
        """Why the devices are divided again now; empty: they are not."""
        refusing, age_s = _refusing(standings), 0.0 if self._decided_s is None else now_s - self._decided_s
        changed = {kind: present[kind] - count for kind, count in self._present.items() if present[kind] != count}
        if changed:
            return ", ".join(f"{abs(by)} {kind} {'came' if by > 0 else 'are gone'}" for kind, by in changed.items())
        quick = all(is_quick(each.start_s) for each in standings.values())
        late = age_s >= (AGAIN_S if quick else self.config.replan_every_s / EARLY)
        if refusing and (late or refusing - self._refusing):
            return f"inputs of {', '.join(sorted(refusing))} are refused"
        return "by the forecast" if not 0 <= age_s < self.config.replan_every_s else ""

    def _decide(self, reason: str, standings: Mapping[str, Standing], present: Budget, now_s: float) -> None:
        held, asked = self._asked(standings, present)
        better = asked.better(held) if asked.plans else None
        self._aims = held
        if better is None:
            decision = FleetDecision(now_s, f"{reason}: no other division is worth its changes", None)
        else:
            budgets, why = better
            self._aims, self._why = held | budgets, f"{reason}: {why}"
            changes = [_change(name, held[name], budgets[name]) for name in budgets]
            decision = FleetDecision(now_s, "; ".join([self._why, *filter(None, changes)]), self._aims)
        moved = [each for each in self.decisions if each.budgets]  # many others would push these out
        self.decisions = [*moved, decision][-KEEP:]

    def _asked(self, standings: Mapping[str, Standing], present: Budget) -> tuple[dict[str, Budget], "_Asked"]:
        """What each application holds, and what is divided. One for which no plan is possible keeps its devices.

        Its controller could not free them.
        """
        held = {name: self._aims[name] if name in standings else has for name, has in self.budgets.items()}
        absent = [_both(max, has, self._uses[name]) for name, has in held.items() if name not in standings]
        asked = _Asked.of(self.config, standings, _without(present, absent), self._plans)
        self._plans |= {each.application.name: each for each in asked.plans}
        able = {each.application.name: standings[each.application.name] for each in asked.plans}
        return (held, asked) if len(able) == len(standings) else self._asked(able, present)

    def _grants(self, standings: Mapping[str, Standing], present: Budget) -> Iterator[tuple[str, Grant]]:
        """Budgets shrink at once, and grow by devices that no budget and no plan has any longer."""
        aims = self._aims
        budgets = {name: _both(min, has, aims[name]) for name, has in self.budgets.items()}
        used = [_both(max, has, self._uses[name]) for name, has in budgets.items()]
        free = _without(present, used)
        for name, has in list(self.budgets.items()):
            if name not in standings:
                continue
            taken = {kind: max(0, min(free[kind], aims[name][kind] - count)) for kind, count in budgets[name].items()}
            free = _without(free, [taken])
            budget = {kind: count + taken[kind] for kind, count in budgets[name].items()}
            ids = self._chosen(name, budget)
            if budget != has or ids != self._ids.get(name) or name in self._unsent:
                why = f"{_change(name, has, budget)}: {self._why}" if budget != has else ""
                self.budgets[name] = budget
                self._unsent.discard(name)
                if ids is not None:
                    self._ids[name] = ids
                yield name, Grant(budget, why, ids)

    def _chosen(self, name: str, budget: Budget) -> frozenset[str] | None:
        """Which devices an application uses of those where its replicas stand by: those that it has, and free ones.

        Others are free once no application may use them, nor still does. Until there are enough for its first choice,
        an application uses every device.
        """
        if not (standby := self._standby[name]):
            return self._ids.get(name)
        has = self._ids.get(name, frozenset())
        others = [other for other in self._ids if other != name]
        taken = {each.device_id for other in others for each in self._standby[other] if each.is_used}
        taken = taken.union(*(self._ids[other] for other in others))
        chosen = list[str]()
        for kind, count in budget.items():
            ids = [each.device_id for each in standby if each.kind == kind]
            ids = [id_ for id_ in ids if id_ in has or id_ not in taken]
            chosen += sorted(ids, key=lambda id_: (id_ not in has, id_))[:count]
        enough = name in self._ids or len(chosen) == sum(budget.values())
        return frozenset(chosen) if enough else None


@dataclass(frozen=True)
class _Asked:
    """The applications that can be planned for, in the order of the file, and the devices that they share."""

    config: ArbiterConfig
    devices: Sequence[Device]
    plans: Sequence[PartPlans]

    @classmethod
    def of(
        cls, config: ArbiterConfig, standings: Mapping[str, Standing], present: Budget, before: Mapping[str, PartPlans]
    ) -> "_Asked":
        """`before`: the plans of the decision before, by application."""
        kinds = {device.kind: device for each in standings.values() for device in each.facts.devices}
        devices = [replace(kinds[kind], count=count) for kind, count in present.items() if count > 0 and kind in kinds]
        asks = [_asks(each, standings[each.name], devices) for each in config.applications if each.name in standings]
        counts = tuple(each.count for each in devices)
        known = [each.knowing(before.get(each.application.name)) for each in part_plans(asks, devices)]
        able = [(each, most) for each in known if (most := each.goodput_per_s(counts))]
        plans = [_asking(each, LEAST_ASKED * most) for each, most in able]
        starts_s = [standings[each.application.name].start_s for each in plans]
        stays_s = [AGAIN_S if is_quick(start_s) else config.replan_every_s for start_s in starts_s]
        shares = [min(1.0, start_s / stay_s) for start_s, stay_s in zip(starts_s, stays_s, strict=True)]
        return cls(
            config, devices, [replace(each, lost_share=share) for each, share in zip(plans, shares, strict=True)]
        )

    def better(self, held: Mapping[str, Budget]) -> tuple[dict[str, Budget], str] | None:
        """The budgets of a division that is worth its changes, and why; None: the present one stays."""
        own = self._parts({each.name: each.devices for each in self.config.applications})
        present = self._parts(held)
        known = [parts for parts in (present, own) if self._fits(parts)]
        for goal, relaxed in self._tries():
            plans = [
                replace(each, held=part) for each, part in zip(self._with_needs(own, relaxed), present, strict=True)
            ]
            try:
                after = best_division(plans, self.devices, goal, known=known).parts
            except UserError:
                continue
            was, now = (
                _asked_value([_without_reserve(each) for each in plans], goal, present) if present in known else None,
                _asked_value(plans, goal, after),
            )
            assert now is not None, "This is a bug: a division gives each application what it needs."
            if was is not None and now - was < self.config.least_gain * abs(was):
                return None
            return self._budgets(after), f"{_reached(goal, was, now)}{self._short(plans, relaxed)}"
        return None

    def _tries(self) -> Iterator[tuple[FleetGoal, int]]:
        """Goals, each with how many needs are given up, those of the lowest priority first."""
        if self.config.goal == "cost":
            yield "cost", 0
        goal = "goodput" if self.config.goal == "cost" else self.config.goal
        yield from ((goal, relaxed) for relaxed in range(3 * len(self.plans) + 1))

    def _with_needs(self, own: Sequence[KindCounts], relaxed: int) -> list[PartPlans]:
        """First each application needs what it asks of its own devices, and its least goodput; then only the latter.

        Then it needs some device, as long as there is one for each: a controller cannot do without any.
        """
        order = sorted(range(len(self.plans)), key=lambda index: (self.plans[index].application.priority, -index))
        plans = []
        for index, (each, part) in enumerate(zip(self.plans, own, strict=True)):
            asks, place = each.application, order.index(index)
            lends = min(asks.rate_per_s or 0.0, each.goodput_per_s(part))
            needed = [max(asks.least_per_s, lends), asks.least_per_s, SOMETHING, 0.0]
            given_up = sum(relaxed > place + tier * len(self.plans) for tier in range(3))
            plans.append(replace(each, application=replace(asks, least_per_s=needed[given_up])))
        return plans

    def _short(self, plans: Sequence[PartPlans], relaxed: int) -> str:
        names = [each.application.name for each in sorted(plans, key=lambda each: each.application.priority)]
        return f"; devices are missing: {', '.join(names[:relaxed])} may get less than agreed" if relaxed else ""

    def _parts(self, budgets: Mapping[str, Budget]) -> tuple[KindCounts, ...]:
        mine = [budgets[each.application.name] for each in self.plans]
        return tuple(tuple(budget.get(device.kind, 0) for device in self.devices) for budget in mine)

    def _fits(self, parts: Sequence[KindCounts]) -> bool:
        return all(
            sum(counts) <= each.count for counts, each in zip(zip(*parts, strict=True), self.devices, strict=True)
        )

    def _budgets(self, parts: Sequence[KindCounts]) -> dict[str, Budget]:
        budgets = dict[str, Budget]()
        for each, part in zip(self.plans, parts, strict=True):
            usable = {device.kind for device in each.application.facts.devices}
            counts = {device.kind: count for device, count in zip(self.devices, part, strict=True)}
            budgets[each.application.name] = self.config.nothing | {
                kind: counts[kind] for kind in counts if kind in usable
            }
        return budgets


def _asks(terms: MemberTerms, standing: Standing, devices: Sequence[Device]) -> FleetApplication:
    known = {each.kind for each in standing.facts.devices}
    facts = standing.facts.with_devices([each for each in devices if each.kind in known])
    return FleetApplication(
        terms.name, facts, standing.objective, terms.weight, standing.expected_per_s, terms.least_per_s, terms.priority,
        standing.kept,
    )  # fmt: skip


def _without_reserve(plans: PartPlans) -> PartPlans:
    """An application that lacks no more than its reserve has what it needs, so that devices do not always move."""
    asks = plans.application
    return replace(plans, application=replace(asks, least_per_s=asks.least_per_s / (1 + RESERVE)))


def _asking(plans: PartPlans, least_per_s: float) -> PartPlans:
    asks = plans.application
    return replace(plans, application=replace(asks, rate_per_s=max(asks.rate_per_s or 0.0, least_per_s)))


def _asked_value(plans: Sequence[PartPlans], goal: FleetGoal, parts: Sequence[KindCounts]) -> float | None:
    """The value of a division without goodput that nobody asks for; None: one has less than it needs."""
    worths = list[float]()
    for each, part in zip(plans, parts, strict=True):
        worth, asks = each.worth(goal, part), each.application
        if worth is None:
            return None
        worths.append(
            worth
            if goal == "cost"
            else asks.worth(goal, min(asks.rate_per_s or 0.0, each.goodput_per_s(part) * each.running_share(part)), 0.0)
        )
    return value_of(goal, worths)[0]


def _reached(goal: FleetGoal, was: float | None, now: float) -> str:
    names = {"goodput": "weighted goodput", "cost": "dollars per hour", "fairness": "the smallest share"}
    if was is None:
        return "not all have what they need"
    return f"{names[goal]} {abs(was):,.4g} becomes {abs(now):,.4g}"


def _refusing(standings: Mapping[str, Standing]) -> frozenset[str]:
    return frozenset(name for name, each in standings.items() if each.refuses)


def is_quick(start_s: float) -> bool:
    return start_s <= QUICK_S


def _change(name: str, before: Budget, after: Budget) -> str:
    """
    >>> _change("reviews", {"v100": 2, "k80": 1}, {"v100": 1, "k80": 3})
    'reviews gives 1 v100 and gets 2 k80'
    """
    gives = as_text({kind: count - after[kind] for kind, count in before.items()})
    gets = as_text({kind: after[kind] - count for kind, count in before.items()})
    parts = [f"gives {gives}"] * bool(gives) + [f"gets {gets}"] * bool(gets)
    return f"{name} {' and '.join(parts)}" if parts else ""


def _both(choose: Callable[[int, int], int], one: Budget, other: Budget) -> dict[str, int]:
    return {kind: choose(count, other.get(kind, 0)) for kind, count in one.items()}


def _without(devices: Budget, budgets: Sequence[Budget]) -> dict[str, int]:
    return {kind: count - sum(each.get(kind, 0) for each in budgets) for kind, count in devices.items()}
