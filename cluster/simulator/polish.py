"""Betters a plan by playing whatever is one move away from it, for as long as there is time (optimizer/moves.py)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from cluster.simulator.playing import CARE, Care, Climb, Find, Played, check_playable, climb_ladder
from cluster.simulator.sustained import SLOS
from optimizer.model.evaluate import evaluate
from optimizer.moves import neighbours
from optimizer.objective import Objective
from optimizer.plan import Plan
from optimizer.problem import Problem

PATIENT = replace(CARE, inputs=15_000, slos=SLOS, last_slos=SLOS, most=inf)  # the time is what ends it


def polished(
    plan: Plan, facts: Problem, objective: Objective, out_of_time: Callable[[], bool], find: Find,
    care: Care = PATIENT, apart: bool = True,
) -> Played:  # fmt: skip
    """Climb from the plan to better ones. The promise of the result is what the simulator sustains of it."""
    climb = Climb(facts, check_playable(objective), replace(plan, promise=None), care, out_of_time)
    before_per_s = climb.rate_per_s
    climb_ladder(climb, objective, find, apart)
    while climb.through(_promising(climb.best, facts, objective)):
        pass
    return climb.settled(plan, before_per_s)


def _promising(plan: Plan, facts: Problem, objective: Objective) -> Iterator[Plan]:
    """The neighbours, those first whose devices can do most."""
    moved = {each: evaluate(each, facts).goodput_per_s for each in neighbours(plan, facts, objective)}
    yield from sorted(moved, key=lambda each: -moved[each])
