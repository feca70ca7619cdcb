"""Claim: if any process dies, every admitted request is answered, and goodput is back at 90 % within seconds.

A live application on virtual devices has two fronts, a controller, and a second node that can be lost. Random faults
kill, stop or slow processes, or deploy the application again, under one open loop of requests. Answers show how long
goodput stays below 90 % of the offered load. The client sends a request again if its connection broke, as HTTP clients
do, since a dead process cannot answer.

Then faults hit one of two applications of a fleet, with an arbiter; the figures `neighbour_...` are those of the other
application. Faults of HAProxy, of Serve's controller and of a node hit both.

`make bench-chaos faults=30 beside=0` takes 6 minutes. `make bench-chaos only=deployed faults=100 fresh=1 beside=0`
deploys 100 times, and opens a connection for each request.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.chaos.faults import (
    AGAIN_S,
    DEVICES,
    FAULTS,
    ITS_DEVICES,
    ITS_PLAN,
    NEIGHBOUR,
    PROFILE,
    SLO_MS,
    START,
    Fault,
    kill,
    load,
    offered_per_s,
    restored,
)
from experiments.replan.suite import BATCH, FAST
from experiments.replan.timeline import Timeline, timeline
from experiments.serve.fleet import promise_per_s
from experiments.shared.live import NAME, Live, application, bare, controller, kill_node, named, node
from isobatch.cluster.load.generator import BROKEN, WRONG, LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.cluster.serving.serve_file import ARBITER
from isobatch.deployments.processes import descendants
from isobatch.optimizer import Plan

ENOUGH = 0.9
REFUSALS = (429, 503, 504)
ROUNDS, BESIDE = 40, 17
BEFORE_S, ROUND_S = 3.0, 9.0
AFTER_S = 4.0  # from a repair to the end of its round: the last 3 s of a round do not show whether goodput is back
MOST_S = 60.0  # a round lasts until goodput is back, but not longer
LONGEST_S = 3600.0
REMOTE = 2  # devices on the node that can be lost
AGENTS = (
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
)  # of each node; Ray ends the node if one of them ends
NODE_ENDS_S = 3.0
PATIENCE = {"look_every_s": 1.0, "replan_every_s": 20.0}  # of the controller: devices that return are used in 5 s
T = TypeVar("T")
console = Console(stderr=True, width=140)  # tables are kept in files too


@dataclass(frozen=True)
class Round:
    """One fault, and the outcomes of the requests that were due from then until the next."""

    what: str
    requests: int
    late: int  # answered right, after the SLO
    refused: int  # status 429, 503 or 504
    failed: int  # any other status
    wrong: int
    broken: int  # connections that ended without an answer; the client sent the request again
    lost: int  # no answer within the time in which the client repeats the request
    recovery_s: float

    @property
    def sentence(self) -> str:
        counts = ", ".join(f"{value} {name}" for name in COUNTS if (value := getattr(self, name)))
        return f"{self.what}: {self.recovery_s:.1f} s to {ENOUGH:.0%}, {counts}"


COUNTS = tuple(field.name for field in fields(Round) if field.type is int)


@dataclass(frozen=True)
class Struck:
    """A fault, with the times at which it began and was repaired."""

    what: str
    at_s: float
    until_s: float


def measure(faults: int = ROUNDS, only: str = "", fresh: int = 0, beside: int = BESIDE) -> dict[str, float]:
    """`only`: faults whose names contain this. `fresh`: 1 opens a connection for each request.

    `beside`: how many faults hit one of two applications.
    """
    figures: dict[str, float] = {}
    if faults:
        alone = _live(only, partial(struck_under_load, rounds=faults, fresh=bool(fresh)))
        console.print(table(alone))
        figures |= figures_of(alone)
    if beside:
        strike = partial(struck_beside_a_neighbour, rounds=beside, fresh=bool(fresh))
        hit, others = _live(only, strike, neighbour=True)
        console.print("the application that is hit:", table(hit), "the other one:", table(others))
        figures |= {"neighbour_faults": float(len(hit)), "beside_lost": float(sum(each.lost for each in hit))}
        figures |= {f"neighbour_{name}": float(sum(getattr(each, name) for each in others)) for name in COUNTS}
    return figures


def _live(only: str, strike: Callable[[Live, dict[str, Fault]], Coroutine[Any, Any, T]], neighbour: bool = False) -> T:
    with TemporaryDirectory() as folder, application_on_two_nodes(Path(folder), neighbour) as (here, more):
        chosen = {name: do for name, do in (FAULTS | more).items() if only in name}
        with redirect_stdout(StringIO()):  # Ray prints much about every process that has died
            return asyncio.run(strike(here, chosen))


@contextmanager
def application_on_two_nodes(folder: Path, neighbour: bool) -> Iterator[tuple[Live, dict[str, Fault]]]:
    """The application, and the faults that end its second node and then add another, or deploy it anew."""
    total = DEVICES[FAST] + neighbour * ITS_DEVICES[FAST]
    with bare() as here, ExitStack() as nodes:
        nodes.enter_context(node(here.ray.address, {FAST: total - REMOTE}))
        second = [nodes.enter_context(node(here.ray.address, {FAST: REMOTE}))]
        alone = [controller(folder, devices=DEVICES, max_batch=BATCH, **PATIENCE)]
        beside = fleet_beside(folder, {FAST: total}) if neighbour else alone
        slos_ms = count(SLO_MS)  # each deployment differs from the one before, so that fronts are started

        def deploy() -> None:
            here.deploy(application(START, PROFILE, folder, slo_ms=next(slos_ms), front_replicas=2), *beside)

        async def deployed(here: Live, chance: random.Random) -> None:
            await asyncio.to_thread(deploy)

        async def lose_node(here: Live, chance: random.Random) -> None:
            kill_node(second.pop())
            second.append(await asyncio.to_thread(nodes.enter_context, node(here.ray.address, {FAST: REMOTE})))

        async def agent_killed(here: Live, chance: random.Random) -> None:
            agents = {process for name in AGENTS for process in named(name)}
            kill(chance.choice(sorted(agents.intersection(descendants(second[-1])))))
            await asyncio.sleep(NODE_ENDS_S)
            await lose_node(here, chance)

        deploy()
        yield (
            here,
            {
                "a node is lost": lose_node,
                "an agent of a node is killed": agent_killed,
                "the application is deployed anew": deployed,
            },
        )


def fleet_beside(folder: Path, devices: dict[str, int]) -> list[dict[str, Any]]:
    """The controller of the application, another application with a controller, and the arbiter of both.

    Each application needs its own devices. After a loss, the application under faults gives up devices first.
    """
    (folder / NEIGHBOUR).mkdir()
    lead, its_lead = (
        controller(place, application=name, shared=devices, max_batch=BATCH, **PATIENCE)
        for name, place in ((NAME, folder), (NEIGHBOUR, folder / NEIGHBOUR))
    )
    path = {"name": NEIGHBOUR, "route_prefix": f"/{NEIGHBOUR}"}
    other = application(ITS_PLAN, PROFILE, folder / NEIGHBOUR, slo_ms=SLO_MS) | path
    its_lead |= {"name": f"{NEIGHBOUR}-controller", "route_prefix": f"/{NEIGHBOUR}/controller"}
    terms = [
        {
            "name": name,
            "devices": own,
            "controller": leads["name"],
            "least_per_s": ENOUGH * promise_per_s(plan, PROFILE),
            "priority": priority,
        }
        for name, own, leads, plan, priority in (
            (NAME, DEVICES, lead, START, 0),
            (NEIGHBOUR, ITS_DEVICES, its_lead, ITS_PLAN, 1),
        )
    ]
    arguments = {"devices": devices, "applications": terms, "look_every_s": PATIENCE["look_every_s"]}
    arbiter = {"name": "fleet", "import_path": ARBITER, "route_prefix": "/fleet", "args": arguments}
    return [lead, other, its_lead, arbiter]


async def struck_beside_a_neighbour(
    here: Live, faults: dict[str, Fault], rounds: int, fresh: bool = False
) -> tuple[list[Round], list[Round]]:
    """As `struck_under_load`, with the outcomes of the other application's requests, too."""
    requests, began = load(f"{here.base}/{NEIGHBOUR}/predict", fresh), list[tuple[str, float]]()

    def noted(name: str) -> Fault:
        def cause(here: Live, chance: random.Random) -> Awaitable[None]:
            began.append((name, requests.now_s()))
            return faults[name](here, chance)

        return cause

    running = asyncio.create_task(requests.at(arrivals("uniform", offered_per_s(ITS_PLAN), LONGEST_S, 0)))
    try:
        hit = await struck_under_load(here, {name: noted(name) for name in faults}, rounds, fresh=fresh)
        ends_s = [*(at_s for _, at_s in began[1:]), requests.now_s()]
    finally:
        requests.stop()
    struck = [Struck(name, at_s, until_s) for (name, at_s), until_s in zip(began, ends_s, strict=True)]
    return hit, rounds_of(await running, struck, requests.resent, ITS_PLAN)


