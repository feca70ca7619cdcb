"""Kinds that pipelines share: a chain that needs few devices of one kind leaves the others to another pipeline.

The worth of a device is its goodput among others of its kind alone. With these worths as prices, chains are planned for
the most goodput per dollar. The chain with the largest goodput above the worth of its devices is taken, and the devices
that it leaves are shared in the same way. This proves no plan the best: only the ceiling bounds it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from isobatch.optimizer.effort import MOST_GAP, Effort
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search
from isobatch.profiles.devices import Device

# The assumed worth of a device whose kind can do nothing alone, as multiples of the largest worth.
GUESSES = (0.1, 0.3, 1.0)


Alone = dict[Device, Plan | None]  # the best pipelines of kinds by themselves, as far as they are known


def promised_per_s(plan: Plan | None) -> float:
    return plan.promise.goodput_per_s if plan and plan.promise else 0.0


def bound_per_s(plan: Plan | None) -> float:
    """A goodput that no other plan exceeds, by the gap of this plan."""
    return plan.promise.goodput_per_s * (1 + plan.promise.gap) if plan and plan.promise else 0.0


def by_itself(
    device: Device, facts: Problem, objective: Objective, gap: float, effort: Effort, known: Alone
) -> Plan | None:
    """The best pipeline of a kind by itself, which is added to the known ones."""
    if device not in known:
        known[device] = search(facts.with_devices([device]), objective, gap, effort=effort)
    return known[device]


@dataclass
class Sharing:
    """Pipelines for the most goodput, each on one or two kinds. Several pipelines may use devices of the same kind."""

    facts: Problem
    objective: Objective
    gap: float
    effort: Effort
    alone: Alone
    _chained: dict[tuple[Device, Device], Plan | None] = field(default_factory=dict)

    def pipelines(self) -> list[Plan]:
        """All pipelines with their promises. Pipelines that differ only in their numbers of devices are merged."""
        alike = defaultdict[object, list[Plan]](list)
        for plan in self._chains_and_rest(self.facts.devices):
            alike[plan.shape].append(plan)
        return [self._merged(plans) for plans in alike.values()]

    def _merged(self, plans: Sequence[Plan]) -> Plan:
        counts = (sum(each.replicas for each in row) for row in zip(*(plan.placements for plan in plans), strict=True))
        placements = (replace(each, replicas=count) for each, count in zip(plans[0].placements, counts, strict=True))
        plan = replace(plans[0], placements=tuple(placements))
        return replace(plan, promise=evaluate(plan, self.facts).promise(MOST_GAP))

    def _chains_and_rest(self, devices: Sequence[Device]) -> list[Plan]:
        """Chains as long as one sustains more than its devices do alone, then every remaining kind by itself."""
        worth = {each.kind: promised_per_s(self._by_itself(each)) / each.count for each in devices}
        chain = max(self._chains(devices, worth), key=lambda each: _gain(each, worth), default=None)
        if chain is None:
            return [plan for each in devices if (plan := self._by_itself(each))]
        used = chain.devices()
        left = [replace(each, count=each.count - used.get(each.kind, 0)) for each in devices]
        return [chain, *self._chains_and_rest([each for each in left if each.count])]

    def _chains(self, devices: Sequence[Device], worth: dict[str, float]) -> Iterator[Plan]:
        most = max(worth.values(), default=0.0)
        for guess in GUESSES if most and not all(worth.values()) else (1.0,):
            least = guess * (most or 1.0)
            priced = [replace(each, price_per_hour=worth[each.kind] or least) for each in devices]
            yield from (chain for pair in combinations(priced, 2) if (chain := self._chain(pair)))

    def _by_itself(self, device: Device) -> Plan | None:
        return by_itself(device, self.facts, self.objective, self.gap, self.effort, self.alone)

    def _chain(self, pair: tuple[Device, Device]) -> Plan | None:
        """The best plan on these two kinds for goodput per dollar, if its gain is worthwhile."""
        if pair not in self._chained and not self.effort.out_of_time():
            facts, objective = self.facts.with_devices(pair), replace(self.objective, goal="goodput-per-dollar")
            below = 1 / (1 + self.effort.worthwhile)
            self._chained[pair] = search(facts, objective, self.gap, below=below, prove=False, effort=self.effort)
        return self._chained.get(pair)


def _gain(chain: Plan, worth: dict[str, float]) -> float:
    """The goodput of a chain above that of its devices alone."""
    return promised_per_s(chain) - sum(worth[kind] * count for kind, count in chain.devices().items())
