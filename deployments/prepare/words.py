"""Texts whose words are labelled: from what single words do to what texts do, which leave with all of their words.

A text leaves at a ramp when at most so many of its words (`most_unsure`) would not leave there by themselves, and at
least one would. What it is right in, and what it agrees in, are shares of its words, and every text counts alike.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.prepare.sample import Indices
from profiles.exit_table import ExitTable

MOST_UNSURE = (0, 1, 2, 4, 8)  # that are tried


def of_texts(words: ExitTable, counts: Indices, most_unsure: int) -> ExitTable:
    """The table of texts that have so many words each, of the table of all words in order."""
    text, ends = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts)
    deciding = ends - counts + np.minimum(most_unsure, counts - 1)  # of words in order, the least sure first
    first = np.full((words.num_ramps, len(counts)), len(words.candidates), np.uint8)
    some = counts > 0
    for ramp, each in enumerate(words.first):
        order = np.lexsort((-each.astype(np.int64), text))
        first[ramp, some] = each[order][deciding[some]]

    def share(of_words: NDArray[Any]) -> NDArray[np.float32]:
        sums = [np.bincount(text, weights=each, minlength=len(counts)) for each in of_words]
        return np.where(some, np.array(sums) / np.maximum(counts, 1), 1.0).astype(np.float32)

    nothing = np.zeros((words.num_ramps + 1, len(counts)), np.uint16)
    return replace(
        words, first=first, right=share(words.right), said=nothing, truth=nothing[0], agreed=share(words.agrees)
    )


def of_words(labels: Indices, given: Indices, counts: Indices, numbers: Indices) -> Indices:
    """The labels of the words that the network answers, of those of all words that were given.

    Each text was given so many words, of which so many are answered: those with these numbers.

    >>> of_words(np.array([7, 8, 9, 5]), np.array([3, 1]), np.array([2, 1]), np.array([0, 2, 0])).tolist()
    [7, 9, 5]
    """
    starts = np.cumsum(given) - given
    found: Indices = labels[np.repeat(starts, counts) + numbers]
    return found
