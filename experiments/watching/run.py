"""Claim: to be watched costs a server next to nothing, whoever watches.

The demo of `isobatch serve`, its controller beside it, asked by clients of which each asks again as soon as it is
answered. Turns are short: longer ones differ by more than what is measured, as a busy machine changes. One that is
watched stands between two that are not and is compared with their mean, so what else the machine does, and what changes
slowly, is in both. Whoever watches does so several times as often as usual, and as many times less of what it costs
counts: otherwise a cost of one per cent would be lost in what two turns differ by all the same. `*_rps_ratio` is the
median of the comparisons of a way; `*_low` and `*_high` bound that median with 95 % confidence, however the comparisons
are distributed. The load, the server and whoever else uses the machine share its cores, so `*_work_ratio` says the same
of the server's processor time per request, which they hardly change. What watches is a thread that sends what a page or
Prometheus sends, or a collector of traces: a browser computes elsewhere.

Traces are always on in that server, and sent as they are by default. The requests of the other turns say that they are
not to be traced, so all that one turn has and the other has not is the spans, and sending them. Spans are sent when 512
have come in a process, which takes less than a second here: so long the load of a turn that is traced runs before it
counts. (Of a launch with several traced inputs there is one span, so that ten times as many traced requests make fewer
than ten times as many spans.)
"""

import asyncio
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from math import comb
from statistics import median

from rich.console import Console

from experiments.serve import servers
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.cluster.load.report import summary
from isobatch.deployments.demo.digits import demo_inputs
from isobatch.deployments.tracing import DEFAULT_SHARE, EXPORTER, PARENT, SHARE

CLIENTS, BODIES, TURN_S, WARM_S = 16, 32, 2.0, 10.0
PAGE_EVERY_S, SCRAPE_EVERY_S = 1.0, 15.0  # by default
SETTLES_S = 1.0
OFTEN = 10  # times as often as by default
UNTRACED = f"{PARENT}: 00-{32 * '1'}-{16 * '2'}-00\r\n"
SURE = 0.95
console = Console(stderr=True)


@dataclass(frozen=True)
class Turn:
    """What a server did while it was watched, or not. `work_s`: processor time of its processes per request."""

    rps: float
    work_s: float


@dataclass(frozen=True)
class Watcher:
    """A way of watching: what asks the server at an address during a turn, and what the load's requests say.

    What it costs is not all there, or not all over, before `settles_s`.
    """

    watching: Callable[[str], AbstractContextManager[None]]
    headers: str = UNTRACED
    settles_s: float = 0.0


def page(url: str) -> AbstractContextManager[None]:
    """Open pages: see `look` in `deployments/page/page.js`."""
    return _asking((f"{url}/stats", f"{url}/controller/status"), PAGE_EVERY_S / OFTEN)


def metrics(url: str) -> AbstractContextManager[None]:
    """Scrapes of the node's metrics: those of Ray and ours."""
    return _asking((servers.metrics_url(),), SCRAPE_EVERY_S / OFTEN)


NOBODY = Watcher(lambda _: nullcontext())
WAYS = {
    "page": Watcher(page),
    "metrics": Watcher(metrics),
    "tracing": Watcher(lambda _: nullcontext(), headers="", settles_s=SETTLES_S),
}


def measure(seconds: int = 560) -> dict[str, float]:
    """As many rounds as these seconds allow, the server's start included."""
    until_s, ways = time.monotonic() + seconds, measurable()
    with collector() as (collecting, spans), demo(_traced(collecting) if "tracing" in ways else {}) as url:
        turn(NOBODY, url, WARM_S)
        result, before = {name: list[Turn]() for name in ways}, turn(NOBODY, url)
        while time.monotonic() + 2 * sum(TURN_S + way.settles_s for way in ways.values()) < until_s:
            for name in random.sample(sorted(ways), len(ways)):
                watched, after = (turn(each, url, settles_s=ways[name].settles_s) for each in (ways[name], NOBODY))
                result[name].append(compared(before, watched, after, OFTEN))
                before = after
            console.print(", ".join(f"{name} {each[-1].rps:.3f}" for name, each in result.items()))
        if "tracing" in ways and not spans:
            raise RuntimeError("no trace came to the collector")
    return {name: value for way, each in result.items() for name, value in ratios(way, each).items()}


