"""What is asked of the planner, window after window: the same network and objective, another survival and fleet."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cluster.controller.corrections import Corrections
from optimizer import Objective, Plan, Problem, optimize, problem
from profiles.devices import Device, links_between
from profiles.errors import UserError
from profiles.files import Profile

FEW = 1e-3


@dataclass(frozen=True)
class Question:
    """`fleet` is the most that may be used; how many of them are there is another matter.

    `cheapest`: not the most goodput is sought, but the fewest dollars for the inputs that come.
    """

    profile: Profile
    fleet: tuple[Device, ...]
    objective: Objective
    one_machine: bool = False
    side_by_side: bool = True
    gap: float = 0.01
    cheapest: bool = False

    def here(self, counts: Mapping[str, int]) -> tuple[Device, ...]:
        """The fleet as far as it is there; of a kind that nobody counted, all of it."""
        return tuple(replace(each, count=min(each.count, counts.get(each.kind, each.count))) for each in self.fleet)

    def facts(self, survival: Sequence[float], corrections: Corrections) -> Problem:
        """By which any plan for the whole fleet can be judged, whatever is there just now."""
        links = links_between(self.fleet, one_machine=self.one_machine)
        return problem(corrections.applied(self.profile), self.fleet, links, _worth_planning(survival))

    def best(
        self,
        survival: Sequence[float],
        corrections: Corrections,
        counts: Mapping[str, int],
        wanted_per_s: float | None = None,
    ) -> Plan:
        """The cheapest plan for so many inputs, if that is told and any plan sustains them; else the most goodput.

        Where nothing can keep the SLO on what is left, the fastest plan there is.
        """
        if wanted_per_s:
            with suppress(UserError):
                goal = replace(self.objective, goal="cost", goodput_per_s=wanted_per_s)
                return self._optimize(survival, corrections, self.here(counts), goal)
        try:
            return self._optimize(survival, corrections, self.here(counts), self.objective)
        except UserError:
            if self.objective.slo_s is None or not any(device.count for device in self.here(counts)):
                raise
            fastest = replace(self.objective, goal="latency", slo_s=None)
            return self._optimize(survival, corrections, self.here(counts), fastest)

    def _optimize(
        self, survival: Sequence[float], corrections: Corrections, here: tuple[Device, ...], objective: Objective
    ) -> Plan:
        links = links_between(here, one_machine=self.one_machine)
        side_by_side = self.side_by_side and objective.goal == "goodput"
        profile = corrections.applied(self.profile)
        return optimize(
            profile, here, links, objective, survival=_worth_planning(survival), gap=self.gap, side_by_side=side_by_side
        )


def _worth_planning(survival: Sequence[float]) -> tuple[float, ...]:
    """Where fewer than one input in a thousand goes, the plan leads too; but by the cost model such a one would wait so
    long for company that no cut before it would keep an SLO.
    """
    return tuple(share if share >= FEW else 0.0 for share in survival)
