"""`isobatch evaluate`, and answers in Python without any server."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from isobatch.cluster import client, evaluation
from isobatch.cluster.cli import app
from isobatch.cluster.evaluation import broken_promise, evaluated, evaluated_pixels, evaluated_points, evaluated_words
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import demo_inputs
from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.predict import PredictedAnswer
from isobatch.deployments.models.ramps import save_ramps
from isobatch.profiles.errors import UserError
from isobatch.profiles.losses import Interval
from isobatch.profiles.model import Words
from isobatch.profiles.promise import ExitPromise
from tests.helpers.command_lines import ROOT, material
from tests.helpers.preparing import command
from tests.helpers.tiny_networks import network


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared network with random ramps, and labelled texts."""
    folder = material(tmp_path_factory.mktemp("evaluated"))
    ramps = network("bert", "confidence", [0.6]).ramps
    (folder / "my-bert").rename(folder / "my-bert-ee")
    save_ramps(folder / "my-bert-ee", ramps.rules, ramps.heads)
    return folder


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_predict_answers_as_the_network_does(place: Path) -> None:
    from isobatch import load

    model, texts = load(place / "my-bert-ee"), ["a good film", "bad", "the film was not dull but not great"]
    answers = model.predict(texts)
    assert all(0 < each.score <= 1 and each.name == model.labels[each.label] for each in answers)
    exits = model.run(model.encode(texts), model.num_blocks, model.ramp_blocks).exits
    assert exits.labels[np.argsort(exits.rows)].tolist() == [each.label for each in answers]
    with pytest.raises(UserError, match="this is one text"):
        model.predict("a good film")
    for wrong in (None, b"a good film", {"a good film": 1}):
        with pytest.raises(UserError, match=f"predict takes a list of inputs, got {type(wrong).__name__}"):
            model.predict(wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has half of a character, such as .ud800: was it cut in the middle of one"):
        model.predict(["a good \ud83d"])
    lines = (line for line in ["a good film", "a dull film"])
    assert len(model.predict(lines)) == 2  # type: ignore[arg-type]
    assert model.predict([]) == []


def test_readme_python_runs(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(place)
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_command_measures_what_the_network_answers(place: Path) -> None:
    model, data = place / "my-bert-ee", place / "others.csv"
    output = run(model, "--data", data, "--device", "cpu").output
    for word in (
        "others.csv: text from 'text', label from 'label'",
        "lost by exits",
        "recall, worst class",
        "by class",
    ):
        assert word in output
    printed = json.loads(run(model, "--data", data, "--device", "cpu", "--json").stdout)
    assert printed["inputs"] == 120
    assert printed["lost"]["mean"] == pytest.approx(printed["full_accuracy"]["mean"] - printed["accuracy"]["mean"])
    assert sum(each["inputs"] for each in printed["classes"]) == 120
    worst = printed["scores"]["worst-class"]
    assert worst["full"]["mean"] == min(each["full_recall"] for each in printed["classes"])
    assert worst["exits"]["mean"] == min(each["recall"] for each in printed["classes"])
    for score in printed["scores"].values():
        assert score["lost"]["within"] > 0, "that nothing was lost here is no proof"


def test_the_network_runs_in_its_ramps_precision(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from isobatch import load

    folder, options = tmp_path / "halves", ("--data", place / "others.csv", "--device", "cpu", "--json")
    shutil.copytree(place / "my-bert-ee", folder)
    ramps = load(folder).ramps
    save_ramps(folder, ramps.rules.model_copy(update={"dtype": "bfloat16"}), ramps.heads)
    by_default, as_told, otherwise = (
        json.loads(run(folder, *options, *more).stdout)
        for more in ((), ("--dtype", "bfloat16"), ("--dtype", "float32"))
    )
    assert by_default == as_told != otherwise
    (record,) = caplog.records
    assert "its ramps were made for bfloat16; in float32 inputs leave at other ramps" in record.getMessage()


def test_8_bits_are_evaluated_in_8_bits() -> None:
    """What is exported while it answers would be answered in float32 meanwhile."""
    network = evaluation.loaded(demo_directory("int8"), "cpu", None)
    assert isinstance(network, OnnxModel)
    network.inner.through = lambda *_: pytest.fail("torch was asked")  # type: ignore[method-assign]
    digits = list(demo_inputs(40))
    for exits in (True, False):
        assert len(evaluation.answered(network, digits, exits)) == len(digits)
    assert not network.exported.requested


@pytest.mark.parametrize(("label", "name", "block"), [(7, "LABEL_7", 0), (0, "great", 0), (0, "LABEL_0", 40)])
def test_a_server_of_others_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, label: int, name: str, block: int
) -> None:
    other = vars(PredictedAnswer(label, name, 0.9, block))
    monkeypatch.setattr(client, "post", lambda url, body, headers: [other] * len(body["inputs"]))
    with pytest.raises(UserError, match="http://x:1/predict serves another network"):
        run(place / "my-bert-ee", "--data", place / "others.csv", "--device", "cpu", "--url", "http://x:1")


def test_a_server_whose_maps_have_another_size_is_refused() -> None:
    small, large = ([PredictedAnswer((0,) * size, ("sky",), (0.9,) * size, 0)] for size in (4, 9))
    evaluation.check_same_sizes("http://x:1", small, small)
    with pytest.raises(UserError, match="http://x:1 serves another network: it answers 9 parts of input 1, this one 4"):
        evaluation.check_same_sizes("http://x:1", small, large)


def test_the_key_of_no_server_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    with pytest.raises(UserError, match="--api-key-variable is for --url: leave it out"):
        run(place / "my-bert-ee", "--data", place / "others.csv", "--api-key-variable", "KEY")


@pytest.mark.parametrize(
    ("url", "said"),
    [("localhost:8000", "'localhost:8000' must look like http://HOST:PORT"), ("http://127.0.0.1:1", "nobody answers")],
)
def test_a_missing_server_is_noticed_first(place: Path, monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    monkeypatch.setattr("isobatch.deployments.models.predict.predict", lambda *_, **__: pytest.fail("it computes"))
    with pytest.raises(UserError, match=said):
        run(place / "my-bert-ee", "--data", place / "others.csv", "--device", "cpu", "--url", url)


def test_what_exits_cost_is_known_better_than_either_accuracy() -> None:
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, 1000)
    full = np.where(random.random(1000) < 0.9, truth, 1 - truth)
    early = np.where(random.random(1000) < 0.98, full, 1 - full)
    figures = evaluated(_said(full), _said(early), truth, 4)
    assert figures.lost.within < 0.7 * figures.accuracy.within
    assert abs(figures.lost.mean - (figures.full_accuracy.mean - figures.accuracy.mean)) < 1e-12
    assert evaluated(_said(full), _said(early), None, 4).accuracy is None


def test_inputs_that_lose_more_than_was_promised_are_told_of() -> None:
    promise = ExitPromise(metric="macro-f1", max_loss=0.01, confidence=0.95, rows=4000, lost=0.004, bound=0.009)
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, 1000)
    bad = evaluated(_said(truth), _said(np.where(random.random(1000) < 0.9, truth, 1 - truth)), truth, 4)
    sentence = "the promise is a loss of at most 1 % of macro-F1; these inputs lose 9"
    assert str(broken_promise(promise, bad)).startswith(sentence)
    assert broken_promise(promise.model_copy(update={"metric": "agreement"}), bad) is not None
    good = evaluated(_said(truth), _said(truth), truth, 4)
    assert broken_promise(promise, good) is None
    assert broken_promise(promise, evaluated(_said(truth), _said(truth), None, 4)) is None, "no labels tell"


def test_intervals_hold_the_truth_in_nineteen_cases_of_twenty() -> None:
    """Of 1,000 trials 932 or more, by three standard errors of a count."""
    random, held = np.random.default_rng(1), 0
    for _ in range(1000):
        truth = np.zeros(200, np.int64)
        accuracy = evaluated(_said(random.random(200) < 0.1), _said(random.random(200) < 0.1), truth, 1).accuracy
        held += abs(accuracy.mean - 0.9) <= accuracy.within
    assert held >= 1000 * 0.95 - 3 * (1000 * 0.95 * 0.05) ** 0.5
    assert evaluated(_said(np.zeros(50)), _said(np.zeros(50)), np.zeros(50, np.int64), 1).accuracy != Interval(1.0, 0.0)


def _said(labels: np.ndarray) -> list[PredictedAnswer]:
    answers = {label: PredictedAnswer(int(label), str(label), 1.0, 0) for label in np.unique(labels).tolist()}
    return [answers[label] for label in labels.tolist()]


def test_a_labelled_text_without_a_word_that_is_answered_is_measured_with_the_others() -> None:
    """A tokenizer may drop a word of a zero-width space, which the file labels all the same."""
    nothing, one = _words(()), _words((1,))
    truth, given, names = np.array([1, 0]), np.array([1, 1]), ("O", "B-PER")
    figures = evaluated_words([one, nothing], [_words((0,)), nothing], truth, given, 4, names)
    assert (figures.inputs, figures.agreement.mean, figures.lost.mean) == (2, 0.0, 1.0)
    with pytest.raises(UserError, match="no text has a word"):
        evaluated_words([nothing], [nothing], None, None, 4, names)


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "a.jsonl", "--model", demo_directory(), "--out", "a.csv"),
        ("evaluate", demo_directory(), "--data", "a.jsonl"),
        ("prepare", demo_directory(), "--data", "a.jsonl", "--out", "ee"),
        ("profile", demo_directory(), "--data", "a.jsonl", "--timing-s", "0.1"),
        ("bench", demo_directory(), "--data", "a.jsonl"),
        ("cascade", "small", demo_directory(), "--data", "a.jsonl", "--devices", "cpu=1", "--out", "both"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_picture_that_does_not_fit_is_named_by_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    pictures = demo_inputs(60).tolist()
    pictures[40] = [line[:7] for line in pictures[40]]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"image": picture}) for picture in pictures))
    shutil.copytree(demo_directory(), tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"^a\.jsonl: row 41: the input is 8 x 7, it must be 8 x 8$"):
        command(*arguments)


