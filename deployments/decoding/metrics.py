"""What clients of a decoder see, for `/stats` and Prometheus. A text takes many launches: all is told at once."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from deployments.front.observed import Observed
from deployments.front.proxy import Burden
from deployments.metrics import MetricSeries

LENGTHS = 200  # texts
LONG = 0.8  # of the time to the first token that is promised: who waits longer is a sign of too many
RequestEnd = Literal["answered", "refused", "cancelled", "failed"]
_METRICS_SAY = {"cancelled": "abandoned"}  # what `isobatch_requests` calls it, here as for other networks


class ClientMeter:
    """Counts one front's requests, and times the tokens of each sequence.

    A token is in time if it comes no later than `ttft_s` after its text was asked for and `tpot_s` for each before it.
    """

    def __init__(self, series: MetricSeries, clock: Callable[[], float], ttft_s: float, tpot_s: float) -> None:
        self.requests: dict[RequestEnd, int] = dict.fromkeys(("answered", "refused", "cancelled", "failed"), 0)
        self.clock, self.series = clock, series
        self.lengths: deque[tuple[int, int]] = deque(maxlen=LENGTHS)  # of the latest texts: of the prompt, and written
        self._asked, self._began_s = 0, clock()
        self._ended, self._ended_tokens = 0, 0  # texts that are whole
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._depths: Counter[int] = Counter()  # tokens, by the block after which they were known
        # Requests: now; that waited long or were refused; the others. A text is its share of the request that it is of.
        self._inside = self._strained = self._at_ease = 0.0
        self._in_time, self._never = 0, 0.0  # tokens, and those of texts that were refused, had they been as the latest

    def ended(self, outcome: RequestEnd) -> None:
        self.requests[outcome] += 1
        self.series.more("isobatch_requests", 1, outcome=_METRICS_SAY.get(outcome, outcome))

    def answered(self, begun_s: float) -> None:
        """A request that came then has its whole answer."""
        self.ended("answered")
        self.series.value("isobatch_latency_ms", 1e3 * (self.clock() - begun_s))

    def sequence(self, prompt_tokens: int, share: float = 1.0) -> "SequenceMeter":
        """Of a sequence that is asked for now, as this share of a request."""
        self._asked += 1
        self._inside += share
        return SequenceMeter(self, prompt_tokens, share)

    def wrote(self, depths: Sequence[int], before: int, asked_s: float) -> None:
        """These tokens came now, of a text that has so many before them and was asked for then."""
        self._depths.update(depths)
        self.series.more("isobatch_written_tokens", len(depths))
        late_s = self.clock() - asked_s - self._ttft_s
        self._in_time += sum(late_s <= place * self._tpot_s for place in range(before, before + len(depths)))

    def began(self, waited_s: float, share: float) -> None:
        """The first tokens of a text came after so long."""
        if waited_s > LONG * self._ttft_s:
            self._strained += share
        else:
            self._at_ease += share

    def left(self, share: float) -> None:
        """A text is not inside any more."""
        self._inside -= share

    def burden(self) -> Burden:
        """What the proxy's limit depends on."""
        return Burden(round(self._inside), round(self._strained), round(self._at_ease))

    def refused(self, share: float) -> None:
        """A text was not let in. How long it would have become, the latest tell."""
        self._strained += share
        if self.lengths:
            self._never += sum(written for _, written in self.lengths) / len(self.lengths)

    def observed(self, num_blocks: int) -> Observed:
        """What the controller asks for, since the start: an input is a token."""
        exits = tuple(self._depths[block] for block in range(num_blocks))
        tokens = sum(exits) + round(self._never)
        return Observed(
            self._began_s,
            self.clock() - self._began_s,
            tokens,
            self._in_time,
            exits,
            arrived_weight=tokens,
            texts=self._ended,
            ended=self._ended_tokens,
            lengths=tuple(self.lengths),
        )

    def whole(self, prompt_tokens: int, tokens: int) -> None:
        """A text is written to its end: its lengths are such as clients ask for."""
        self.lengths.append((prompt_tokens, tokens))
        self._ended += 1
        self._ended_tokens += tokens

    def workload(self) -> dict[str, Any]:
        """What clients have asked for, as `isobatch plan --observed` reads it."""
        prompts, outputs = zip(*self.lengths, strict=True) if self.lengths else ((), ())
        seconds = self.clock() - self._began_s
        return {"texts": self._asked, "seconds": seconds, "prompts": list(prompts), "outputs": list(outputs)}


class SequenceMeter:
    """Times the tokens of one sequence, as its client gets them: in groups."""

    def __init__(self, meter: ClientMeter, prompt_tokens: int, share: float) -> None:
        self._meter, self._series, self._clock = meter, meter.series, meter.clock
        self._prompt_tokens, self._share = prompt_tokens, share
        self._began_s = self._first_s = self._last_s = self._clock()
        self._first = self._further = 0

    def wrote(self, depths: Sequence[int]) -> None:
        """These tokens came now, by the blocks after which they were known."""
        tokens = len(depths)
        if not tokens:
            return
        self._last_s = self._clock()
        self._meter.wrote(depths, self._first + self._further, self._began_s)
        if self._first:
            self._further += tokens
            return
        self._first, self._first_s = tokens, self._last_s
        self._meter.began(self._first_s - self._began_s, self._share)
        self._series.more("isobatch_prompt_tokens", self._prompt_tokens)
        self._series.value("isobatch_ttft_ms", 1e3 * (self._first_s - self._began_s))

    def refused(self) -> None:
        self._meter.refused(self._share)

    def finished(self) -> None:
        self._meter.whole(self._prompt_tokens, self._first + self._further)

    def ended(self) -> None:
        """The time from one token to the next, where there was a next one."""
        self._meter.left(self._share)
        if self._further:
            self._series.value("isobatch_tpot_ms", 1e3 * (self._last_s - self._first_s) / self._further)