async def struck_under_load(
    here: Live, faults: dict[str, Fault], rounds: int, heal: Callable[[Live], Awaitable[None]] = restored,
    round_s: float = ROUND_S, fresh: bool = False,
) -> list[Round]:  # fmt: skip
    """Cause each fault once, then random faults, under load; `heal` repairs each fault."""
    chance = random.Random(7)
    names = [*faults, *chance.choices(list(faults), k=max(0, rounds - len(faults)))][:rounds]
    await load(here.url).at(arrivals("uniform", offered_per_s(), BEFORE_S, 0))  # warms up
    requests, struck = load(here.url, fresh), list[Struck]()
    running = asyncio.create_task(requests.at(arrivals("uniform", offered_per_s(), LONGEST_S, 0)))
    await asyncio.sleep(BEFORE_S)
    try:
        for name in names:
            at_s = requests.now_s()
            await faults[name](here, chance)
            await asyncio.sleep(max(0.0, at_s + round_s - requests.now_s()))
            await heal(here)
            while True:
                await asyncio.sleep(AFTER_S)
                ended = Struck(name, at_s, requests.now_s())
                (seen,) = rounds_of(requests.so_far(), [ended], requests.resent)
                if seen.recovery_s < math.inf or ended.until_s > at_s + MOST_S:
                    break
            struck.append(ended)
            console.print(f"{len(struck)} of {len(names)}, {seen.sentence}")
    finally:
        requests.stop()
    return rounds_of(await running, struck, requests.resent)


