"""A linear program that bounds every division of a fleet. With whole numbers, it proposes divisions.

By each row of worths (pipelines/ceiling.py) an application sustains at most the sum of the worths of its devices. With
n[a, k] devices of kind k for application a, which sustain u[a],

    u[a] <= scale[a] * worths[a, row] . n[a]  for every row,    u[a] >= needed[a],    sum over a of n[a, k] <= counts[k]
    most:  sum of weight * min(u, rate)   |   - sum of price * n   |   t, where every u[a] >= t * weight[a] * rate[a]

Proposals for a running fleet also subtract the goodput that is lost while replicas start on new devices, of which there
are g[a, k] >= n[a, k] - held[a, k].

With fractions of devices and every scale at 1, this bounds all divisions. Scales fit it to the goodput of real plans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from isobatch.optimizer.effort import Floats
from isobatch.optimizer.fleets.application import BEYOND, FleetApplication, FleetGoal, KindCounts, Worths
from isobatch.profiles.devices import Device

NODES = 300  # of the search for whole numbers: a limit in nodes gives the same answer on every machine
WHOLE_GAP = 1e-3  # of that search
INFEASIBLE = 2  # the status of scipy's `milp`
LEVEL = 1e-3  # for fairness, the most that all goodputs count beside the smallest one


@dataclass(frozen=True)
class DivisionProgram:
    """The variables, in this order: n, u, how much of u is wanted, t, and g.

    `held`: the devices of each application now, and `lost_share` what is lost of those that it gains (`PartPlans`).
    """

    applications: Sequence[FleetApplication]
    goal: FleetGoal
    devices: Sequence[Device]
    worths: Sequence[Worths]
    held: Sequence[KindCounts] = ()
    lost_share: float = 0.0

    @property
    def needed(self) -> Floats:
        """What each application needs. Where that is any goodput, it is what some device adds at least."""
        some = [float(each.rows[each.rows > 0].min()) for each in self.worths]
        least = np.array([each.needed_per_s(self.goal) for each in self.applications])
        return np.where(least > 0, np.maximum(least, some), 0.0)

    def bound(self) -> float | None:
        """A value that no division exceeds (for cost: dollars that none undercuts, negative); None: there is none."""
        solution = self._solved(self._aim(), self.needed, np.ones(len(self.applications)), whole=True)
        return None if solution.status == INFEASIBLE else float(solution.bound)

    def most_per_s(self, index: int, before: Sequence[int]) -> float:
        """The highest goodput of an application while the applications `before` it have what they need."""
        needed, aim = np.zeros(len(self.applications)), self._zeros()
        needed[list(before)] = self.needed[list(before)]
        aim[self._u][index] = 1.0
        solution = self._solved(aim, needed, np.ones(len(self.applications)))
        return 0.0 if solution.x is None else float(aim @ solution.x)

    def proposal(self, needed: Floats, scales: Floats) -> tuple[KindCounts, ...] | None:
        """The best division in whole devices, if applications sustain these shares of their upper bounds."""
        aim = self._aim()
        if self.goal == "fairness":
            units = self._units()
            aim[self._u] += LEVEL / len(self.applications) * units[self._wanted.stop] / units[self._u]
        if self.held and self.goal != "cost":  # of a goodput, what its devices add at least
            adds = [
                weight * each.rows.min(axis=0)
                for weight, each in zip(aim[self._u] + aim[self._wanted], self.worths, strict=True)
            ]
            aim[self._gained] = -self.lost_share * np.ravel(adds)
        solution = self._solved(aim, needed, scales, whole=True, able=True)
        if solution.x is None:
            return None
        parts = np.rint(solution.x[: self._u.start]).reshape(len(self.applications), -1)
        return tuple(tuple(int(count) for count in part) for part in parts)

    @property
    def _u(self) -> slice:
        start = len(self.applications) * len(self.devices)
        return slice(start, start + len(self.applications))

    @property
    def _wanted(self) -> slice:
        return slice(self._u.stop, self._u.stop + len(self.applications))

    @property
    def _gained(self) -> slice:
        start = self._wanted.stop + 1
        return slice(start, start + self._u.start * bool(self.held))

    @property
    def _levels(self) -> Floats:
        """The goodput that counts as 1 for fairness, by application."""
        return np.array([1 / each.worth("fairness", 1.0, 0.0) for each in self.applications])

    def _zeros(self) -> Floats:
        return np.zeros(self._gained.stop)

    def _aim(self) -> Floats:
        aim, weights = self._zeros(), np.array([each.weight for each in self.applications])
        if self.goal == "cost":
            aim[: self._u.start] = np.tile([-each.price_per_hour for each in self.devices], len(self.applications))
        elif self.goal == "fairness":
            aim[self._wanted.stop] = 1.0
        else:
            aim[self._u], aim[self._wanted] = BEYOND * weights, (1 - BEYOND) * weights
        return aim

    def _solved(
        self, aim: Floats, needed: Floats, scales: Floats, whole: bool = False, able: bool = False
    ) -> OptimizeResult:
        """`able`: without a device of a kind that has goodput by itself, an application sustains nothing."""
        low, high = self._zeros(), self._zeros() + np.inf
        low[self._u] = needed
        high[: self._u.start] = np.tile([each.count for each in self.devices], len(self.applications))
        high[self._wanted] = [each.rate_per_s or np.inf for each in self.applications]
        rows = np.array(list(self._limits(scales, able)))
        held = np.ravel(np.array(self.held, float))
        others = np.zeros(len(rows) - len(self.devices) - len(held))
        most = np.concatenate([[float(each.count) for each in self.devices], held, others])
        options = {"node_limit": NODES, "mip_rel_gap": WHOLE_GAP} if whole else {}
        integral = self._zeros()
        integral[: self._u.start] = whole
        unit = self._units()  # the solver's tolerances are for numbers near 1
        rows, aim = rows * unit, aim * unit
        size, largest = np.abs(rows).max(axis=1), float(np.abs(aim).max()) or 1.0  # 0 where all devices are free
        limits = LinearConstraint(rows / size[:, None], -np.inf, most / size)
        bounds = Bounds(low / unit, high / unit)
        solution = milp(-aim / largest, integrality=integral, bounds=bounds, constraints=limits, options=options)
        if solution.x is not None:
            solution.x = solution.x * unit
        solution.bound = solution.mip_dual_bound and -float(solution.mip_dual_bound) * largest
        return solution

    def _units(self) -> Floats:
        units, counts = self._zeros() + 1.0, [each.count for each in self.devices]
        most = np.array([float((each.rows @ counts).min()) for each in self.worths])
        units[self._u] = units[self._wanted] = most
        units[self._wanted.stop] = float((most / self._levels).min())  # t is no larger
        return units

    def _limits(self, scales: Floats, able: bool) -> Iterator[Floats]:
        """Rows of the constraints: first those limited by `counts`, then by `held`, and then by 0."""
        kinds = len(self.devices)
        for kind in range(kinds):
            used = self._zeros()
            used[kind : self._u.start : kinds] = 1.0
            yield used
        for place, gained in enumerate(range(self._gained.start, self._gained.stop)):
            more = self._zeros()
            more[place], more[gained] = 1.0, -1.0
            yield more
        for index, (each, scale) in enumerate(zip(self.worths, scales, strict=True)):
            part, u = slice(index * kinds, (index + 1) * kinds), self._u.start + index
            enough = float((each.rows @ [device.count for device in self.devices]).max())  # of one able device
            for row in (*(scale * each.rows), *([enough * each.able] if able and each.able.any() else [])):
                sustained = self._zeros()
                sustained[part], sustained[u] = -row, 1.0
                yield sustained
            wanted, level = self._zeros(), self._zeros()
            wanted[self._wanted.start + index], wanted[u] = 1.0, -1.0
            level[self._wanted.stop], level[u] = self._levels[index], -1.0
            yield from (wanted, level)
