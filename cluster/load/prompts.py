"""Load on a decoder: prompts over OpenAI's interface, each answer streamed.

The time to the first token (TTFT) counts from the time at which a request was due. The time per output token (TPOT) is
the average from the first token to the last.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from isobatch.cluster.load.generator import BROKEN, Carrier, HttpConnection, LoadGenerator, LoadRecord
from isobatch.cluster.load.report import counted, quantiles
from isobatch.profiles.errors import UserError, read_text

PATH = "/v1/completions"
MOST_AT_ONCE = 4096  # texts that are written at the same time; more wait here
SHOWN = (50.0, 95.0, 99.0)  # percentiles of times


@dataclass(frozen=True)
class WrittenText:
    """The result of one prompt. `first_s` and `last_s` are the times of its first and last token."""

    due_s: float
    status: int
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


class _TextConnection(HttpConnection):
    """Counts the tokens of a streamed text, and notes when they come."""

    def __init__(self, load: "PromptLoad") -> None:
        super().__init__()
        self._load = load

    def ask(self, request: bytes, done: Callable[[int, bytes], None]) -> None:
        self.ended, self.first_s, self.last_s, self.tokens, self._rest = False, 0.0, 0.0, 0, b""
        super().ask(request, done)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._load.streamed += len(body)
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self.ended = True
            elif event.startswith(b"data: ") and (new := _tokens_in(event[6:])):
                self.tokens += new
                self.last_s = time.perf_counter()
                self.first_s = self.first_s or self.last_s


def _tokens_in(event: bytes) -> int:
    """
    >>> _tokens_in(b'{"choices": [{"exit_blocks": [2, 7]}]}'), _tokens_in(b'{"choices": [{"text": "a"}]}')
    (2, 1)
    """
    choices = json.loads(event).get("choices") or ()
    return sum(len(each["exit_blocks"]) if "exit_blocks" in each else bool(each.get("text")) for each in choices)


class PromptLoad(LoadGenerator):
    """Sends prompts. `max_tokens`: of each text; None, which JSON writes as null: the server's own limit."""

    patience_s = 60.0

    def __init__(self, url: str, prompts: Sequence[str], max_tokens: int | None, headers: str = "") -> None:
        bodies = [json.dumps({"prompt": each, "max_tokens": max_tokens, "stream": True}).encode() for each in prompts]
        super().__init__(
            url.rstrip("/") + PATH, bodies, MOST_AT_ONCE, headers, connection=lambda: _TextConnection(self)
        )
        self._times: dict[int, tuple[float, float, int]] = {}  # of written texts, by the number of their request

    def texts(self, record: LoadRecord) -> list[WrittenText]:
        """The results of the prompts, from the record of their requests."""
        requests = enumerate(zip(record.due_s.tolist(), record.status.tolist(), strict=True))
        return [WrittenText(due_s, status, *self._times.get(index, ())) for index, (due_s, status) in requests]

    def _finish(self, connection: Carrier, index: int, status: int, answer: bytes) -> None:
        assert isinstance(connection, _TextConnection), "This is a bug: another connection was made."
        if status == 200 and connection.ended and connection.tokens:
            first_s, last_s = connection.first_s - self._started_s, connection.last_s - self._started_s
            self._times[index] = first_s, last_s, connection.tokens
        elif status == 200:
            status = BROKEN
        super()._finish(connection, index, status, answer)


def prompts_in(path: Path) -> list[str]:
    try:
        # Not splitlines, which also divides at signs that a text may hold, such as U+2028.
        prompts = [line for each in read_text(path).split("\n") if (line := each.removesuffix("\r"))]
    except UserError as error:
        raise UserError(f"{error}: --prompts is a file of texts, a prompt in each line") from error
    if not prompts:
        raise UserError(f"{path} has no prompt: it needs one in each line")
    return prompts


@dataclass(frozen=True)
class TextSummary:
    """Rates are per second, from the first request to the last token. A text is good if it began within the SLO."""

    requests: int
    seconds: float
    answered_per_s: float
    tokens_per_s: float
    good_share: float  # of all requests
    outcomes: Mapping[str, int]
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]  # of texts with several tokens


def summed(written: Sequence[WrittenText], slo_ms: float) -> TextSummary:
    answered = [each for each in written if each.status == 200]
    seconds = max((each.last_s for each in answered), default=0.0)
    ttft_ms = [1e3 * each.ttft_s for each in answered]
    tpot_ms = [1e3 * each.tpot_s for each in answered if each.tokens > 1]
    return TextSummary(
        requests=len(written),
        seconds=seconds,
        answered_per_s=len(answered) / seconds if seconds else 0.0,
        tokens_per_s=sum(each.tokens for each in answered) / seconds if seconds else 0.0,
        good_share=sum(each <= slo_ms for each in ttft_ms) / max(len(written), 1),
        outcomes=counted([each.status for each in written]),
        ttft_ms=quantiles(np.array(ttft_ms), SHOWN),
        tpot_ms=quantiles(np.array(tpot_ms), SHOWN),
    )


def table(summary: TextSummary, slo_ms: float) -> Table:
    rows = Table("figure", "value")
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in summary.outcomes.items())
    rows.add_row("requests", f"{summary.requests:,} ({outcomes})")
    rows.add_row("answered per second", f"{summary.answered_per_s:,.1f}")
    rows.add_row("tokens per second", f"{summary.tokens_per_s:,.1f}")
    rows.add_row(f"first token within {slo_ms:g} ms", f"{summary.good_share:.1%}")
    for name, values in (("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms)):
        rows.add_row(name, ", ".join(f"{q} {value:,.1f} ms" for q, value in values.items()) or "none")
    return rows
