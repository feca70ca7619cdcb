"""What users of other servers bring along works on the real front, through the proxy and past Serve's own handling."""

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import ViTImageProcessor
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from tests.helpers.asking import ask
from tests.helpers.command_lines import material
from tests.helpers.tiny_networks import hugging_face
from tests.integration.conftest import Put


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small vision transformer without ramps."""
    folder = tmp_path / "vit"
    hugging_face("vit").save_pretrained(folder)
    ViTImageProcessor(do_resize=False, do_rescale=False, do_normalize=False).save_pretrained(folder)
    return folder


def application(name: str, folder: Path, prefix: str = "/", **fields: Any) -> dict[str, Any]:
    arguments = {"model": str(folder), "slo_ms": 60_000, **fields}
    return {"name": name, "import_path": "isobatch.deployments.app:build", "route_prefix": prefix, "args": arguments}


def test_every_interface_answers_and_a_file_is_answered_through_the_server(
    deployed: Put, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    material(tmp_path)
    monkeypatch.chdir(tmp_path)
    texts = application("texts", tmp_path / "my-bert", relevant_label="LABEL_1")
    base = deployed(texts, application("pictures", checkpoint, "/pictures"))

    status, classified = ask(base, "POST", "/classify", {"input": ["a good film"]})
    assert (status, classified["data"][0]["num_classes"]) == (200, 3)
    status, reply = ask(base, "POST", "/predict", {"inputs": "a good film", "scores": "all"})
    listed = {each["label"]: each["score"] for each in reply["outputs"][0]["scores"]}
    assert [listed[label] for label in range(3)] == pytest.approx(classified["data"][0]["probs"], abs=1e-5)
    documents = ["a good film", "a dull film"]
    status, ranking = ask(base, "POST", "/v1/rerank", {"query": "good", "documents": documents, "top_n": 1})
    assert (status, len(ranking["results"])) == (200, 1)
    ranked = ask(base, "POST", "/rerank", {"query": "good", "texts": documents})[1]
    assert (ranked[0]["index"], len(ranked)) == (ranking["results"][0]["index"], 2)
    assert ask(base, "POST", "/score", {"text_1": "good", "text_2": documents})[0] == 200
    assert ask(base, "POST", "/tokenize", {"inputs": "good"})[0] == ask(base, "GET", "/info")[0] == 200
    status, refused = ask(base, "POST", "/classify", {"messages": []})
    assert (status, refused["error"]["type"]) == (400, "BadRequestError")

    content = BytesIO()
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(content, "PNG")
    status, pictured = ask(base, "POST", "/pictures/predict", {"inputs": base64.b64encode(content.getvalue()).decode()})
    arrays = ask(base, "POST", "/pictures/predict", {"inputs": np.full((8, 8), 99).tolist()})[1]
    assert (status, pictured["outputs"][0]["score"]) == (200, pytest.approx(arrays["outputs"][0]["score"], abs=1e-5))

    done = CliRunner().invoke(app, ["predict", "others.csv", "--url", base, "--scores", "all", "--out", "a.jsonl"])
    assert done.exit_code == 0, done.exception
    answers = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert [answer["row"] for answer in answers] == list(range(1, 121))
    assert all(len(answer["scores"]) == 3 for answer in answers)
