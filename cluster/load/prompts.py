"""Load on a network that writes texts: prompts over OpenAI's interface, each answer streamed over its own connection.

The time to the first token (TTFT) counts from when a request was due. The time per output token (TPOT) is the average
from the first token to the last.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from httptools import HttpParserError, HttpResponseParser
from rich.table import Table

from isobatch.cluster.load.generator import BROKEN, Floats, http_parts
from isobatch.cluster.load.report import counted, is_failure, quantiles
from isobatch.profiles.errors import UserError, read_text

PATH = "/v1/completions"
PATIENCE_S = 60.0  # a request that takes longer is lost
SHOWN = (50.0, 95.0, 99.0)  # percentiles of times


@dataclass(frozen=True)
class WrittenText:
    """The result of one prompt. `first_s` and `last_s` are the times of its first and last token."""

    due_s: float
    status: int
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    error: bytes = b""  # the body of an answer that is no stream

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


class _Answer:
    def __init__(self) -> None:
        self.parser = HttpResponseParser(self)
        self.done, self.ended = False, False
        self.times_s: list[float] = []
        self.tokens = 0
        self.rest = b""

    def on_body(self, body: bytes) -> None:
        *events, self.rest = (self.rest + body).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self.ended = True
            elif event.startswith(b"data: ") and (new := _tokens_in(event[6:])):
                self.tokens += new
                self.times_s.append(time.perf_counter())

    def on_message_complete(self) -> None:
        self.done = True


def _tokens_in(event: bytes) -> int:
    """
    >>> _tokens_in(b'{"choices": [{"exit_blocks": [2, 7]}]}'), _tokens_in(b'{"choices": [{"text": "a"}]}')
    (2, 1)
    """
    choices = json.loads(event).get("choices") or ()
    return sum(len(each["exit_blocks"]) if "exit_blocks" in each else bool(each.get("text")) for each in choices)


class PromptLoad:
    def __init__(self, url: str, prompts: Sequence[str], max_tokens: int | None, headers: Mapping[str, str]) -> None:
        parts, self._place = http_parts(url)
        self._requests = [_request(parts.netloc, prompt, max_tokens, headers) for prompt in prompts]

    async def at(self, due_s: Floats) -> list[WrittenText]:
        begun_s = time.perf_counter()
        tasks = []
        for index, due in enumerate(due_s):
            if (wait_s := begun_s + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._ask(index, begun_s, float(due))))
        return list(await asyncio.gather(*tasks))

    async def by_clients(self, clients: int, seconds: float) -> list[WrittenText]:
        """Closed loop: each client sends its next prompt as soon as it has the whole answer."""
        begun_s = time.perf_counter()
        numbers = count()

        async def client() -> list[WrittenText]:
            texts = []
            while (now_s := time.perf_counter() - begun_s) < seconds:
                texts.append(await self._ask(next(numbers), begun_s, now_s))
            return texts

        by_client = await asyncio.gather(*(client() for _ in range(clients)))
        return [text for texts in by_client for text in texts]

    async def _ask(self, index: int, begun_s: float, due_s: float) -> WrittenText:
        answer = _Answer()
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection(*self._place)
                try:
                    writer.write(self._requests[index % len(self._requests)])
                    while not answer.done and (data := await reader.read(65_536)):
                        answer.parser.feed_data(data)
                finally:
                    writer.close()
        except (OSError, TimeoutError, HttpParserError):
            return WrittenText(due_s, BROKEN)
        status = answer.parser.get_status_code()
        if status != 200 or not (answer.ended and answer.times_s):
            return WrittenText(due_s, BROKEN if status == 200 else status, error=answer.rest)
        first_s, last_s = (moment - begun_s for moment in (answer.times_s[0], answer.times_s[-1]))
        return WrittenText(due_s, status, first_s, last_s, answer.tokens)


def _request(host: str, prompt: str, max_tokens: int | None, headers: Mapping[str, str]) -> bytes:
    """A request for at most `max_tokens`; None, which JSON writes as null: the server's own limit."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
    more_headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}{more_headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def prompts_in(path: Path) -> list[str]:
    try:
        prompts = [line for line in read_text(path).splitlines() if line]
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

    @property
    def failed(self) -> bool:
        return is_failure(self.outcomes)


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
