"""What a node lacks is one sentence that names the node's cure; a node like ours lacks nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.serving import readiness
from isobatch.cluster.serving.readiness import NodeHas, NodeNeeds, look, missing
from isobatch.cluster.serving.serve_file import ARBITER, CONTROLLER, DECODER
from isobatch.deployments.ray_settings import NODE_SETTINGS
from isobatch.profiles.errors import UserError

HERE = NodeHas({"ray": "2.60.0"}, "c0de", {"/models/plan.json": "a1"}, dict(NODE_SETTINGS))
SET = "RAY_SERVE_ENABLE_HA_PROXY"


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        (replace(HERE, settings=dict(NODE_SETTINGS) | {SET: None}), f"{SET} is not set where it should be 1"),
        (replace(HERE, settings=dict(NODE_SETTINGS) | {SET: "0"}), f"{SET} is 0 where it should be 1"),
        (replace(HERE, no_proxy="it is ''"), "HAProxy cannot run there"),
        (replace(HERE, versions={"ray": "2.59.0"}), "ray is 2.59.0 there and 2.60.0 here"),
        (replace(HERE, code="01d"), "isobatch itself is another version there"),
        (replace(HERE, files={"/models/plan.json": ""}), "/models/plan.json is not there: copy it"),
        (replace(HERE, files={"/models/plan.json": "b2"}), "/models/plan.json has another content there"),
        (replace(HERE, unset=["KEY"]), "the environment variable KEY is not set there"),
        (replace(HERE, taken=[8000]), "port 8000 is taken there"),
        (replace(HERE, unfetched="s3://a/b: needs the extra [s3]"), "s3://a/b: needs the extra [s3]"),
    ],
)
def test_each_thing_that_is_missing_is_one_sentence(there: NodeHas, sentence: str) -> None:
    (result,) = missing(HERE, there)
    assert sentence in result
    assert "\n" not in result


@pytest.fixture(autouse=True)
def without_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "serve_client", lambda: None)


def test_a_look_finds_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NODE_SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/bin/true")
    monkeypatch.setenv("KEY", "k")
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "plan.json").write_text("{}")
    files = [str(tmp_path), str(tmp_path / "plan.json"), "/nowhere"]
    result = look(NodeNeeds(files, ["KEY", "OTHER"], []))
    assert result.settings == NODE_SETTINGS
    assert [bool(result.files[path]) for path in files] == [True, True, False]
    assert (result.unset, result.no_proxy) == (["OTHER"], "")
    before = result.files[str(tmp_path)]
    (tmp_path / "ramps.safetensors").write_text("ramps")
    assert look(NodeNeeds(files, [], [])).files[str(tmp_path)] not in ("", before)


def test_of_a_decoder_all_that_it_reads_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k")
    files = {name: str(tmp_path / name) for name in ("plan", "profile")} | {"model": "s3://models/it"}
    fields = {"import_path": DECODER, "args": files | {"api_key_variable": "KEY", "grpc_port": 9001}}
    wanted = readiness.needs_of({"applications": [fields], "http_options": {"port": 8000}})
    assert wanted == NodeNeeds([files["plan"], files["profile"]], ["KEY"], [8000, 9001], ["s3://models/it"])


def test_the_keys_of_controllers_and_arbiters_are_looked_for_too() -> None:
    results = [
        {"import_path": CONTROLLER, "args": {"api_key_variable": "HERS"}},
        {"import_path": ARBITER, "args": {"api_key_variable": "HIS"}},
        {"import_path": CONTROLLER},
    ]
    wanted = readiness.needs_of({"applications": results, "http_options": {"port": 8000}})
    assert wanted.variables == ["HERS", "HIS"]


def test_a_node_that_does_not_answer_is_named_and_loopback_is_for_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import GetTimeoutError, NodeDiedError

    monkeypatch.setattr(readiness, "look", lambda _: HERE)
    content: dict[str, Any] = {"applications": [], "http_options": {"host": "0.0.0.0", "port": 8000}}
    for error, sentence in (
        (ModuleNotFoundError("No module named 'cluster'"), "isobatch is not installed there .*No module named"),
        (NodeDiedError("its node is dead"), "it has ended or does not answer .*dead"),
        (GetTimeoutError("timed out"), "it has ended or does not answer .*timed out"),
    ):
        answers = [("10.0.0.1", HERE), ("10.0.0.2", error)]
        monkeypatch.setattr(readiness, "each_node", lambda *_, answers=answers: answers)
        with pytest.raises(UserError, match=rf"node 10\.0\.0\.2: {sentence}"):
            readiness.check_nodes(content)
    monkeypatch.setattr(readiness, "each_node", lambda *_: [("10.0.0.1", HERE), ("10.0.0.2", HERE)])
    readiness.check_nodes(content)  # nodes like ours lack nothing
    content["http_options"]["host"] = "127.0.0.1"
    with pytest.raises(UserError, match=r"host = 127\.0\.0\.1: fronts on other nodes could not be reached"):
        readiness.check_nodes(content)
