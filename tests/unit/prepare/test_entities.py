"""F1 of whole entities, by hand and beside a plain count of chunks."""

from typing import Any

import numpy as np
import pytest

from isobatch.deployments.prepare.entities import entities, entity_f1

BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
BIOES = ("O", "B-PER", "I-PER", "E-PER", "S-PER", "S-LOC")


def found(names: tuple[str, ...], *texts: str) -> set[tuple[int, int, str]]:
    """The entities of texts, whose words' labels stand between blanks."""
    results = [[names.index(name) for name in text.split()] for text in texts]
    counts = np.array([len(each) for each in results])
    return set(entities(np.concatenate([np.array(each, np.int64) for each in results]), counts, names))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["B-PER I-PER O B-LOC"], {(0, 1, "PER"), (3, 3, "LOC")}),
        (["B-PER B-PER I-PER"], {(0, 0, "PER"), (1, 2, "PER")}),  # neighbours of one kind
        (["I-PER I-PER O I-LOC"], {(0, 1, "PER"), (3, 3, "LOC")}),  # nothing says where they begin: IOB1
        (["B-PER I-LOC I-LOC"], {(0, 0, "PER"), (1, 2, "LOC")}),  # another kind is another entity
        (["O B-PER", "I-PER O"], {(1, 1, "PER"), (2, 2, "PER")}),  # none goes beyond its text
        (["", "O", "B-LOC"], {(1, 1, "LOC")}),
        (["O O"], set()),
    ],
)
def test_entities_of_labels_that_say_where_one_begins(texts: list[str], expected: set[Any]) -> None:
    assert found(BIO, *texts) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B-PER I-PER E-PER S-PER O S-LOC", {(0, 2, "PER"), (3, 3, "PER"), (5, 5, "LOC")}),
        ("B-PER E-PER E-PER", {(0, 1, "PER"), (2, 2, "PER")}),  # an end without a beginning is one of its own
        ("S-PER I-PER E-PER", {(0, 0, "PER"), (1, 2, "PER")}),
        ("B-PER E-PER I-PER", {(0, 1, "PER"), (2, 2, "PER")}),
        ("I-PER S-LOC", {(0, 0, "PER"), (1, 1, "LOC")}),
    ],
)
def test_entities_of_labels_that_say_where_one_ends(text: str, expected: set[Any]) -> None:
    assert found(BIOES, text) == expected
    bilou = tuple(name.replace("E-", "L-").replace("S-", "U-") for name in BIOES)
    assert found(bilou, text.replace("E-", "L-").replace("S-", "U-")) == expected


def test_f1_counts_entities_that_are_found_whole() -> None:
    #                  Ada Bee saw | Rome | Eve in Oslo
    truth = np.array([1, 2, 0, 3, 1, 0, 3])
    full = np.array([1, 2, 0, 3, 1, 0, 0])  # one of four is missing: 3 right, 3 answered
    exits = np.array([1, 0, 0, 3, 0, 0, 4])  # half a person is none; I-LOC alone is a place: 2 right, 3 answered
    score = entity_f1(truth, full, exits, np.array([3, 1, 3]), BIO)
    assert score.entities == 4
    assert score.full.mean == pytest.approx(2 * 3 / (4 + 3))
    assert score.exits.mean == pytest.approx(2 * 2 / (4 + 3))
    assert score.lost.mean == pytest.approx(2 / 7)
    assert 0 < score.lost.within < 1


def test_there_is_no_f1_where_nothing_is_named() -> None:
    labels, counts = np.array([0, 1, 0]), np.array([3])
    assert entity_f1(labels, labels, labels, counts, ("NOUN", "VERB")) is None, "these are parts of speech"
    assert entity_f1(labels * 0, labels, labels, counts, BIO) is None, "no entity is there to be found"


def test_the_intervals_hold() -> None:
    """Of 400 samples of 150 texts each about 95 % hold the truth, which is that of very many texts."""
    random = np.random.default_rng(3)

    def drawn(texts: int) -> Any:
        counts = random.integers(1, 12, texts)
        truth = random.choice(3, counts.sum(), p=[0.7, 0.2, 0.1])
        hard = np.repeat(random.random(texts) < 0.3, counts)  # in some texts much is wrong
        full, exits = (
            np.where(random.random(counts.sum()) < np.where(hard, often, 0.02), random.integers(0, 3, counts.sum()), of)
            for often, of in ((0.2, truth), (0.3, truth))
        )
        return entity_f1(truth, full, exits, counts, BIO)

    true = drawn(20_000)
    held = np.zeros(3)
    for _ in range(400):
        seen = drawn(150)
        held += [
            abs(getattr(seen, each).mean - getattr(true, each).mean) <= getattr(seen, each).within
            for each in ("full", "exits", "lost")
        ]
    # 400 tries of 95 % are below 92 % in one case of 400.
    assert (held / 400 >= 0.92).all(), held / 400