def measurable() -> dict[str, Watcher]:
    """The ways of watching for which everything is installed here."""
    if find_spec("opentelemetry.exporter.otlp"):
        return WAYS
    missing = "tracing is NOT measured: pip install 'isobatch[tracing]' has what sends spans"
    console.print(missing, style="bold red", markup=False)
    return {name: way for name, way in WAYS.items() if name != "tracing"}


@contextmanager
def demo(environment: Mapping[str, str]) -> Iterator[str]:
    """Served as it is shipped; the controller looks, and changes nothing while it is measured."""
    with servers.demo({}, {"replan_every_s": 86_400.0}, environment=environment) as base:
        _await(f"{base}/controller/status")
        yield base


def _await(url: str) -> None:
    """The controller begins a little later than the application that it waits for."""
    until_s = time.monotonic() + servers.PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                reply.read()
                return
        except OSError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.5)


def turn(way: Watcher, url: str, seconds: float = TURN_S, settles_s: float = 0.0) -> Turn:
    def requests_in(for_s: float) -> float:
        load = LoadGenerator(f"{url}/predict", _digits(), CLIENTS, way.headers)
        return summary(asyncio.run(load.by_clients(CLIENTS, for_s)), float("inf")).answered_per_s

    with way.watching(url):
        if settles_s:
            requests_in(settles_s)
        began_s = servers.processor_s()
        rps = requests_in(seconds)
        work_s = servers.processor_s() - began_s
    return Turn(rps, work_s / (rps * seconds))


@cache
def _digits() -> Sequence[bytes]:
    return [json.dumps({"inputs": one}).encode() for one in demo_inputs(BODIES).round(1).tolist()]


def compared(before: Turn, watched: Turn, after: Turn, often: float = 1.0) -> Turn:
    """What is left of the requests a second, and of what a request takes the other way round: below 1 it costs.

    Of a watcher that looks `often` times as often as usual, the cost counts divided by `often`.

    >>> compared(Turn(1100.0, 0.001), Turn(900.0, 0.001), Turn(900.0, 0.001), often=5)
    Turn(rps=0.98, work_s=1.0)
    """
    rps = 2 * watched.rps / (before.rps + after.rps)
    work = (before.work_s + after.work_s) / (2 * watched.work_s)
    return Turn(*(1 - (1 - ratio) / often for ratio in (rps, work)))


def ratios(way: str, comparisons: Sequence[Turn]) -> dict[str, float]:
    """
    >>> ratios("page", 9 * [Turn(0.99, 0.8)])["page_work_ratio_low"]
    0.8
    """
    figures = {f"{way}_comparisons": float(len(comparisons))}
    for name, each in (
        ("rps", [one.rps for one in comparisons]),
        ("work", [one.work_s for one in comparisons]),
    ):
        low, high = interval(each)
        figures |= {f"{way}_{name}_ratio": median(each)}
        figures |= {f"{way}_{name}_ratio_low": low, f"{way}_{name}_ratio_high": high}
    return figures


def interval(values: Sequence[float], sure: float = SURE) -> tuple[float, float]:
    """Between which the median is: each value is above it or below it like a coin. Of less than six: the extremes.

    >>> interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    (2.0, 9.0)
    """
    ranked, tail, outside = sorted(values), 0.0, 0
    while outside < len(ranked) // 2:
        tail += comb(len(ranked), outside) / 2 ** len(ranked)
        if tail > (1 - sure) / 2:
            break
        outside += 1
    place = max(0, outside - 1)
    return ranked[place], ranked[-1 - place]


def _traced(collecting: str) -> dict[str, str]:
    share = f"{OFTEN * float(DEFAULT_SHARE):g}"
    return {EXPORTER: "otlp", SHARE: share, "OTEL_EXPORTER_OTLP_ENDPOINT": collecting}


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """What takes traces, as an OpenTelemetry collector does: its address, and what came."""
    came: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: its lines would be in between the bench's."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", came
        finally:
            listening.shutdown()
            thread.join()


@contextmanager
def _asking(paths: tuple[str, ...], every_s: float) -> Iterator[None]:
    """Somebody asks for these, again and again, from now until the block ends."""
    ended, wrong = threading.Event(), list[Exception]()

    def ask() -> None:
        while not ended.is_set():
            began_s = time.monotonic()
            try:
                for path in paths:
                    with urllib.request.urlopen(path, timeout=30) as reply:
                        reply.read()
            except OSError as error:
                wrong.append(error)
                return
            ended.wait(every_s - (time.monotonic() - began_s))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if wrong:
        raise RuntimeError(f"whoever watched was not answered: {wrong[0]}")
