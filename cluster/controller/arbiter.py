"""Moves devices between the applications of a fleet while they run. Pure code, as the controller: no Ray, no clock.

Each application keeps its own controller, which plans on its *budget*: the devices that it may use. The arbiter changes
budgets only. An application lends devices that it is not expected to need. It keeps the goodput that it asks for, as
far as its own devices sustain that.

A *parked* application has had no inputs for a while, and others get its devices. Where replicas stand by, its next
inputs are answered by one of them, on a device of another application, until it has devices of its own again. The two
applications slow each other there. Without standby its replicas end, and its next inputs wait until others start.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from isobatch.cluster.controller.config import ArbiterConfig
from isobatch.cluster.controller.fleet_division import AGAIN_S, Asked, Budget, Standing, is_quick, kind_for_one
from isobatch.deployments.front.observed import StandbyReplica
from isobatch.optimizer.fleets.application import PartPlans
from isobatch.profiles.devices import as_text

EARLY = 4  # while the same applications go on to refuse inputs, devices are divided after this part of the time
MOVING_S = 0.5  # between two looks while a device changes hands
LATER = 1 / 8  # the same after 4 s, as a share of the time since the decision: a giver may not be able to shrink
KEEP = 20  # decisions that are remembered


@dataclass(frozen=True)
class Grant:
    """A new budget, and why; "": it is the old one. `device_ids`: those that are used, where replicas stand by.

    `parked`: all replicas end; the next grant starts some again.
    """

    budget: Budget
    why: str
    device_ids: frozenset[str] | None = None
    parked: bool = False


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
    taker's budget grows. So no two plans ever use the same device, but for the one of a parked application.
    """

    config: ArbiterConfig
    decisions: list[FleetDecision] = field(default_factory=list)
    budgets: dict[str, Budget] = field(default_factory=dict)  # by application, as far as they are known
    _uses: dict[str, Budget] = field(default_factory=dict)  # the devices that each used when it answered last
    _ids: dict[str, frozenset[str]] = field(default_factory=dict)  # of devices, where replicas stand by
    _standby: dict[str, tuple[StandbyReplica, ...]] = field(default_factory=dict)  # as each answered last
    _aims: dict[str, Budget] = field(default_factory=dict)  # the budgets of the last decision
    _plans: dict[str, PartPlans] = field(default_factory=dict)  # of the last decision
    _unsent: set[str] = field(default_factory=set)  # applications that the last grant may not have reached
    _parked: dict[str, Grant] = field(default_factory=dict)  # with standby, it names the device of the next inputs
    asleep: frozenset[str] = frozenset()  # the parked ones without inputs at the last decision
    _woken: dict[str, Grant] = field(default_factory=dict)  # no longer parked, but their plan may still use that device
    _kinds: dict[str, tuple[object, str]] = field(default_factory=dict)  # the answers of `kind_for_one`
    _why: str = ""
    _decided_s: float | None = None
    _refusing: frozenset[str] = frozenset()  # the applications that refused inputs at the last decision
    _present: Budget = field(default_factory=dict)  # the devices of the last decision
    _moving_s: float = 0.0  # since the last decision that moved devices

    def look(self, standings: Mapping[str, Standing], present: Budget, now_s: float) -> dict[str, Grant]:
        """`standings` of the applications whose controllers answer. Others and paused ones keep what they have."""
        self.budgets |= {name: self._in_full(each.budget) for name, each in standings.items()}
        self._uses |= {name: self._uses_of(name, each) for name, each in standings.items()}
        self._standby |= {name: each.standby or () for name, each in standings.items()}
        if len(self.budgets) < len(self.config.applications):
            return {}  # since the start some have not answered: it is unknown what they hold
        standings = {name: each for name, each in standings.items() if not each.paused}
        if self._decided_s is None:
            self._decided_s, self._present, self._aims = now_s, dict(present), dict(self.budgets)
            self._park(standings, present, self._parked_before(standings, present))
            self.asleep = frozenset(self._parked)
        asleep = self._park(standings, present)
        awake = {name: each for name, each in standings.items() if name not in asleep}
        if reason := self._reason(awake, asleep, present, now_s):
            self._decided_s, self._present = now_s, dict(present)
            self._refusing, self.asleep = _refusing(awake), asleep
            self._decide(reason, awake, present, now_s)
        self._moving_s = now_s - max((each.at_s for each in self.decisions if each.budgets), default=now_s)
        return dict(self._grants(standings, present))

    def send_again(self, names: Collection[str]) -> None:
        """The last grants to these applications did not arrive, or not completely: the next look repeats them."""
        self._unsent.update(names)

    @property
    def parked(self) -> Collection[str]:
        """Applications without a device of their own."""
        return self._parked.keys()

    @property
    def is_moving(self) -> bool:
        """Whether a device changes hands."""
        return self._aims != self.budgets

    @property
    def look_again_s(self) -> float:
        """After this time the next look is due."""
        every_s = self.config.look_every_s
        return min(max(MOVING_S, LATER * self._moving_s), every_s) if self.is_moving else every_s

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

    def _park(self, standings: Mapping[str, Standing], present: Budget, names: Collection[str] = ()) -> frozenset[str]:
        """Take the devices of these applications, and of those without inputs. Returns the parked ones without any."""
        after_s = {each.name: each.park_after_s or inf for each in self.config.applications}
        quiet = {name for name, each in standings.items() if each.quiet_s >= after_s[name]}
        for name, each in standings.items():
            parked = self._parked.get(name)
            lost = parked and any(count > present[kind] for kind, count in parked.budget.items())
            parks = lost or (parked is None and name in quiet.union(names))
            kind, ends = "", each.standby is None or each.parked
            if parks and (ends or (kind := self._kind_for_one(name, each, present))):
                why = f"{name} is parked" + f": no inputs for {each.quiet_s:.0f} s" * (name in quiet)
                budget = self.config.nothing if ends else self.config.nothing | {kind: 1}
                self._parked[name] = Grant(budget, why, parked=ends)
                self._aims[name] = self.config.nothing
                self._uses[name] = self._uses_of(name, each)
                self._ids.pop(name, None)
                self._woken.pop(name, None)
        self.budgets |= dict.fromkeys(self._parked, self.config.nothing)
        unknown = {name for name in self.asleep if name not in standings or not standings[name].had_inputs}
        return frozenset(self._parked.keys() & (quiet | unknown))

    def _uses_of(self, name: str, standing: Standing) -> Budget:
        """The devices that nobody else may use: none, once a parked application has given up its own."""
        if not (parked := self._parked.get(name)):
            return standing.uses
        if name in self._unsent:  # its replicas may still run, whatever its controller knows
            return self._uses[name]
        if not self._arrived(parked, standing):
            return _both(max, self._in_full(standing.budget), standing.uses)
        gives = any(count > parked.budget[kind] for kind, count in standing.uses.items())
        return standing.uses if gives else self.config.nothing

    def _arrived(self, parked: Grant, standing: Standing) -> bool:
        return self._in_full(standing.budget) == parked.budget and standing.parked == parked.parked

    def _in_full(self, budget: Budget) -> Budget:
        return _both(max, self.config.nothing, budget)

    def _kind_for_one(self, name: str, standing: Standing, present: Budget) -> str:
        """As `kind_for_one`, which takes long, once for each network, objective and set of devices."""
        question = standing.facts, standing.objective, dict(present)
        if name not in self._kinds or self._kinds[name][0] != question:
            self._kinds[name] = question, kind_for_one(*question)
        return self._kinds[name][1]

    def _reason(self, standings: Mapping[str, Standing], asleep: frozenset[str], present: Budget, now_s: float) -> str:
        """Why the devices are divided again now; empty: they are not."""
        refusing, age_s = _refusing(standings), 0.0 if self._decided_s is None else now_s - self._decided_s
        changed = {kind: present[kind] - count for kind, count in self._present.items() if present[kind] != count}
        if changed:
            return ", ".join(f"{abs(by)} {kind} {'came' if by > 0 else 'are gone'}" for kind, by in changed.items())
        if asleep != self.asleep:
            changes = {"no inputs arrive": asleep - self.asleep, "inputs arrive again": self.asleep - asleep}
            return ", ".join(f"{what} for {', '.join(sorted(names))}" for what, names in changes.items() if names)
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

    def _asked(self, standings: Mapping[str, Standing], present: Budget) -> tuple[dict[str, Budget], "Asked"]:
        """What each application holds, and what is divided. One for which no plan is possible keeps its devices.

        Its controller could not free them.
        """
        waiting = self._parked.keys() - self.asleep  # their devices are on the way, even if they are silent now
        held = {n: self._aims[n] if n in standings or n in waiting else has for n, has in self.budgets.items()}
        uses = self._uses | dict.fromkeys(self._parked, self.config.nothing)
        absent = [_both(max, has, uses[name]) for name, has in held.items() if name not in standings]
        asked = Asked.of(self.config, standings, _without(present, absent), self._plans)
        self._plans |= {each.application.name: each for each in asked.plans}
        able = {each.application.name: standings[each.application.name] for each in asked.plans}
        return (held, asked) if len(able) == len(standings) else self._asked(able, present)

    def _grants(self, standings: Mapping[str, Standing], present: Budget) -> Iterator[tuple[str, Grant]]:
        """Budgets shrink at once, and grow by devices that no budget and no plan has any longer.

        A parked application gets all its devices at once: some of them may not be enough for its network.
        """
        aims = self._aims
        budgets = {name: _both(min, has, aims[name]) for name, has in self.budgets.items()}
        used = [_both(max, has, self._uses[name]) for name, has in self.budgets.items()]  # whatever shrinks now
        free = _without(present, used)
        for name, has in list(self.budgets.items()):
            if name not in standings:
                continue
            taken = {kind: max(0, min(free[kind], aims[name][kind] - count)) for kind, count in budgets[name].items()}
            budget = {kind: count + taken[kind] for kind, count in budgets[name].items()}
            ids = self._chosen(name, budget)
            if name in self._parked:
                complete = any(budget.values()) and budget == aims[name]
                if not complete or (ids is None and self._standby[name]):
                    yield from self._of_parked(name, standings[name])
                    continue
                self._woken[name] = self._parked.pop(name)
            free = _without(free, [taken])
            left = self._left(name, standings[name], budget)
            repeats = standings[name].parked and not any(standings[name].uses.values())
            if budget != has or ids != self._ids.get(name) or name in self._unsent or repeats:
                why = f"{_change(name, has, budget)}: {self._why}" if budget != has else ""
                self.budgets[name] = _both(max, has, budget)  # until its controller answers with the smaller one
                self._unsent.discard(name)
                if ids is not None:
                    self._ids[name] = ids
                yield name, Grant(budget, why, ids if ids is None else ids | left)

    def _left(self, name: str, standing: Standing, budget: Budget) -> frozenset[str]:
        """The device of another application that one needs since it was parked, until its plan does without."""
        if not (parked := self._woken.get(name)):
            return frozenset()
        if any(count and not budget[kind] and standing.uses.get(kind) for kind, count in parked.budget.items()):
            return parked.device_ids or frozenset()
        del self._woken[name]
        self._unsent.add(name)
        return frozenset()

    def _of_parked(self, name: str, standing: Standing) -> Iterator[tuple[str, Grant]]:
        """The grant to a parked application, unless it has it: a device that another application may have, too."""
        before = self._parked[name]
        replicas = [each for each in self._standby[name] if before.budget[each.kind]]
        ids = [each.device_id for each in sorted(replicas, key=lambda each: (not each.is_used, each.device_id))]
        kept = (before.device_ids or frozenset()).intersection(ids)
        grant = replace(before, device_ids=kept or frozenset(ids[:1]) or None)
        arrived = self._arrived(grant, standing)
        if grant != before or not arrived or name in self._unsent:
            self._parked[name] = grant
            self._unsent.discard(name)
            yield name, replace(grant, why="" if self._in_full(standing.budget) == grant.budget else grant.why)

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


def _refusing(standings: Mapping[str, Standing]) -> frozenset[str]:
    return frozenset(name for name, each in standings.items() if each.refuses)


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