def test_pictures_without_any_label_are_refused_in_one_sentence() -> None:
    """All pixels are void, or no point is seen: there is nothing to be right or wrong about."""
    answers = [PredictedAnswer((0, 1), ("a", "b"), (1.0, 1.0), 0)] * 3
    with pytest.raises(UserError, match="no pixel of these pictures has a label"):
        evaluated_pixels(answers, answers, np.full((3, 2), -1), 4)
    with pytest.raises(UserError, match="no point of these pictures has a place"):
        evaluated_points(answers, answers, np.full((3, 2, 2), np.nan), 4, Keypoints((2, 2)), 1.0)


def _words(labels: tuple[int, ...]) -> PredictedAnswer:
    places = tuple(range(len(labels)))
    return PredictedAnswer(
        labels, tuple(map(str, labels)), (1.0,) * len(labels), 0, Words("a text", places, places, places)
    )


@pytest.mark.parametrize("given", [None, "ACTIVE"])
@pytest.mark.parametrize(
    "line",
    [
        "prepare . --data a.csv --max-accuracy-loss 1% --out b",
        "evaluate . --data a.csv",
        "predict a.csv --model . --out b.csv",
    ],
    ids=lambda line: line.partition(" ")[0],
)
def test_threads_that_wait_leave_the_cores_to_others_unless_the_user_wants_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, given: str | None
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("text\na\n")
    result = CliRunner().invoke(app, line.split())
    assert isinstance(result.exception, UserError), result.output  # there is no checkpoint
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")
