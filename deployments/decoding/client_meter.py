"""Counts and times of requests and their texts, as clients see them, for `/stats` and Prometheus."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from isobatch.deployments.front.observed import Observed
from isobatch.deployments.front.proxy import Burden, WatchedProxies
from isobatch.deployments.metrics import MetricSeries

LATEST_TEXTS = 200  # whose lengths are reported to the controller
LONG_WAIT = 0.8  # of the promised time to the first token: a longer wait is a sign of too many requests
RequestEnd = Literal["answered", "refused", "cancelled", "failed"]
_OUTCOMES = {"cancelled": "abandoned"}  # as the metric `isobatch_requests` names it for all networks


class ClientMeter:
    """Counts one front's requests, and times the tokens of each sequence.

    A token is in time if it comes no later than `ttft_s` after its text was asked for and `tpot_s` for each before it.
    """

    def __init__(
        self, series: MetricSeries, clock: Callable[[], float], ttft_s: float, tpot_s: float, now_s: float | None = None
    ) -> None:  # fmt: skip
        """`now_s`: the time by the clock that fronts and controllers share; None: they share `clock`."""
        self.requests: dict[RequestEnd, int] = dict.fromkeys(get_args(RequestEnd), 0)
        self.clock, self.series = clock, series
        self.lengths = deque[tuple[int, int]](maxlen=LATEST_TEXTS)  # tokens of the prompt, tokens that were written
        self._opened_s = clock()
        self._began_s = self._opened_s if now_s is None else now_s
        self.ended_texts = self.ended_tokens = 0  # texts that were written to their end, and their tokens
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.depths: Counter[int] = Counter()  # tokens, by the block after which they were known
        # Requests in progress; those that waited long or were refused; others. A text counts as a part of its request.
        self.inside = self.strained = self.at_ease = 0.0
        self.in_time = 0  # tokens
        self.refused_tokens = 0.0  # of refused texts, if these would have been as long as the latest texts
        self.proxies = WatchedProxies()

    def counted(self) -> dict[RequestEnd, int]:
        """The requests by their outcome, including those that proxies have refused."""
        if refused := self.proxies.new_refusals():
            self._add("refused", refused)
        return self.requests

    def ended(self, outcome: RequestEnd) -> None:
        """Count a request, and those that proxies have refused: metrics must not wait until `/stats` is asked."""
        self._add(outcome, 1)
        self.counted()

    def _add(self, outcome: RequestEnd, requests: int) -> None:
        self.requests[outcome] += requests
        self.series.inc("isobatch_requests", requests, outcome=_OUTCOMES.get(outcome, outcome))

    def answered(self, begun_s: float) -> None:
        """A request that came at this time has its whole answer."""
        self.ended("answered")
        self.series.observe("isobatch_latency_ms", 1e3 * (self.clock() - begun_s))

    def sequence(self, prompt_tokens: int, share: float = 1.0, age_s: float = 0.0) -> "SequenceMeter":
        """The meter of a sequence that was requested `age_s` ago, as this share of a request."""
        self.inside += share
        return SequenceMeter(self, prompt_tokens, share, age_s)

    def burden(self) -> Burden:
        """The numbers of requests by which the proxy sets its limit."""
        return Burden(round(self.inside), round(self.strained), round(self.at_ease))

    def observed(self, num_blocks: int) -> Observed:
        """The counts since the start, for the controller: an input is a token."""
        exits = tuple(self.depths[block] for block in range(num_blocks))
        tokens = sum(exits) + round(self.refused_tokens)
        return Observed(
            self._began_s, self.clock() - self._opened_s, tokens, self.in_time, exits, arrived_weight=tokens,
            texts=self.ended_texts, ended=self.ended_tokens, lengths=tuple(self.lengths),
        )  # fmt: skip


class SequenceMeter:
    """Times the groups of tokens of one sequence as its client gets them."""

    def __init__(self, meter: ClientMeter, prompt_tokens: int, share: float, age_s: float) -> None:
        self._meter, self._prompt_tokens, self._share = meter, prompt_tokens, share
        self._began_s = self._first_s = self._last_s = meter.clock() - age_s
        self._first = self._further = 0

    def wrote(self, depths: Sequence[int]) -> None:
        """Count tokens that came now; `depths`: the blocks after which they were known."""
        meter, tokens, before = self._meter, len(depths), self._first + self._further
        if not tokens:
            return
        self._last_s = meter.clock()
        waited_s = self._last_s - self._began_s
        meter.depths.update(depths)
        meter.series.inc("isobatch_written_tokens", tokens)
        late_s = waited_s - meter.ttft_s
        meter.in_time += sum(late_s <= place * meter.tpot_s for place in range(before, before + tokens))
        if before:
            self._further += tokens
            return
        self._first, self._first_s = tokens, self._last_s
        if waited_s > LONG_WAIT * meter.ttft_s:
            meter.strained += self._share
        else:
            meter.at_ease += self._share
        meter.series.inc("isobatch_prompt_tokens", self._prompt_tokens)
        meter.series.observe("isobatch_ttft_ms", 1e3 * waited_s)

    def refused(self) -> None:
        """Count a refused text, as if it would have been as long as the latest texts. One may have begun before."""
        meter, written = self._meter, self._first + self._further
        if not written:
            meter.strained += self._share
        if meter.lengths:
            mean = sum(tokens for _, tokens in meter.lengths) / len(meter.lengths)
            meter.refused_tokens += max(0.0, mean - written)

    def finished(self) -> None:
        """Count a text that is written to its end, and its lengths."""
        tokens = self._first + self._further
        self._meter.lengths.append((self._prompt_tokens, tokens))
        self._meter.ended_texts += 1
        self._meter.ended_tokens += tokens

    def ended(self) -> None:
        """Report the mean time from one token to the next."""
        self._meter.inside -= self._share
        if self._further:
            self._meter.series.observe("isobatch_tpot_ms", 1e3 * (self._last_s - self._first_s) / self._further)
