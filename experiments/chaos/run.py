"""Claim: whatever dies, what was admitted is answered, and service is back to 90 % of what it can be within seconds.

A live application on virtual devices, two fronts, and a second node that can be lost. Faults are drawn by chance, each
under an open loop of requests; how long goodput stays below 90 % of what is offered is read off the answers.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.chaos.faults import FAULTS, Fault, restored
from experiments.live import Live, application, bare, kill_node, node
from experiments.load import BROKEN, WRONG, Record
from experiments.replan.suite import START, offered_per_s, profile
from experiments.replan.timeline import load, timeline
from experiments.workloads import arrivals

SLO_MS = 3000.0
SHARE = 0.5  # of what the weakest plan sustains: what is left after a fault can carry it
ENOUGH = 0.9
ROUNDS = 30
BEFORE_S, AFTER_S = 3.0, 9.0
REMOTE = 2  # of the devices stand on the node that can be lost
console = Console(stderr=True)


@dataclass(frozen=True)
class Round:
    """One fault, and what became of the requests around it."""

    what: str
    requests: int
    lost: int  # no answer at all
    failed: int  # an answer of 500
    late: int  # refused, expired
    wrong: int
    resent: int  # once more, after the connection had ended without a word
    recovery_s: float


def measure() -> dict[str, float]:
    with TemporaryDirectory() as folder, application_on_two_nodes(Path(folder)) as (here, lose_node):
        faults = FAULTS | {"a node is lost": lose_node}
        rounds = asyncio.run(_rounds(here, faults))
    console.print(table(rounds))
    return _figures(rounds)


@contextmanager
def application_on_two_nodes(folder: Path, fronts: int = 2) -> Iterator[tuple[Live, Fault]]:
    """The application, and the fault that takes the second node from it and then gives it another."""
    total = START.devices()["v100"]
    with bare() as here, ExitStack() as nodes:
        nodes.enter_context(node(here.ray.address, {"v100": total - REMOTE}))
        second = [nodes.enter_context(node(here.ray.address, {"v100": REMOTE}))]
        here.deploy(application(START, profile(), folder, slo_ms=SLO_MS, front_replicas=fronts))

        async def lose_node(here: Live, chance: random.Random) -> None:
            kill_node(second.pop())
            second.append(await asyncio.to_thread(nodes.enter_context, node(here.ray.address, {"v100": REMOTE})))

        yield here, lose_node


async def _rounds(here: Live, faults: dict[str, Fault]) -> list[Round]:
    """Each fault once, then whichever chance chooses."""
    chance = random.Random(7)
    names = [*faults, *chance.choices(list(faults), k=max(0, ROUNDS - len(faults)))]
    await load(here.url, SLO_MS).at(arrivals("uniform", offered_per_s(SHARE), BEFORE_S, 0))  # warms up
    return [await round_of(here, name, faults[name], chance) for name in names[:ROUNDS]]


async def round_of(here: Live, what: str, fault: Fault, chance: random.Random) -> Round:
    rate = offered_per_s(SHARE)
    requests = load(here.url, SLO_MS, seed=chance.randrange(1000))
    running = asyncio.create_task(requests.at(arrivals("uniform", rate, BEFORE_S + AFTER_S, 0)))
    await asyncio.sleep(BEFORE_S)
    at_s = requests.now_s()
    await fault(here, chance)
    record = await running
    await restored(here)
    seen = _round(what, record, at_s, rate, len(requests.resent))
    told = ", ".join(f"{getattr(seen, name)} {name}" for name in ("lost", "failed", "late", "resent"))
    console.print(f"{what}: {seen.recovery_s:.1f} s, {told}")
    return seen


def _round(what: str, record: Record, at_s: float, rate: float, resent: int) -> Round:
    status = record.status
    counts = [int((status == one).sum()) for one in (BROKEN, 500, WRONG)]
    late = int(np.isin(status, (429, 503, 504)).sum())
    recovery_s = timeline(record, SLO_MS).recovered_s(at_s, ENOUGH * rate)
    return Round(what, len(status), counts[0], counts[1], late, counts[2], resent, recovery_s)


def table(rounds: list[Round]) -> Table:
    rows = Table(
        "fault",
        "times",
        "s to 90 %, worst",
        "lost",
        "failed",
        "late",
        "sent twice",
        "of requests",
        title="faults under load",
    )
    for what in dict.fromkeys(each.what for each in rounds):
        same = [each for each in rounds if each.what == what]
        sums = [sum(getattr(each, name) for each in same) for name in ("lost", "failed", "late", "resent", "requests")]
        rows.add_row(what, str(len(same)), f"{max(each.recovery_s for each in same):.1f}", *map(str, sums))
    return rows


def _figures(rounds: list[Round]) -> dict[str, float]:
    figures = {
        name: float(sum(getattr(each, name) for each in rounds))
        for name in ("lost", "failed", "late", "wrong", "resent")
    }
    figures |= {"faults": float(len(rounds)), "requests": float(sum(each.requests for each in rounds))}
    figures["worst_recovery_s"] = max(each.recovery_s for each in rounds)
    for each in rounds:
        name = f"recovery_s_{each.what.replace(' ', '_').replace(chr(39), '')}"
        figures[name] = max(figures.get(name, 0.0), each.recovery_s)
    return figures
