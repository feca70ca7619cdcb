"""What no pipelines side by side can exceed together, however many there are, even if they share kinds.

Prices on a second of every kind, `mu`, and on latency, `nu`, bound the sum: each pipeline pays at least `bound` for an
input, and all together pay no more than the devices are worth. Two things make that tight. A pipeline on one kind pays
no less than the best one there, which was found before. And rounds are over in time or they are no pipeline, so that
for them latency needs no price.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optimizer.bounds import Cut, cut
from optimizer.dp import least_without_exits
from optimizer.graph import Graph
from optimizer.objective import Objective
from optimizer.prices import Pricing
from optimizer.problem import Problem
from optimizer.rounds import Floats, Rounds

ROUNDS = 30
TRIED = 2  # of the tightest cuts
STEPS = 4


@dataclass(frozen=True)
class Ceiling:
    """`paces`: what every kind sustains at most by itself, for the goal goodput; 0 where nobody knows."""

    facts: Problem
    objective: Objective
    paces: Floats

    def bound(self, gap: float) -> float:
        """A value that no pipelines undercut. Once it is within `gap` of what kinds do alone, it is good enough."""
        enough = 1 / (self.paces.sum() * (1 + gap)) if self.paces.any() else np.inf
        least = 0.0
        for by in self._prices():
            least = max(least, self._least(by))
            if least >= enough:
                break
        return least

    @cached_property
    def _graph(self) -> Graph:
        return Graph(self.facts, self.objective)

    @cached_property
    def _bare(self) -> Graph:
        return Graph(self.facts.without_exits, self.objective)

    def _prices(self) -> Iterator[Cut]:
        """Kinds by what they do alone, with the best price for latency; then the best prices; then between the two."""
        pricing = Pricing(self._graph.options, self._graph.worth, self._graph.at, rounds=ROUNDS)
        if not self.paces.any():
            yield from pricing.cuts()[: -1 - TRIED : -1]
            return
        total = float(self.paces.sum())
        pricing = replace(pricing, shares=self.paces / total, enough=1 / total)
        apart = replace(pricing, held=True).cuts()[-1]
        yield apart
        free = replace(pricing, lateness=apart.nu * self.objective.budget_s if apart.nu else 0.0).cuts()
        yield from free[: -1 - TRIED : -1]
        yield from self._between(apart, free[-1])

    def _between(self, apart: Cut, free: Cut) -> Iterator[Cut]:
        """Bounds are concave in the prices: where one end is held up by kinds alone, the other by chains, halve."""
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            share = (low + high) / 2
            mu, nu = (1 - share) * apart.mu + share * free.mu, (1 - share) * apart.nu + share * free.nu
            offset = nu * self.objective.budget_s if nu else 0.0
            by = cut(self._graph.options, mu, nu, offset, free.at)[0]
            yield by
            low, high = (share, high) if by.bound < self._alone(by) else (low, share)

    def _least(self, by: Cut) -> float:
        """What no pipeline costs less than, at these prices."""
        least = min(by.bound, self._alone(by), self._in_rounds(by, self._graph))
        if min(map(min, self.facts.survivals)) < 1 and least_without_exits(self.facts, self.objective, by) < least:
            bare = cut(self._bare.options, by.mu, by.nu, by.offset, self._bare.at)[0].bound
            least = min(least, bare, self._in_rounds(by, self._bare))
        return least

    @cached_property
    def _known(self) -> NDArray[np.bool_]:
        """Kinds whose best pipeline is known and has one placement, so that with fewer devices each does no better."""
        known: NDArray[np.bool_] = (self.paces > 0) & self._graph.builder.room.roomy
        return known

    def _alone(self, by: Cut) -> float:
        costs = by.mu * self._graph.worth.counts / np.where(self._known, self.paces, 1.0) - self._spared(by)
        return float(costs[self._known].min(initial=np.inf))

    def _in_rounds(self, by: Cut, graph: Graph) -> float:
        """What rounds on any other kind cost at least."""
        budget_s, least = self.objective.budget_s * (1 + 1e-9), np.inf
        for kind in np.nonzero(~self._known)[0]:

            def price(loads: Floats, arrivals: float, first: Floats, mu: float = float(by.mu[kind])) -> Floats:
                late = graph.at.latency(arrivals * loads, first - 1, first) > budget_s
                return np.where(late, np.inf, mu * loads) - self._spared(by)

            least = Rounds(graph.builder, int(kind)).best(price, least)[0]
        return least

    def _spared(self, by: Cut) -> float:
        """What a cut gives back, but for lateness."""
        return by.offset - (by.nu * self.objective.budget_s if by.nu else 0.0)
