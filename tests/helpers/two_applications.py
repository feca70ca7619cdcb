"""An arbiter of two applications on four devices, and what their controllers report to it."""

from collections.abc import Mapping
from dataclasses import replace

from isobatch.cluster.controller.arbiter import Arbiter
from isobatch.cluster.controller.config import ArbiterConfig, MemberTerms
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.fleet_division import Budget, Standing
from isobatch.deployments.front.observed import StandbyReplica
from isobatch.optimizer.fleets.application import FleetGoal
from tests.helpers.fluid_application import MEDIUM, question

FLEET = {"v100": 2, "k80": 2}
OWN = {"a": {"v100": 1, "k80": 1}, "b": {"v100": 1, "k80": 1}}
WINDOW_S = 120.0
ASKED = question(MEDIUM, **FLEET)


def sustained(budget: Budget) -> float:
    if not any(budget.values()):
        return 0.0
    return ASKED.best(MEDIUM, Corrections(), budget).promise.goodput_per_s


EACH_PER_S = sustained(OWN["a"])


def arbiter(own: Mapping[str, Budget] = OWN, goal: FleetGoal = "goodput", **terms: Mapping[str, float]) -> Arbiter:
    members = tuple(
        MemberTerms(name=name, devices=dict(devices), controller=f"{name}-controller", **terms.get(name, {}))  # type: ignore[arg-type]
        for name, devices in own.items()
    )
    return Arbiter(ArbiterConfig(devices=FLEET, goal=goal, applications=members))


def standing(expected: float, budget: Budget, uses: Budget | None = None, refuses: bool = False) -> Standing:
    """`expected`: inputs, as a share of what its own devices sustain."""
    facts = ASKED.facts(MEDIUM, Corrections())
    return Standing(
        facts, ASKED.objective, expected * EACH_PER_S, 1.0, budget, budget if uses is None else uses, refuses,
        virtual=True,
    )  # fmt: skip


IDS = {f"{kind}-{number}": kind for kind, count in FLEET.items() for number in range(count)}


def by_ids(each: Standing, used: frozenset[str], ready: frozenset[str] = frozenset(IDS)) -> Standing:
    return replace(each, standby=tuple(StandbyReplica(IDS[id_], id_, id_ in used) for id_ in sorted(ready)))
