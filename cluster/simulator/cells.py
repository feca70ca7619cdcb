"""A cell: a small copy of a large fleet that is simulated in its place, so that a run costs the same at any rate.

A cell has a share of the replicas of every placement, at least one, with the same splits and batch sizes, and it gets
this share of the inputs. Arrivals vary as much as those of the whole fleet: they are every n-th of a Poisson process.
Fewer replicas become free less often and survivors vary more, so that a cell sustains slightly less than its share.

A few fast devices cannot be divided. Their SLO is shortened instead: a rate that is sustained within a shorter SLO is
also sustained within a longer one.
"""

from dataclasses import dataclass, replace

from isobatch.cluster.simulator.simulation import World
from isobatch.optimizer.model.evaluate import Score, evaluate
from isobatch.optimizer.plan import Placement, Plan
from isobatch.optimizer.problem import Problem

WHOLE = 2_000  # a fleet that gets at most this many inputs within an SLO is simulated whole
SIZE = 1_000  # inputs that a cell gets within an SLO
LARGER = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)  # sizes that are tried, as multiples of the size
ALIKE = 0.02  # a cell is like its fleet if each of its placements is as busy, up to this share of the time
# The shares of their estimates that pipelines sustain differ by about this much. A cell that divides the inputs among
# its pipelines in other parts errs by this, as far as the parts differ.
PIPELINES_DIFFER = 0.1
ENOUGH = 4.0  # a shortened SLO is this many times the latency of full launches, which leaves time for queues


@dataclass(frozen=True)
class Cell:
    """A cell, and the size that it represents. `unlike`: the largest difference of busy time, as a share."""

    plan: Plan
    share: float
    unlike: float


@dataclass(frozen=True)
class CellError:
    """The part of a plan that was simulated for its promise. `error`: the difference between two cells, if two ran.

    >>> print(CellError(12, 960, 0.008, 1.0))
    in a cell of 12 of its 960 devices, within 0.8 %
    >>> print(CellError(1, 1, 0.004, 0.25))
    within 25 % of the SLO, within 0.4 %
    """

    devices: int
    of_devices: int
    error: float | None
    slo_share: float

    def __str__(self) -> str:
        parts = (
            [f"in a cell of {self.devices} of its {self.of_devices} devices"] if self.devices < self.of_devices else []
        )
        parts += [f"within {100 * self.slo_share:.0f} % of the SLO"] if self.slo_share < 1 else []
        return " and ".join(parts) + ("" if self.error is None else f", within {100 * self.error:.1f} %")


def world_of(plan: Plan, facts: Problem, slo_s: float, size: float = SIZE, whole: float = WHOLE) -> World:
    """The world in which this plan is simulated: the whole fleet, or a cell that gets about `size` inputs."""
    score = evaluate(plan, facts)
    if (at_once := slo_s * score.goodput_per_s) <= whole:
        return World(plan, facts, slo_s)
    cell = _cell_like(plan, facts, score, at_once / size)
    inside_s = slo_s
    if (left := at_once * cell.share) > max(LARGER) * size:
        inside_s = min(slo_s, max(slo_s * max(LARGER) * size / left, ENOUGH * score.latency_s))
    return World(cell.plan, facts, inside_s, share=cell.share)


def _cell_like(plan: Plan, facts: Problem, score: Score, times: float) -> Cell:
    """The smallest cell that is like the fleet, or else the most similar one."""
    best = Cell(plan, 1.0, 1.0)
    for larger in LARGER:
        cell = _cell(plan, facts, score, max(1.0, times / larger))
        if cell.unlike < best.unlike:
            best = cell
        if best.unlike <= ALIKE:
            break
    return best


def _cell(plan: Plan, facts: Problem, score: Score, times: float) -> Cell:
    """The fleet with `times` fewer devices. `score`: of the whole fleet.

    A placement is compared within its pipeline, because each pipeline takes as many inputs as it can.
    """
    cell = plan.with_each(lambda each: replace(each, placements=tuple(_fewer(one, times) for one in each.placements)))
    inside = evaluate(cell, facts)
    cell_share, unlike, moved = inside.goodput_per_s / score.goodput_per_s, 0.0, 0.0
    scores, scores_inside = score.pipelines or (score,), inside.pipelines or (inside,)
    for pipeline, its_score, its_inside in zip(plan.pipelines, scores, scores_inside, strict=True):
        share = its_inside.goodput_per_s / its_score.goodput_per_s
        moved += abs(share / cell_share - 1) * its_score.goodput_per_s / score.goodput_per_s / 2
        for placement in pipeline.placements:
            busy = sum(split.busy for split in its_score.splits if split.split in placement.splits)
            busier = placement.replicas * share / _fewer(placement, times).replicas
            unlike = max(unlike, abs(busy * (busier - 1)))
    return Cell(cell, cell_share, unlike + PIPELINES_DIFFER * moved)


def _fewer(placement: Placement, times: float) -> Placement:
    """Where survivors move between its replicas, two remain: on a single one they would move at no cost."""
    moves = len(placement.splits) > 1 and not placement.local
    least = min(placement.replicas, 2 if moves else 1)
    return replace(placement, replicas=max(least, round(placement.replicas / times)))
