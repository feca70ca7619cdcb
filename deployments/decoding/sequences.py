"""One sequence on its way: which tokens are known, how far each split has seen them, and where it runs next.

The keys and values (KV) of every split are those of the full network on the tokens so far. So a token depends on the
tokens before it and on nothing else: not on who shared a launch, nor on exits, restarts or cuts. Where KV is projected
instead, it depends on where those before it left, too, which a sequence that begins again remembers.
"""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from deployments.decoding.pages import PageTable


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0: the most probable one, whatever the seed."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True)
class Wanted:
    """What a client wants written. The sequence ends after a token of `stop`, or after `max_tokens`.

    `prompt` is what is written on from. Where the network has an encoder, that reads `source`, which the client gave,
    and the prompt is the token that every answer begins with. `replayed`: of the last tokens of the prompt, which
    another replica has written, the block after which each was known.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    source: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()

    @property
    def given(self) -> int:
        """Tokens that the client gave."""
        return len(self.source) or len(self.prompt)


@dataclass(frozen=True)
class Opinion:
    """What a ramp or the head says after a position: the next token, and whether that is sure enough to be taken."""

    token: int
    sure: bool = True


class Finish(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Splits:
    """How the network is cut and what exits mean.

    `ends`: the block before which each split stops. `verified`: what exits said is a draft until the full network has
    said the same. `max_pending`: positions that a sequence may leave unseen by deeper splits before it has to visit
    them. `project`: the KV of blocks that a token has skipped is made of the state in which it left, as CALM does; it
    is no position that has to be seen.
    """

    ends: tuple[int, ...]
    verified: bool = False
    max_pending: int = 16
    project: bool = False

    @cached_property
    def last(self) -> int:
        return len(self.ends) - 1

    @cached_property
    def num_blocks(self) -> int:
        return self.ends[-1]

    def blocks(self, split: int) -> range:
        """
        >>> Splits((2, 6)).blocks(1)
        range(2, 6)
        """
        return range(self.ends[split - 1] if split else 0, self.ends[split])


class Sequence:
    """A sequence, from its prompt to its last token.

    `at` is the split where it runs next. `filled[s]` counts the positions whose KV split s has made; those that split
    s - 1 has seen and split s has not are pending there. `told` counts the tokens that were written for good. A source
    has KV of its own in every block (`source_table`), which is made before the first position runs.
    """

    def __init__(self, name: int, wanted: Wanted, splits: Splits, arrived_s: float, page_tokens: int) -> None:
        self.name, self.wanted, self.arrived_s = name, wanted, arrived_s
        self._splits = splits
        self.table = PageTable(splits.num_blocks, len(wanted.prompt) + wanted.max_tokens, page_tokens)
        self.source_table = PageTable(splits.num_blocks, len(wanted.source), page_tokens)
        self.tokens = list(wanted.prompt)
        self.depths: list[int] = []  # of each written token: the block after which it was known
        self.told = 0
        self.entered_s = arrived_s  # when it became a resident
        self.corrected = 0  # drafts that the full network did not agree with
        self.restart()

    def restart(self) -> None:
        """Forget all KV, and what was not yet written for good; the tokens that were become part of the prompt."""
        self._cut(len(self.wanted.prompt) + self.told)
        self.filled = [0] * len(self._splits.ends)
        self.at = 0
        self._owed = True  # whether the token after the last known position is still to be found

    def follow(self, splits: Splits) -> None:
        """Begin again, cut in another way."""
        self._splits = splits
        self.restart()

    def waiting(self, split: int) -> int:
        """Positions that stand before this split."""
        return (self.filled[split - 1] if split else len(self.tokens)) - self.filled[split]

    def projected(self, split: int, rows: int) -> tuple[int, ...]:
        """Of the next rows there, by their number, those that left before it, whose KV is projected. Prompts run."""
        if not (split and self._splits.project):
            return ()
        first = self._first
        depths = (*self.wanted.replayed, *self.depths)
        start, reached = self.filled[split], self._splits.blocks(split).start
        return tuple(
            row
            for row in range(max(0, first - start), rows)
            if (said := start + row + 1 - first) < len(depths) and depths[said] < reached
        )

    def unread(self, split: int) -> int:
        """Positions of its source that are to be read in the next launch of this split."""
        return 0 if split or self.filled[0] else len(self.wanted.source)

    def unseen(self, split: int) -> int:
        """Positions that stand before this split and have to run through it."""
        waiting = self.waiting(split)
        return waiting - len(self.projected(split, waiting))

    def missing(self, split: int, positions: int) -> int:
        """Pages that it lacks to have so many positions seen by a split, and its source."""
        return self.table.missing(self._splits.blocks(split), positions) + self._source_missing()

    def grow(self, split: int, positions: int, pages: list[int]) -> None:
        """Take as many pages as are missing."""
        if cut := self._source_missing():
            self.source_table.grow(range(self._splits.num_blocks), len(self.wanted.source), pages[:cut])
        self.table.grow(self._splits.blocks(split), positions, pages[cut:])

    def give_pages(self) -> list[int]:
        """All its pages, which it has no more."""
        return self.table.clear() + self.source_table.clear()

    def _source_missing(self) -> int:
        unread = self.wanted.source and self.unread(split=0)
        return self.source_table.missing(range(self._splits.num_blocks), unread) if unread else 0

    def wants(self, split: int, rows: int) -> int:
        """At how many of the last of these rows a ramp or the head has to say something."""
        stop = self.filled[split] + rows
        if split == self._splits.last and self._splits.verified:
            return max(0, stop - max(self.filled[split], self._told_until - 1))
        return int(self._owed and rows == self.waiting(split))

    def ran(self, split: int, rows: int, opinions: Listed[Opinion]) -> None:
        """Take in that so many rows ran through a split, and what was said after the last of them."""
        whole = rows == self.waiting(split)
        self.filled[split] += rows
        if split == self._splits.last and self._splits.verified:
            self._check(opinions, whole)
        elif whole and self._owed:
            self._decide(split, opinions[-1])
        elif whole:
            self._go_on(split)

    def _decide(self, split: int, opinion: Opinion) -> None:
        last = split == self._splits.last
        if not (opinion.sure or last):
            self.at = split + 1
            return
        self._write(opinion.token, split)
        if not self._splits.verified:
            self.told = len(self.depths)
        if last or not self._must_visit(split + 1):
            self._enter()
        else:
            self._owed, self.at = False, split + 1

    def _must_visit(self, split: int) -> bool:
        """Whether the sequence runs deeper though its token is known: too much is pending, or its end is a draft."""
        pending = self.waiting(split)
        if self._splits.project:  # only prompts have to be seen
            pending = min(self.filled[split - 1], self._first) - self.filled[split]
        return pending >= self._splits.max_pending or (self._splits.verified and bool(self._finish()))

    def _go_on(self, split: int) -> None:
        if split == self._splits.last:
            self._enter()
        else:
            self.at = split + 1

    def _enter(self) -> None:
        self.at, self._owed = 0, True

    def _check(self, opinions: Listed[Opinion], whole: bool) -> None:
        """Keep drafts as far as the full network says the same; its own token comes in place of the first other."""
        stop = self.filled[-1]
        for position, opinion in zip(range(stop - len(opinions), stop), opinions, strict=True):
            following = position + 1
            if following < len(self.tokens) and self.tokens[following] == opinion.token:
                continue
            if following < len(self.tokens):
                self.corrected += 1
                self._cut(following)
                self.filled = [min(filled, following) for filled in self.filled]
                whole = True
            self._write(opinion.token, self._splits.last)
            break
        self.told = max(self.told, min(len(self.tokens), self.filled[-1] + 1) - len(self.wanted.prompt))
        if whole:
            self._enter()

    def _write(self, token: int, split: int) -> None:
        self.tokens.append(token)
        self.depths.append(self._splits.ends[split] - 1)

    def _cut(self, length: int) -> None:
        del self.tokens[length:]
        del self.depths[length - len(self.wanted.prompt) :]

    @property
    def _first(self) -> int:
        """The position after the client's own prompt."""
        return len(self.wanted.prompt) - len(self.wanted.replayed)

    @property
    def _told_until(self) -> int:
        return len(self.wanted.prompt) + self.told

    @property
    def finish(self) -> Finish | None:
        """Why it has ended, once its last token is written for good."""
        return self._finish() if self.told == len(self.depths) else None

    def _finish(self) -> Finish | None:
        if self.depths and self.tokens[-1] in self.wanted.stop:
            return Finish.STOP
        return Finish.LENGTH if len(self.depths) >= self.wanted.max_tokens else None
