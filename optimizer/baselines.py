"""What one would run without a planner, by the same costs: so that every plan can say what it gains."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from optimizer import cost
from optimizer.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.options import Builder
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import Problem
from profiles.devices import Device, Link

FREE = 1e30  # bytes per second that never hold anybody up


@dataclass(frozen=True)
class Lane:
    """All devices of one kind, each of which runs the whole network; they share the inputs with the other lanes."""

    device: Device
    load_s: float  # seconds of device per input
    latency_s: float
    batch_size: int

    @property
    def goodput_per_s(self) -> float:
        return self.device.count / self.load_s


@dataclass(frozen=True)
class Baseline:
    """Data-parallel serving: every kind that keeps the SLO is a lane, at the batch size that suits it best."""

    name: str
    lanes: tuple[Lane, ...]

    @property
    def goodput_per_s(self) -> float:
        return sum(lane.goodput_per_s for lane in self.lanes)

    @property
    def latency_s(self) -> float:
        return max((lane.latency_s for lane in self.lanes), default=inf)

    @property
    def cost_per_hour(self) -> float:
        return sum(lane.device.count * lane.device.price_per_hour for lane in self.lanes)

    def cost_for(self, goodput_per_s: float) -> float:
        """Dollars per hour for a goodput: whole devices, from the cheapest per input on; infinite beyond the fleet."""
        dollars, left = 0.0, goodput_per_s
        for lane in sorted(self.lanes, key=lambda each: each.load_s * each.device.price_per_hour):
            used = min(lane.device.count, ceil(left * lane.load_s * (1 - 1e-12)))
            dollars, left = dollars + used * lane.device.price_per_hour, left - used / lane.load_s
            if left <= 1e-9 * goodput_per_s:
                return dollars
        return inf


def baselines(facts: Problem, objective: Objective) -> tuple[Baseline, ...]:
    """The network without exits, with all its ramps at shrinking batches, and E3 without model parallelism."""
    kinds: dict[str, Callable[[Problem, Objective], Iterator[Lane]]] = {
        "no exits": _stock,
        "early exit, shrinking batches": _naive,
        "serial E3, one device at a time": _serial,
    }
    return tuple(Baseline(name, tuple(_best_lanes(facts, objective, lanes))) for name, lanes in kinds.items())


def held_to(objective: Objective, stock: Baseline, alpha: float) -> Objective:
    """E3's constraints: at least the goodput of the network without exits, at no more than `alpha` times its cost."""
    allowed = inf if objective.cost_per_hour is None else objective.cost_per_hour
    goodput = stock.goodput_per_s if objective.goal != "cost" else objective.goodput_per_s
    price = stock.cost_per_hour if objective.goal != "cost" else stock.cost_for(goodput)
    dollars = min(allowed, alpha * price)
    return replace(
        objective,
        goodput_per_s=max(objective.goodput_per_s, goodput),
        cost_per_hour=None if np.isinf(dollars) else dollars,
    )


def _best_lanes(
    facts: Problem, objective: Objective, lanes: Callable[[Problem, Objective], Iterator[Lane]]
) -> Iterator[Lane]:
    for device in facts.devices:
        alone = facts.with_devices((device,))
        fitting = [lane for lane in lanes(alone, objective) if lane.latency_s <= objective.budget_s * (1 + 1e-9)]
        if fitting:
            yield min(fitting, key=lambda lane: lane.load_s)


def _stock(facts: Problem, objective: Objective) -> Iterator[Lane]:
    return _whole(facts, objective, ())


def _naive(facts: Problem, objective: Objective) -> Iterator[Lane]:
    f = facts.survival
    return _whole(facts, objective, tuple(k for k in range(len(f) - 1) if f[k + 1] < f[k]))


def _whole(facts: Problem, objective: Objective, ramps: tuple[int, ...]) -> Iterator[Lane]:
    """One split, at every batch size."""
    (device,), (table,) = facts.devices, facts.tables
    for batch in range(1, min(objective.max_batch, table.batch_sizes[-1]) + 1):
        split = Split(0, facts.num_blocks, batch, ramps)
        score = evaluate(Plan((Placement(device.kind, device.count, (split,)),)), facts, _at_pace(objective))
        if not score.broken:
            yield Lane(device, device.count / score.goodput_per_s, score.latency_s, batch)


def _at_pace(objective: Objective) -> Objective:
    """Only facts can be broken; the lane has its share of the inputs, never more than it sustains."""
    return Objective(arrivals_per_s=objective.arrivals_per_s)


def _serial(facts: Problem, objective: Objective) -> Iterator[Lane]:
    """Rounds on one device: each split on all its batches before the next one begins, survivors waiting in between.

    A round takes as many inputs as fill one batch of the deepest split, and lasts as long as they take in all.
    """
    (device,) = facts.devices
    link = Link(device.kind, device.kind, FREE, 0.0)
    local = replace(facts, links={(device.kind, device.kind): link})
    builder = Builder(local, objective.max_batch, inf, pruned=False)
    if not builder.roomy.all():
        return
    prefix = np.full((facts.num_blocks + 1, builder.options()[0].batch.max() + 1), inf)
    prefix[0] = 0.0
    for here in builder.options():
        total = prefix[here.start, here.batch] + here.load_s[0]
        np.minimum.at(prefix, (here.stop, here.batch), total)
        last = (here.stop == facts.num_blocks) & np.isfinite(total)
        for load, batch in zip(total[last], here.batch[last], strict=True):
            yield _round(device, float(load), int(batch), facts.survival[here.start], objective)


def _round(device: Device, load_s: float, batch: int, reach: float, objective: Objective) -> Lane:
    inputs = batch / reach if reach > 0 else inf
    pace = device.count / load_s
    waiting = (float(cost.fill_arrivals(1.0, inputs)), float(cost.wait_arrivals(1.0, inputs)))
    latency_s = cost.latency_s(inputs * load_s, *waiting, objective.rate_at(pace), pace)
    return Lane(device, load_s, latency_s, batch)
