"""NDCG@10, the usual measure of lists of documents that are ranked by their scores.

A document adds its relevance, divided by log2(rank + 1), if it is among the ten best. The sum is divided by that of the
best order. Of equal scores the earlier document ranks higher, as in answers to requests.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.losses import Floats, Indices

DEPTH = 10


@dataclass(frozen=True)
class RankedLists:
    """Documents: the list that each belongs to, and its relevance. Every list has a relevant document."""

    lists: Indices
    relevance: NDArray[Any]

    @cached_property
    def list_of(self) -> Indices:
        """The list of each document, numbered from 0."""
        numbers: Indices = np.unique(self.lists, return_inverse=True)[1]
        return numbers

    def ndcg(self, scores: NDArray[Any]) -> Floats:
        """NDCG@10 of each list, if documents have these scores."""
        ndcg: Floats = self._gain(scores) / self._most
        return ndcg

    def losses(self, scores: NDArray[Any]) -> Floats:
        """The loss of each document if it alone is answered at a ramp. `scores`: ramps + 1 x documents, full ones last.

        A document's loss is in units of a list of mean length, so that the mean over documents is that over lists.
        """
        full, lost = self.ndcg(scores[-1]), np.zeros(scores.shape)
        place = self._ranks(np.zeros(len(self.lists)))
        for ramp, there in enumerate(scores[:-1]):
            for each in range(int(place.max()) + 1):  # one document of every list
                chosen = place == each
                ndcg = self.ndcg(np.where(chosen, there, scores[-1]))
                lost[ramp, chosen] = (full - ndcg)[self.list_of[chosen]]
        return lost * (len(place) / len(full))

    @cached_property
    def _most(self) -> Floats:
        return self._gain(self.relevance)

    def _gain(self, scores: NDArray[Any]) -> Floats:
        ranks = self._ranks(scores)
        gains = np.where(ranks < DEPTH, self.relevance / np.log2(ranks + 2.0), 0.0)
        return np.bincount(self.list_of, weights=gains).astype(np.float64)

    def _ranks(self, scores: NDArray[Any]) -> Indices:
        """The rank of each document in its list, from 0."""
        order, counts = np.lexsort((-scores, self.list_of)), np.bincount(self.list_of)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        return ranks
