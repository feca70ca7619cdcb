"""Sends requests to a server, and computes figures from its answers."""

import asyncio
import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from experiments.shared.live import answer_at
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.report import summary
from isobatch.cluster.load.workloads import arrivals

DRAWN = json.dumps({"inputs": None}).encode()  # an input that leaves at random by the profile


def leaving_at(block: int, inputs: int = 1) -> bytes:
    one = {"exit_block": block}
    return json.dumps({"inputs": one if inputs == 1 else [one] * inputs}).encode()


def rate(url: str, clients: int, seconds: float) -> float:
    """Answers per second to clients that each send the next request when they have an answer."""
    record = asyncio.run(LoadGenerator(url, [DRAWN], clients).by_clients(clients, seconds))
    return summary(record, float("inf")).answered_per_s


def median_ms(url: str, body: bytes, count: int, per_s: float = 20.0) -> float:
    """The median latency of lone requests, sent one after another; the first ones warm up.

    It counts from the sending of a request, since an event loop's timers are up to a millisecond late.
    """
    record = asyncio.run(LoadGenerator(url, [body]).at(arrivals("uniform", per_s, (count + 10) / per_s, 0)))
    return median(_latencies_ms(record)[10:])


def under(url: str, rate_per_s: float, seconds: float, slo_ms: float, *bodies: bytes) -> LoadRecord:
    """Open loop at this rate, every request with the SLO as its deadline; the bodies take turns."""
    source = LoadGenerator(url, bodies or [DRAWN], headers=f"X-Deadline-Ms: {slo_ms:g}\r\n")
    return asyncio.run(source.at(arrivals("poisson", rate_per_s, seconds, seed=1)))


def stats(url: str) -> dict[str, Any]:
    """The content of /stats of the application at this address."""
    content: dict[str, Any] = answer_at(url.replace("/predict", "/stats"))
    return content


def p50s_ms(record: LoadRecord, bodies: int) -> Sequence[float]:
    """The median latency for each of the bodies that took turns, from when a request was due."""
    if (record.status != 200).any():
        raise RuntimeError(f"{(record.status != 200).sum()} of {len(record.status)} requests were not answered")
    latencies_ms = 1e3 * (record.ended_s - record.due_s)
    return [median(latencies_ms[body::bodies]) for body in range(bodies)]


def _latencies_ms(record: LoadRecord) -> Sequence[float]:
    answered = record.status == 200
    result: list[float] = (1e3 * (record.ended_s - record.sent_s))[answered].tolist()
    if not result:
        raise RuntimeError(f"none of {len(record.status)} requests was answered")
    return result
