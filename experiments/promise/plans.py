"""Computes the gain of thresholds that are chosen for a plan, by the cost model, on inputs that neither has seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from experiments.planner.networks import distilbert
from experiments.promise.recordings import Recorded
from experiments.promise.tried import drawn
from isobatch import cluster
from isobatch.optimizer import Objective, Plan, Problem, evaluate, problem
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import opened
from isobatch.optimizer.tuning import Tuned, tuned
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.files import Profile, load
from isobatch.profiles.losses import Indices

SLO_S, BATCHES = 0.1, (4, 8, 16, 64)
COUNTED = 0.1  # the least survival that is compared; a table of thousands of inputs says little about less


@dataclass(frozen=True)
class Served:
    """Devices, and the times of a network's blocks there."""

    profile: Profile
    devices: str

    def facts(self) -> Problem:
        kinds = fleet(self.devices)
        return problem(self.profile, kinds, links_between(kinds))


def fleet_of(name: str) -> Served:
    """The demo's own profile; for texts DistilBERT, which also has six blocks, on V100s by their datasheet."""
    if name == "demo":
        return Served(load(Path(cluster.__file__).parent / "demo" / "profile.json"), "cpu=2")
    return Served(Profile("distilbert", (datasheet_table(distilbert(), "v100"),)), "v100=4")


def plans(name: str, recording: str) -> dict[str, float]:
    result = gained(name, *drawn(name, recording, "accuracy"))
    return {f"{figure}_{name}": value for figure, value in result}


def gained(name: str, evidence: Evidence, others: Recorded) -> Iterator[tuple[str, float]]:
    """The goodput with thresholds for the plan over that with those of `isobatch prepare`.

    Also the largest error of the survival behind a ramp that these plans expect.
    """
    facts, gains, offs = fleet_of(name).facts(), list[float](), [0.0]
    for max_batch in BATCHES:
        objective = Objective(slo_s=SLO_S, max_batch=max_batch)
        result = tuned(facts, objective, evidence, partial(side_by_side, objective=objective))
        gains.append(_gain(result, facts, objective, evidence, others.known) if result else 1.0)
        if result:
            offs.append(_off(result.plan, result.chosen, evidence, others.known))
    yield "plan_thresholds_gain", geometric_mean(gains)
    yield "survivors_off", max(offs)


def _off(plan: Plan, chosen: Indices, evidence: Evidence, others: ExitTable) -> float:
    ramps = opened(plan)
    planned, places = evidence.exits(chosen).survival_with(ramps), others.places(_shut(chosen, ramps))
    counted = {ramp: float((places > ramp).mean()) for ramp in ramps}
    offs = [abs(planned[ramp + 1] / share - 1) for ramp, share in counted.items() if share >= COUNTED]
    return max(offs, default=0.0)


def _shut(chosen: Indices, ramps: Sequence[int]) -> Indices:
    """Inputs leave only at these ramps."""
    return np.where(np.isin(np.arange(len(chosen)), ramps), chosen, 0)


def _gain(result: Tuned, facts: Problem, objective: Objective, evidence: Evidence, others: ExitTable) -> float:
    def goodput_per_s(plan: Plan, chosen: Indices) -> float:
        places = others.places(_shut(chosen, opened(plan)))
        survival = [float((places >= block).mean()) for block in range(facts.num_blocks)]
        return evaluate(plan, facts.surviving(survival), objective).goodput_per_s

    return goodput_per_s(result.plan, result.chosen) / goodput_per_s(result.before, evidence.prepared)
