"""The state of one sequence: its tokens, the positions that each split has processed, and the split that runs next.

The keys and values (KV) of every split are those of the full network on the tokens so far. So a token depends only on
the tokens before it: not on the other sequences of a launch, nor on exits, restarts or cuts. Where KV is projected
instead, a token also depends on the blocks after which the tokens before it left; a restarted sequence remembers them.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from isobatch.deployments.decoding.pages import page_names, pages_for


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. At temperature 0 it is the most probable one, for any seed. `top_k` 0: all tokens may be
    chosen. `min_p`: a token needs this share of the most probable one's probability.

    Before that, logits are changed: `bias` changes those of some tokens, `repetition` those of tokens in the prompt or
    the text, `presence` those of tokens in the text, and `frequency` the same for each time that they are there.
    `alternatives`: the number of most probable tokens whose log probabilities are returned; None: no log probability
    is returned. `grammar`: llguidance's, which the whole text follows; empty: there is none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    alternatives: int | None = None
    grammar: str = ""

    @property
    def looks_back(self) -> bool:
        """Whether the tokens before the next one matter beside the network's logits."""
        return bool(self.presence or self.frequency or self.repetition != 1.0 or self.grammar)


GREEDY = Sampling()


@dataclass(frozen=True)
class TextTerms:
    """The client's settings for a text, beside the prompt. If the client sets no `max_tokens` (None), `usual_tokens`
    limits the text, if it is given and there is room for it. `full`: no token leaves at a ramp."""

    max_tokens: int | None = None
    sampling: Sampling = GREEDY
    min_tokens: int = 0
    ignore_eos: bool = False
    usual_tokens: int | None = None
    full: bool = False


@dataclass(frozen=True)
class TextRequest:
    """The text that a client asks for. The sequence ends after a token of `stop`, or after `max_tokens`. No token of
    `stop` is written before `min_tokens`.

    New tokens follow `prompt`. If the network has an encoder, the encoder reads `source`, the client's own prompt, and
    `prompt` is the token that every answer begins with. `replayed`: the last tokens of the prompt were written by
    another replica, and were known after these blocks. `full`: no token leaves at a ramp.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    source: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    min_tokens: int = 0
    requested_s: float = 0.0  # when its request reached the front, in Unix time; 0: now
    full: bool = False

    def age_s(self, now_s: float) -> float:
        """The time since its request, which counts for the time to its first token."""
        return max(0.0, now_s - self.requested_s) if self.requested_s else 0.0

    @property
    def first_written(self) -> int:
        """The position after the client's own prompt."""
        return len(self.prompt) - len(self.replayed)

    def banned(self, position: int) -> frozenset[int]:
        """The tokens that may not be written at a position."""
        return self.stop if position - self.first_written < self.min_tokens else frozenset()

    @property
    def given(self) -> int:
        """The number of tokens that the client gave."""
        return len(self.source) or len(self.prompt)


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probabilities of a token and of the most probable ones at its place, and the block after which they were
    read. They are the network's, before a request changes its logits."""

    logprob: float
    best: tuple[tuple[int, float], ...]
    block: int


UNDEFINED = -1  # in place of a token: the logits are not finite


@dataclass(frozen=True)
class TokenPrediction:
    """The token that a ramp or the head predicts after a position, and whether it is sure enough to be sent."""

    token: int
    sure: bool = True
    logprobs: TokenLogprobs | None = None


class LaunchFailedError(Exception):
    """The network raised an error in a launch, and can run others."""


class Finish(StrEnum):
    """Why a sequence ended: in OpenAI's words, or by a failure of this sequence alone."""

    STOP = "stop"
    LENGTH = "length"
    UNDEFINED = "undefined"  # the logits of its next token are not finite
    FAILED = "failed"  # the network raised an error when it ran alone


FAILURES = {
    Finish.UNDEFINED: "the text has no next token: the network's numbers are too large",
    Finish.FAILED: "the network failed on this text; the log of its process says where",
}


