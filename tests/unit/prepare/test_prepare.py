"""The whole of `isobatch prepare` on a tiny network: what is written is what was measured, and will be served."""

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cluster import cli
from deployments.models import TorchModel, load
from deployments.models.ramps import read_rules
from deployments.prepare import pipeline
from deployments.prepare.data import rows
from deployments.prepare.features import features
from deployments.prepare.sample import LabelNames, draw
from optimizer.plan import read_plan
from profiles.errors import UserError
from profiles.evidence import EVIDENCE, Evidence
from profiles.exits import ExitProfile
from profiles.files import Profile, save
from profiles.files import load as load_profile
from profiles.latency import LatencyTable
from profiles.lengths import Lengths
from profiles.promise import promise_in
from tests.helpers.exit_tables import exit_table
from tests.helpers.tiny_networks import NUM_LABELS, hugging_face

WORDS = ["the", "a", "film", "is", "was", "not", "good", "bad", "great", "dull", "and", "but"]
COUNT = 120

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "isobatch" / "features"


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest on so small a network."""
    monkeypatch.setattr(pipeline, "draw_exits", lambda _, path: path.touch())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from transformers import BertTokenizer

    folder = tmp_path / "network"
    hugging_face("bert").save_pretrained(folder)
    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)}).save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def reviews(path: Path, labelled: bool = True) -> Path:
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(COUNT)]
    labels = random.integers(NUM_LABELS, size=COUNT)
    table = [f"{text},{label}" if labelled else text for text, label in zip(lines, labels, strict=True)]
    path.write_text("\n".join(["text,label" if labelled else "text", *table]) + "\n")
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command as a user types it: its exit code."""

    def typed(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["isobatch", "prepare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    return typed


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


def test_a_checkpoint_without_a_tokenizer_stops_before_the_data_is_read(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert run(checkpoint, "--data", tmp_path / "nowhere.csv", "--out", tmp_path / "out") == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_loaded(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no-folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    monkeypatch.setattr(pipeline, "load", None)
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", tmp_path / "out") == 2
    assert "isobatch cannot be written: Not a directory: XDG_CACHE_HOME=DIR names" in capsys.readouterr().err


def rules_in(folder: Path) -> dict[str, Any]:
    rules: dict[str, Any] = json.loads((folder / "exits.json").read_text())
    return rules


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(
    ("policy", "dtype"), [("confidence", "float32"), ("patience", "float32"), ("confidence", "bfloat16")]
)
def test_what_is_written_is_what_will_be_served(
    run: Run, checkpoint: Path, tmp_path: Path, policy: str, dtype: str
) -> None:
    """The prepared network, loaded and run, leaves and answers as its exits.json says."""
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    told = ("--policy", policy, "--dtype", dtype, "--max-accuracy-loss", "40%")
    assert run(checkpoint, "--data", data, "--out", out, *told) == 0
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


def test_the_result_is_still_the_same_checkpoint_and_holds_no_pickle(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
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
def test_ramps_are_made_from_blocks_in_the_precision_that_is_served(
    run: Run, checkpoint: Path, tmp_path: Path, cache: Path
) -> None:
    data, dtypes = reviews(tmp_path / "a.csv"), ("float32", "float16", "bfloat16", "int8")
    for dtype in dtypes:
        assert run(checkpoint, "--data", data, "--out", tmp_path / dtype, "--dtype", dtype) == 0
        assert rules_in(tmp_path / dtype)["dtype"] == dtype
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == len(dtypes), "features of their own"
    made = [load_file(tmp_path / dtype / "ramps.safetensors") for dtype in dtypes]
    assert {weights.dtype for ramps in made for weights in ramps.values()} == {torch.float32}
    assert len({ramps["0.weight"].numpy().tobytes() for ramps in made}) == len(dtypes)


@pytest.mark.usefixtures("no_picture")
def test_what_appears_meanwhile_is_not_replaced_unasked(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def while_another_writes(*told: Any) -> Any:
        out.mkdir()
        (out / "exits.json").write_text("another's")
        return features(*told)

    monkeypatch.setattr(pipeline, "features", while_another_writes)
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", out) == 2
    assert "exists already; --force replaces it" in capsys.readouterr().err
    assert (out / "exits.json").read_text() == "another's"


@pytest.mark.usefixtures("no_picture")
def test_names_in_brackets_are_told_as_they_are(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "recorded[may].csv", labelled=False)
    assert run(checkpoint, "--data", data, "--out", tmp_path / "out[v2]") == 0
    said = "".join(capsys.readouterr().out.split())
    assert "recorded[may].csvhasnocolumnoflabels" in said
    assert "out[v2]:aHuggingFacecheckpoint" in said


def test_a_network_whose_weights_are_broken_is_one_sentence(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training that diverged leaves weights that are no numbers."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["classifier.bias"] = weights["classifier.bias"] * float("nan")
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", tmp_path / "out") == 2
    assert "the network's answers are not finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("metric", ["accuracy", "agreement"])
def test_what_is_promised_is_written_said_and_tested_on_rows_of_its_own(
    run: Run, checkpoint: Path, tmp_path: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    told = ("--max-accuracy-loss", "40%", "--confidence", 0.9, "--metric", metric)
    assert run(checkpoint, "--data", data, "--out", out, *told) == 0
    rules = rules_in(out)
    promise = rules["promise"]
    assert (promise["metric"], promise["max_loss"], promise["confidence"], promise["rows"]) == (metric, 0.4, 0.9, 42)
    lost = rules["full_accuracy"] - rules["exit_accuracy"] if metric == "accuracy" else 1 - rules["agreement"]
    assert promise["lost"] == pytest.approx(lost)
    assert promise["lost"] < promise["bound"] <= 0.4
    assert promise_in(out) == read_rules(out / "exits.json").promise is not None
    said = " ".join(capsys.readouterr().out.split())
    moved = "lost" if lost >= 0 else "gained"
    assert f"at most 40 % of {metric} lost, 90 % sure (42 inputs {moved}" in said
    assert "takes 5 inputs to test it on" in said


@pytest.mark.usefixtures("no_picture")
def test_a_promise_may_be_about_the_class_that_loses_most(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    told = ("--max-accuracy-loss", "60%", "--confidence", 0.9, "--metric", "worst-class")
    assert run(checkpoint, "--data", data, "--out", out, *told) == 0
    rules = rules_in(out)
    promise, classes = rules["promise"], rules["classes"]
    assert promise["counted"] == min(each["inputs"] for each in classes)
    assert promise["lost"] == pytest.approx(max(each["full_recall"] - each["recall"] for each in classes))
    assert promise["lost"] < promise["bound"] <= 0.6
    said = " ".join(capsys.readouterr().out.split())
    assert "at most 60 % of any class's recall lost, 90 % sure (42 inputs lost" in said
    assert "inputs of each class to test it on" in said


def test_a_metric_that_counts_classes_needs_labels(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "a.csv", labelled=False)
    assert run(checkpoint, "--data", data, "--out", tmp_path / "out", "--metric", "macro-f1") == 2
    assert "has no column of labels, which --metric macro-f1 needs" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_picture")
def test_too_few_rows_promise_nothing_and_let_nobody_leave(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    assert run(checkpoint, "--data", data, "--out", out, "--max-accuracy-loss", "1%") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no input leaves early: 42 inputs to test it on are too few to promise 1 %; give 855 rows or more" in said
    assert run(checkpoint, "--data", data, "--out", tmp_path / "none", "--max-accuracy-loss", "0") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "that nothing at all is lost can hardly be shown" in said
    assert "takes" not in said
    model = load(out)
    images = model.encode(["a good film", "dull"])
    assert (model.run(images, model.num_blocks, model.ramp_blocks).exits.blocks == model.num_blocks - 1).all()


def test_rules_of_before_promises_still_load(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    rules = {"version": 1, "kind": "light", "ramps": [{"block": 0, "threshold": 0.1}], "notes": {"margin": 2.0}}
    (tmp_path / "exits.json").write_text(json.dumps(rules))
    assert read_rules(tmp_path / "exits.json").promise is None
    assert promise_in(tmp_path) is None
    assert promise_in(tmp_path / "nowhere") is None


@pytest.mark.usefixtures("no_picture")
def test_other_thresholds_are_served_as_they_were_measured(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    data, prepared, out = reviews(tmp_path / "a.csv"), tmp_path / "prepared", tmp_path / "tuned"
    assert (
        run(checkpoint, "--data", data, "--out", prepared, "--max-accuracy-loss", "60%", "--metric", "agreement") == 0
    )
    evidence = Evidence.read(prepared / EVIDENCE)
    np.testing.assert_allclose(
        evidence.test.candidates[evidence.prepared], [ramp["threshold"] for ramp in rules_in(prepared)["ramps"]]
    )
    pipeline.tune(prepared, out, evidence, evidence.shown([1], evidence.test.costs))
    model, rules = load(out), rules_in(out)
    sample = draw(rows(data), data, LabelNames(model.labels), 20_000)
    part = [sample.values[row] for row in sample.parts.test]
    exits = model.run(model.encode(part), model.num_blocks, model.ramp_blocks).exits
    assert set(exits.blocks.tolist()) == {1, 3}
    for ramp in rules["ramps"]:
        assert ramp["survival"] == pytest.approx((exits.blocks > ramp["block"]).mean())
    assert rules["mean_depth_share"] == pytest.approx((exits.blocks + 1).mean() / model.num_blocks)
    assert rules["promise"]["lost"] < rules["promise"]["max_loss"] == 0.6


@pytest.mark.usefixtures("no_picture")
def test_a_plan_and_thresholds_are_chosen_together(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, out = tmp_path / "prepared", tmp_path / "tuned"
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", prepared) == 0
    Evidence(exit_table(1, count=2000), exit_table(2, count=2000), "accuracy", 0.03, 0.95).save(prepared / EVIDENCE)
    times = tuple((0.0005 + 0.001 * batch,) * 4 for batch in (1, 8))
    table = LatencyTable("cpu", (1, 8), times, ((1e-5,) * 4,) * 2, 0.001, (64,) * 4, (64,) * 4, "told", length=6)
    measured = Profile("network", (table,), lengths=Lengths((6,)), token_exits=ExitProfile((1.0, 0.9, 0.9, 0.9)))
    save(measured, tmp_path / "profile.json")

    def tune(*more: str) -> str:
        told = ["tune", prepared, "--profile", tmp_path / "profile.json", "--devices", "cpu=2", "--max-batch", "8"]
        said = CliRunner().invoke(cli.app, [*map(str, [*told, "--out", out]), *more], catch_exceptions=False)
        assert said.exit_code == 0
        return said.output

    assert "with the thresholds of before" in tune()
    plan, profile, promise = read_plan(out / "plan.json"), load_profile(out / "profile.json"), promise_in(out)
    assert promise is not None
    assert promise.max_loss == 0.03
    assert plan.length == profile.length == 6
    assert profile.token_exits is None, "they were those of other thresholds"
    assert profile.exits is not None
    assert np.flatnonzero(np.diff(profile.exits.survival)).tolist() == list(plan.ramps)
    shut = [ramp["block"] for ramp in rules_in(out)["ramps"] if ramp["threshold"] == 0.0]
    assert sorted([*shut, *plan.ramps]) == [0, 1, 2]
    load(out)
    with monkeypatch.context() as patched:
        patched.setattr("optimizer.tuning.tuned", lambda *_: pytest.fail("it searches"))
        with pytest.raises(UserError, match="exists already; --force replaces it"):
            tune()
    tune("--force")


@pytest.mark.usefixtures("no_picture")
def test_nothing_is_replaced_unasked(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    assert run(checkpoint, "--data", data, "--out", out) == 0
    assert run(checkpoint, "--data", data, "--out", out) == 2
    assert "exists already; --force replaces it" in capsys.readouterr().err
    assert run(checkpoint, "--data", data, "--out", out, "--force") == 0
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    assert run(checkpoint, "--data", data, "--out", precious, "--force") == 2
    assert (precious / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--label-column", "lable"), "no column 'lable'; it has: 'text', 'label'"),
        (("--policy", "entropie"), "policy 'deployments.exits:entropie' cannot be imported"),
        (("--max-accuracy-loss", "one"), "--max-accuracy-loss one is no share; write it as 1% or 0.01"),
        (("--policy", "os:getcwd"), "policy 'os:getcwd' failed when tried on two inputs: TypeError"),
        (("--out", "/proc/x/y"), "/proc/x/y: cannot be written: /proc: "),
        (("--out", f"{__file__}/y"), f"{__file__}/y: cannot be written: {__file__}: Not a directory"),
        (("--data", "none.csv"), "none.csv: cannot be read: No such file or directory"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    assert run(checkpoint, "--data", data, "--out", out, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
    assert not out.exists()


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "exits.png")

    monkeypatch.setattr(pipeline, "draw_exits", full)
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "made" / "out"
    assert run(checkpoint, "--data", data, "--out", out) == 2
    error = capsys.readouterr().err.strip()
    assert "exits.png: No space left on device" in error
    assert "\n" not in error
    assert list(out.parent.iterdir()) == []


def test_a_directory_that_is_no_checkpoint_and_one_with_pickles_only(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--data", data, "--out", out) == 2
    (checkpoint / "model.safetensors").unlink()
    assert run(checkpoint, "--data", data, "--out", out) == 2
    said = capsys.readouterr().err
    assert "it has no config.json" in said
    assert "has no *.safetensors weights" in said
