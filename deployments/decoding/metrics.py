"""What clients of a decoder see, for `/stats` and Prometheus. A text takes many launches: all is told at once."""

from collections.abc import Callable
from typing import Literal

from deployments.metrics import MetricSeries

RequestEnd = Literal["answered", "refused", "cancelled", "failed"]
_METRICS_SAY = {"cancelled": "abandoned"}  # what `isobatch_requests` calls it, here as for other networks


class ClientMeter:
    """Counts one front's requests, and times the tokens of each sequence."""

    def __init__(self, series: MetricSeries, clock: Callable[[], float]) -> None:
        self.requests: dict[RequestEnd, int] = dict.fromkeys(("answered", "refused", "cancelled", "failed"), 0)
        self.clock, self._series = clock, series

    def ended(self, outcome: RequestEnd) -> None:
        self.requests[outcome] += 1
        self._series.more("isobatch_requests", 1, outcome=_METRICS_SAY.get(outcome, outcome))

    def answered(self, begun_s: float) -> None:
        """A request that came then has its whole answer."""
        self.ended("answered")
        self._series.value("isobatch_latency_ms", 1e3 * (self.clock() - begun_s))

    def sequence(self, prompt_tokens: int) -> "SequenceMeter":
        """Of a sequence that is asked for now."""
        return SequenceMeter(self._series, self.clock, prompt_tokens)


class SequenceMeter:
    """Times the tokens of one sequence, as its client gets them: in groups."""

    def __init__(self, series: MetricSeries, clock: Callable[[], float], prompt_tokens: int) -> None:
        self._series, self._clock, self._prompt_tokens = series, clock, prompt_tokens
        self._began_s = self._first_s = self._last_s = clock()
        self._first = self._further = 0

    def wrote(self, tokens: int) -> None:
        if not tokens:
            return
        self._last_s = self._clock()
        self._series.more("isobatch_written_tokens", tokens)
        if self._first:
            self._further += tokens
            return
        self._first, self._first_s = tokens, self._last_s
        self._series.more("isobatch_prompt_tokens", self._prompt_tokens)
        self._series.value("isobatch_ttft_ms", 1e3 * (self._first_s - self._began_s))

    def ended(self) -> None:
        """The time from one token to the next, where there was a next one."""
        if self._further:
            self._series.value("isobatch_tpot_ms", 1e3 * (self._last_s - self._first_s) / self._further)
