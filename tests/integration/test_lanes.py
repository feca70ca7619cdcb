"""Pipelines side by side in one real graph, and what the simulator says of it beside what it does."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.fidelity.calibration import calibration, measured
from experiments.fidelity.compare import compare, live
from experiments.fidelity.suite import PLANS, SLO_S, Case, profile
from experiments.serve.fleet import facts_for, promise_per_s, serve_file
from optimizer.plan import Plan
from tests.helpers.asking import ask, predict
from tests.helpers.toy_graph import cut_at
from tests.helpers.toy_model import RAMPS, left_at
from tests.integration.conftest import Put

SLOWER = 4.0  # launches take four times as long as in the bench, so that a busy machine weighs little beside them
GOODPUT_ERROR = 0.1  # of the live figure; Poisson arrivals are the same in both
P50_ERROR = 0.5  # of the live figure, with other tests on the same cores; `make bench-fidelity` has the true error


def test_pipelines_side_by_side_answer_as_one(leisurely: str, lead: Callable[[Plan], None]) -> None:
    lead(Plan(cut_at(2).placements, beside=(cut_at(),)))
    wanted = [[block, label] for label in range(10) for block in range(4)]
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(lambda pair: predict(leisurely, [pair]), wanted))
    for (block, label), (output,) in zip(wanted, replies, strict=True):
        assert (output["label"], output["exit_block"]) == (label, left_at(block, RAMPS))
    splits = ask(leisurely, "GET", "/stats")[1]["splits"]
    assert [each["blocks"] for each in splits] == [[0, 2], [2, 4], [0, 4]]
    assert len({each["group"] for each in splits}) == 3
    assert all(each["launches"] for each in splits), "every pipeline took its share"


def test_the_simulator_says_what_the_live_graph_does(deployed: Put, tmp_path: Path) -> None:
    """As `make bench-fidelity`, but on slower devices and with wider bounds."""
    plan, facts = PLANS["2 splits, mixed"], profile(SLOWER)
    case = Case("2 splits, mixed", "poisson", load=0.8, seconds=5.0, slo_s=SLOWER * SLO_S)
    file = json.loads(serve_file(tmp_path, plan, facts, 1e3 * case.slo_s).read_text())
    url, promised = f"{deployed(*file['applications'])}/predict", promise_per_s(plan, facts)
    calibrated = calibration([measured(url, plan, facts, promised)])
    row = compare(live(case, url, promised), plan, facts_for(facts, plan.devices()), calibrated)
    assert abs(row.error("goodput_per_s")) < GOODPUT_ERROR, row
    assert abs(row.error("p50_ms")) < P50_ERROR, row
