"""Claim: plans, dispatching and controlling go on at thousands of devices; the figures say what becomes dear first.

BERT-base by datasheets on four kinds of GPUs in equal numbers, eight to a node, SLO 100 ms. Devices and time are
simulated; planner, dispatcher and controller are the product's, and their processor time is what they take here.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from typing import TypeVar

import numpy as np

from experiments.planner.settings import BERT_BASE, evenly
from isobatch.cluster.controller.available_devices import Inventory
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.rehearsal import replan
from isobatch.cluster.load.workloads import Floats, Ints, arrivals, exit_blocks
from isobatch.cluster.simulator.simulation import World
from isobatch.cluster.simulator.sustained import run
from isobatch.deployments.config import INSIDE_A_FRONT, AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits
from isobatch.deployments.graph import Graph
from isobatch.deployments.resources import Resources
from isobatch.optimizer import Objective, Plan, Problem, evaluate, optimize, problem
from isobatch.profiles.devices import Device, fleet, links_between
from isobatch.profiles.exits import ExitProfile

KINDS, GPUS_OF_A_NODE, DTYPE = 4, 8, "float32"
OBJECTIVE = Objective(slo_s=0.1, max_batch=32)
LOAD = 0.9  # of what the plan promises
SLOS, MOST_INPUTS = 5.0, 300_000  # that a run lasts, and has
FRONT_S = 0.0002  # of a front's core for a small request
STEERED_PER_S, WINDOWS, PATIENCE = 3_000.0, 4, Patience(replan_every_s=2.0, look_every_s=0.5)
T = TypeVar("T")


def measure(sizes: str = "46,1000,10000", most_per_s: int = 1_000_000) -> dict[str, float]:
    """`most_per_s`: no more requests a second are simulated, whatever the plan promises."""
    result: dict[str, float] = {}
    for gpus in map(int, str(sizes).split(",")):
        result |= {f"{name}_{gpus}": value for name, value in at(evenly(gpus, KINDS), most_per_s).items()}
    return result


def at(devices: str, most_per_s: float) -> dict[str, float]:
    """The figures of one fleet. Seconds and microseconds are of processor time."""
    question = ClassifierPlanningProblem(BERT_BASE.profile(devices, DTYPE), fleet(devices), OBJECTIVE)
    links = links_between(question.fleet)
    plan, plan_s = timed(partial(optimize, question.profile, question.fleet, links, OBJECTIVE))
    facts = problem(question.profile, question.fleet, links)
    promised = evaluate(plan, facts).goodput_per_s
    counted, counting_s = timed(inventory(question.fleet))
    assert counted == {each.kind: each.count for each in question.fleet}, "This is a bug: all of them fit."
    return {
        "plan_s": plan_s,
        "promised_per_s": promised,
        **dispatched(plan, facts, min(LOAD * promised, most_per_s)),
        "rerouting_s": timed(rerouting(plan, facts))[1],
        "counting_s": counting_s,
        **steered(plan, facts, question, min(STEERED_PER_S, most_per_s)),
    }


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the processor time that it takes."""
    begun_s = time.process_time()
    return work(), time.process_time() - begun_s


def dispatched(plan: Plan, facts: Problem, rate: float) -> dict[str, float]:
    """The product's dispatcher at this rate, in virtual time, which lets in what so many fronts do, or one alone."""
    fronts, slo_s = ceil(rate * FRONT_S), OBJECTIVE.slo_s or 0.0
    inputs = min(int(rate * SLOS * slo_s), MOST_INPUTS)
    alone, together = (World(plan, facts, slo_s, Limits(backlog=each * INSIDE_A_FRONT)) for each in (1, fronts))
    report, spent_s = timed(partial(run, together, rate, inputs, seed=0))
    return {
        "offered_per_s": rate,
        "in_time": report.good_share,
        "in_time_4096_inside": run(alone, rate, inputs, seed=0).good_share,
        "us_an_input": 1e6 * spent_s / inputs,
        "fronts": fronts,
        "connections_of_a_front": sum(plan.devices().values()),
    }


def rerouting(plan: Plan, facts: Problem) -> Callable[[], None]:
    """What a front does when a replica has gone: it shares the others out, and its dispatcher follows."""
    graph = Graph(plan, facts, fleet="scale.000000")
    alive = {fleet: [f"{index:06d}" for index in range(plan.devices()[kind])] for kind, fleet in graph.fleets.items()}
    dispatcher = Dispatcher(graph.route, graph.members(alive), Limits())
    fewer = {fleet: replicas[1:] for fleet, replicas in alive.items()}
    return lambda: dispatcher.reroute(graph.route, graph.members(fewer))


def inventory(devices: tuple[Device, ...]) -> Inventory:
    """The controller's count of devices, on nodes of eight GPUs."""
    nodes: list[Resources] = [
        {"CPU": 64.0, "GPU": float(GPUS_OF_A_NODE), f"accelerator_type:{device.kind.upper()}": 1.0}
        for device in devices
        for _ in range(ceil(device.count / GPUS_OF_A_NODE))
    ]
    most = {device.kind: device.count for device in devices}
    return Inventory(most, AppConfig().replica_needs, lambda: nodes)


def steered(plan: Plan, facts: Problem, question: ClassifierPlanningProblem, rate: float) -> dict[str, float]:
    """The controller over some windows of few requests: what it does depends on devices and blocks, not on them."""
    seconds = WINDOWS * PATIENCE.replan_every_s + 1
    result = replan(
        World(plan, facts, OBJECTIVE.slo_s or 0.0), question, _inputs(facts, rate, seconds), seconds, patience=PATIENCE
    )
    spent = result.spent
    return {"look_s": spent.look_s / max(1, spent.looks), "window_s": spent.window_s / max(1, spent.windows)}


def _inputs(facts: Problem, rate: float, seconds: float) -> Iterator[tuple[Floats, Ints]]:
    times_s = arrivals("poisson", rate, seconds, seed=0)
    yield times_s, exit_blocks(ExitProfile(facts.survival), len(times_s), np.random.default_rng(1))
