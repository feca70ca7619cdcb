"""Chooses the next launch of a replica, and which waiting sequences become residents.

A sequence that waits for a deep split generates no tokens meanwhile, so deep splits do not wait for a full batch. One
runs when a share of the residents is pending before it, when no other sequence can continue, or when a token would be
late. The first split always runs with all sequences that are ready.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from isobatch.deployments.decoding.pages import PagePool, pages_for
from isobatch.deployments.decoding.sequences import (
    Finish,
    Sequence,
    Splits,
    TextRequest,
    TokenLogprobs,
    TokenPrediction,
)

RECENT = 0.05  # the weight of the latest launch or sequence in a running mean
SPREADS = 3.0  # mean deviations above the mean, which hardly any time exceeds
RECENT_S = 2.0  # the time over which tokens per second are averaged


class Pace:
    """Running means. Every time is 0 until it is measured, so that no sequence is refused without a reason."""

    def __init__(self) -> None:
        self.launch_s: dict[int, float] = defaultdict(float)  # by split
        self.residence_s = 0.0
        self._first_s = self._first_spread_s = 0.0  # from becoming a resident to the first token
        self._tokens = self._seconds = 0.0

    def launched(self, split: int, took_s: float) -> None:
        self.launch_s[split] = _mean(self.launch_s[split], took_s)

    def sequence_ended(self, stayed_s: float) -> None:
        self.residence_s = _mean(self.residence_s, stayed_s)

    def sequence_began(self, took_s: float) -> None:
        """A sequence has its first token, which took this time since it became a resident."""
        self._first_spread_s = _mean(self._first_spread_s, abs(took_s - self._first_s)) if self._first_s else 0.0
        self._first_s = _mean(self._first_s, took_s)

    @property
    def first_token_s(self) -> float:
        """The time in which nearly all residents have their first token."""
        return self._first_s + SPREADS * self._first_spread_s

    def tokens_written(self, tokens: int, took_s: float) -> None:
        weight = max(0.0, 1.0 - took_s / RECENT_S)
        self._tokens = weight * self._tokens + tokens
        self._seconds = weight * self._seconds + took_s

    def forget_speed(self) -> None:
        """Forget the speed of residents that have ended: it says nothing about the next ones."""
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def tpot_s(self, residents: int) -> float:
        """The time from one token of a sequence to its next, with this number of residents at the present speed.

        A launch with more sequences writes more tokens, so this holds only for the present number of residents.
        """
        return residents / self.tokens_per_s if self._tokens else 0.0


def _mean(before: float, latest: float) -> float:
    return before + RECENT * (latest - before) if before else latest


by_size = attrgetter("size")  # the key by which pieces are sorted and grouped
FEW_ROWS = 16  # a sequence with more rows than this in its first split counts as reading a prompt
# The share of the residents that a deep split waits for, if neither exits.json nor the user says another one.
DEEP_SHARE = 0.6
SHORTEST_RETRY_S = 1.0  # the shortest Retry-After
MOST_KEPT = 0.5  # the largest share of the time to the first token that is kept for the launches until then


@dataclass(frozen=True)
class DecodingLimits:
    """The limits by which one replica admits sequences and forms launches.

    `deep_share`: the share of the residents that a deep split waits for. `prompt_rows`: the most positions of prompts
    in one launch. `max_waiting`: the most sequences that may wait for a place. `ttft_s` and `tpot_s`: the time to the
    first token, and from one token to the next, that clients are promised.
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
    """Rows of one sequence in a launch: `rows` positions from `start` on.

    A ramp or the head predicts a token after each of the last `num_predictions` rows. `projected` has the indices of
    rows that do not run: only their KV is made.
    """

    sequence: Sequence
    start: int
    rows: int
    num_predictions: int
    projected: tuple[int, ...] = ()

    @property
    def running(self) -> int:
        return self.rows - len(self.projected)

    @cached_property
    def size(self) -> tuple[int, int, int]:
        """Attention computes pieces of one size together, padded to the same rows, context and source."""
        source = len(self.sequence.request.source)
        return _size_class(self.running), _size_class(self.start + self.rows), _size_class(source)


@dataclass(frozen=True)
class DecodingLaunch:
    """The pieces that run through a split together."""

    split: int
    pieces: tuple[Piece, ...]

    @property
    def running(self) -> int:
        return sum(piece.running for piece in self.pieces)

    @property
    def projects(self) -> bool:
        return any(piece.projected for piece in self.pieces)


