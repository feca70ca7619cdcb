"""Whether the tail of a plan's answers is as short as without exits at any load (`isobatch plan --no-later`).

The cost model knows full launches only, as at full load. At lower loads launches are smaller, so the network without
exits answers sooner, while an input that runs to the end of a plan waits at each cut. So plans are simulated beside the
network without exits, with the same inputs, at several loads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from isobatch.cluster.simulator.cells import SIZE, world_of
from isobatch.cluster.simulator.sustained import run
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem

LOADS = (0.3, 0.5, 0.7, 0.9)  # shares of what the network without exits sustains by the cost model
MOST = 1.02  # times the p99 without exits: the ratio of two runs varies by this much by chance
PATIENCE = 20.0  # times the SLO, so that no input is refused and missing from the tail
SEED = 4  # of inputs that are used for nothing else


@dataclass(frozen=True)
class Tails:
    """The p99 latencies that no plan may exceed: those of `stock`, the network without exits, in runs of `inputs`."""

    facts: Problem
    stock: Plan
    slo_s: float
    inputs: int
    cell: float = SIZE
    _kept: dict[Plan, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def kept_by(self, plan: Plan) -> bool:
        if plan not in self._kept:
            self._kept[plan] = all(ratio <= MOST for ratio in self.ratios(plan))
        return self._kept[plan]

    def ratios(self, plan: Plan) -> Iterator[float]:
        """The p99 of a plan over that without exits, load by load."""
        for load, without_s in zip(LOADS, self._without_s, strict=True):
            yield self._p99_s(plan, load) / without_s

    @cached_property
    def _without_s(self) -> list[float]:
        return [self._p99_s(self.stock, load) for load in LOADS]

    def _p99_s(self, plan: Plan, load: float) -> float:
        rate_per_s = load * evaluate(self.stock, self.facts).goodput_per_s
        world = world_of(plan, self.facts, PATIENCE * self.slo_s, PATIENCE * self.cell, 2 * PATIENCE * self.cell)
        return run(world, rate_per_s, self.inputs, SEED).tally.quantile_s(0.99)
