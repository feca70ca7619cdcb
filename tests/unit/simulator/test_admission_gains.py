"""Admission never answers fewer in time than letting everybody in would, beyond chance, up to 1.2 times the promise."""

from itertools import pairwise

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from isobatch.cluster.load.workloads import arrivals, exit_blocks
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import Simulation, World
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.pipelines.spread import joined
from isobatch.optimizer.plan import Placement, Plan
from isobatch.optimizer.problem import Problem, split_with_ramps
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.latency import LatencyTable
from tests.helpers.everybody import EverybodyDispatcher

INPUTS, SEEDS = 1200, (1, 2)
# Where everybody is let in and at least this share is in time, the rate is about 1.2 times the promise at most.
NEAR_PROMISE = 0.9
CHANCE = 0.015  # of all inputs


@st.composite
def lanes(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Lanes of one kind each, cut once or not, with exits or without. They shrink to one lane of one block."""
    blocks = draw(st.integers(1, 3))
    survival = [1.0]
    for _ in range(blocks - 1):
        survival.append(survival[-1] * draw(st.sampled_from((1.0, 0.7, 0.4))))
    kinds = [f"kind{number}" for number in range(draw(st.integers(1, 3)))]
    slowness, times_by_8 = st.sampled_from((1.0, 2.0, 4.0)), st.sampled_from((1.0, 2.0, 6.0))
    tables = tuple(table(kind, blocks, draw(slowness), draw(times_by_8)) for kind in kinds)
    batches, counts, cuts = st.sampled_from((4, 1, 2, 8)), st.integers(1, 3), st.integers(0, blocks - 1)
    drawn = [(kind, draw(batches), draw(counts), draw(cuts)) for kind in kinds]
    devices = tuple(Device(kind, replicas + bool(cut), 10**9, 1.0) for kind, _, replicas, cut in drawn)
    links = {(a, b): Link(a, b, 1e9, 0.0002) for a in kinds for b in kinds}
    facts = Problem(tuple(survival), tables, devices, links)
    return facts, joined([lane(facts, *each) for each in drawn])


def table(kind: str, blocks: int, slowness: float, times_by_8: float) -> LatencyTable:
    """A batch of 8 takes this many times as long as one input."""
    one, none, sizes = (0.001 * slowness,) * blocks, (0.0,) * blocks, (1000,) * blocks
    eight = tuple(seconds * times_by_8 for seconds in one)
    return LatencyTable(kind, (1, 8), (one, eight), (none, none), 0.0002, sizes, sizes, "measured")


def lane(facts: Problem, kind: str, batch: int, replicas: int, cut: int) -> Plan:
    edges = (0, cut, facts.num_blocks) if cut else (0, facts.num_blocks)
    splits = [split_with_ramps(facts, a, b, batch, inner=not cut) for a, b in pairwise(edges)]
    counts = (replicas, 1) if cut else (replicas,)
    return Plan(tuple(Placement(kind, count, (split,)) for count, split in zip(counts, splits, strict=True)))


def run(world: World, rate: float, seed: int, dispatcher: type[Dispatcher]) -> Report:
    seconds = INPUTS / rate
    times_s = arrivals("poisson", rate, seconds, seed)
    depths = exit_blocks(ExitProfile(world.facts.survival), len(times_s), np.random.default_rng(seed))
    return Simulation(world, [(times_s, depths)], seconds, seed, dispatcher=dispatcher).finish()


@given(lanes(), st.sampled_from((1.2, 1.6, 2.5, 4.0)), st.sampled_from((1.0, 0.5, 0.7, 0.85, 1.2)))
@settings(max_examples=8, deadline=None)
def test_no_answer_in_time_is_lost_by_refusing(problem: tuple[Problem, Plan], slo_times: float, load: float) -> None:
    """`slo_times`: the SLO as a multiple of the latency of an input that is alone in the slowest lane."""
    facts, plan = problem
    score = evaluate(plan, facts)
    alone_s = max(sum(each.alone_s for each in one.splits) for one in score.pipelines or (score,))
    world, rate = World(plan, facts, slo_times * alone_s), load * score.goodput_per_s
    all_in = [run(world, rate, seed, EverybodyDispatcher) for seed in SEEDS]
    arrived, of_all = sum(each.arrived for each in all_in), sum(each.good for each in all_in)
    assume(of_all >= NEAR_PROMISE * arrived)
    ours = sum(run(world, rate, seed, Dispatcher).good for seed in SEEDS)
    assert ours >= of_all - CHANCE * arrived
