"""What runs in the application of one placement: a replica that computes on a thread, and stays reachable meanwhile.

What computes (torch, ONNX Runtime) is imported where a network is loaded: virtual devices start without it.
"""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.config import AppConfig, named
from deployments.replicas.exchange import Exchange
from deployments.replicas.holdings import Holdings
from deployments.replicas.line import Desk, Whereabouts
from deployments.replicas.local_workers import LocalWorkers
from deployments.replicas.split import Departed, Order, SplitReplica, Stayed
from optimizer.plan import read_plan
from profiles.errors import UserError
from profiles.files import load
from profiles.model import SplitModel

DEPLOYMENT = "split"  # the one deployment of an application of replicas
_HERE = "here"
HAND_OVER_S = 0.05  # how often a replica that is to end looks whether it still holds anything


class Placed:
    """One replica of a placement. Serve asks it where it is; orders come over connections of their own."""

    def __init__(self, config: AppConfig, kind: str, directory: str) -> None:
        self._holdings = Holdings()
        self._exchange = Exchange(self._holdings)
        self._workers = LocalWorkers({_HERE: SplitReplica(load_model(config, kind, directory), self._holdings)})
        self._desk = Desk(self.run, self.end_if_stuck)
        self._opening = asyncio.Lock()
        self._whereabouts: Whereabouts | None = None
        # Serve awaits this before it ends a replica. On the instance, so that Python's own clean-up does not call it.
        self.__del__ = self.hand_over

    async def whereabouts(self) -> Whereabouts:
        """Answers when the network is loaded; from then on orders are taken."""
        async with self._opening:
            if not self._whereabouts:
                host = node_address()
                await self._exchange.open(host)
                self._whereabouts = Whereabouts(replica_name(), await self._desk.open(host), self._desk.key)
                gc.freeze()  # the network is here to stay: nobody need look for garbage in it while it serves
        return self._whereabouts

    async def hand_over(self) -> None:
        """Returns when all is computed and fetched: who made it may be replaced, but not what was made.

        A front that hears from Serve that this replica goes hangs up, as soon as it has what it asked for.
        """
        while self._desk.callers or len(self._holdings):
            await asyncio.sleep(HAND_OVER_S)

    def end_if_stuck(self, after_s: float) -> None:
        """End this very process if its launch has taken so long: Serve puts another replica in its place."""
        if self._workers.computes_for_s(_HERE) >= after_s:
            os._exit(1)  # a thread that hangs would keep any gentler end from coming

    async def run(self, order: Order) -> AsyncIterator[Departed | Stayed]:
        """What others hold is brought here first, while the launch before this one still computes."""
        here = replace(order, parts=await self._exchange.gather(order.parts))
        async for reply in self._workers.run(_HERE, here):
            yield reply


def node_address() -> str:
    """Where Ray says that this machine can be reached by the others."""
    import ray

    return str(ray.util.get_node_ip_address())


def replica_name() -> str:
    """What Serve calls the replica in this process."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def load_model(config: AppConfig, kind: str, directory: str) -> SplitModel:
    """The network as a device of this kind runs it."""
    if config.backend == "virtual":
        return _virtual(config, kind)
    from deployments.models.backends import backend_of, make_ready, planned, warn_of_another

    model = _load(config, directory, "cpu" if kind == "cpu" else "cuda")
    if config.plan:
        make_ready(model, directory, planned(model, read_plan(Path(config.plan)), kind))
    if config.profile:
        warn_of_another(Path(config.profile), kind, backend_of(model))
    return model


def load_front_model(config: AppConfig, directory: str) -> SplitModel:
    """The network as the front needs it: where there is a plan, only to encode."""
    if config.backend == "virtual":
        return _virtual(config, None)
    if config.planned:
        encoding: SplitModel = named(config.loader)(directory, device="cpu", dtype="float32")
        return encoding
    from deployments.models.backends import make_ready, stretches

    model = _load(config, directory, config.device)
    make_ready(model, directory, [*stretches(model, 0, model.num_blocks, model.ramp_blocks if config.exits else ())])
    return model


def _load(config: AppConfig, directory: str, device: str) -> SplitModel:
    from deployments.models.backends import INT8, on_backend

    int8 = config.dtype == INT8
    model: SplitModel = named(config.loader)(directory, device=device, dtype="float32" if int8 else config.dtype)
    assert config.backend != "virtual", "This is a bug: a virtual device loads nothing."
    return on_backend(model, directory, config.backend, int8=int8)


def _virtual(config: AppConfig, kind: str | None) -> SplitModel:
    from deployments.replicas.virtual import VirtualModel

    assert config.profile, "This is a bug: AppConfig asks for it."
    profile = load(Path(config.profile))
    if profile.exits is None:
        raise UserError(f"{config.profile} says nothing of exits: profile it with --data")
    return VirtualModel(profile.table(kind or profile.kinds[0]), profile.exits)


def resources(config: AppConfig, kind: str) -> dict[str, Any]:
    """What a replica asks Ray for: a virtual device asks for next to nothing."""
    if config.backend == "virtual":
        told = "cpus_per_replica" in config.model_fields_set
        return {"num_cpus": config.cpus_per_replica if told else 0.01}
    return (
        {"num_cpus": config.cpus_per_replica}
        if kind == "cpu"
        else {"num_gpus": 1, "accelerator_type": accelerator(kind)}
    )


def needs(config: AppConfig, kind: str) -> dict[str, float]:
    """The same as amounts of Ray's resources."""
    asked = resources(config, kind)
    amounts = {"CPU": asked.get("num_cpus", 1.0), "GPU": asked.get("num_gpus", 0.0)}
    if kind := asked.get("accelerator_type", ""):
        amounts[f"accelerator_type:{kind}"] = 0.001  # Ray's own way to ask for a node that has it
    return amounts


def accelerator(kind: str) -> str:
    """Ray's name for a kind of device.

    >>> accelerator("a100")
    'A100'
    """
    return kind.upper()
