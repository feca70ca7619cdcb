"""Two mixed fleets. One is that of `isobatch serve cluster/local.yaml`: what it answers of what its plan promises, on
four nodes of this machine. The other exists in virtual time only: what a slow link between two kinds of devices costs,
and that the plan which is made once it is declared goes another way.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from cluster.load.report import summary
from cluster.load.workloads import arrivals, exit_blocks
from cluster.serving.serve_file import serve_file
from cluster.simulator.simulation import World, simulate
from deployments.config import AppConfig, checked
from deployments.graph import read_graph
from experiments.serve import measures
from experiments.serve.servers import isobatch
from optimizer import Objective, Plan, Problem, evaluate, optimize, problem
from profiles.devices import Link, fleet, links_between
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.latency import LatencyTable

LOCAL = Path(__file__).parents[2] / "cluster" / "local.yaml"
SECONDS, WARM_S = 20.0, 5.0
TOGETHER = 4  # inputs of a request: with one, HTTP and the generator would take more of two cores than there is

BLOCKS, BATCH, HIDDEN_BYTES = 8, 16, 196_608  # as BERT-base's of 128 tokens, in float16
SURVIVAL = (1.0, 1.0, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5)
# One kind is as good as the other at the early blocks only, so that a plan has them there.
BLOCK_S = {"v100": (0.004,) * BLOCKS, "k80": (0.005,) * 4 + (0.016,) * 4}
DEVICES, ACROSS, SLOW_GBIT_PER_S = fleet("v100=2,k80=4"), "k80>v100", 0.05
OBJECTIVE = Objective(slo_s=0.3, max_batch=BATCH)
OFFERED, VIRTUAL_S = 0.9, 20.0  # of what the better plan promises


def four_nodes() -> dict[str, float]:
    """Offered exactly what is promised, by Poisson arrivals."""
    config = checked(AppConfig, serve_file(LOCAL, {})["applications"][0]["args"])
    promised, slo_ms = promise_of(read_graph(config).plan), config.slo_ms
    body, per_s = json.dumps({"inputs": [{}] * TOGETHER}).encode(), promised / TOGETHER
    with isobatch(LOCAL) as url:
        measures.under(url, per_s / 2, WARM_S, slo_ms, body)
        kept = summary(measures.under(url, per_s, SECONDS, slo_ms, body), slo_ms)
    return {"promised_per_s_4nodes": promised, "goodput_share_4nodes": kept.goodput_per_s / per_s}


def promise_of(plan: Plan) -> float:
    assert plan.promise, "This is a bug: the planner promises something."
    return plan.promise.goodput_per_s


def slow_link() -> dict[str, float]:
    """Both plans run where the link is slow, under what the second one sustains. The devices are simulated."""
    slow = {ACROSS: SLOW_GBIT_PER_S}
    unaware, aware = (optimize(_profile(), DEVICES, _links(told), OBJECTIVE) for told in ({}, slow))
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