@dataclass(frozen=True)
class NewTokens:
    """The tokens that a launch has written of one sequence, their depths, why the sequence has ended, if it has, and
    the log probabilities, if they are requested."""

    name: int
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(unsafe_hash=True)
class ReplicaFull(Exception):  # noqa: N818 (a usual answer, which some callers raise)
    """The replica has no place for a sequence now; it may have one after `retry_after_s`."""

    retry_after_s: float

    def __reduce__(self) -> tuple[type["ReplicaFull"], tuple[float]]:
        return type(self), (self.retry_after_s,)


class NoReplica(ReplicaFull):
    """No replica has taken the sequence, or the one that was asked runs a network with other tokens."""


class NeverFits(NoReplica):
    """The text needs more memory than any replica of this deployment has. Others may have places for other texts."""


def _size_class(size: int) -> int:
    """The size class: pieces in one class differ by at most about four times in their rows or their context.

    >>> [_size_class(size) for size in (1, 2, 4, 5, 200)]
    [0, 1, 1, 2, 4]
    """
    return (max(size - 1, 0).bit_length() + 1) // 2  # the logarithm to base 4, rounded up


class Scheduler:
    """The sequences of one replica. It decides what runs; the engine computes and passes the time in."""

    def __init__(self, splits: Splits, limits: DecodingLimits, pool: PagePool) -> None:
        self.splits, self.limits, self.pool = splits, limits, pool
        self.pace = Pace()
        self.residents: dict[int, Sequence] = {}  # in the order in which they became residents
        self.waiting: deque[Sequence] = deque()
        self.preempted = 0
        # For each split, by its first block: the launches, the sequences in them, and the room for sequences in them.
        self.launched: dict[int, tuple[int, int, int]] = {}
        # The number of residents when the last launch was chosen, if sequences still waited then; else 0.
        self._crowd = 0
        self._now_s = 0.0  # when a launch was chosen last
        self._names = 0  # the name of the latest sequence
        self._largest = 0  # the most pages that any sequence can need
        self._dropped, self._late = list[int](), list[int]()

    def refusal(self, age_s: float = 0.0) -> ReplicaFull | None:
        """The refusal of a sequence that was requested `age_s` ago, if its first token would probably be late."""
        wait_s = self._wait_s()
        first_s = age_s + wait_s + self._first_token_s()
        waiting = len(self.waiting) - max(0, self._places - len(self.residents))  # after the next launch is chosen
        if waiting >= self.limits.max_waiting or first_s > self.limits.ttft_s:
            return ReplicaFull(max(wait_s, SHORTEST_RETRY_S))
        return None

    @property
    def _places(self) -> int:
        return self._crowd or self.limits.max_residents

    def _wait_s(self) -> float:
        """The time for which one more sequence would wait for a place."""
        ahead = len(self.waiting) + 1 - (self._places - len(self.residents))
        oldest = next(iter(self.residents.values()), None)
        stay_s = self.pace.residence_s or (self._now_s - oldest.entered_s if oldest else 0.0)  # while none has ended
        return stay_s * max(0, ahead) / self._places

    def take_late(self) -> list[tuple[int, ReplicaFull]]:
        """The waiting sequences that were refused since the last call, as their first token would be late."""
        late, self._late = self._late, []
        return [(name, ReplicaFull(max(self._wait_s(), SHORTEST_RETRY_S))) for name in late]

    def fits(self, request: TextRequest) -> bool:
        """Whether the text fits in the pages once it is written."""
        longest = len(request.prompt) + request.max_tokens
        return self._pages(longest) + self._pages(len(request.source)) <= self.pool.count

    def add(self, request: TextRequest, now_s: float) -> int:
        """Add a sequence, which waits for a place, and return its name."""
        assert self.fits(request), "This is a bug: the sequence never fits in the pages."
        longest, source = len(request.prompt) + request.max_tokens, self._pages(len(request.source))
        self._largest = max(self._largest, self._pages(longest + self.limits.page_tokens) + source)
        self._names += 1
        self.waiting.append(Sequence(self._names, request, self.splits, now_s, self.limits.page_tokens))
        return self._names

    def recut(self, splits: Splits, limits: DecodingLimits) -> None:
        """Continue with other splits and limits. Pages stay as they are. If the splits differ, residents restart from
        the tokens that they have written, in the same order."""
        self.limits = replace(limits, page_tokens=self.limits.page_tokens)
        if splits == self.splits:
            return
        self.splits = splits
        for sequence in reversed(list(self.residents.values())):
            self.preempt(sequence)
        for sequence in self.waiting:
            sequence.recut(splits)
        self.pace.launch_s.clear()

    def cancel(self, name: int, now_s: float) -> None:
        """Forget a sequence and free its pages. A text that reaches a stop string also ends like this, as only the
        front knows stop strings."""
        if sequence := self.residents.pop(name, None):
            self._release(sequence)
            if sequence.confirmed:
                self.pace.sequence_ended(now_s - sequence.entered_s)
        else:
            self.waiting = deque(sequence for sequence in self.waiting if sequence.name != name)

    @property
    def tokens_per_s(self) -> float:
        return self.pace.tokens_per_s if self.residents else 0.0

    def take_dropped(self) -> list[int]:
        """The names of the sequences whose pending states may be forgotten, since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def next(self, now_s: float) -> DecodingLaunch | None:
        """The launch to run now; None if there is nothing to do."""
        self._admit(now_s)
        while self.residents:
            split = self._split(now_s)
            if pieces := self._pieces_with_pages(split):
                return DecodingLaunch(split, pieces)
        return None

    def done(
        self, launch: DecodingLaunch, predictions: Listed[Listed[TokenPrediction]], now_s: float, took_s: float
    ) -> list[NewTokens]:
        """Record a launch with the predictions of each piece, and return the tokens that are new."""
        self.pace.launched(launch.split, took_s)
        start = self.splits.blocks(launch.split).start
        count, sequences, room = self.launched.get(start, (0, 0, 0))
        self.launched[start] = count + 1, sequences + len(launch.pieces), room + self.limits.max_residents
        written = []
        for piece, predicted in zip(launch.pieces, predictions, strict=True):
            sequence, before, corrected = piece.sequence, piece.sequence.confirmed, piece.sequence.corrected
            sequence.advance(launch.split, piece.rows, predicted)
            sequence.launches_waited = 0
            if launch.split == self.splits.last:
                for page, name in sequence.newly_full():
                    self.pool.name(page, name)
            if sequence.corrected > corrected:
                self._dropped.append(sequence.name)  # the states after the wrong draft are useless
            new = slice(before, sequence.confirmed)
            if sequence.confirmed and not before:
                self.pace.sequence_began(now_s - sequence.entered_s)
            given = len(sequence.request.prompt)
            tokens = sequence.tokens[given + before : given + sequence.confirmed]
            if finish := sequence.finish:
                del self.residents[sequence.name]
                self._release(sequence)
                self.pace.sequence_ended(now_s - sequence.entered_s)
            if tokens or finish:
                logprobs = tuple(each for each in sequence.logprobs[new] if each)
                written.append(NewTokens(sequence.name, tuple(tokens), tuple(sequence.depths[new]), finish, logprobs))
        self.pace.tokens_written(sum(len(new_tokens.tokens) for new_tokens in written), took_s)
        return written

    def _admit(self, now_s: float) -> None:
        """Admit waiting sequences in order, while there are places and pages, and tokens come in time. Refuse those
        that have waited so long that their first token would be late."""
        if not self.residents:
            self.pace.forget_speed()
        self._now_s, late_s = now_s, now_s + self._first_token_s() - self.limits.ttft_s
        if late := [each for each in self.waiting if each.arrived_s < late_s and not each.begun]:
            self._late += [each.name for each in late]
            self.waiting = deque(each for each in self.waiting if each not in late)
        while self.waiting and self._has_place():
            sequence = self.waiting.popleft()
            sequence.entered_s, sequence.begun = now_s, True
            self.residents[sequence.name] = sequence
        self._crowd = len(self.residents) if self.waiting else 0

    def _first_token_s(self) -> float:
        """The time to keep for the first token of a new resident. It is limited, so that some texts always begin."""
        return min(self.pace.first_token_s, MOST_KEPT * self.limits.ttft_s)

    def _has_place(self) -> bool:
        count = len(self.residents)
        if not count:
            return True
        if count >= self.limits.max_residents or self.pace.tpot_s(count) > self.limits.tpot_s:
            return False
        if (count + 1) * self._largest <= self.pool.count:
            return True
        # Each needs room for its next page too: otherwise it would be preempted at once. Pages that others hold already
        # are not needed again.
        ahead, first = self.limits.page_tokens, self.waiting[0]
        missing = sum(each.missing(len(each.tokens) + ahead) for each in (*self.residents.values(), first))
        return missing - self.pool.held(first.shareable()) <= self.pool.free

    def _pages(self, positions: int) -> int:
        return pages_for(positions, self.limits.page_tokens)

    def _split(self, now_s: float) -> int:
        """The deepest split that is due; else the first, if a sequence is ready; else the one with most sequences."""
        counts, starving = [0] * len(self.splits.ends), set[int]()
        for sequence in self.residents.values():
            counts[sequence.at] += 1
            sequence.launches_waited = sequence.launches_waited + 1 if sequence.at else 0
            if sequence.launches_waited > self.splits.max_pending:  # its tokens may all be late, and so not urgent
                starving.add(sequence.at)
        enough = self.limits.deep_share * len(self.residents)
        for split in range(self.splits.last, 0, -1):
            if counts[split] and (counts[split] >= enough or split in starving or self._is_urgent(split, now_s)):
                return split
        return 0 if counts[0] else max(range(len(counts)), key=counts.__getitem__)

    def _is_urgent(self, split: int, now_s: float) -> bool:
        """Whether some token is in time only if the split runs now, and not after one more launch of the first split.
        Late tokens do not count: under overload all are late, and every launch would be small."""
        soon_s = now_s + self.pace.launch_s[0] + self.pace.launch_s[split]
        due_s = (
            sequence.arrived_s + self.limits.ttft_s + sequence.confirmed * self.limits.tpot_s
            for sequence in self.residents.values()
            if sequence.at == split
        )
        return any(now_s <= each <= soon_s for each in due_s)

    def _pieces_with_pages(self, split: int) -> tuple[Piece, ...]:
        """The pieces to run there, with pages. If pages are short, the youngest residents are preempted."""
        needs = [(piece, piece.sequence.missing(piece.start + piece.rows)) for piece in self._pieces(split)]
        while sum(missing for _, missing in needs) > self.pool.free:
            youngest = next(reversed(self.residents.values()))
            self.preempt(youngest)
            self.preempted += 1
            needs = [(piece, missing) for piece, missing in needs if piece.sequence is not youngest]
        for piece, missing in needs:
            if missing:
                taken = self.pool.take(missing)
                assert taken is not None, "This is a bug: there were enough pages."
                piece.sequence.grow(taken)
        return tuple(sorted((piece for piece, _ in needs), key=by_size))

    def _pieces(self, split: int) -> Iterator[Piece]:
        """A piece of each sequence there, oldest first. Long prompts are limited to the rows that one launch takes. A
        source is read as a whole, in a launch of its own if it is longer than that."""
        most = room = self.limits.prompt_rows
        pending = self.splits.max_pending if split else min(self.splits.max_pending, FEW_ROWS)
        for sequence in self.residents.values():
            unread = sequence.unread(split)
            if sequence.at != split or unread > room < most:
                continue
            if room and not sequence.pages:
                self._share(sequence)
            waiting, few = sequence.waiting(split), sequence.unseen(split) <= pending
            rows = waiting if few else min(waiting, room)
            room = max(0, room - unread - (0 if few else rows))
            if rows:
                predictions, projected = sequence.num_predictions(split, rows), sequence.projected(split, rows)
                yield Piece(sequence, sequence.filled[split], rows, predictions, projected)

    def _share(self, sequence: Sequence) -> None:
        """Let a sequence begin after its first positions that are already in full pages of other sequences."""
        sequence.begin_at(self.pool.share(sequence.shareable()))
        self.pool.asked += len(sequence.tokens)
        self.pool.shared += sequence.filled[0]

    def preempt(self, sequence: Sequence) -> None:
        """Take a resident's pages. It restarts from the tokens that it has written, as the first waiting sequence."""
        del self.residents[sequence.name]
        self._release(sequence)
        sequence.restart()
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.give(sequence.give_pages())
        self._dropped.append(sequence.name)
