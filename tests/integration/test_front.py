"""The real front: HTTP through the proxy, refusals too, and no split where there is no plan."""

from typing import Any

import pytest

from isobatch.profiles.errors import UserError
from tests.helpers.asking import ask, eventually, predict
from tests.helpers.toy_graph import fleets
from tests.integration.conftest import Put

UNPLANNED: dict[str, Any] = {
    "name": "toy",
    "import_path": "isobatch.deployments.app:build",
    "args": {
        "model": "/models/toy",
        "loader": "tests.helpers.toy_model:load",
        "slo_ms": 60_000,  # so that a busy machine refuses nothing
        "max_inputs": 50,
        "max_body_bytes": 100_000,
        "drain_s": 1.0,
        "replicas": 2,
    },
    "deployments": [{"name": "network", "ray_actor_options": {"num_cpus": 0.5}}],  # room for two
}


@pytest.fixture
def unplanned(deployed: Put) -> str:
    """The address of two fronts, each of which computes all by itself."""
    return deployed(UNPLANNED)


@pytest.mark.long
@pytest.mark.beside("graph", last=3)
def test_where_no_plan_keeps_the_slo_the_start_says_so_and_without_a_plan_no_split_is_left(
    deployed: Put, canary_toy: dict[str, Any]
) -> None:
    """Though a deployment between them has failed, whose deployer never started."""
    deployed(canary_toy)  # as the test before leaves it
    assert fleets()
    with pytest.raises(UserError, match="SLO"):
        deployed(canary_toy | {"args": canary_toy["args"] | {"plan": None, "devices": {"cpu": 2}, "slo_ms": 0.5}})
    assert fleets()
    base = deployed(UNPLANNED)
    assert eventually(lambda: not fleets())
    assert predict(base, [[3, 7]])[0]["label"] == 7


@pytest.mark.beside("graph", last=3)
def test_either_of_two_fronts_without_a_plan_knows_what_both_have_answered(unplanned: str) -> None:
    before = ask(unplanned, "GET", "/stats")[1]["requests"]["answered"]
    for number in range(1, 5):
        assert predict(unplanned, [[3, 7]])[0]["label"] == 7
        stats = ask(unplanned, "GET", "/stats")[1]
        assert stats["requests"]["answered"] - before == number
        assert (stats["splits"][0]["replicas"], len(stats["fronts"])) == (2, 2)


@pytest.mark.beside("graph", last=3)
@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b'{"inputs": [["a", 1]]}', 422, "input 0 is ['a', 1]"),
        (b" " * 100_001, 413, "100001 bytes: 100000 are allowed"),
        (b" " * 5_000_000, 413, "5000000 bytes: 100000 are allowed"),
    ],
)
def test_what_is_wrong_is_said_through_the_proxy_too(unplanned: str, body: bytes, status: int, sentence: str) -> None:
    before = ask(unplanned, "GET", "/stats")[1]["exits"]
    result, reply = ask(unplanned, "POST", "/predict", body)
    assert (result, sentence in reply["error"]) == (status, True), reply
    assert ask(unplanned, "GET", "/stats")[1]["exits"] == before
