"""What exits do class by class, and what is warned of."""

import tracemalloc

import numpy as np

from isobatch.deployments.prepare.report import by_class, class_table, warnings

NAMES = ["common", "rare"]


def labels(*parts: tuple[int, int]) -> np.ndarray:
    """So many of each label."""
    return np.concatenate([np.full(count, label) for label, count in parts])


def test_recall_and_f1_of_each_class() -> None:
    truth = np.array([0, 0, 0, 1, 1, 1])
    one, other = by_class(truth, np.array([0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 0, 1, 1]))
    assert (one.inputs, one.full_recall, one.recall, one.lost, one.won) == (3, 2 / 3, 1.0, 0, 1)
    assert (other.full_recall, other.recall, other.lost, other.won) == (1.0, 2 / 3, 1, 0)
    assert (round(other.full_f1, 4), round(other.f1, 4)) == (round(6 / 7, 4), 0.8)
    assert class_table((one, other), NAMES).row_count == 2


def test_classes_of_many_pixels_need_little_memory() -> None:
    truth, full, exits = np.random.default_rng(0).integers(200, size=(3, 200_000))
    tracemalloc.start()
    classes = by_class(truth, full, exits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(each.inputs for each in classes) == 200_000
    assert peak < 2 * truth.nbytes, "a flag for each pixel and label would be 40 MB"


def test_a_rare_class_that_pays_for_the_others_is_named() -> None:
    """Accuracy rises from 94.9 to 97.3 %, and the rare class's recall falls from 93 to 55 %."""
    truth = labels((0, 950), (1, 50))
    full = np.concatenate([labels((0, 903), (1, 47)), labels((1, 46), (0, 4))])
    exits = np.concatenate([labels((0, 945), (1, 5)), labels((1, 28), (0, 22))])
    assert (exits == truth).mean() > (full == truth).mean()
    (sentence,) = [each for each in warnings(by_class(truth, full, exits), NAMES) if "pays" in each]
    assert sentence.startswith(
        "'rare' pays for the others: 92.0% of its 50 inputs are answered right in full, 56.0% with"
    )


def test_chance_is_not_warned_of() -> None:
    """Three more errors of 100 are within what two standard errors allow."""
    truth = labels((0, 900), (1, 100))
    full = np.concatenate([labels((0, 890), (1, 10)), labels((1, 90), (0, 10))])
    exits = np.concatenate([labels((0, 890), (1, 10)), labels((1, 87), (0, 13))])
    assert list(warnings(by_class(truth, full, exits), NAMES)) == []


def test_a_network_that_always_answers_one_class_is_no_triumph() -> None:
    truth, always = labels((0, 700), (1, 300)), labels((0, 1000))
    (sentence,) = warnings(by_class(truth, always, always), NAMES)
    assert sentence.startswith("the most frequent class alone ('common') gets 70.0%, the full network 70.0%")
    (sentence,) = warnings(by_class(always, always, always), NAMES, labelled=False)
    assert "answers 'common' to every input" in sentence


def test_a_network_that_is_wrong_nearly_always_has_swapped_labels() -> None:
    truth = labels((0, 50), (1, 50))
    (sentence,) = warnings(by_class(truth, 1 - truth, 1 - truth), NAMES)
    assert sentence.startswith("the full network answers 0.0% right, fewer than by chance: are labels swapped?")
