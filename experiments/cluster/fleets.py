"""Two mixed fleets. One is that of `isobatch serve cluster/local.yaml`: what it answers of what its plan promises, on
four nodes of this machine. The other exists in virtual time only: what a slow link between two kinds of devices costs,
and that the plan which is made once it is declared goes another way.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments.serve.servers import isobatch
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.cluster.load.workloads import arrivals, exit_blocks
from isobatch.cluster.serving.serve_file import serve_file
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.graph import read_graph
from isobatch.optimizer import Objective, Plan, Problem, evaluate, optimize, problem
from isobatch.profiles.devices import Link, fleet, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable

LOCAL = Path(__file__).parents[2] / "cluster" / "local.yaml"
SECONDS, AT_ONCE_S, LOOK_S = 20.0, 16.0, 2.0
RISE, STEP_S = (0.25, 0.5, 0.75), 3.0  # of what is promised, and how long each is asked for: as real load grows
WELL = 0.9  # of those that ask
TOGETHER = 4  # inputs of a request: with one, HTTP and the generator would take more of two cores than there is

BLOCKS, BATCH, HIDDEN_BYTES = 8, 16, 196_608  # as BERT-base's of 128 tokens, in float16
SURVIVAL = (1.0, 1.0, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5)
# One kind is as good as the other at the early blocks only, so that a plan has them there.
BLOCK_S = {"v100": (0.004,) * BLOCKS, "k80": (0.005,) * 4 + (0.016,) * 4}
DEVICES, ACROSS, SLOW_GBIT_PER_S = fleet("v100=2,k80=4"), "k80>v100", 0.05
OBJECTIVE = Objective(slo_s=0.3, max_batch=BATCH)
OFFERED, VIRTUAL_S = 0.9, 20.0  # of what the better plan promises


def four_nodes() -> dict[str, float]:
    """Offered exactly what is promised, by Poisson arrivals: at once to a server that has just started, then rising."""
    config = checked(AppConfig, serve_file(LOCAL, {})["applications"][0]["args"])
    promised, slo_ms = promise_of(read_graph(config).plan), config.slo_ms
    per_s = promised / TOGETHER
    with isobatch(LOCAL) as url:
        recovery_s = _recovery_s(*_asked(url, _rising(per_s, (), AT_ONCE_S), slo_ms))
        due_s, good = _asked(url, _rising(per_s, RISE, SECONDS), slo_ms)
    share = float(good[due_s >= len(RISE) * STEP_S].sum() / SECONDS / per_s)
    return {"promised_per_s_4nodes": promised, "goodput_share_4nodes": share, "at_once_recovery_s_4nodes": recovery_s}


def _rising(per_s: float, shares: Sequence[float], seconds: float) -> np.ndarray:
    """When requests are due: a step at each of these shares of the rate, then `seconds` at the whole rate."""
    steps = [arrivals("poisson", share * per_s, STEP_S, seed) + seed * STEP_S for seed, share in enumerate(shares)]
    return np.concatenate([*steps, arrivals("poisson", per_s, seconds, len(steps)) + len(steps) * STEP_S])


def _asked(url: str, due_s: np.ndarray, slo_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """When each request was due, and whether it was answered in time."""
    body = json.dumps({"inputs": [{}] * TOGETHER}).encode()
    record = asyncio.run(LoadGenerator(url, [body], headers=f"X-Deadline-Ms: {slo_ms:g}\r\n").at(due_s))
    return record.due_s, (record.status == 200) & (record.ended_s - record.due_s <= slo_ms / 1e3)


def _recovery_s(due_s: np.ndarray, good: np.ndarray) -> float:
    """The end of the last look in which too few of those that asked were answered in time; 0 where there was none."""
    edges = np.arange(0.0, due_s[-1] + LOOK_S, LOOK_S)
    arrived, answered = np.histogram(due_s, edges)[0], np.histogram(due_s[good], edges)[0]
    poor = np.flatnonzero(answered < WELL * arrived)
    return float(edges[poor[-1] + 1]) if len(poor) else 0.0


def promise_of(plan: Plan) -> float:
    assert plan.promise, "This is a bug: the planner promises something."
    return plan.promise.goodput_per_s


def slow_link() -> dict[str, float]:
    """Both plans run where the link is slow, under what the second one sustains. The devices are simulated."""
    slow = {ACROSS: SLOW_GBIT_PER_S}
    unaware, aware = (optimize(_profile(), DEVICES, _links(links), OBJECTIVE) for links in ({}, slow))
    facts = problem(_profile(), DEVICES, _links(slow))
    offered = OFFERED * evaluate(aware, facts).goodput_per_s
    assert ACROSS in crossed(unaware), "This is a bug: without the slow link, a plan uses it."
    return {
        "slow_link_avoided": float(ACROSS not in crossed(aware)),
        "slow_link_good_share_before": _good_share(unaware, facts, offered),
        "slow_link_good_share_after": _good_share(aware, facts, offered),
    }


def crossed(plan: Plan) -> set[str]:
    """The links between kinds over which survivors travel."""
    ways = [(a.kind, b.kind) for pipeline in plan.pipelines for a, b in pairwise(pipeline.placements)]
    return {f"{source}>{target}" for source, target in ways if source != target}


def _profile() -> Profile:
    sizes, none = (HIDDEN_BYTES,) * BLOCKS, ((0.0,) * BLOCKS,) * 2
    tables = tuple(
        LatencyTable(kind, (1, BATCH), (seconds, seconds), none, 0.0, sizes, sizes, "made up")
        for kind, seconds in BLOCK_S.items()
    )
    return Profile("virtual", tables, ExitProfile(SURVIVAL))


def _links(gbit_per_s: Mapping[str, float]) -> tuple[Link, ...]:
    return links_between(DEVICES, gbit_per_s=gbit_per_s)


def _good_share(plan: Plan, facts: Problem, per_s: float) -> float:
    times_s = arrivals("poisson", per_s, VIRTUAL_S, seed=0)
    leaves = exit_blocks(ExitProfile(SURVIVAL), len(times_s), np.random.default_rng(1))
    return simulate(World(plan, facts, OBJECTIVE.slo_s or 0.0), [(times_s, leaves)], VIRTUAL_S).good_share
