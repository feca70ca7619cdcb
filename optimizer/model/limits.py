"""The limits that a plan must keep: the fleet, the memory of its devices, the existing ramps, and the objective."""

from collections.abc import Iterator
from itertools import pairwise

from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem


def memory_bytes(split: Split, facts: Problem, kind: str) -> int:
    """The memory of a split on its device: its weights, and the activations of its largest block."""
    table = facts.table(kind)
    blocks = slice(split.start, split.stop)
    weights = sum(table.memory_bytes[blocks]) - sum(table.repeated_bytes[split.start + 1 : split.stop])
    return weights + split.batch_size * max(table.activation_bytes[blocks], default=0)


def waiting_bytes(placement: Placement, facts: Problem) -> int:
    """The memory of waiting inputs on a replica of a local placement: up to a batch, and the survivors of a launch."""
    hidden = facts.table(placement.kind).hidden_bytes
    splits = sorted(placement.splits, key=lambda split: split.start)
    joins = [(a, b) for a, b in pairwise(splits) if placement.local and a.stop == b.start]
    return sum((a.batch_size + b.batch_size) * hidden[a.stop - 1] for a, b in joins)


def broken_counts(plan: Plan, facts: Problem) -> Iterator[str]:
    for kind, used in plan.devices().items():
        if used > facts.device(kind).count:
            yield f"{used} {kind} are used, the fleet has {facts.device(kind).count}"


def broken_facts(plan: Plan, facts: Problem) -> Iterator[str]:
    yield from broken_counts(plan, facts)
    for placement in plan.placements:
        has = facts.device(placement.kind).memory_bytes
        needed = sum(memory_bytes(split, facts, placement.kind) for split in placement.splits)
        needed += waiting_bytes(placement, facts)
        if needed > has:
            yield f"{needed / 1e9:.2f} GB are placed on one {placement.kind}, which has {has / 1e9:.2f} GB"
    for ramp in set(plan.ramps) - facts.ramp_blocks:
        yield f"ramp {ramp} is active, but no ramp stands behind that block"


def broken_objective(goodput_per_s: float, latency_s: float, price: float, objective: Objective) -> Iterator[str]:
    close = 1 + 1e-9
    if latency_s > objective.budget_s * close:
        yield f"latency {latency_s * 1e3:.4g} ms is over the budget of {objective.budget_s * 1e3:.4g} ms"
    if goodput_per_s * close < objective.goodput_per_s:
        yield f"goodput {goodput_per_s:.4g}/s is under the {objective.goodput_per_s:.4g}/s wanted"
    if objective.cost_per_hour is not None and price > objective.cost_per_hour * close:
        yield f"${price:.4g} per hour is over the ${objective.cost_per_hour:.4g} allowed"
