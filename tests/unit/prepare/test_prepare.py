"""All of `isobatch prepare` on a tiny network: the written directory holds what was measured, and is served so."""

from pathlib import Path

import pytest
import torch

from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.prepare.data import rows
from isobatch.deployments.prepare.sample import LabelNames, draw
from isobatch.profiles.evidence import EVIDENCE
from tests.helpers.tiny_networks import hugging_face
from tests.unit.prepare.conftest import Run, reviews, rules_in

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.usefixtures("no_picture")
def test_which_columns_are_read_is_said_and_labels_may_have_other_names(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "a.csv")
    text = data.read_text().replace("text,label", "text;label")
    for number, name in enumerate(("bad", "so-so", "good")):
        text = text.replace(f",{number}\n", f";{name}\n")
    data.write_text(text)
    options = ("--data", data, "--out", tmp_path / "out", "--delimiter", ";")
    assert run(checkpoint, *options, "--labels", "bad=0,so-so=1,good=2") == 0
    assert "a.csv: text from 'text', label from 'label'" in capsys.readouterr().out
    assert run(checkpoint, *options, "--force") == 2
    assert "--labels" in capsys.readouterr().err


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(
    ("policy", "dtype"), [("confidence", "float32"), ("patience", "float32"), ("confidence", "bfloat16")]
)
def test_what_is_written_will_be_served(run: Run, checkpoint: Path, tmp_path: Path, policy: str, dtype: str) -> None:
    """The prepared network, loaded and run, leaves and answers as its exits.json says."""
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    options = ("--policy", policy, "--dtype", dtype, "--max-accuracy-loss", "40%")
    assert run(checkpoint, "--data", data, "--out", out, *options) == 0
    model, rules = load(out, dtype=dtype), rules_in(out)
    sample = draw(rows(data), data, LabelNames(model.labels), 20_000)
    part = sample.parts.test
    assert sample.labels is not None
    exits = model.run(model.encode([sample.values[row] for row in part]), model.num_blocks, model.ramp_blocks).exits
    assert model.ramp_blocks == (0, 1, 2)
    for ramp in rules["ramps"]:
        assert ramp["survival"] == pytest.approx((exits.blocks > ramp["block"]).mean())
    assert rules["exit_accuracy"] == pytest.approx((exits.labels == sample.labels[part]).mean())
    assert rules["mean_depth_share"] == pytest.approx((exits.blocks + 1).mean() / model.num_blocks)
    assert rules["mean_depth_share"] < 1


def test_the_result_is_the_same_checkpoint_without_pickles(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / "out"
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", out, "--ramp", "pooler") == 0
    assert rules_in(out)["kind"] == "pooler"
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "ramps.safetensors", "exits.json", "exits.png", EVIDENCE} <= names
    assert {Path(name).suffix for name in names} <= {".json", ".safetensors", ".png", ".txt", ".npz"}
    before = hugging_face("bert").state_dict()
    after = AutoModelForSequenceClassification.from_pretrained(out).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.usefixtures("no_picture")
def test_features_are_computed_once_and_the_result_is_reproducible(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = reviews(tmp_path / "a.csv")
    assert run(checkpoint, "--data", data, "--out", tmp_path / "first") == 0

    def refuse(*_: object) -> None:
        raise AssertionError("features were computed again")

    monkeypatch.setattr(TorchModel, "features", refuse)
    assert run(tmp_path / "first", "--data", data, "--out", tmp_path / "again") == 0
    for name in ("exits.json", "ramps.safetensors"):
        first, again = ((tmp_path / folder / name).read_bytes() for folder in ("first", "again"))
        assert first == again.replace(b'"checkpoint": "first"', b'"checkpoint": "network"')


@pytest.mark.usefixtures("no_picture")
def test_recorded_inputs_without_labels_follow_the_network(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv", labelled=False), "--out", out) == 0
    assert "no column of labels" in " ".join(capsys.readouterr().out.split())
    assert rules_in(out)["full_accuracy"] == 1.0
    assert rules_in(out)["notes"]["targets"] == "the network's own predictions"
    assert rules_in(out)["promise"]["metric"] == "agreement"
