"""Runs the launches that the scheduler chooses, one after the other."""

from collections.abc import Callable, Iterable
from typing import Protocol

from isobatch.deployments.decoding.scheduler import DecodingLaunch, DecodingLimits, NewTokens, ReplicaFull, Scheduler
from isobatch.deployments.decoding.sequences import Splits, TextRequest, TokenPrediction


class Runner(Protocol):
    """A network that runs launches."""

    def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]: ...

    def drop(self, name: int) -> None: ...

    def recut(self, splits: Splits) -> None: ...


class Engine:
    """Takes sequences and returns their tokens. It is used from one thread."""

    def __init__(self, scheduler: Scheduler, network: Runner, clock: Callable[[], float]) -> None:
        self.scheduler, self.network, self._clock = scheduler, network, clock

    def open(self, request: TextRequest, age_s: float = 0.0) -> int | ReplicaFull:
        """Add a sequence that was requested `age_s` ago and return its name, or refuse it."""
        return self.scheduler.refusal(age_s) or self.scheduler.add(request, self._clock() - age_s)

    def cancel(self, name: int) -> None:
        self.scheduler.cancel(name, self._clock())
        self._forget()

    def recut(self, splits: Splits, limits: DecodingLimits) -> None:
        """Go on with other splits and limits. Tokens stay the same, unless other ramps predict other tokens."""
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
        predictions = self.network.run(launch)
        ended_s = self._clock()
        written = self.scheduler.done(launch, predictions, ended_s, ended_s - begun_s)
        self._forget()
        return written

    def write_all(self, requests: Iterable[TextRequest]) -> list[list[int]]:
        """Write all these sequences, and return the tokens of each."""
        return [tokens for tokens, _ in self.write_with_depths(requests)]

    def write_with_depths(self, requests: Iterable[TextRequest]) -> list[tuple[list[int], list[int]]]:
        """The same, with the block after which each token was known."""
        written: dict[int, tuple[list[int], list[int]]] = {}
        for request in requests:
            name = self.open(request)
            assert not isinstance(name, ReplicaFull), "This is a bug: the limits do not let all of these wait."
            written[name] = [], []
        while (news := self.step()) is not None:
            for new_tokens in news:
                tokens, depths = written[new_tokens.name]
                tokens.extend(new_tokens.tokens)
                depths.extend(new_tokens.depths)
        return list(written.values())

    def _forget(self) -> None:
        for name in self.scheduler.take_dropped():
            self.network.drop(name)
