"""Which launch a replica runs next: the sequences on it, who of them runs together, and who comes in.

A sequence that waits for a deep split writes nothing meanwhile, so deep splits do not wait for a full batch: one runs
when a share of the residents stands before it, when nobody else can go on, or when a token would be late. The first
split always runs with everybody who is ready.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from deployments.decoding.pace import Pace
from deployments.decoding.pages import PagePool, pages_for
from deployments.decoding.sequences import Finish, Opinion, Sequence, Splits, Wanted

by_size = attrgetter("size")  # of pieces
FEW = 16  # rows of a sequence in its first split that are no part of a prompt's
DEEP_SHARE = 0.6  # where nobody has measured


@dataclass(frozen=True)
class DecodingLimits:
    """What one replica lets in, and how it forms launches.

    `deep_share`: of the residents, that a deep split waits for. `prompt_rows`: positions of prompts in one launch.
    `max_waiting`: sequences that may wait for a place. `ttft_s` and `tpot_s`: the time until the first token, and from
    one to the next, that clients are promised.
    """

    max_residents: int = 32
    page_tokens: int = 16
    deep_share: float = DEEP_SHARE
    prompt_rows: int = 256
    max_waiting: int = 256
    ttft_s: float = 1.0
    tpot_s: float = 0.2


@dataclass(frozen=True)
class Piece:
    """So many rows of one sequence, from `start` on; the last `asked` of them are looked at by a ramp or the head.

    `projected`: rows, by their number, that only leave their KV. The others run.
    """

    sequence: Sequence
    start: int
    rows: int
    asked: int
    projected: tuple[int, ...] = ()

    @property
    def running(self) -> int:
        return self.rows - len(self.projected)

    @cached_property
    def size(self) -> tuple[int, int, int]:
        """Attention sees parts of one size side by side, padded to one number of rows, one context and one source."""
        return _power(self.running), _power(self.start + self.rows), _power(len(self.sequence.wanted.source))


@dataclass(frozen=True)
class DecodingLaunch:
    """What runs through a split at once."""

    split: int
    pieces: tuple[Piece, ...]

    @property
    def running(self) -> int:
        return sum(part.running for part in self.pieces)

    @property
    def projects(self) -> bool:
        return any(part.projected for part in self.pieces)


@dataclass(frozen=True)
class Written:
    """What became of a sequence in a launch: tokens that are new, the depth of each, and whether it has ended."""

    name: int
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    finish: Finish | None = None


@dataclass(frozen=True)
class Full:
    """A sequence is not let in now; it may be in so many seconds."""

    retry_after_s: float


def _power(size: int) -> int:
    """Parts are of one size up to about four times the rows or the context of each other.

    >>> [_power(size) for size in (1, 2, 4, 5, 200)]
    [0, 1, 1, 2, 4]
    """
    return (max(size - 1, 0).bit_length() + 1) // 2  # of 4


class Scheduler:
    """The sequences of one replica. It decides and remembers; whoever drives it computes and tells the time."""

    def __init__(self, splits: Splits, limits: DecodingLimits, pool: PagePool) -> None:
        self.splits, self.limits, self.pool = splits, limits, pool
        self.pace = Pace()
        self.residents: dict[int, Sequence] = {}  # in the order in which they came in
        self.waiting: deque[Sequence] = deque()
        self.preempted = 0
        # By a split's first block: launches, sequences in them, and how many there was room for.
        self.launched: dict[int, tuple[int, int, int]] = {}
        self._crowd = 0  # residents at the last look, if others had to wait: places, pages or time were short; else 0
        self._names = 0
        self._largest = 0  # pages that any sequence has needed, at most
        self._dropped: list[int] = []

    def full(self) -> Full | None:
        """Whether one more would wait longer for its first token than is promised, by what was measured so far."""
        places = self._crowd or self.limits.max_residents
        ahead = len(self.waiting) + 1 - (places - len(self.residents))
        wait_s = self.pace.residence_s * max(0, ahead) / places
        if len(self.waiting) >= self.limits.max_waiting or wait_s > self.limits.ttft_s:
            return Full(max(wait_s, 1.0))
        return None

    def add(self, wanted: Wanted, now_s: float) -> int:
        """The name of a new sequence, which waits for a place."""
        longest, source = len(wanted.prompt) + wanted.max_tokens, self._pages(len(wanted.source))
        assert self._pages(longest) + source <= self.pool.count, "This is a bug: it never fits."
        self._largest = max(self._largest, self._pages(longest + self.limits.page_tokens) + source)
        self._names += 1
        self.waiting.append(Sequence(self._names, wanted, self.splits, now_s, self.limits.page_tokens))
        return self._names

    def follow(self, splits: Splits, limits: DecodingLimits) -> None:
        """Go on in another way. Pages stay as they are. Where the network is cut elsewhere, residents begin again from
        what they have written, in the order in which they came."""
        self.limits = replace(limits, page_tokens=self.limits.page_tokens)
        if splits == self.splits:
            return
        self.splits = splits
        for sequence in reversed(list(self.residents.values())):
            self._put_out(sequence)
        for sequence in self.waiting:
            sequence.follow(splits)
        self.pace.cut_anew()

    def cancel(self, name: int, now_s: float) -> None:
        """Forget a sequence, wherever it is; its pages are free at once. Texts end so, too: at a stop string, which
        only the front sees."""
        if sequence := self.residents.pop(name, None):
            self._release(sequence)
            if sequence.told:
                self.pace.left(now_s - sequence.entered_s)
        else:
            self.waiting = deque(one for one in self.waiting if one.name != name)

    def dropped(self) -> list[int]:
        """The sequences, since the last call, of which nothing is pending any more."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def next(self, now_s: float) -> DecodingLaunch | None:
        """What to run now; None where there is nothing to do."""
        self._let_in(now_s)
        while self.residents:
            split = self._split(now_s)
            if parts := self._with_pages(split):
                return DecodingLaunch(split, parts)
        return None

    def done(
        self, launch: DecodingLaunch, opinions: Listed[Listed[Opinion]], now_s: float, took_s: float
    ) -> list[Written]:
        """What was written in a launch, given what was said of each part's rows."""
        self.pace.launched(launch.split, took_s)
        start = self.splits.blocks(launch.split).start
        count, sequences, room = self.launched.get(start, (0, 0, 0))
        self.launched[start] = count + 1, sequences + len(launch.pieces), room + self.limits.max_residents
        written = []
        for part, said in zip(launch.pieces, opinions, strict=True):
            sequence, before, corrected = part.sequence, part.sequence.told, part.sequence.corrected
            sequence.ran(launch.split, part.rows, said)
            if sequence.corrected > corrected:
                self._dropped.append(sequence.name)  # what followed the wrong draft is pending no more
            new = slice(before, sequence.told)
            given = len(sequence.wanted.prompt)
            tokens = sequence.tokens[given + before : given + sequence.told]
            if finish := sequence.finish:
                del self.residents[sequence.name]
                self._release(sequence)
                self.pace.left(now_s - sequence.entered_s)
            if tokens or finish:
                written.append(Written(sequence.name, tuple(tokens), tuple(sequence.depths[new]), finish))
        self.pace.wrote(sum(len(each.tokens) for each in written), took_s)
        return written

    def _let_in(self, now_s: float) -> None:
        """Let in who has waited longest, while there are places and pages, and tokens keep coming in time."""
        while self.waiting and self._has_place():
            sequence = self.waiting.popleft()
            sequence.entered_s = now_s
            self.residents[sequence.name] = sequence
        self._crowd = len(self.residents) if self.waiting else 0

    def _has_place(self) -> bool:
        count = len(self.residents)
        if not count:
            return True
        if count >= self.limits.max_residents or self.pace.tpot_s(count) > self.limits.tpot_s:
            return False
        if (count + 1) * self._largest <= self.pool.count:
            return True
        # Each is to have room for its next page too: a place is no use to one that is put out again at once.
        ahead = self.limits.page_tokens
        needed = sum(
            self._pages(len(one.tokens) + ahead) + self._pages(len(one.wanted.source))
            for one in (*self.residents.values(), self.waiting[0])
        )
        return needed <= self.pool.count

    def _pages(self, positions: int) -> int:
        return self.splits.num_blocks * pages_for(positions, self.limits.page_tokens)

    def _split(self, now_s: float) -> int:
        """The deepest split whose turn it is; else the first, if anybody is ready; else where most of them wait."""
        counts = [0] * len(self.splits.ends)
        for sequence in self.residents.values():
            counts[sequence.at] += 1
        for split in range(self.splits.last, 0, -1):
            if counts[split] and (
                counts[split] >= self.limits.deep_share * len(self.residents) or self._presses(split, now_s)
            ):
                return split
        return 0 if counts[0] else max(range(len(counts)), key=counts.__getitem__)

    def _presses(self, split: int, now_s: float) -> bool:
        """Whether somebody there has a token that is in time only if the split runs now. One that is late anyway does
        not hurry the others: under overload all are, and every launch would be small."""
        soon_s = now_s + self.pace.launch_s(split)
        return any(
            now_s <= self._due_s(sequence) <= soon_s for sequence in self.residents.values() if sequence.at == split
        )

    def _due_s(self, sequence: Sequence) -> float:
        return sequence.arrived_s + self.limits.ttft_s + sequence.told * self.limits.tpot_s

    def _with_pages(self, split: int) -> tuple[Piece, ...]:
        """The rows to run there, once they have pages: where these are short, who came last is put out."""
        found = [(part, part.sequence.missing(split, part.start + part.rows)) for part in self._parts(split)]
        while sum(missing for _, missing in found) > self.pool.free:
            youngest = next(reversed(self.residents.values()))
            self._put_out(youngest)
            self.preempted += 1
            found = [(part, missing) for part, missing in found if part.sequence is not youngest]
        for part, missing in found:
            if missing:
                taken = self.pool.take(missing)
                assert taken is not None, "This is a bug: there were pages enough."
                part.sequence.grow(split, part.start + part.rows, taken)
        return tuple(sorted((part for part, _ in found), key=by_size))

    def _parts(self, split: int) -> Iterator[Piece]:
        """Everybody who stands there; of long prompts as much as one launch takes, first those who came first. A source
        is read as a whole, if need be alone."""
        most = room = self.limits.prompt_rows
        pending = self.splits.max_pending if split else min(self.splits.max_pending, FEW)
        for sequence in self.residents.values():
            unread = sequence.unread(split)
            if sequence.at != split or unread > room < most:
                continue
            waiting, few = sequence.waiting(split), sequence.unseen(split) <= pending
            rows = waiting if few else min(waiting, room)
            room = max(0, room - unread - (0 if few else rows))
            if rows:
                asked, projected = sequence.wants(split, rows), sequence.projected(split, rows)
                yield Piece(sequence, sequence.filled[split], rows, asked, projected)

    def _put_out(self, sequence: Sequence) -> None:
        """Take a resident's pages; it begins again from what it has written, as the first of those who wait."""
        del self.residents[sequence.name]
        self._release(sequence)
        sequence.restart()
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.give(sequence.give_pages())
        self._dropped.append(sequence.name)
