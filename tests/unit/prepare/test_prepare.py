"""All of `isobatch prepare` on a tiny network: the written directory holds what was measured, and is served so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.deployments.folders import PLAN, PROFILE, STEPS
from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.prepare import features
from isobatch.deployments.prepare.data import rows
from isobatch.deployments.prepare.sample import LabelNames, draw
from isobatch.profiles.evidence import EVIDENCE
from tests.helpers.commands import ran
from tests.helpers.preparing import check_exits
from tests.helpers.tiny_networks import hugging_face
from tests.unit.prepare.conftest import Run, printed, reviews, rules_in

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.usefixtures("no_picture")
def test_which_columns_are_read_is_said_and_labels_may_have_other_names(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "a.csv")
    text = data.read_text().replace("text,label", "text;label")
    for number, name in enumerate(("bad", "so, so", "a=b")):
        text = text.replace(f",{number}\n", f";{name}\n")
    data.write_text(text)
    options = ("--data", data, "--out", tmp_path / "out", "--delimiter", ";")
    assert run(checkpoint, *options, "--labels", 'bad=0,"so, so"=1,a=b=2') == 0
    assert "a.csv: text from 'text', label from 'label'" in capsys.readouterr().out
    assert run(checkpoint, *options, "--force", "--labels", "bad=0,a=b=2") == 2
    assert """--labels "so, so"=NUMBER,OTHER=NUMBER""" in capsys.readouterr().err


@pytest.mark.usefixtures("no_picture")
def test_texts_that_are_cut_are_counted_also_where_their_features_are_known(
    run: Run, checkpoint: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "a.csv")
    header, *lines = data.read_text().splitlines()
    data.write_text("\n".join([header, *("good " * 30 + line for line in lines[:7]), *lines[7:]]) + "\n")
    sentence = "7 of 120 texts are longer than the 24 tokens that the network reads: the rest of each is cut off"
    for _ in range(2):
        assert run(checkpoint, "--data", data, "--out", out, "--force") == 0
        assert sentence in printed(capsys)
        assert rules_in(out)["notes"]["cut"] == sentence


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(
    ("policy", "dtype"), [("confidence", "float32"), ("patience", "float32"), ("confidence", "bfloat16")]
)
def test_what_is_written_will_be_served(
    run: Run, asked: tuple[object, ...], out: Path, tmp_path: Path, policy: str, dtype: str
) -> None:
    """The prepared network, loaded and run, leaves and answers as its exits.json says."""
    assert run(*asked, "--policy", policy, "--dtype", dtype, "--max-accuracy-loss", "40%") == 0
    model, data = load(out, dtype=dtype), tmp_path / "a.csv"
    sample = draw(rows(data), data, LabelNames(model.labels), 20_000)
    part = sample.parts.test
    answers = model.predict([sample.values[row] for row in part])
    assert model.ramp_blocks == (0, 1, 2)
    right = np.array([each.label for each in answers]) == sample.labels[part]
    assert check_exits(out, answers, 4)["exit_accuracy"] == pytest.approx(right.mean())


def test_the_result_is_the_same_checkpoint_without_pickles_and_without_the_plan_of_other_exits(
    run: Run, asked: tuple[object, ...], checkpoint: Path, out: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    for name in (PLAN, PROFILE, STEPS):
        (checkpoint / name).write_text("{}")
    assert run(*asked, "--ramp", "pooler") == 0
    assert rules_in(out)["kind"] == "pooler"
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "ramps.safetensors", "exits.json", "exits.png", EVIDENCE} <= names
    assert {Path(name).suffix for name in names} <= {".json", ".safetensors", ".png", ".txt", ".npz"}
    assert not {PLAN, PROFILE, STEPS} & names
    before = hugging_face("bert").state_dict()
    after = AutoModelForSequenceClassification.from_pretrained(out).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.usefixtures("no_picture")
def test_features_are_computed_once_for_a_version_of_transformers_and_the_result_is_reproducible(
    run: Run, asked: tuple[object, ...], out: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*asked) == 0

    def refuse(*_: object) -> None:
        raise AssertionError("features were computed again")

    with monkeypatch.context() as patched:
        patched.setattr(TorchModel, "features", refuse)
        assert run(out, "--data", tmp_path / "a.csv", "--out", tmp_path / "again") == 0
    for name in ("exits.json", "ramps.safetensors"):
        again = (tmp_path / "again" / name).read_bytes()
        assert (out / name).read_bytes() == again.replace(b'"checkpoint": "out"', b'"checkpoint": "network"')
    monkeypatch.setattr(features, "version", lambda _: "5.99.0")
    assert run(*asked, "--force") == 0
    assert sum(path.is_dir() for path in cache.iterdir()) == 2


@pytest.mark.usefixtures("no_picture")
def test_evaluate_warns_of_inputs_that_ramps_were_trained_on(
    run: Run, asked: tuple[object, ...], out: Path, tmp_path: Path
) -> None:
    assert run(*asked) == 0
    header, *lines = (tmp_path / "a.csv").read_text().splitlines()
    (tmp_path / "b.csv").write_text("\n".join([header, *lines[:-1]]))
    for name, is_known in (("a.csv", True), ("b.csv", False)):
        evaluated = " ".join(ran("evaluate", out, "--data", tmp_path / name, "--device", "cpu").split())
        assert ("ramps were trained on inputs of a.csv, and are surer of them" in evaluated) == is_known


@pytest.mark.usefixtures("no_picture")
def test_rows_of_a_directory_that_datasets_has_saved_are_known_again(
    run: Run, checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    table = pytest.importorskip("pyarrow.csv").read_csv(reviews(tmp_path / "a.csv"))
    from pyarrow import ipc

    def saved(name: str, part: Any) -> None:
        (data := tmp_path / "saved").mkdir(exist_ok=True)
        with ipc.new_stream(data / name, table.schema) as stream:
            stream.write_table(part)

    def evaluated() -> str:
        return " ".join(ran("evaluate", out, "--data", tmp_path / "saved", "--device", "cpu").split())

    saved("data-00000-of-00002.arrow", table.slice(0, 70))
    saved("data-00001-of-00002.arrow", table.slice(70))
    assert run(checkpoint, "--data", tmp_path / "saved", "--out", out) == 0
    saved("cache-5a3e.arrow", table.slice(0, 1))  # what `datasets` keeps of a call of map
    assert "ramps were trained on inputs of saved, and are surer of them" in evaluated()
    saved("data-00001-of-00002.arrow", table.slice(71))
    assert "ramps were trained on" not in evaluated()


@pytest.mark.usefixtures("no_picture")
def test_recorded_inputs_without_labels_follow_the_network(
    run: Run, checkpoint: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv", labelled=False), "--out", out) == 0
    output = printed(capsys)
    assert "no column of labels" in output
    assert "longer than" not in output
    rules = rules_in(out)
    assert rules["full_accuracy"] == 1.0
    assert rules["notes"]["targets"] == "the network's own predictions"
    assert rules["promise"]["metric"] == "agreement"
