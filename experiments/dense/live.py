"""Measures p99 over HTTP with exits over that without, in turns on one replica, at four loads."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from experiments.shared.live import NAME, Live, application, bare
from experiments.shared.scenes import Scenes
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.cluster.load.request_bodies import bodies_of
from isobatch.cluster.load.workloads import arrivals
from isobatch.cluster.simulator.tails import LOADS, PATIENCE, Tails
from isobatch.optimizer import Plan, evaluate
from isobatch.profiles.files import Profile

TURNS, WARMS_UP_S = 3, 5.0


def live_tail(
    tails: Tails, plan: Plan, profile: Profile, model: Path, fresh: Scenes, lasts_s: float
) -> Iterator[tuple[str, float]]:
    """`model`: with the thresholds that the plan was made for. Arrivals are the same with exits and without."""
    with TemporaryDirectory() as name, bare() as here:
        patience_ms = 1e3 * PATIENCE * tails.slo_s
        here.deploy(application(plan, profile, Path(name), model=str(model), backend="torch", slo_ms=patience_ms))
        yield from asyncio.run(_ratios(here, tails, plan, fresh, lasts_s))


async def _ratios(here: Live, tails: Tails, plan: Plan, fresh: Scenes, lasts_s: float) -> list[tuple[str, float]]:
    most_per_s, bodies = evaluate(tails.stock, tails.facts).goodput_per_s, bodies_of(fresh.pictures)

    async def p99_s(load: float, seconds: float, seed: int) -> float:
        record = await LoadGenerator(here.url, bodies).at(arrivals("poisson", load * most_per_s, seconds, seed))
        answered = record.status == 200
        return float(np.quantile(record.ended_s[answered] - record.due_s[answered], 0.99))

    ratios: dict[float, list[float]] = {load: [] for load in LOADS}
    for turn in range(TURNS):
        p99s_s: dict[Plan, list[float]] = {}
        for each in (tails.stock, plan) if turn % 2 else (plan, tails.stock):
            await RunningApplication(NAME).roll_out(each)
            await p99_s(LOADS[-1], WARMS_UP_S, seed=TURNS)
            p99s_s[each] = [await p99_s(load, lasts_s, seed=turn) for load in LOADS]
        for load, with_s, without_s in zip(LOADS, p99s_s[plan], p99s_s[tails.stock], strict=True):
            ratios[load].append(with_s / without_s)
    return [(f"live_p99_ratio_at_{load}", median(each)) for load, each in ratios.items()]
