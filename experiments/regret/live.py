"""Live, with real compute: Ray Serve, HTTP, a BERT-base that is really computed, and the controller beside it.

What the devices can is measured in the same run: the same load, while the controller is paused on the plan of most
goodput. All is on one machine's cores, the generator too.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from rich.console import Console

from experiments.regret.judged import Burst, believed_error, reacted_s, share_of
from experiments.shared.live import NAME, Live, answer_at, application, bare, controller
from experiments.shared.real_network import DTYPE, KIND, LARGEST_BATCH, checkpoint, profiled, survival_of, texts
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.optimizer import Objective, Plan, Problem, evaluate, optimize
from isobatch.optimizer.problem import problem
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.files import Profile

SLO_MS = 1000.0
SLACK = 0.2
CALM = 0.2  # of what the plan of most goodput promises
TIMES = {"burst_10x": 10.0, "burst_30x": 30.0}  # the calm rate
MIXED, FULL_SHARE = 0.4, 0.3  # of that plan; of the requests, that ask for the whole network
MIXED_WINDOWS = 2
REST_S, SETTLES_S = 5.0, 5.0  # between bursts; after a plan was rolled out
ROUNDS = 3
STARTS_WITHIN_S = 60.0
SMALL = 0.95  # of what the plan of most goodput sustains
ASKED = 512  # different texts
ORDINARY, IN_FULL = 2, 3  # seeds of texts that may leave, and of those that are run to the end
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class Timing:
    """How long each stretch of the live part lasts."""

    calm_s: float
    burst_s: float
    window_s: float  # of the controller
    rounds: int


@dataclass(frozen=True)
class ServedBert:
    """The running application, the plan of most goodput for it, and the quickest that sustains twice the calm rate."""

    here: Live
    folder: Path
    profile: Profile
    facts: Problem
    most: Plan
    quick: Plan
    per_s: float  # what `most` promises

    @property
    def calm_per_s(self) -> float:
        return CALM * self.per_s

    async def begin(self, window_s: float, name: str) -> None:
        """Deploy it with a controller that remembers nothing."""
        own = self.folder / name
        own.mkdir()
        front = application(
            self.most, self.profile, own, model=str(checkpoint()), backend="torch", dtype=DTYPE, slo_ms=SLO_MS,
            cpus_per_replica=1,
        )  # fmt: skip
        beside = controller(own, replan_every_s=window_s, max_batch=LARGEST_BATCH, slack=SLACK)
        await asyncio.to_thread(self.here.deploy, front, beside)
        await self.roll_out(self.most)
        until_s = time.monotonic() + STARTS_WITHIN_S
        while not await self._is_steered() and time.monotonic() < until_s:
            await asyncio.sleep(0.2)

    async def _is_steered(self) -> bool:
        with suppress(HTTPError):  # 503: the controller waits for the application
            return "forecast" in await self.answer_of("status")
        return False

    async def answer_of(self, what: str, data: bytes | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = await asyncio.to_thread(answer_at, f"{self.here.base}/controller/{what}", body=data)
        return answer

    async def roll_out(self, plan: Plan) -> None:
        await RunningApplication(NAME).roll_out(plan)

    async def stays(self, plan: Plan) -> None:
        """From now on the controller only watches, and this plan runs."""
        await self.answer_of("pause", b"")
        await self.roll_out(plan)
        await self.ask(self.calm_per_s, SETTLES_S)

    async def steered(self) -> None:
        await self.answer_of("resume", b"")

    async def events_since(self, at_s: float) -> list[dict[str, Any]]:
        events = (await self.answer_of("status"))["events"]
        return [each for each in events if each["at_s"] >= at_s and each["what"] in ("rolled out", "rolled back")]

    async def runs_small(self) -> bool:
        """Whether a plan runs that by the profile sustains clearly less than the one of most goodput."""
        running = await RunningApplication(NAME).plan()
        return evaluate(running, self.facts).goodput_per_s < SMALL * self.per_s

    async def ask(self, per_s: float, seconds: float, full: bool = False) -> LoadRecord:
        headers = f"X-Deadline-Ms: {SLO_MS:g}\r\n" + ("X-Full: 1\r\n" if full else "")
        bodies = [json.dumps({"inputs": [text]}).encode() for text in texts(ASKED, IN_FULL if full else ORDINARY)]
        generator = LoadGenerator(f"{self.here.base}/predict", bodies, headers=headers)
        return await generator.at(arrivals("poisson", per_s, seconds, seed=3), patience_s=2 * SLO_MS / 1e3)

    async def burst(self, times: float, seconds: float) -> Burst:
        """So many times the calm rate."""
        began_s = time.time()
        record = await self.ask(times * self.calm_per_s, seconds)
        events = await self.events_since(began_s)
        for each in events:
            console.print(
                f"{each['at_s'] - began_s:.1f} s into {times:g}x, {each['what']} {each['after']}: {each['why']}"
            )
        rolled_out_s = [each["at_s"] for each in events if each["what"] == "rolled out"]
        return Burst.of(record, began_s, SLO_MS, rolled_out_s)


def live(timing: Timing, only: str, folder: Path) -> dict[str, float]:
    """`only`: of mixed, bursts and react, those whose names are in it."""
    known = profiled(checkpoint(), folder, budget_s=min(30.0, timing.calm_s))
    with bare() as here:
        return asyncio.run(_measured(_planned(here, folder, known), timing, only))


def _planned(here: Live, folder: Path, known: Profile) -> ServedBert:
    devices = fleet(f"{KIND}=1")
    links, objective = links_between(devices), Objective(slo_s=SLO_MS / 1e3, slack=SLACK, max_batch=LARGEST_BATCH)
    most = optimize(known, devices, links, objective)
    facts = problem(known, devices, links, length=known.length)
    per_s = evaluate(most, facts).goodput_per_s
    wanted = replace(objective, goal="latency", goodput_per_s=2 * CALM * per_s)
    return ServedBert(here, folder, known, facts, most, optimize(known, devices, links, wanted), per_s)


async def _measured(served: ServedBert, timing: Timing, only: str) -> dict[str, float]:
    """All on one event loop: Serve's handles stay with the one that they were first used on."""
    parts = {"mixed": _mixed, "bursts": _bursts, "react": _react}
    chosen = {name: part for name, part in parts.items() if name in only.split(",")}
    await served.begin(timing.window_s, "begun")
    await served.ask(served.per_s, SETTLES_S)  # warms up
    figures = {"promised_per_s": served.per_s}
    for name, part in chosen.items():
        await served.begin(timing.window_s, name)
        figures |= await part(served, timing)
    return figures


