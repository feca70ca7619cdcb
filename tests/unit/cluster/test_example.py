"""The request shown after the start fits the checkpoint; the reason shown after a failure is the replica's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.commands.serve import example
from isobatch.cluster.serving.serve_file import serve_file, with_demo


def body_for(folder: Path, config: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    request = example(serve_file(folder, {}))
    return None if request is None else json.loads(request[1])["inputs"]


def test_the_demo_is_asked_about_a_digit() -> None:
    request = example(serve_file(None, {}))
    assert request is not None
    (image,) = json.loads(request[1])["inputs"]
    assert [len(row) for row in image] == [8] * 8
    assert max(map(max, image)) == 16


def test_a_checkpoint_is_asked_about_what_it_reads(tmp_path: Path) -> None:
    assert body_for(tmp_path, {"vocab_size": 10}) == ["a text to be classified"]
    labels_words = {"vocab_size": 10, "architectures": ["BertForTokenClassification"]}
    assert body_for(tmp_path, labels_words) == ["a text whose words are to be labelled"]
    assert body_for(tmp_path, {"num_channels": 1, "image_size": 2}) == [[[0.5, 0.5], [0.5, 0.5]]]
    (image,) = body_for(tmp_path, {"num_channels": 3})
    assert (len(image), len(image[0]), image[0][0]) == (224, 224, [0.5, 0.5, 0.5])
    assert body_for(tmp_path, {"model_type": "other"}) is None


def test_the_demo_stands_where_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.named.DEMO", "tempfile:gettempdir")
    content = serve_file(None, {"max_batch": 4})
    complete = with_demo(content)
    arguments = complete["applications"][0]["args"]
    assert Path(arguments.pop("model")).is_dir()
    assert arguments.pop("name") == "demo"
    assert complete == content
    named = serve_file(tmp_path, {})
    assert with_demo(named) == named