@dataclass(frozen=True)
class Splits:
    """Where the network is cut, and what exits mean.

    `ends`: the block before which each split stops. `verified`: a token of a ramp is a draft until the full network
    predicts the same token. `max_pending`: positions that a sequence may write before deeper splits process them.
    `project`: the KV of blocks that a token has skipped is projected from the state in which the token left, as in
    CALM, so deeper splits need not process its position.
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

    `at` is the split where it runs next. `filled[s]` counts the positions that split s has processed, whose KV it has
    made; positions that split s - 1 has processed and split s has not are pending before split s. `confirmed` counts
    the written tokens that no check can take back. Its KV lies in `pages`, in the order of positions. A source has KV
    of its own (`source_pages`), which is made before the first position runs.
    """

    def __init__(self, name: int, request: TextRequest, splits: Splits, arrived_s: float, page_tokens: int) -> None:
        self.name, self.request, self.arrived_s = name, request, arrived_s
        self._splits, self._page_tokens = splits, page_tokens
        self.pages: list[int] = []
        self.source_pages: list[int] = []
        self._names: list[bytes] = []  # of its full pages
        self.tokens = list(request.prompt)
        self.depths: list[int] = []  # of each written token: the block after which it was known
        self.logprobs: list[TokenLogprobs | None] = []  # the same
        self.confirmed = 0
        self.entered_s = arrived_s  # the time at which it became a resident
        self.begun = bool(request.replayed)  # it was a resident, here or elsewhere, so it is no longer refused
        self.corrected = 0  # drafts that the full network has replaced
        self._undefined = False  # whether its next token is
        self.restart()

    def restart(self) -> None:
        """Forget all KV and all tokens that are not confirmed; the confirmed ones become part of the prompt."""
        self._cut(len(self.request.prompt) + self.confirmed)
        self.filled = [0] * len(self._splits.ends)
        self._named = 0  # full pages that other sequences may share
        self.at = 0
        self.launches_waited = 0  # launches that were chosen while it waited before a deeper split
        self._owed = True  # whether the next token is still to be predicted

    def recut(self, splits: Splits) -> None:
        """Restart with the network cut elsewhere."""
        self._splits = splits
        self.restart()

    def waiting(self, split: int) -> int:
        """The number of positions that are pending before this split."""
        return (self.filled[split - 1] if split else len(self.tokens)) - self.filled[split]

    def projected(self, split: int, rows: int) -> tuple[int, ...]:
        """The indices of the rows whose tokens left before this split, among its next ones: their KV is projected."""
        if not (split and self._splits.project):
            return ()
        first = self.request.first_written
        depths = (*self.request.replayed, *self.depths)
        start, reached = self.filled[split], self._splits.blocks(split).start
        return tuple(
            row
            for row in range(max(0, first - start), rows)
            if (token := start + row + 1 - first) < len(depths) and depths[token] < reached
        )

    def unread(self, split: int) -> int:
        """The number of positions of its source that the encoder reads before the next launch of this split."""
        return 0 if split or self.filled[0] else len(self.request.source)

    def unseen(self, split: int) -> int:
        """The number of pending positions that have to run through this split."""
        waiting = self.waiting(split)
        return waiting - len(self.projected(split, waiting))

    def missing(self, positions: int) -> int:
        """The number of pages that it lacks for its source and for this number of positions."""
        return max(0, pages_for(positions, self._page_tokens) - len(self.pages)) + self._source_missing()

    def grow(self, pages: list[int]) -> None:
        cut = self._source_missing()
        self.source_pages += pages[:cut]
        self.pages += pages[cut:]

    def begin_at(self, pages: list[int]) -> None:
        """Begin after the positions of these pages, whose KV another sequence has computed."""
        self.pages = pages
        self.filled = [len(pages) * self._page_tokens] * len(self.filled)

    def give_pages(self) -> list[int]:
        pages = self.pages + self.source_pages
        self.pages, self.source_pages = [], []
        return pages

    def shareable(self) -> list[bytes]:
        """The names of its full pages whose KV depends on nothing but the tokens before their end.

        The last position is left out, since it has to run. Where KV is projected, only those of the prompt count.
        """
        if self.request.source:
            return []
        most = self.request.first_written if self._splits.project else len(self.tokens)
        count = min(most, len(self.tokens) - 1) // self._page_tokens
        if count > len(self._names):
            self._names = page_names(self.tokens[: count * self._page_tokens], self._page_tokens, self._names)
        return self._names[:count]

    def newly_full(self) -> Iterator[tuple[int, bytes]]:
        """The pages that others may share since the last call, with their names."""
        full = self.filled[-1] // self._page_tokens
        if full > self._named:
            yield from list(zip(self.pages[:full], self.shareable(), strict=False))[self._named :]
            self._named = full

    def _source_missing(self) -> int:
        return max(0, pages_for(len(self.request.source), self._page_tokens) - len(self.source_pages))

    def num_predictions(self, split: int, rows: int) -> int:
        """After how many of the last of these rows a ramp or the head has to predict a token."""
        stop = self.filled[split] + rows
        if split == self._splits.last and self._splits.verified:
            return max(0, stop - max(self.filled[split], len(self.request.prompt) + self.confirmed - 1))
        return int(self._owed and rows == self.waiting(split))

    def advance(self, split: int, rows: int, predictions: Listed[TokenPrediction]) -> None:
        """Record that rows ran through a split, with the predictions after the last of them."""
        whole = rows == self.waiting(split)
        self.filled[split] += rows
        if split == self._splits.last and self._splits.verified:
            self._check(predictions, whole)
        elif whole and self._owed:
            self._decide(split, predictions[-1])
        elif whole and split == self._splits.last:
            self._to_first_split()
        elif whole:
            self.at = split + 1

    def _decide(self, split: int, prediction: TokenPrediction) -> None:
        last = split == self._splits.last
        if not last and (self.request.full or prediction.token == UNDEFINED or not prediction.sure):
            self.at = split + 1
            return
        self._write(prediction, split)
        if not self._splits.verified:
            self.confirmed = len(self.depths)
        if last or not self._must_visit(split + 1):
            self._to_first_split()
        else:
            self._owed, self.at = False, split + 1

    def _must_visit(self, split: int) -> bool:
        """Whether a sequence runs deeper although its token is known: too much is pending, or its end is a draft."""
        pending = self.waiting(split)
        if self._splits.project:  # only prompts have to run through it
            pending = min(self.filled[split - 1], self.request.first_written) - self.filled[split]
        return pending >= self._splits.max_pending or (self._splits.verified and bool(self._finish()))

    def _to_first_split(self) -> None:
        self.at, self._owed = 0, True

    def _check(self, predictions: Listed[TokenPrediction], whole: bool) -> None:
        """Keep the drafts up to the first one that the full network predicts differently, and replace that one."""
        stop = self.filled[-1]
        for position, prediction in zip(range(stop - len(predictions), stop), predictions, strict=True):
            following = position + 1
            if following < len(self.tokens) and self.tokens[following] == prediction.token:
                self.logprobs[following - len(self.request.prompt)] = prediction.logprobs
                continue
            if following < len(self.tokens):
                self.corrected += 1
                self._cut(following)
                self.filled = [min(filled, following) for filled in self.filled]
                whole = True
            self._write(prediction, self._splits.last)
            break
        self.confirmed = max(self.confirmed, min(len(self.tokens), self.filled[-1] + 1) - len(self.request.prompt))
        if whole:
            self._to_first_split()

    def _write(self, prediction: TokenPrediction, split: int) -> None:
        if prediction.token == UNDEFINED:
            self._undefined = True
            return
        self.tokens.append(prediction.token)
        self.logprobs.append(prediction.logprobs)
        self.depths.append(self._splits.ends[split] - 1)

    def _cut(self, length: int) -> None:
        del self.tokens[length:]
        del self._names[length // self._page_tokens :]
        del self.depths[length - len(self.request.prompt) :]
        del self.logprobs[length - len(self.request.prompt) :]

    @property
    def finish(self) -> Finish | None:
        """Why it has ended, once its last token is confirmed."""
        return self._finish() if self.confirmed == len(self.depths) else None

    def _finish(self) -> Finish | None:
        if self._undefined:
            return Finish.UNDEFINED
        if self.depths and self.tokens[-1] in self.request.stop:
            return Finish.STOP
        return Finish.LENGTH if len(self.depths) >= self.request.max_tokens else None
