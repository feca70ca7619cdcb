"""Kinds that pipelines share: a chain that needs few devices of one kind leaves the others to another pipeline.

A device is worth what it sustains among others of its kind alone. Of the chains that are the best plans for goodput per
dollar at such prices, that one is taken which sustains most above what its devices are worth; what it leaves is shared
in the same way, as long as there is such a chain. That is no proof of the best: only the ceiling bounds it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from optimizer.effort import Effort
from optimizer.objective import Objective
from optimizer.plan import Plan
from optimizer.problem import Problem
from optimizer.search.exact import search
from profiles.devices import Device

# What a device may be worth of a kind that can do nothing alone, times what the best one is worth.
GUESSES = (1e-3, 0.1, 0.3, 1.0)


def goodput_per_s(plan: Plan | None) -> float:
    """What a plan promises."""
    return plan.promise.goodput_per_s if plan and plan.promise else 0.0


@dataclass
class Sharing:
    """Pipelines for the most goodput, each on one kind or on two, which may be in several of them."""

    facts: Problem
    objective: Objective
    gap: float
    effort: Effort
    _alone: dict[Device, Plan | None] = field(default_factory=dict)
    _chained: dict[tuple[Device, Device], Plan | None] = field(default_factory=dict)

    def pipelines(self, devices: Sequence[Device]) -> list[Plan]:
        """Chains as long as one sustains more than its devices do alone, then every kind that is left by itself."""
        worth = {each.kind: goodput_per_s(self._by_itself(each)) / each.count for each in devices}
        chain = max(self._chains(devices, worth), key=lambda each: _gain(each, worth), default=None)
        if chain is None:
            return [plan for each in devices if (plan := self._by_itself(each))]
        used = chain.devices()
        left = [replace(each, count=each.count - used.get(each.kind, 0)) for each in devices]
        return [chain, *self.pipelines([each for each in left if each.count])]

    def _chains(self, devices: Sequence[Device], worth: dict[str, float]) -> Iterator[Plan]:
        for guess in GUESSES if min(worth.values(), default=1.0) == 0 else (1.0,):
            least = guess * (max(worth.values(), default=0.0) or 1.0)
            priced = [replace(each, price_per_hour=worth[each.kind] or least) for each in devices]
            yield from (chain for pair in combinations(priced, 2) if (chain := self._chain(pair)))

    def _by_itself(self, device: Device) -> Plan | None:
        if device not in self._alone:
            here = self.facts.with_devices([device])
            self._alone[device] = search(here, self.objective, self.gap, effort=self.effort)
        return self._alone[device]

    def _chain(self, pair: tuple[Device, Device]) -> Plan | None:
        """The plan on these two kinds that sustains most for what it uses, if that is worthwhile."""
        if pair not in self._chained and not self.effort.out_of_time():
            here, asked = self.facts.with_devices(pair), replace(self.objective, goal="goodput-per-dollar")
            below = 1 / (1 + self.effort.worthwhile)
            self._chained[pair] = search(here, asked, self.gap, below=below, prove=False, effort=self.effort)
        return self._chained.get(pair)


def _gain(chain: Plan, worth: dict[str, float]) -> float:
    """How much more a chain sustains than its devices would alone."""
    return goodput_per_s(chain) - sum(worth[kind] * count for kind, count in chain.devices().items())
