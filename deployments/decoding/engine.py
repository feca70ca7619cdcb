"""The loop of a decoding replica: one launch after the other, on the scheduler's word."""

from collections.abc import Callable, Iterable
from typing import Protocol

from deployments.decoding.scheduler import DecodingLaunch, DecodingLimits, Full, Scheduler, Written
from deployments.decoding.sequences import Opinion, Splits, Wanted


class Runner(Protocol):
    """What runs launches."""

    def run(self, launch: DecodingLaunch) -> list[list[Opinion]]: ...

    def drop(self, name: int) -> None: ...

    def follow(self, splits: Splits) -> None: ...


class Engine:
    """Sequences come in, tokens come out. It is used from one thread."""

    def __init__(self, scheduler: Scheduler, network: Runner, clock: Callable[[], float]) -> None:
        self.scheduler, self.network, self._clock = scheduler, network, clock

    def open(self, wanted: Wanted) -> int | Full:
        """The name of a new sequence, unless it cannot be let in soon."""
        return self.scheduler.full() or self.scheduler.add(wanted, self._clock())

    def cancel(self, name: int) -> None:
        self.scheduler.cancel(name, self._clock())
        self._forget()

    def follow(self, splits: Splits, limits: DecodingLimits) -> None:
        """Go on in another way: no token changes, unless ramps elsewhere say others."""
        self.scheduler.follow(splits, limits)
        self._forget()
        self.network.follow(splits)

    def step(self) -> list[Written] | None:
        """Run one launch; None where there is nothing to do."""
        begun_s = self._clock()
        launch = self.scheduler.next(begun_s)
        self._forget()
        if launch is None:
            return None
        opinions = self.network.run(launch)
        ended_s = self._clock()
        written = self.scheduler.done(launch, opinions, ended_s, ended_s - begun_s)
        self._forget()
        return written

    def write_all(self, wanted: Iterable[Wanted]) -> list[list[int]]:
        """What sequences write that all come at once."""
        return [tokens for tokens, _ in self.write_with_depths(wanted)]

    def write_with_depths(self, wanted: Iterable[Wanted]) -> list[tuple[list[int], list[int]]]:
        """The same, each beside the block after which its tokens were known."""
        written: dict[int, tuple[list[int], list[int]]] = {}
        for each in wanted:
            name = self.open(each)
            assert not isinstance(name, Full), "This is a bug: whoever asks so gives limits that let all wait."
            written[name] = [], []
        while (news := self.step()) is not None:
            for one in news:
                written[one.name][0].extend(one.tokens)
                written[one.name][1].extend(one.depths)
        return list(written.values())

    def _forget(self) -> None:
        for name in self.scheduler.dropped():
            self.network.drop(name)
