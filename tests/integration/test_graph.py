"""A plan as a real graph: splits in applications of their own, survivors merged between them, gone with their front."""

import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from profiles.errors import UserError
from tests.helpers.asking import ask, eventually, predict
from tests.helpers.toy_graph import application, cut_at, fleets
from tests.helpers.toy_model import BLOCKS, RAMPS, left_at

Put = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that share an application: the same file, deployed again, changes nothing and takes no time."""
    return tmp_path_factory.mktemp("toy")


def test_hundreds_in_flight_each_get_their_own_answer(deployed: Put, folder: Path) -> None:
    base = deployed(application(folder, cut_at(2)))
    wanted = [[block, label] for label in range(10) for block in range(4)] * 10
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda pair: predict(base, [pair]), wanted))
    for (block, label), (output,) in zip(wanted, replies, strict=True):
        assert (output["label"], output["exit_block"]) == (label, left_at(block, RAMPS))
        assert [step["block"] for step in output["splits"]] == ([0] if output["exit_block"] < 2 else [0, 2])
    assert ask(base, "GET", "/readyz")[0] == 200


def test_the_open_inference_protocol_answers_through_the_graph_too(deployed: Put, folder: Path) -> None:
    base = deployed(application(folder, cut_at(2)))
    tensor = {"name": "inputs", "shape": [2, 2], "datatype": "INT64", "data": [[3, 7], [0, 3]]}
    status, reply = ask(base, "POST", "/v2/models/toy/infer", {"inputs": [tensor]})
    assert (status, reply["outputs"][0]["data"]) == (200, [7, 3])


def test_what_happens_is_told_to_prometheus(deployed: Put, folder: Path) -> None:
    import ray

    base = deployed(application(folder, cut_at(2)))
    predict(base, [[3, 7], [0, 3]])
    metrics = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def told() -> bool:
        text = urllib.request.urlopen(metrics, timeout=10).read().decode()
        return all(
            f"isobatch_{name}" in text for name in ("requests", "exits", "launches", "batch_fill", "latency_ms_bucket")
        )

    assert eventually(told)


def test_a_front_is_not_ready_while_a_split_has_no_replica(deployed: Put, folder: Path) -> None:
    from ray import serve

    base = deployed(application(folder, cut_at(2)))
    assert eventually(lambda: len(fleets()) == 1), fleets()  # those of another application have gone
    serve.delete(fleets()[0])
    status, reply = ask(base, "GET", "/readyz")
    assert (status, "cpu-1" in reply["error"]) == (503, True)
    assert ask(base, "GET", "/healthz")[0] == 200


def test_another_plan_replaces_the_splits(deployed: Put, tmp_path: Path) -> None:
    deployed(application(tmp_path, cut_at(2)))
    before = fleets()
    base = deployed(application(tmp_path, cut_at(1, 2), "load_slow"))
    assert [step["block"] for step in predict(base, [3, 5])[0]["splits"]] == [0, 1, 2]
    assert eventually(lambda: len(fleets()) == 1), fleets()
    assert fleets() != before  # the loader is another: so are the replicas


def test_several_fronts_share_the_splits_and_tell_one_story(deployed: Put, tmp_path: Path) -> None:
    several = application(tmp_path, cut_at(2))
    several["args"] |= {"front_replicas": 2}
    several["deployments"] = [{"name": "front", "ray_actor_options": {"num_cpus": 0.1}}]  # however few cores there are
    base = deployed(several)
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda label: predict(base, [3, label % 10]), range(120)))
    assert [output["label"] for (output,) in replies] == [number % 10 for number in range(120)]
    assert ask(base, "GET", "/readyz")[0] == 200
    for _ in range(4):  # whichever of them is asked
        stats = ask(base, "GET", "/stats")[1]
        assert stats["requests"]["answered"] == 120
        assert (len(stats["fronts"]), stats["exits"]["3"]) == (2, 120)


def test_without_a_file_the_plan_is_made_at_the_start(deployed: Put, tmp_path: Path) -> None:
    made = application(tmp_path, cut_at(2))
    made["args"] |= {"plan": None, "devices": {"cpu": 2}}
    base = deployed(made)
    assert [output["label"] for output in predict(base, [[3, 7], [0, 3]])] == [7, 3]
    stats = ask(base, "GET", "/stats")[1]
    planned = stats["splits"]
    assert "on 2 cpu" in stats["plan"] or "on 1 cpu" in stats["plan"]
    assert (planned[0]["blocks"][0], planned[-1]["blocks"][1]) == (0, BLOCKS)
    made["args"] |= {"slo_ms": 0.5}
    with pytest.raises(UserError, match="SLO"):
        deployed(made)


def test_what_was_admitted_is_answered_before_the_splits_go(deployed: Put, tmp_path: Path) -> None:
    from ray import serve

    base = deployed(application(tmp_path, cut_at(2), "load_slow"))  # four blocks of half a second
    with ThreadPoolExecutor(1) as pool:
        slow: Future[list[dict[str, Any]]] = pool.submit(predict, base, [[3, 7], [0, 3]])
        time.sleep(0.3)
        serve.delete("toy")
        assert [output["label"] for output in slow.result()] == [7, 3]
    assert eventually(lambda: not fleets()), fleets()


def test_without_a_plan_any_more_no_split_is_left(deployed: Put, folder: Path) -> None:
    planned = application(folder, cut_at(2))
    deployed(planned)
    assert fleets()
    arguments = {name: planned["args"][name] for name in ("model", "loader")}
    base = deployed(planned | {"args": arguments})
    assert eventually(lambda: not fleets())
    assert predict(base, [[3, 7]])[0]["label"] == 7


def test_a_plan_for_another_network_is_one_sentence(deployed: Put, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="covers 5 blocks, the network has 4") as error:
        deployed(application(tmp_path, cut_at(2, blocks=5)))
    assert "\n" not in str(error.value)


def test_a_split_that_cannot_load_says_why(deployed: Put, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights here") as error:
        deployed(application(tmp_path, cut_at(2), "load_at_the_front_only"))
    assert "\n" not in str(error.value)
