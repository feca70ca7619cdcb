"""Exit tables of texts whose words are labelled, made from tables of single words: a text leaves with all its words.

A text leaves at a ramp if at most `most_unsure` of its words would not leave there by themselves, and at least one
would. Its accuracy and agreement are shares of its words, and all texts have the same weight.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.prepare.sample import Indices
from profiles.exit_table import ExitTable

MOST_UNSURE = (0, 1, 2, 4, 8)  # numbers of words per text that need not be sure, from which the best is chosen


def of_texts(words: ExitTable, counts: Indices, most_unsure: int) -> ExitTable:
    """The table of texts from the table of all their words, in order. `counts`: the number of words of each text."""
    text, ends = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts)
    deciding = ends - counts + np.minimum(most_unsure, counts - 1)  # the deciding word, if the least sure is first
    first = np.full((words.num_ramps, len(counts)), len(words.candidates), np.uint8)
    has_words = counts > 0
    for ramp, each in enumerate(words.first):
        order = np.lexsort((-each.astype(np.int64), text))
        first[ramp, has_words] = each[order][deciding[has_words]]

    def share(of_words: NDArray[Any]) -> NDArray[np.float32]:
        sums = [np.bincount(text, weights=each, minlength=len(counts)) for each in of_words]
        return np.where(has_words, np.array(sums) / np.maximum(counts, 1), 1.0).astype(np.float32)

    nothing = np.zeros((words.num_ramps + 1, len(counts)), np.uint16)
    return replace(
        words, first=first, right=share(words.right), labels=nothing, truth=nothing[0], agreed=share(words.agrees)
    )


def of_words(labels: Indices, given: Indices, counts: Indices, numbers: Indices) -> Indices:
    """The labels of the answered words, from the labels of all words.

    Of each text's `given` words `counts` are answered: those with these `numbers`.

    >>> of_words(np.array([7, 8, 9, 5]), np.array([3, 1]), np.array([2, 1]), np.array([0, 2, 0])).tolist()
    [7, 9, 5]
    """
    starts = np.cumsum(given) - given
    answered: Indices = labels[np.repeat(starts, counts) + numbers]
    return answered
