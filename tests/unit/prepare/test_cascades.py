"""Combinations of networks: figures are those of the written directory, and promises hold."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isobatch.deployments.models import load_served
from isobatch.deployments.models.levels import read_levels
from isobatch.deployments.models.ramps import read_rules
from isobatch.deployments.prepare.cascades import Combination, ComparisonTerms, calibrated, candidate, write_cascade
from isobatch.deployments.prepare.measuring import PrepareOptions
from isobatch.deployments.prepare.pipeline import prepare
from isobatch.deployments.prepare.sample import Parts, Sample
from isobatch.profiles.errors import UserError
from isobatch.profiles.promise import RULES
from tests.helpers.made_up_candidates import COSTS, POLICY, made_up
from tests.helpers.tiny_networks import hugging_face
from tests.helpers.tiny_tokenizers import WORDS, save_tokenizer

COUNT = 240


def test_a_small_network_that_knows_what_it_knows_spares_most_of_the_large_one() -> None:
    candidates, terms = made_up(3000)
    both = calibrated(candidates, Combination((0, 1)), COSTS, terms)
    assert (both.blocks, both.edges, both.starts) == ((1,), (2,), [0, 2, 6])
    figures, survival = both.figures(both.shown()), both.survival(both.shown())
    assert figures.promise
    assert survival[:2] == (1.0, 1.0)
    assert survival[2] == survival[5] == pytest.approx(0.3, abs=0.05)
    assert figures.accuracy >= float(both.evidence.test.full_right.mean()) - 0.01


def test_nothing_may_be_lost_against_the_last_network_alone_whatever_a_cascade_says_when_nobody_leaves() -> None:
    candidates, terms = made_up(3000)
    worse = replace(candidates[0], head=-candidates[0].head)
    spoilt = calibrated([worse, candidates[1]], Combination((0,)), COSTS, terms)
    assert spoilt.figures(spoilt.shown()).promise is None
    alone = calibrated(candidates, Combination((1,)), COSTS, terms)
    assert alone.alone
    assert alone.figures(alone.shown()).promise
    assert (alone.figures(alone.shown()).lost, alone.figures(alone.shown()).agreement) == (0.0, 1.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cascades")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr("isobatch.deployments.prepare.pipeline.draw_exits", lambda _, path: path.touch())
        yield folder


@pytest.fixture(scope="module")
def checkpoints(cache: Path) -> list[Path]:
    """BERT with ramps, and ELECTRA, whose labels have other numbers."""
    for name, labels in (("bert", ["a", "b", "c"]), ("electra", ["c", "a", "b"])):
        hugging_face(name).save_pretrained(cache / name)
        save_tokenizer(cache / name)
        path = cache / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": dict(enumerate(labels))}))
    prepare(cache / "bert", sample(), cache / "bert-ee", PrepareOptions(max_accuracy_loss=0.5))
    return [cache / "bert-ee", cache / "electra"]


def sample() -> Sample:
    random = np.random.default_rng(5)
    texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(COUNT)]
    return Sample(texts, random.integers(0, 3, COUNT), Parts.of(COUNT))


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("members", [(0, 1), (0,), (1,)])
def test_answers_as_promised(checkpoints: list[Path], tmp_path: Path, members: tuple[int, ...], exits: bool) -> None:
    rows = sample()
    result = [candidate(folder, folder.name, rows, ["c", "a", "b"]) for folder in checkpoints]
    truth = torch.nn.functional.one_hot(torch.from_numpy(rows.labels), 3).float()
    shape = np.concatenate((rows.parts.train, rows.parts.calibrate))
    terms = ComparisonTerms(truth, shape, rows.parts.test, POLICY, "accuracy", max_loss=0.4)
    made = calibrated(result, Combination(members, exits), [[1.0] * 4, [2.0] * 3], terms)
    chosen = np.array([len(made.evidence.test.candidates) // 2] * len(made.blocks), np.int64)
    rules = write_cascade(tmp_path / "out", made, chosen, POLICY, {"rows": COUNT})

    model = load_served(tmp_path / "out")
    answers, full = (model.predict([rows.values[row] for row in rows.parts.test], exits) for exits in (True, False))
    table = made.evidence.test
    places = table.places(chosen)
    blocks = [*made.blocks, made.starts[-1] - 1]
    assert [each.exit_block for each in answers] == [blocks[place] for place in places.tolist()]
    right = np.array([each.label for each in answers]) == (
        rows.labels[rows.parts.test] if members[-1] == 1 else mapped(rows.labels[rows.parts.test], model.labels)
    )
    assert right.mean() == pytest.approx(made.figures(chosen).accuracy)
    assert read_rules(tmp_path / "out" / RULES) == rules
    assert rules.exit_accuracy == pytest.approx(right.mean())
    agrees = np.array([each.label == at_end.label for each, at_end in zip(answers, full, strict=True)])
    assert rules.agreement == pytest.approx(agrees.mean()), "which audits compare with"
    if len(members) > 1:
        levels = read_levels(tmp_path / "out")
        assert [level.model for level in levels.levels] == ["bert-ee", "electra"]
        assert levels.levels[1].weight == made.weights[1]


def mapped(labels: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """The labels as a network numbers them that is not the last."""
    return np.array([names.index(("c", "a", "b")[label]) for label in labels])


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    candidates, terms = made_up(200)
    made = calibrated(candidates, Combination((1,)), COSTS, terms)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="--force"):
        write_cascade(tmp_path / "out", made, made.shown(), POLICY, {})
