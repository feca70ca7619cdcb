"""Two applications on one Ray: each is asked, counted and ended by itself."""

import time
from pathlib import Path
from typing import Any

import pytest

from isobatch.deployments import ray_facts
from tests.helpers.asking import Load, ask, eventually, predict
from tests.helpers.toy_graph import application, cut_at, fleets
from tests.helpers.toy_model import BLOCKS
from tests.integration.conftest import Put

pytestmark = [pytest.mark.beside("graph", last=2), pytest.mark.long]


def test_an_application_comes_as_a_canary_while_one_serves_and_answers_its_share_until_it_answers_otherwise(
    graph: str, deployed: Put, canary_toy: dict[str, Any], tmp_path: Path
) -> None:
    """A new front starts beside the old one: nobody waits for it. Rarely a client is cut off as the old one ends."""
    other = application(tmp_path, cut_at(), loader="load_retrained", cpus_per_replica=0.25, name="retrained")
    other |= {"name": "toy.b", "route_prefix": "/b"}  # as names of toy's own replicas begin
    other["deployments"] = [{"name": "front", "ray_actor_options": {"num_cpus": 0.125}}]  # however few cores there are

    def answered(label: int, prefix: str = "") -> tuple[str, int]:
        status, reply = ask(graph, "POST", f"{prefix}/predict", {"inputs": [3, label]})
        assert status == 200, reply
        return reply["model"], reply["outputs"][0]["label"]

    with Load(graph, clients=4) as load:
        began_s = time.monotonic()
        deployed(canary_toy)  # without the canary
        took_s = time.monotonic() - began_s
    assert len(load.wrong) <= 1, load.wrong
    assert load.longest_s - load.stalled_s < 0.3 * took_s
    assert {answered(7) for _ in range(10)} == {("toy", 7)}
    assert eventually(lambda: len(fleets()) == 1), fleets()  # the replicas of the old front have ended
    before, there = set(fleets()), processors()
    deployed(canary_toy, other)
    (fleet,) = set(fleets()) - before - {"toy.b"}
    assert [ray_facts.front_of(name) for name in (fleet, *before)] == ["toy.b", "toy"]
    assert there - processors() == 0.125 + 0.25, "the other's front and its replica"
    assert eventually(lambda: answered(7)[0] == "retrained")
    assert {answered(7) for _ in range(50)} == {("toy", 7), ("retrained", 7)}
    assert answered(7, "/b") == ("retrained", 7)
    assert eventually(lambda: answered(8) == ("retrained", 9))
    assert eventually(lambda: answered(8) and ask(graph, "GET", "/stats")[1]["canary"]["withdrawn_by"] == 1)
    assert {answered(8) for _ in range(20)} == {("toy", 8)}
    own, others = (ask(graph, "GET", f"{prefix}/stats")[1]["requests"] for prefix in ("", "/b"))
    assert others["answered"] <= own["answered"] - 20, "each application counts its own"
    assert others["failed"] == 0
    deployed(canary_toy)
    assert eventually(lambda: set(fleets()) == before)
    assert answered(7) == ("toy", 7)
    assert ask(graph, "POST", "/b/predict", {"inputs": [3, 7]})[0] == 404


def processors() -> float:
    """What there is for toy."""
    return float(sum(node.get("CPU", 0.0) for node in ray_facts.nodes_beside_others("toy")))


@pytest.mark.beside("graph", last=4)
def test_other_replicas_replace_those_that_leave_them_no_room(deployed: Put, tmp_path: Path) -> None:
    """The old ones end with their front, also if more fronts follow; the new ones have waited for their processors.

    Without a file, the plan is made at the start.
    """
    most = 0.75 * processors()
    whole = application(tmp_path, cut_at(), cpus_per_replica=most, name="whole")
    whole["args"] |= {"plan": None, "devices": {"cpu": 1}}
    whole["deployments"] = [{"name": "front", "ray_actor_options": {"num_cpus": 0.125}}]
    base = deployed(whole)
    assert [output["label"] for output in predict(base, [[3, 7], [0, 3]])] == [7, 3]
    stats = ask(base, "GET", "/stats")[1]
    assert "on 1 cpu" in stats["plan"]
    assert (stats["splits"][0]["blocks"][0], stats["splits"][-1]["blocks"][1]) == (0, BLOCKS)
    assert eventually(lambda: len(fleets()) == 1), fleets()  # Serve lists those of the last deployment until they end
    (before,) = fleets()
    deployed(whole | {"args": whole["args"] | {"drain_s": 29.0, "front_replicas": 2}})
    assert eventually(lambda: len(fleets()) == 1), fleets()
    assert eventually(lambda: len(ask(base, "GET", "/stats")[1]["fronts"]) == 2)
    (after,) = fleets()
    assert after != before
    assert ask(base, "POST", "/predict", {"inputs": [3, 7]})[1]["model"] == "whole"
