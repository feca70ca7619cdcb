"""Lists of the benchmark of rerankers: they hold their own sentence once, and are drawn as different lists."""

import numpy as np

from experiments.rerank.network import LENGTH, lists_of
from experiments.rerank.run import redrawn
from isobatch.profiles.exit_table import ExitTable


def test_a_list_is_a_question_its_sentence_and_nine_of_others() -> None:
    pairs = [(f"question {number % 30}", f"sentence {number}") for number in range(40)]
    found = lists_of(pairs, 25)
    assert len({question for question, _ in found}) == len(found) == 25
    for question, sentences in found:
        assert (question, sentences[0]) in pairs
        assert len(set(sentences)) == len(sentences) == LENGTH


def test_a_list_that_is_drawn_twice_counts_twice() -> None:
    lists, rows = np.array([3, 3, 1, 1, 1]), np.arange(5)
    first, two = np.zeros((1, 5), np.uint8), np.stack((rows, rows)).astype(np.float32)
    table = ExitTable(
        np.zeros(1), first, two, np.zeros((2, 5), np.int64), rows, np.ones(2), agreed=two, scores=two, lists=lists,
        relevance=rows.astype(np.float32),
    )  # fmt: skip
    drawn = redrawn(table, np.random.default_rng(0), 50)
    assert drawn.lists is not None
    assert drawn.scores is not None
    members = [drawn.truth[drawn.lists == number].tolist() for number in range(50)]
    assert {tuple(each) for each in members} == {(0, 1), (2, 3, 4)}
    assert (drawn.scores[0] == drawn.truth).all()
