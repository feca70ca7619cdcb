"""What is asked of a server, and what is read off its answers."""

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from statistics import median
from typing import Any

from experiments.load import Load, Record
from experiments.load_report import summary
from experiments.workloads import arrivals

DRAWN = json.dumps({"inputs": None}).encode()  # it leaves where the profile says


def leaving_at(block: int, inputs: int = 1) -> bytes:
    one = {"exit_block": block}
    return json.dumps({"inputs": one if inputs == 1 else [one] * inputs}).encode()


def rate(url: str, clients: int, seconds: float) -> float:
    """Answers per second to so many clients, each of which asks again as soon as it is answered."""
    record = asyncio.run(Load(url, [DRAWN], clients).by_clients(clients, seconds))
    return summary(record, float("inf")).answered_per_s


def median_ms(url: str, body: bytes, count: int, per_s: float = 20.0) -> float:
    """The latency of a lone request: one after another, a little apart; the first ones only warm up.

    From when it was sent: an event loop's timers are up to a millisecond late, and by how much depends on the latency.
    """
    record = asyncio.run(Load(url, [body]).at(arrivals("uniform", per_s, (count + 10) / per_s, 0)))
    return median(_latencies_ms(record)[10:])


def under(url: str, rate_per_s: float, seconds: float, slo_ms: float, *bodies: bytes) -> Record:
    """Open loop at this rate, every request with the SLO as its deadline; the bodies take turns."""
    source = Load(url, bodies or [DRAWN], headers=f"X-Deadline-Ms: {slo_ms:g}\r\n")
    return asyncio.run(source.at(arrivals("poisson", rate_per_s, seconds, seed=1)))


def stats(url: str) -> dict[str, Any]:
    """What /stats says of the application that answers there."""
    with urllib.request.urlopen(url.replace("/predict", "/stats"), timeout=30) as reply:
        told: dict[str, Any] = json.load(reply)
    return told


def fronts(url: str) -> dict[str, float]:
    """What all fronts together have taken of the machine: `cpu_s`, `memory_mb`."""
    found = stats(url)["fronts"]
    return {name: sum(front[name] for front in found) for name in ("cpu_s", "memory_mb")}


def p50s_ms(record: Record, bodies: int) -> Sequence[float]:
    """Of each of the bodies that took turns, from when a request was due."""
    if (record.status != 200).any():
        raise RuntimeError(f"{(record.status != 200).sum()} of {len(record.status)} requests were not answered")
    latencies_ms = 1e3 * (record.ended_s - record.due_s)
    return [median(latencies_ms[body::bodies]) for body in range(bodies)]


def _latencies_ms(record: Record) -> Sequence[float]:
    answered = record.status == 200
    found: list[float] = (1e3 * (record.ended_s - record.sent_s))[answered].tolist()
    if not found:
        raise RuntimeError(f"none of {len(record.status)} requests was answered")
    return found