def rounds_of(record: LoadRecord, struck: Sequence[Struck], resent: set[int], plan: Plan = START) -> list[Round]:
    times = timeline(record, SLO_MS, by_due=True)
    return [_round(record, times, each, resent, plan) for each in struck]


def _round(record: LoadRecord, times: Timeline, struck: Struck, resent: set[int], plan: Plan) -> Round:
    inside = (record.due_s >= struck.at_s - SLO_MS / 1e3) & (record.due_s < struck.until_s - SLO_MS / 1e3)
    status, late = record.status[inside], (record.ended_s - record.due_s)[inside] > SLO_MS / 1e3
    return Round(
        struck.what,
        len(status),
        late=int(((status == 200) & late).sum()),
        refused=int(np.isin(status, REFUSALS).sum()),
        failed=int((~np.isin(status, (200, WRONG, BROKEN, *REFUSALS))).sum()),
        wrong=int((status == WRONG).sum()),
        broken=int(np.isin(np.flatnonzero(inside), list(resent)).sum()),
        lost=int((status == BROKEN).sum()),
        recovery_s=times.recovered_s(struck.at_s, struck.until_s - SLO_MS / 1e3, ENOUGH * offered_per_s(plan)),
    )


def table(rounds: list[Round]) -> Table:
    columns = ("fault", "times", "s to 90 %, worst", *COUNTS)
    rows = Table(*columns, title=f"faults under load, SLO {SLO_MS:g} ms; asked again for {AGAIN_S:g} s")
    for what in dict.fromkeys(each.what for each in rounds):
        same = [each for each in rounds if each.what == what]
        sums = (str(sum(getattr(each, name) for each in same)) for name in COUNTS)
        rows.add_row(what, str(len(same)), f"{max(each.recovery_s for each in same):.1f}", *sums)
    return rows


def figures_of(rounds: list[Round]) -> dict[str, float]:
    figures = {"faults": float(len(rounds))}
    figures |= {name: float(sum(getattr(each, name) for each in rounds)) for name in COUNTS}
    return figures | {"worst_recovery_s": max(each.recovery_s for each in rounds)}
