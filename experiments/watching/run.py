"""Claim: to be watched costs a server next to nothing, whoever watches.

The demo of `isobatch serve`, its controller beside it, asked by clients of which each asks again as soon as it is
answered. The ways of watching and nobody take turns, in an order of chance, and each way is compared with nobody in the
same round: `*_rps_ratio` is the median of the rounds. The load, the server and whoever else uses the machine share its
cores, so `*_work_ratio` says the same of the server's processor time per request, which they hardly change; quartiles
stand beside both. What watches is a thread that sends what a page or Prometheus sends: a browser computes elsewhere.
"""

import asyncio
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from rich.console import Console

from cluster.load.generator import LoadGenerator
from cluster.load.report import summary
from cluster.serving.local import ROOT
from deployments.demo.digits import demo_inputs
from experiments.serve import servers

CLIENTS, BODIES = 16, 32
PAGE_EVERY_S, SCRAPE_EVERY_S = 1.0, 15.0
console = Console(stderr=True)


@dataclass(frozen=True)
class Turn:
    """What a server did while it was watched, or not. `work_s`: processor time of its processes per request."""

    rps: float
    work_s: float


nobody = nullcontext[str]


def page(url: str) -> AbstractContextManager[str]:
    """An open page: see `look` in `deployments/page/page.js`."""
    return _asking(url, (f"{url}/stats", f"{url}/controller/status"), PAGE_EVERY_S)


def metrics(url: str) -> AbstractContextManager[str]:
    """A scraper at its usual pace, of the node's metrics: those of Ray and ours."""
    return _asking(url, (servers.metrics_url(),), SCRAPE_EVERY_S)


# A way watches the server at an address for a turn, and yields the address to load: another one, if it needs a server
# of its own.
Way = Callable[[str], AbstractContextManager[str]]
WAYS: dict[str, Way] = {"page": page, "metrics": metrics}


def measure(rounds: int = 8, seconds: int = 15) -> dict[str, float]:
    """A turn lasts as long as a scraper waits, so that each has one scrape."""
    with demo() as url:
        turn(nobody, url, float(seconds))  # warms up
        found = [_round(url, float(seconds), random.Random(number)) for number in range(rounds)]
    return {name: value for way in WAYS for name, value in ratios(way, found).items()}


@contextmanager
def demo() -> Iterator[str]:
    """Served as it is shipped; the controller looks, and changes nothing while it is measured."""
    args: dict[str, object] = {"cpus_per_replica": 0, "replan": True}
    args |= {name: str(ROOT / f"cluster/demo/{name}.json") for name in ("plan", "profile")}
    with TemporaryDirectory() as folder:
        controller = {"memory": folder, "replan_every_s": 86_400.0}
        applications = [
            {"name": "isobatch", "import_path": "deployments.app:build", "route_prefix": "/", "args": args},
            {
                "name": "controller",
                "import_path": "cluster.controller.app:build",
                "route_prefix": "/controller",
                "args": controller,
            },
        ]
        file = Path(folder) / "serve.yaml"
        file.write_text(json.dumps({"applications": applications}))  # JSON is YAML
        with servers.isobatch(file) as url:
            base = url.removesuffix("/predict")
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


def _round(url: str, seconds: float, chance: random.Random) -> dict[str, Turn]:
    order = ["nobody", *WAYS]
    chance.shuffle(order)
    found = {name: turn(WAYS.get(name, nobody), url, seconds) for name in order}
    console.print(", ".join(f"{name} {each.rps:.0f}/s {1e6 * each.work_s:.0f} us" for name, each in found.items()))
    return found


def turn(way: Way, url: str, seconds: float) -> Turn:
    digits = [json.dumps({"inputs": one}).encode() for one in demo_inputs(BODIES).round(1).tolist()]
    with way(url) as loaded:
        began_s = servers.processor_s()
        record = asyncio.run(LoadGenerator(f"{loaded}/predict", digits, CLIENTS).by_clients(CLIENTS, seconds))
        work_s = servers.processor_s() - began_s
    answered = summary(record, float("inf")).answered_per_s * seconds
    return Turn(answered / seconds, work_s / answered)


def ratios(way: str, rounds: list[dict[str, Turn]]) -> dict[str, float]:
    """Of the requests a second, and of what a request takes the other way round: below 1, watching costs something.

    >>> ratios("page", 3 * [{"nobody": Turn(1000.0, 0.001), "page": Turn(990.0, 0.00125)}])["page_work_ratio"]
    0.8
    """
    figures: dict[str, float] = {}
    for name, each in (
        ("rps", [found[way].rps / found["nobody"].rps for found in rounds]),
        ("work", [found["nobody"].work_s / found[way].work_s for found in rounds]),
    ):
        low, _, high = quantiles(each, n=4)
        figures |= {f"{way}_{name}_ratio": median(each)}
        figures |= {f"{way}_{name}_ratio_lower_quartile": low, f"{way}_{name}_ratio_upper_quartile": high}
    return figures


@contextmanager
def _asking(url: str, paths: tuple[str, ...], every_s: float) -> Iterator[str]:
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
        yield url
    finally:
        ended.set()
        thread.join()
    if wrong:
        raise RuntimeError(f"whoever watched was not answered: {wrong[0]}")
