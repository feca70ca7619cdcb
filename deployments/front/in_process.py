"""Runs the network in the front's own process, without a plan: each copy of it computes one batch at a time."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.messages import FrontState
from isobatch.deployments.replica.loading import load_front_model
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.split import SplitReplica
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import SplitModel, edges_of

_GROUP = "here"
# The planned time of a launch: nothing was measured, so late inputs are dropped when batches form, not at admission.
_UNKNOWN_S = 0.0


class RunningNetwork(Protocol):
    """Runs a network for a front: in this process, or on replicas by the deployer's plan (`Follower`)."""

    @property
    def plan(self) -> str | None:
        """The present plan in words."""

    @property
    def promised_per_s(self) -> float | None:
        """The inputs per second that the plan promises, if any."""

    async def open(self, model: SplitModel, clock: Callable[[], float]) -> Driver: ...

    async def others(self) -> list[FrontState]:
        """The states of the application's other fronts."""


class InProcess:
    plan = promised_per_s = None

    def __init__(self, config: AppConfig) -> None:
        self._config = config

    async def open(self, model: SplitModel, clock: Callable[[], float]) -> Driver:
        config = self._config
        ramps = frozenset(model.ramp_blocks if config.exits else ())
        times = (_UNKNOWN_S,) * config.max_batch
        stage = Stage(0, model.num_blocks, config.max_batch, _GROUP, times, ramps=ramps)
        # No batch waits at a busy thread, so that it can still merge with inputs that arrive meanwhile.
        # A launch that fails is the fault of its inputs, as all copies are alike: none is benched.
        limits = replace(config.limits(1 / config.front_replicas), ahead=0, probe_every_s=0.0)
        networks = [model]
        for _ in range(1, config.replicas):
            networks.append(await asyncio.to_thread(load_front_model, config, str(config.folder)))
        if len({id(each) for each in networks}) < len(networks):
            each = f"replicas: {config.replicas} needs a network of its own for each thread"
            raise UserError(f"loader {config.loader}: it returned the same network twice: {each}")
        replicas = {f"{_GROUP}-{number}": SplitReplica(each) for number, each in enumerate(networks)}
        dispatcher = Dispatcher(Route((stage,), edges=edges_of(model)), {_GROUP: list(replicas)}, limits)
        return Driver(dispatcher, LocalWorkers(replicas), clock)

    async def others(self) -> list[FrontState]:
        return []
