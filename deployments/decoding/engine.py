"""Runs the launches that the scheduler chooses, one after the other.

In simulations the network computes nothing: a table says how long launches take, and how many tokens leave.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from random import Random
from typing import Protocol

from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.pages import PagePool
from isobatch.deployments.decoding.scheduler import (
    SHORTEST_RETRY_S,
    DecodingLaunch,
    DecodingLimits,
    NeverFits,
    NewTokens,
    Piece,
    ReplicaFull,
    Scheduler,
    by_size,
)
from isobatch.deployments.decoding.sequences import (
    FAILURES,
    Finish,
    LaunchFailedError,
    Splits,
    TextRequest,
    TokenPrediction,
)
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import DecoderProfile, DecodingTable, DecodingWorkload, LaunchSize

log = logging.getLogger(__name__)
# Texts that fail alone while no text gets a token. After three the replica is probably the cause, and Serve starts
# another one. After two, a pair of bad texts could end an idle replica.
MOST_FAILED_ALONE = 3


class Runner(Protocol):
    """A network that runs launches. After a `LaunchFailedError` it can run others."""

    def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]: ...

    def drop(self, name: int) -> None: ...

    def spoilt(self, pages: Iterable[int]) -> list[int]:
        """The pages whose KV is not finite: each text that reads one has no next token."""
        ...

    def recut(self, splits: Splits) -> None: ...


class Engine:
    """Takes sequences and returns their tokens. It is used from one thread."""

    def __init__(self, scheduler: Scheduler, network: Runner, clock: Callable[[], float]) -> None:
        self.scheduler, self.network, self._clock = scheduler, network, clock
        self._suspects = set[int]()  # sequences that run alone up to their next token, as a launch with them has failed
        self._failed_alone = set[tuple[int, ...]]()  # texts, by their tokens: one may be tried again

    def open(self, request: TextRequest, age_s: float = 0.0) -> int | ReplicaFull:
        """Add a sequence that was requested `age_s` ago and return its name, or refuse it. One that another replica has
        begun is not refused: its client has read a part."""
        if not self.scheduler.fits(request):  # the front is that of an earlier deployment, which had more memory
            return NeverFits(SHORTEST_RETRY_S)
        refused = None if request.replayed else self.scheduler.refusal(age_s)
        return refused or self.scheduler.add(request, self._clock() - age_s)

    def cancel(self, name: int) -> None:
        self.scheduler.cancel(name, self._clock())
        self._suspects.discard(name)
        self._forget()

    def recut(self, splits: Splits, limits: DecodingLimits) -> None:
        """Continue with other splits and limits. Tokens stay the same, unless other ramps predict other tokens."""
        self.scheduler.recut(splits, limits)
        self._forget()
        self.network.recut(splits)

    def step(self) -> list[NewTokens] | None:
        """Run one launch and return the new tokens; None if there is nothing to do."""
        begun_s = self._clock()
        launch = self.scheduler.next(begun_s)
        self._forget()
        if launch is None:
            return None
        if suspect := next((piece for piece in launch.pieces if piece.sequence.name in self._suspects), None):
            launch = replace(launch, pieces=(suspect,))
        try:
            predictions = self.network.run(launch)
        except LaunchFailedError as error:
            return self._failed(launch, error)
        ended_s = self._clock()
        pages = {piece.sequence.name: piece.sequence.pages for piece in launch.pieces}
        written = self.scheduler.done(launch, predictions, ended_s, ended_s - begun_s)
        self._suspects.difference_update(each.name for each in written)
        if undefined := [page for each in written if each.finish is Finish.UNDEFINED for page in pages[each.name]]:
            self.scheduler.pool.forget(self.network.spoilt(undefined))
        if written:
            self._failed_alone.clear()
        self._forget()
        return written

    def _failed(self, launch: DecodingLaunch, error: LaunchFailedError) -> list[NewTokens]:
        """End the sequence that has failed alone, or raise the error if too many have. If there were several, each
        restarts, to run alone."""
        log.exception("a launch of %d texts failed", len(launch.pieces))
        sequences = [piece.sequence for piece in launch.pieces]
        if len(sequences) == 1:
            self._failed_alone.add((*sequences[0].request.source, *sequences[0].tokens))
            if len(self._failed_alone) == MOST_FAILED_ALONE:
                raise error
            self.cancel(sequences[0].name)
            return [NewTokens(sequences[0].name, (), (), Finish.FAILED)]
        for sequence in sorted(sequences, key=attrgetter("name"), reverse=True):  # the oldest is the first to continue
            self.scheduler.preempt(sequence)
            self._suspects.add(sequence.name)
        self._forget()
        return []

    def write_all(self, requests: Iterable[TextRequest]) -> list[list[int]]:
        return [tokens for tokens, _ in self.write_with_depths(requests)]

    def write_with_depths(self, requests: Iterable[TextRequest]) -> list[tuple[list[int], list[int]]]:
        """The tokens of these texts, and the block after which each token was known."""
        written: dict[int, tuple[list[int], list[int]]] = {}
        for request in requests:
            name = self.open(request)
            assert not isinstance(name, ReplicaFull), "This is a bug: the limits do not let all of these wait."
            written[name] = [], []
        while (news := self.step()) is not None:
            for new_tokens in news:
                if new_tokens.finish in FAILURES:
                    raise UserError(FAILURES[new_tokens.finish])
                tokens, depths = written[new_tokens.name]
                tokens.extend(new_tokens.tokens)
                depths.extend(new_tokens.depths)
        return list(written.values())

    def _forget(self) -> None:
        for name in self.scheduler.take_dropped():
            self.network.drop(name)


TOKEN = 1  # that is written
OTHER_TOKEN = 2  # the full network's, where it disagrees with a draft
_UNSURE = TokenPrediction(TOKEN, sure=False)
_SURE = TokenPrediction(TOKEN)


def size_of(launch: DecodingLaunch, splits: Splits) -> LaunchSize:
    """The size of a launch, which its time is computed from."""
    blocks, bands, read, seen = len(splits.blocks(launch.split)), 0, 0, 0
    for _, group in groupby((piece for piece in launch.pieces if piece.running), key=by_size):
        pieces = list(group)
        rows, context = max(piece.running for piece in pieces), max(piece.start + piece.rows for piece in pieces)
        context += max(len(piece.sequence.request.source) for piece in pieces)
        bands += 1
        read += len(pieces) * context
        seen += len(pieces) * rows * context
    predictions = sum(piece.num_predictions for piece in launch.pieces)
    sources, source_rows, source_seen = _read_by_encoder(launch)
    return LaunchSize(
        launches=1,
        pieces=len(launch.pieces),
        blocks=blocks,
        bands=blocks * bands,
        rows=blocks * launch.running,
        read=blocks * read,
        seen=blocks * seen,
        heads=float(predictions > 0),
        asked=predictions,
        sources=sources,
        source_rows=source_rows,
        source_seen=source_seen,
        projections=blocks * launch.projects,
        projected=blocks * (sum(piece.rows for piece in launch.pieces) - launch.running),
    )


def _read_by_encoder(launch: DecodingLaunch) -> tuple[int, int, int]:
    """The groups of sources that are read in a launch, their positions, and the positions that these attend to."""
    sources = sorted(
        (piece.size[-1], unread) for piece in launch.pieces if (unread := piece.sequence.unread(launch.split))
    )
    groups = [[length for _, length in group] for _, group in groupby(sources, key=itemgetter(0))]
    padded = [(len(group), max(group)) for group in groups]
    return len(groups), sum(n * longest for n, longest in padded), sum(n * longest**2 for n, longest in padded)


@dataclass
class VirtualDecoder:
    """Simulates launches: `wait` lets their time pass, and `random` says which tokens leave."""

    table: DecodingTable
    workload: DecodingWorkload
    splits: Splits
    wait: Callable[[float], None]
    random: Random

    def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
        self.wait(self.table.seconds(size_of(launch, self.splits)))
        if launch.split == self.splits.last:
            return [self._checked(piece) for piece in launch.pieces]
        leaves, draw = 1.0 - self._survival(launch.split), self.random.random
        return [[_SURE if draw() < leaves else _UNSURE] * piece.num_predictions for piece in launch.pieces]

    def drop(self, name: int) -> None:
        """There is nothing to forget."""

    def spoilt(self, pages: Iterable[int]) -> list[int]:
        return []

    def recut(self, splits: Splits) -> None:
        self.splits = splits

    def _survival(self, split: int) -> float:
        """The share of the tokens in a split that continue after it."""
        before = self.workload.after(self.splits.ends[split - 1] - 1) if split else 1.0
        return self.workload.after(self.splits.ends[split] - 1) / before if before else 0.0

    def _checked(self, piece: Piece) -> list[TokenPrediction]:
        """The full network's predictions, most of which agree with drafts."""
        agrees = (self.random.random() < self.workload.agreement for _ in range(piece.num_predictions))
        return [TokenPrediction(TOKEN if agree else OTHER_TOKEN) for agree in agrees]


class VirtualClock:
    """A clock that a simulation sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def virtual_engine(
    profile: DecoderProfile, kind: str, config: DecoderConfig, random: Random, clock: VirtualClock
) -> Engine:
    """The engine of a replica with this configuration, whose launches are simulated."""
    table, workload = profile.table(kind), profile.workload
    cuts = tuple(block + 1 for block, _ in workload.survival) if config.cuts is None else config.cuts
    splits = config.splits(cuts, profile.num_blocks)
    scheduler = Scheduler(splits, config.limits(), PagePool(config.pages(profile.num_blocks * table.kv_bytes)))
    return Engine(scheduler, VirtualDecoder(table, workload, splits, clock.wait, random), clock)
