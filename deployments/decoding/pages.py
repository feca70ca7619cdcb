"""Pages of a replica's memory for keys and values (KV): the free ones, and those of each sequence.

A page holds the KV of one block for a few neighbouring positions. Blocks have pages of their own, so that deep blocks
may lag behind, and a cut may move without a page being copied.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """The free pages of one replica, for all blocks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take this number of pages; return None if fewer are free.

        >>> pool = PagePool(3)
        >>> pool.take(2), pool.take(2)
        ([1, 2], None)
        """
        if count > len(self._free):
            return None
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)


class PageTable:
    """The pages of one sequence: for each block a row of pages, in the order of positions."""

    def __init__(self, num_blocks: int, positions: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._held = [0] * num_blocks
        self.pages: NDArray[np.int64] = np.zeros((num_blocks, pages_for(positions, page_tokens)), np.int64)

    def missing(self, blocks: range, positions: int) -> int:
        """How many more pages these blocks need to hold this number of positions."""
        needed, held = pages_for(positions, self._page_tokens), self._held[blocks.start : blocks.stop]
        return 0 if min(held) >= needed else sum(max(0, needed - each) for each in held)

    def grow(self, blocks: range, positions: int, pages: list[int]) -> None:
        """Take the missing pages."""
        needed, taken = pages_for(positions, self._page_tokens), iter(pages)
        for block in blocks:
            for place in range(self._held[block], needed):
                self.pages[block, place] = next(taken)
            self._held[block] = max(self._held[block], needed)

    def clear(self) -> list[int]:
        """Return all pages and forget them."""
        held = [int(page) for block, count in enumerate(self._held) for page in self.pages[block, :count]]
        self._held = [0] * len(self._held)
        return held


def pages_for(positions: int, page_tokens: int) -> int:
    """
    >>> pages_for(16, 16), pages_for(17, 16)
    (1, 2)
    """
    return -(-positions // page_tokens)
