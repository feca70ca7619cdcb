"""The controller of a running application: what it begins with, and the loop that never gives up."""

import asyncio
import fcntl
import logging
import time
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from cluster.controller.application import Application
from cluster.controller.config import ControllerConfig
from cluster.controller.core import Core
from cluster.controller.events import Events
from cluster.controller.loop import Controller
from cluster.controller.question import Question
from deployments.config import AppConfig
from deployments.planning import device, usable
from optimizer import Objective, Plan, read_plan
from profiles.files import Profile
from profiles.history import History

log = logging.getLogger("ray.serve")  # where Serve's own lines about a replica go
_locks: list[Any] = []  # held for as long as this process lives


def controller_of(
    config: ControllerConfig, app_config: AppConfig, profile: Profile, application: Application, running: Plan
) -> Controller:
    folder = memory(config, profile)
    history, events = History(folder / "exits.jsonl"), Events(folder / "events.jsonl")
    asked = question(config, app_config, profile)
    core = Core(asked, config, history, events, running, time.time())
    return Controller(application, core, time.time, time.perf_counter, asyncio.to_thread, partial(_tell, config))


def allowed(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> dict[str, int]:
    """The most that plans may use: what was told, or what the application began with, whatever is lost just now."""
    if config.devices or app_config.plan is None:
        told = app_config.model_copy(update={"devices": config.devices}) if config.devices else app_config
        return {each.kind: each.count for each in usable(told, profile)}
    return read_plan(Path(app_config.plan)).devices()


def question(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> Question:
    objective = Objective(
        slo_s=(config.slo_ms or app_config.slo_ms) / 1e3, slack=config.slack, max_batch=config.max_batch
    )
    fleet = tuple(device(kind, amount) for kind, amount in allowed(config, app_config, profile).items())
    cheapest = config.goal == "cost"
    return Question(profile, fleet, objective, config.one_machine, config.side_by_side, config.gap, cheapest)


def memory(config: ControllerConfig, profile: Profile) -> Path:
    """A folder of one's own for this application and this network: whoever holds its lock writes there."""
    mark = sha256(f"{profile.model} {profile.num_blocks}".encode()).hexdigest()[:6]
    for number in count():
        folder = Path(config.memory).expanduser() / f"{config.application}-{mark}{f'-{number}' if number else ''}"
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()  # another controller, of another cluster on this machine
        else:
            _locks.append(lock)
            return folder
    raise AssertionError("This is a bug: counting never ends.")


async def lead(controller: Controller, look_every_s: float) -> None:
    """For ever: whatever goes wrong in one look, the next one comes."""
    while True:
        await asyncio.sleep(look_every_s)
        try:
            await controller.step()
            controller.trouble = None
        except Exception as error:
            if controller.trouble is None:
                log.warning("the controller could not look: %s", error, exc_info=True)
            controller.trouble = f"{type(error).__name__}: {error}"


def _tell(config: ControllerConfig, event: Any) -> None:
    if event.what != "stayed":
        log.warning("%s: %s: %s", config.application, event.what, event.why)
