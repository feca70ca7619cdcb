"""The application under faults, and the faults: functions that cause a fault and return when it is done."""

import asyncio
import contextlib
import os
import random
import signal
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from http.client import HTTPException

from experiments.replan import timeline
from experiments.replan.suite import BATCH, FAST, ROUNDS, profile
from experiments.replan.timeline import PersistentLoad
from experiments.serve.fleet import promise_per_s
from experiments.shared.live import NAME, Live, named
from isobatch.cluster.controller.application import RolloutError, RunningApplication
from isobatch.cluster.controller.decide import served_alike
from isobatch.optimizer import Objective, Plan, optimize
from isobatch.profiles.devices import Device, links_between

DEVICES = {FAST: 7}
NEIGHBOUR, ITS_DEVICES = "neighbour", {FAST: 3}  # another application of the same fleet, without faults
PROFILE = profile({FAST: 0.030})
SLO_MS = 2000.0
AGAIN_S = 10.0  # seconds for which a client repeats a request whose connection broke
SHARE = 0.5  # of the sustained rate, so that the devices that are left after a fault suffice


def best(devices: Mapping[str, int]) -> Plan:
    fleet = [Device(kind, count, 10**12, 1.0) for kind, count in devices.items()]
    return optimize(PROFILE, fleet, links_between(fleet), Objective(slo_s=SLO_MS / 1e3, max_batch=BATCH))


START, ITS_PLAN = best(DEVICES), best(ITS_DEVICES)


def offered_per_s(plan: Plan = START) -> float:
    return SHARE * promise_per_s(plan, PROFILE)


def load(url: str, fresh: bool = False) -> PersistentLoad:
    """Requests that name the block after which their input is sure; an answer from an earlier block counts as wrong.

    `fresh`: each request has a connection of its own.
    """
    return timeline.load(url, SLO_MS, AGAIN_S, lambda left_after, sure_after: left_after >= sure_after, fresh)


SLOW, HANGS = 5.0, 1e6
STOPPED_S = 5.0  # longer than HAProxy waits for a front that hangs, and fronts for a replica
WITHIN_S = 60.0  # a fault that is not repaired within this time fails the run
ALSO = [plan for _, plan in ROUNDS if plan.devices() == START.devices()]  # plans for the same devices

Fault = Callable[[Live, random.Random], Awaitable[None]]


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


async def _any(here: Live, deployment: str, chance: random.Random) -> int:
    """A running replica of the deployment, chosen by chance; Serve may still be restarting it after the last fault."""
    async with asyncio.timeout(WITHIN_S):
        while not (running := await asyncio.to_thread(here.processes, deployment)):
            await asyncio.sleep(0.2)
    return chance.choice(sorted(running.values()))


async def _stop(process: int) -> None:
    """Stop the process for a while, as on a machine without time for it."""
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        os.kill(process, signal.SIGCONT)


async def replica_killed(here: Live, chance: random.Random) -> None:
    kill(await _any(here, "split", chance))


async def replica_hangs(here: Live, chance: random.Random) -> None:
    here.slow_down(await _any(here, "split", chance), HANGS)


async def replica_slow(here: Live, chance: random.Random) -> None:
    here.slow_down(await _any(here, "split", chance), SLOW)


async def front_killed(here: Live, chance: random.Random) -> None:
    kill(await _any(here, "front", chance))


async def replica_stopped(here: Live, chance: random.Random) -> None:
    await _stop(await _any(here, "split", chance))


async def front_stopped(here: Live, chance: random.Random) -> None:
    await _stop(await _any(here, "front", chance))


async def deployer_stopped(here: Live, chance: random.Random) -> None:
    await _stop(await _any(here, "deployer", chance))


async def haproxy_stopped(here: Live, chance: random.Random) -> None:
    await _stop(chance.choice(named("haproxy")))


async def deployer_killed(here: Live, chance: random.Random) -> None:
    kill(await _any(here, "deployer", chance))


async def deployer_killed_in_a_roll_out(here: Live, chance: random.Random) -> None:
    """The application must continue with either plan; the next round rolls the first plan out again."""
    roll_out = asyncio.create_task(RunningApplication(NAME).roll_out(chance.choice(ALSO)))
    await asyncio.sleep(chance.uniform(0.0, 0.2))
    kill(await _any(here, "deployer", chance))
    with contextlib.suppress(Exception):
        await asyncio.wait_for(roll_out, 20.0)


async def controller_killed(here: Live, chance: random.Random) -> None:
    kill(await _any(here, "controller", chance))


async def controller_killed_in_a_roll_out(here: Live, chance: random.Random) -> None:
    """Kill the controller while it rolls out the best plan, which an operator has forced."""
    with contextlib.suppress(RolloutError):  # another roll-out is already under way
        await RunningApplication(NAME).roll_out(chance.choice(ALSO))
    force = asyncio.create_task(asyncio.to_thread(_force, here))
    await asyncio.sleep(chance.uniform(0.0, 0.2))
    kill(await _any(here, "controller", chance))
    await force


async def serve_controller_killed(here: Live, chance: random.Random) -> None:
    for process in named("ServeController"):
        kill(process)


async def haproxy_killed(here: Live, chance: random.Random) -> None:
    for process in named("haproxy"):
        kill(process)


FAULTS: dict[str, Fault] = {
    "a replica is killed": replica_killed,
    "a replica hangs": replica_hangs,
    "a replica is 5 times slower": replica_slow,
    "a front is killed": front_killed,
    "a replica is stopped": replica_stopped,
    "a front is stopped": front_stopped,
    "the deployer is stopped": deployer_stopped,
    "HAProxy is stopped": haproxy_stopped,
    "the deployer is killed": deployer_killed,
    "the deployer is killed in a roll-out": deployer_killed_in_a_roll_out,
    "the controller is killed": controller_killed,
    "the controller is killed in a roll-out": controller_killed_in_a_roll_out,
    "Serve's controller is killed": serve_controller_killed,
    "HAProxy is killed": haproxy_killed,
}


async def restored(here: Live) -> None:
    """Make slow processes fast again, and roll out the first plan."""
    for file in here.faults.iterdir():
        file.unlink()
    application = RunningApplication(NAME)
    async with asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(Exception):  # the deployer is restarting, or the controller is rolling out a plan
                if served_alike(await application.plan(), START):
                    return
                await application.roll_out(START)
            await asyncio.sleep(0.2)


def _force(here: Live) -> None:
    """Force a plan; the controller may die before it replies."""
    request = urllib.request.Request(f"{here.base}/controller/force", method="POST")
    with contextlib.suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=20):
        pass
