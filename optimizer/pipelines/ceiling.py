"""An upper bound on pipelines side by side, however many there are, even if they share kinds.

Multipliers `mu` on a second of every kind and `nu` on latency bound the sum: each pipeline pays at least `bound` for an
input, and all together pay no more than the devices have. Two facts make this tight. A pipeline on one kind pays no
less than the best one there, which is already known. And a local placement that answers too late is no choice at all,
so local placements need no multiplier for latency.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from isobatch.optimizer.effort import EFFORT, SAME, Bools, Effort, Floats
from isobatch.optimizer.goals.relaxation import Cut
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.bounds import cut
from isobatch.optimizer.search.exact import cheapest_blocks_s, least_without_exits
from isobatch.optimizer.search.local_placements import LocalSearch
from isobatch.optimizer.search.sweeps import Search


@dataclass(frozen=True)
class Ceiling:
    """`alone_per_s`: the most that every kind sustains by itself, for the goal goodput; 0 where it is not known."""

    facts: Problem
    objective: Objective
    alone_per_s: Floats
    effort: Effort = EFFORT

    def bound(self, gap: float) -> float:
        """A lower bound on the value of all pipelines. The search stops within `gap` of the kinds' own values."""
        enough = 1 / (self.alone_per_s.sum() * (1 + gap)) if self.alone_per_s.any() else np.inf
        least = 0.0
        for by in self._cuts():
            least = max(least, self._least(by))
            if least >= enough or self.effort.out_of_time():
                break
        return least

    def worths(self) -> list[Floats]:
        """Rows of a goodput for a device of each kind: no pipelines sustain more than the sum over their devices."""
        least = [(by, self._least(by)) for by in self._cuts()]
        return [by.mu / bound for by, bound in least if 0 < bound < np.inf]

    @cached_property
    def _search(self) -> Search:
        return Search(self.facts, self.objective, self.effort)

    @cached_property
    def _bare(self) -> Search:
        return Search(self.facts.without_exits, self.objective, self.effort)

    def _cuts(self) -> Iterator[Cut]:
        """Cuts to try: the goal's first bound, which is never 0 for goodput; the shares that kinds have alone, with the
        best multiplier of latency; the best of all multipliers; and some between the two."""
        goal, relaxation = self.objective.aim, self._search.relaxed(self.effort.ceiling_steps)
        tried = self.effort.ceiling_cuts
        yield goal.first_bound(relaxation)
        if not self.alone_per_s.any():
            yield from goal.cuts(relaxation)[: -1 - tried : -1]
            return
        shares, total = self._shares(), float(self.alone_per_s.sum())
        relaxation = replace(relaxation, shares=shares, enough=1 / total)
        apart = goal.cuts(replace(relaxation, fixed_shares=True))[-1]
        yield apart
        lateness = apart.nu * self.objective.budget_s if apart.nu else 0.0
        free = goal.cuts(replace(relaxation, lateness=lateness))
        yield from free[: -1 - tried : -1]
        yield from self._between(apart, free[-1])

    def _shares(self) -> Floats:
        """The shares that kinds have alone. A kind that can do nothing alone gets its goodput without any time limit.

        Without a share, the seconds of that kind would cost nothing, and a way through it would make every bound 0.
        """
        each_s = cheapest_blocks_s(self.facts, self.objective) @ self.facts.survival
        guesses = self._search.valuation.counts / np.maximum(each_s, 1e-300)
        guesses = np.where(self.alone_per_s > 0, self.alone_per_s, guesses)
        return np.asarray(guesses / guesses.sum())

    def _between(self, apart: Cut, free: Cut) -> Iterator[Cut]:
        """Cuts between the two, by halving: bounds are concave, and either kinds alone or chains bind."""
        low, high = 0.0, 1.0
        for _ in range(self.effort.ceiling_halvings):
            share = (low + high) / 2
            mu, nu = (1 - share) * apart.mu + share * free.mu, (1 - share) * apart.nu + share * free.nu
            offset = nu * self.objective.budget_s if nu else 0.0
            by = cut(self._search.options, mu, nu, offset, free.at_s)[0]
            yield by
            low, high = (share, high) if by.bound < self._alone(by) else (low, share)

    def _least(self, by: Cut) -> float:
        """The least cost of any pipeline at these multipliers."""
        least = min(by.bound, self._alone(by), self._local(by, self._search))
        if min(self.facts.survival) < 1 and least_without_exits(self.facts, self.objective, by) < least:
            bare = cut(self._bare.options, by.mu, by.nu, by.offset, self._bare.at_s)[0].bound
            least = min(least, bare, self._local(by, self._bare))
        return least

    @cached_property
    def _known(self) -> Bools:
        """Kinds whose best pipeline is known and has one placement: with fewer devices, none would do better."""
        known: Bools = (self.alone_per_s > 0) & self._search.builder.memory.holds_any_cut
        return known

    def _alone(self, by: Cut) -> float:
        costs = by.mu * self._search.valuation.counts / np.where(self._known, self.alone_per_s, 1.0) - self._offset(by)
        return float(costs[self._known].min(initial=np.inf))

    def _local(self, by: Cut, pipelines: Search) -> float:
        """The least cost of local placements on any other kind."""
        budget_s, least = self.objective.budget_s * (1 + SAME), np.inf
        for kind in np.nonzero(~self._known)[0]:

            def costs(loads: Floats, arrivals: float, first: Floats, mu: float = float(by.mu[kind])) -> Floats:
                late = arrivals * loads + (2 * first - 1) * pipelines.at_s > budget_s
                return np.where(late, np.inf, mu * loads) - self._offset(by)

            least = LocalSearch(pipelines.builder, int(kind)).best(costs, least)[0]
        return least

    def _offset(self, by: Cut) -> float:
        """The offset of a cut, without its part for lateness."""
        return by.offset - (by.nu * self.objective.budget_s if by.nu else 0.0)
