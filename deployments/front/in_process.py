"""Runs the network in the front's own process, without a plan and one batch at a time."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol
from uuid import uuid4

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.messages import FrontState
from isobatch.deployments.front.stats import state_of
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.split import SplitReplica
from isobatch.profiles.model import SplitModel, edges_of

NamedState = tuple[str, FrontState]
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
    """`ask_all`: the states of all fronts of the application, by their names."""

    plan = promised_per_s = None

    def __init__(self, config: AppConfig, ask_all: Callable[[], Awaitable[list[NamedState]]] | None = None) -> None:
        self._config, self._ask_all = config, ask_all
        self._name = uuid4().hex  # also of its replica of the network

    async def open(self, model: SplitModel, clock: Callable[[], float]) -> Driver:
        config = self._config
        ramps = frozenset(model.ramp_blocks if config.exits else ())
        times = (_UNKNOWN_S,) * config.max_batch
        stage = Stage(0, model.num_blocks, config.max_batch, _GROUP, times, ramps=ramps)
        # No batch waits at the busy thread, so that it can still merge with inputs that arrive meanwhile.
        # A launch that fails is the fault of its inputs, as there is no other replica: it is never benched.
        limits = replace(config.limits(1 / config.fronts), share=1.0, ahead=0, probe_every_s=0.0)
        dispatcher = Dispatcher(Route((stage,), edges=edges_of(model)), {_GROUP: [self._name]}, limits)
        self._driver = Driver(dispatcher, LocalWorkers({self._name: SplitReplica(model)}), clock)
        return self._driver

    def state(self) -> NamedState:
        return self._name, state_of(self._driver)

    async def others(self) -> list[FrontState]:
        states = await self._ask_all() if self._ask_all else []
        return [state for name, state in states if name != self._name]
