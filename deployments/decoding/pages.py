"""The pages of a replica's memory for keys and values (KV), and their names, by which texts share them."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from hashlib import blake2b


class PagePool:
    """The pages of one replica.

    A page holds the KV of all blocks for a few neighbouring positions of one text. A full page may serve every text
    that begins with the same tokens. An unused page stays until its place is needed: the least recently used page is
    evicted first.

    `asked` counts the positions that new texts needed before their first token; `shared` counts how many of these were
    in pages of other texts already.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked = self.shared = 0
        self._empty = list(range(count))
        self._users = [0] * count  # texts that hold each page
        self._names: dict[int, bytes] = {}  # of the pages whose content may be shared
        self._pages: dict[bytes, int] = {}  # the same pages, by name
        self._kept: dict[int, None] = {}  # shared pages without a text, in the order in which they were given back

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """Take this number of pages; return None if fewer are free.

        >>> pool = PagePool(3)
        >>> pool.take(2), pool.take(2)
        ([1, 2], None)
        """
        if count > self.free:
            return None
        while len(self._empty) < count:
            oldest = next(iter(self._kept))
            del self._kept[oldest], self._pages[self._names.pop(oldest)]
            self._empty.append(oldest)
        first = len(self._empty) - count
        taken = self._empty[first:]
        del self._empty[first:]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, names: Iterable[bytes]) -> list[int]:
        """Take the pages of these names, up to the first name that no page has."""
        shared = list(self._named(names))
        for page in shared:
            self._kept.pop(page, None)
            self._users[page] += 1
        return shared

    def held(self, names: Iterable[bytes]) -> int:
        """How many of these pages texts already hold, so that one more text takes no free page for them."""
        return sum(self._users[page] > 0 for page in self._named(names))

    def _named(self, names: Iterable[bytes]) -> Iterator[int]:
        """The pages of these names, up to the first name that no page has."""
        for name in names:
            if (page := self._pages.get(name)) is None:
                return
            yield page

    def name(self, page: int, name: bytes) -> None:
        """Let later texts share a page, which is full."""
        if page not in self._names and name not in self._pages:
            self._names[page], self._pages[name] = name, page

    def forget(self, pages: Iterable[int]) -> None:
        """Let no later text share these pages."""
        for page in self._names.keys() & pages:
            del self._pages[self._names.pop(page)]
            if page in self._kept:
                del self._kept[page]
                self._empty.append(page)

    def give(self, pages: Listed[int]) -> None:
        """Free the pages of a text, in the order of its positions: the last ones are needed least. Later texts may
        share full ones."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._names:
                    self._kept[page] = None
                else:
                    self._empty.append(page)


def page_names(tokens: Listed[int], page_tokens: int, before: Listed[bytes] = ()) -> list[bytes]:
    """The names of the full pages of a text, each by all tokens up to its end; `before`: the first of these names.

    >>> one, two = page_names([1, 2, 3, 4, 5], 2), page_names([1, 2, 9, 4], 2)
    >>> len(one), one[0] == two[0], one[1] == two[1]
    (2, True, False)
    """
    names = list(before)
    for start in range(len(names) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        content = ",".join(map(str, tokens[start : start + page_tokens])).encode()
        names.append(blake2b(content, key=names[-1] if names else b"", digest_size=16).digest())
    return names


def pages_for(positions: int, page_tokens: int) -> int:
    """
    >>> pages_for(16, 16), pages_for(17, 16)
    (1, 2)
    """
    return -(-positions // page_tokens)
