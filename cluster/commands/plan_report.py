"""The tables that `isobatch plan` prints."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from math import ceil

from rich.table import Table

from isobatch.cluster.commands import number_text
from isobatch.cluster.simulator.plan_choice import SimulatedChoice
from isobatch.optimizer import Objective, Placement, Plan, Problem, Promise, Score
from isobatch.optimizer.effort import MOST_GAP
from isobatch.optimizer.pipelines.baselines import Baseline
from isobatch.optimizer.pipelines.batch_gain import BatchGain
from isobatch.optimizer.plan import SimulatedTimes, blocks_text
from isobatch.profiles.latency import ESTIMATED, MOST_BATCH, PUBLISHED, mixed_backends_warning
from isobatch.profiles.sweep import WORTH_DOUBLING, rate_per_s


@dataclass(frozen=True)
class PlanResult:
    """A plan, and everything that is reported of it."""

    facts: Problem
    objective: Objective
    plan: Plan
    score: Score
    baselines: tuple[Baseline, ...]
    simulated: SimulatedChoice | None = None  # the result of the simulation
    not_simulated: str = ""  # why it was not simulated
    batch_gains: tuple[BatchGain, ...] = ()  # by kind of device
    # What the plan sustains if all estimated times are too short, and too long; None where no time is estimated.
    between_per_s: tuple[float, float] | None = None
    hurried: bool = False  # whether Ctrl-C ended the search

    @property
    def pipelines(self) -> list[tuple[Plan, Score]]:
        return list(zip(self.plan.pipelines, self.score.pipelines or (self.score,), strict=True))

    @property
    def times(self) -> SimulatedTimes | None:
        """What the simulator shows at the promised rate."""
        return self.plan.promise.simulated if self.plan.promise else None

    def as_json(self) -> dict[str, object]:
        """The JSON that docs/planner.md describes; fields are added, never renamed, within a schema version."""
        of_tables = ("kind", "source", "origin", "backend", "dtype")
        of_scores = ("goodput_per_s", "cost_per_hour", "latency_s")
        simulated = self.simulated and {
            **{name: getattr(self.simulated, name) for name in ("before_per_s", "after_per_s", "tried")},
            "cell": self.simulated.cell and asdict(self.simulated.cell),
            **(asdict(self.times) if self.times else {}),
        }
        return {
            "schema_version": 1,
            "plan": json.loads(self.plan.to_json()),
            "score": {**self.score.as_json(), "latency_parts_s": self.score.latency_parts_s},
            "tables": [
                {name: getattr(table, name) for name in of_tables} | {"estimated": table.derived}
                for table in self.facts.tables
            ],
            "simulated": simulated,
            "between_per_s": self.between_per_s,
            "batch_gains": [asdict(each) for each in self.batch_gains],
            "baselines": [
                {"name": each.name, **{name: getattr(each.score, name, None) for name in of_scores}}
                | {"goodput_per_s": _goodput_per_s(each.plan, each.score)}
                for each in self.baselines
            ],
        }


def tables(result: PlanResult, objective: Objective) -> Iterator[Table | str]:
    yield _splits(result)
    yield from _survivors(result)
    yield _promise(result)
    yield _baselines(result)
    yield from map(str, result.batch_gains)
    yield from _larger_batches(result, objective)
    yield from _estimated(result)
    yield from _fronts(result, objective)
    for line in result.score.broken:
        yield f"[bold red]broken:[/] {line}"


def _larger_batches(result: PlanResult, objective: Objective) -> Iterator[str]:
    """Say where larger batches than the plan may have would be worth a try."""
    first = [plan.placements[0] for plan in result.plan.pipelines]
    planned = {(each.kind, each.splits[0].batch_size) for each in first}
    for kind, largest in ((gain.kind, gain.batch) for gain in result.batch_gains):
        table, twice = result.facts.table(kind), 2 * largest
        if (kind, largest) not in planned or twice > MOST_BATCH:
            continue
        if rate_per_s(table, largest) > WORTH_DOUBLING * rate_per_s(table, largest / 2):
            timed = f"isobatch profile --largest {twice}, then " if table.largest < twice else ""
            limit = f" --max-batch {twice}" if objective.max_batch < twice else ""
            yield (
                f"{kind}: the plan has the largest batches that it may have, {largest}, and larger ones may answer "
                f"more: {timed}isobatch plan{limit}"
            )


def _fronts(result: PlanResult, objective: Objective) -> Iterator[str]:
    """Say how many fronts the promise needs, if it needs more than one."""
    from isobatch.deployments.config import A_FRONT_PER_S, INSIDE_A_FRONT

    per_s = result.plan.promise.goodput_per_s if result.plan.promise else 0.0
    fronts = ceil(max(per_s / A_FRONT_PER_S, per_s * (objective.slo_s or 0.0) / INSIDE_A_FRONT))
    if fronts > 1:
        yield (
            f"A front, on a core of its own, passes on some {A_FRONT_PER_S:,} requests per second and holds "
            f"{INSIDE_A_FRONT:,} inputs: if every request has one input, serve with front_replicas: {fronts}."
        )


def _estimated(result: PlanResult) -> Iterator[str]:
    """Name the kinds of devices whose numbers are estimates."""
    for origin, words in ((PUBLISHED, "fitted to published times"), (ESTIMATED, "from those of other devices")):
        kinds = [table for table in result.facts.tables if table.origin == origin]
        estimated = [" ".join(filter(None, (each.kind, each.backend, each.dtype))) for each in kinds]
        if estimated:
            yield f"[bold]{origin}[/] ({words}), not measured: {', '.join(estimated)}. 'isobatch profile' measures."
    if warning := mixed_backends_warning(result.facts.tables):
        yield f"[bold yellow]mixed:[/] {warning}"


def _splits(result: PlanResult) -> Table:
    """A row per split; splits that share a placement show its replicas once; pipelines are ruled off.

    In a local placement survivors stay on the replica that made them.
    """
    columns = "blocks", "device", "replicas", "batch", "ramps", "ms per launch", "busy", "survivors"
    table = Table(*columns, title="splits")
    for plan, score in result.pipelines:
        table.add_section()
        seen: list[Placement] = []
        for part in score.splits:
            split, placement = part.split, plan.placement_of(part.split)
            count = f"{placement.replicas} (local)" if placement.local else str(placement.replicas)
            replicas = "(the same)" if placement in seen else count
            seen.append(placement)
            table.add_row(
                split.blocks_text, placement.kind, replicas, str(split.batch_size), _ramps(split.ramps),
                f"{part.launch_s * 1e3:.2f}", f"{part.busy:.0%}", f"{part.survivors:.1%}",
            )  # fmt: skip
    return table


def _survivors(result: PlanResult) -> Iterator[str]:
    """Say how large the full batch of each later split is, and how long it takes to get there."""
    pipelines = result.pipelines
    for _, score in pipelines:
        for before, part in pairwise(score.splits):
            origin = f" from {before.kind}" if len(pipelines) > 1 else ""
            split, table = part.split, result.facts.table(before.kind)
            weight = f"{split.batch_size * table.hidden_bytes[split.start - 1] / 1e6:,.3g} MB"
            path = "stays on its device" if part.stays else f"takes {part.transfer_s * 1e3:.1f} ms on the link"
            yield f"A batch{origin} before block {split.start} weighs {weight} and {path}."


def _ramps(ramps: tuple[int, ...]) -> str:
    """The ramps in words, with neighbours written as a range.

    >>> _ramps((1, 2, 3, 7)), _ramps(())
    ('1-3, 7', 'none')
    """
    runs = [[ramp for _, ramp in run] for _, run in groupby(enumerate(ramps), key=lambda each: each[1] - each[0])]
    return ", ".join(blocks_text(run[0], run[-1]) for run in runs) or "none"


def _promise(result: PlanResult) -> Table:
    score, objective = result.score, result.objective
    table = Table("promise", "value", show_header=False, title="promise")
    counted = f" (an input is {result.facts.length} tokens)" if result.facts.length else ""
    if simulated := result.simulated:
        cell = f", {simulated.cell}" if simulated.cell else ""
        goodput = f"{number_text(simulated.after_per_s)} per second{counted}, {simulated.comparison}{cell}"
        table.add_row("goodput, as simulated", goodput)
        table.add_row("devices alone", f"{number_text(score.goodput_per_s)} per second, were inputs evenly spaced")
    else:
        table.add_row("goodput", f"{number_text(score.goodput_per_s)} per second{counted}")
    if result.between_per_s:
        low, high = result.between_per_s
        between = f"{number_text(low)} to {number_text(high)} per second"
        table.add_row("by errors of estimates", f"{between}, in four of five cases")
    table.add_row("latency, as simulated", str(result.times or f"not simulated: {result.not_simulated}"))
    budget = f" of {objective.budget_s * 1e3:.1f} ms ({objective.slack:.0%} slack kept)" if objective.slo_s else ""
    table.add_row("full launches all the way", f"{score.latency_s * 1e3:.1f} ms{budget}, to the last block")
    for part, seconds in score.latency_parts_s.items():
        table.add_row(f"  {part}", f"{seconds * 1e3:.1f} ms")
    table.add_row("cost", f"${score.cost_per_hour:,.2f} per hour")
    if score.cost_per_hour:
        table.add_row("inputs per dollar", f"{_goodput_per_s(result.plan, score) * 3600 / score.cost_per_hour:,.0f}")
    if result.plan.promise and not result.score.broken:
        table.add_row("best possible", _best_possible(result, result.plan.promise))
    return table


def _best_possible(result: PlanResult, promise: Promise) -> str:
    gap = promise.gap
    if result.simulated and promise.goodput_per_s > result.score.goodput_per_s:
        return "not known: it sustains more than the estimate for the devices alone"
    if result.simulated:
        return f"within {gap:.2%} of the best estimate for the devices alone that keeps the slack"
    if gap == 0:
        return "yes, proved"
    if gap == MOST_GAP:
        return "not known: nothing was proved"
    if result.objective.aim.at_given_goodput:
        return f"no plan costs less than ${promise.cost_per_hour / (1 + gap):,.2f} per hour, proved"
    return f"within {gap:.2%}, proved"


def _baselines(result: PlanResult) -> Table:
    title = "gain by estimate; the plan was chosen by simulation" if result.simulated else "gain"
    table = Table("against", "goodput", "dollars per hour", "full launches", "gain", title=title)
    for each in result.baselines:
        if each.score:
            latency = f"{each.score.latency_s * 1e3:.1f} ms"
            figures = (number_text(_goodput_per_s(each.plan, each.score)), f"{each.score.cost_per_hour:,.2f}", latency)
            table.add_row(each.name, *figures, _gain(result, each))
        else:
            table.add_row(each.name, "-", "-", "-", "it cannot do that at any batch size")
    return table


def _goodput_per_s(plan: Plan | None, score: Score | None) -> float:
    """As simulated, where the plan was simulated; 0 without a score."""
    if plan and plan.promise and plan.promise.simulated:
        return plan.promise.goodput_per_s
    return score.goodput_per_s if score else 0.0


def _gain(result: PlanResult, baseline: Baseline) -> str:
    """By simulation where both plans were simulated, otherwise as the devices alone allow."""
    score, other = result.score, baseline.score
    assert other is not None, "This is a bug: a plan has a score."
    if result.objective.aim.at_given_goodput:
        return f"{1 - score.cost_per_hour / other.cost_per_hour:.0%} cheaper" if other.cost_per_hour else "as cheap"
    simulated = baseline.plan and baseline.plan.promise and baseline.plan.promise.simulated
    own_per_s = _goodput_per_s(result.plan, score) if simulated else score.goodput_per_s
    gain = own_per_s / _goodput_per_s(baseline.plan, other)
    if not (score.cost_per_hour and other.cost_per_hour):
        return f"{gain:.2f}x"
    return f"{gain:.2f}x, {gain * other.cost_per_hour / score.cost_per_hour:.2f}x per dollar"
