"""Pipelines side by side in one real graph, and what the simulator says of it beside what it does."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from experiments.fidelity.compare import front_s
from experiments.fidelity.suite import PLANS, SLO_S, Case, profile
from experiments.load import Load
from experiments.serve.fleet import facts_for, promise_per_s, serve_file
from experiments.simulator import World, simulate
from optimizer.plan import Plan
from tests.integration.asking import ask, predict
from tests.integration.test_graph import application, cut_at
from tests.toy import RAMPS, left_at

Put = Callable[..., str]
LATE_MS = 20.0  # of the load generator: a machine that is busier than this says nothing of the graph
SECONDS = 4.0


def test_pipelines_side_by_side_answer_as_one(deployed: Put, tmp_path: Path) -> None:
    plan = Plan(cut_at(2).placements, beside=(cut_at(),))
    base = deployed(application(tmp_path, plan, "load_leisurely"))
    wanted = [[block, label] for label in range(10) for block in range(4)]
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(lambda pair: predict(base, [pair]), wanted))
    for (block, label), (output,) in zip(wanted, replies, strict=True):
        assert (output["label"], output["exit_block"]) == (label, left_at(block, RAMPS))
    splits = ask(base, "GET", "/stats")[1]["splits"]
    assert [each["blocks"] for each in splits] == [[0, 2], [2, 4], [0, 4]]
    assert len({each["group"] for each in splits}) == 3
    assert all(each["launches"] for each in splits), "every pipeline took its share"


def test_the_simulator_says_what_the_live_graph_does(deployed: Put, tmp_path: Path) -> None:
    """Far looser than `make bench-fidelity`, and only where this machine keeps up."""
    plan, facts = PLANS["2 splits, mixed"], profile()
    file = json.loads(serve_file(tmp_path, plan, facts, 1e3 * SLO_S).read_text())
    url = f"{deployed(*file['applications'])}/predict"
    problem, promised = facts_for(facts, plan.devices()), promise_per_s(plan, facts)
    front = front_s(url, asked=10)
    times_s, sure_after = Case("", "poisson", 0.7).inputs(promised, SECONDS)
    bodies = [json.dumps({"inputs": {"exit_block": block}}).encode() for block in sure_after.tolist()]
    record = asyncio.run(Load(url, bodies).at(times_s))
    late_ms = 1e3 * float(np.percentile(record.sent_s - record.due_s, 99))
    if late_ms > LATE_MS or front * 1e3 > LATE_MS:
        pytest.skip(
            f"this machine is too busy: requests left {late_ms:.0f} ms late, a lone one took {front:.3f} s more"
        )
    report = simulate(World(plan, problem, SLO_S, front_s=front), [(times_s, sure_after)], SECONDS)
    latency_s = (record.ended_s - record.due_s)[record.status == 200]
    assert len(latency_s) == pytest.approx(report.answered, rel=0.1)
    assert float(np.median(latency_s)) == pytest.approx(report.tally.quantile_s(0.5), rel=0.35)