async def _mixed(served: ServedBert, timing: Timing) -> dict[str, float]:
    """What the controller believes of survival: of ordinary requests alone, then with those that are run in full.

    The texts that are sent leave early by themselves; what is compared is the share of these texts, not the chance.
    """
    known = await asyncio.to_thread(survival_of, texts(ASKED, ORDINARY))
    per_s, seconds = MIXED * served.per_s, MIXED_WINDOWS * timing.window_s + 2 * Patience().look_every_s
    await served.ask(per_s, seconds)
    await asyncio.gather(
        served.ask((1 - FULL_SHARE) * per_s, seconds), served.ask(FULL_SHARE * per_s, seconds, full=True)
    )
    mixed = await _survival(served)
    return {"x_full_mix_survival_error": believed_error(mixed, known)}


async def _survival(served: ServedBert) -> Sequence[float]:
    forecast = (await served.answer_of("status"))["forecast"]
    return forecast["survival"] if forecast else ()


async def _bursts(served: ServedBert, timing: Timing) -> dict[str, float]:
    """Calm, then both bursts under the controller, and both on the plan of most goodput.

    Every other round has the opposite order of both: a burst that comes second finds a front that has just learned.
    """
    steered, stayed = {name: list[Burst]() for name in TIMES}, {name: list[Burst]() for name in TIMES}
    for number in range(timing.rounds):
        order = 1 if number % 2 == 0 else -1
        await served.ask(served.calm_per_s, timing.calm_s)
        for result in (steered, stayed)[::order]:
            if result is stayed:
                await served.stays(served.most)
            else:
                await served.steered()
            for name in list(TIMES)[::order]:
                result[name].append(await served.burst(TIMES[name], timing.burst_s))
                await served.ask(served.calm_per_s, REST_S)
        await served.steered()
        spent = (await served.answer_of("status"))["effort"]
        console.print(f"the controller took {spent}")
        for name in TIMES:
            one, other = steered[name][-1], stayed[name][-1]
            console.print(f"{name}: {one.good_per_s:.1f} in time per second, {other.good_per_s:.1f} if the plan stays")
    return {f"{name}_in_time": share_of(steered[name], stayed[name]) for name in TIMES}


async def _react(served: ServedBert, timing: Timing) -> dict[str, float]:
    """A burst that comes just after somebody has rolled out the quick plan, which cannot carry it."""
    result = list[float]()
    for _ in range(timing.rounds):
        await served.roll_out(served.quick)
        await served.ask(served.calm_per_s, SETTLES_S)
        if not await served.runs_small():  # a window has ended meanwhile
            await served.roll_out(served.quick)
        burst = await served.burst(TIMES["burst_10x"], timing.burst_s)
        result.append(reacted_s(burst))
        console.print(
            f"from the first refusal to another plan: {result[-1]:.1f} s{'' if burst.rolled_out_s else ' at least'}"
        )
        await served.ask(served.calm_per_s, REST_S)
    return {"seconds_to_react": max(result)}
