"""The replica as Serve runs it. It computes on a thread, so that it answers calls meanwhile."""

import asyncio
import fcntl
import gc
import os
import tempfile
from collections.abc import AsyncIterator, Hashable
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace

from isobatch.deployments.config import AppConfig
from isobatch.deployments.named import VIRTUAL
from isobatch.deployments.own_cores import as_computing
from isobatch.deployments.ray_facts import application_name, node_id, replica_name, wire_of
from isobatch.deployments.replica.loading import cold_launches, load_model, weights_in
from isobatch.deployments.replica.local_workers import LocalWorkers, end_if_gpu_failed
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.serve_process import ReplicaProcess
from isobatch.deployments.sources import local
from isobatch.deployments.tracing import part_of
from isobatch.deployments.transport.exchange import Exchange
from isobatch.deployments.transport.holdings import Holdings
from isobatch.deployments.transport.orders import Departed, Order, Stayed
from isobatch.deployments.transport.replica_connection import HELD_AFTER_S, OrderServer, ReplicaAddress
from isobatch.optimizer.plan import Plan
from isobatch.profiles.devices import is_cpu, whole_kind

DEPLOYMENT = "split"  # the only deployment of an application of replicas
_WORKER = "replica"  # the name of this process's only worker
HAND_OVER_CHECK_S = 0.05  # how often a replica that is about to end checks whether it still holds survivors


def take_device(folder: Path, most: int) -> tuple[int, TextIO]:
    """The number of a device of this node on which no other replica of the application stands by, and its lock.

    Ray would place several replicas of one application on a device that applications share.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(most):
        lock = (folder / str(number)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return number, lock
    raise RuntimeError(f"each of the {most} devices of this node has a replica of this application")


class ServeReplica(ReplicaProcess):
    """One replica, which can run any split. Fronts get its address through Serve and send orders directly to it."""

    def __init__(self, config: AppConfig, kind: str, directory: str) -> None:
        super().__init__()
        directory = str(local(directory))  # on this node
        self._device_id = ""
        if config.standby:
            folder = Path(tempfile.gettempdir(), f"isobatch-standby-{os.getuid()}", node_id(), application_name())
            number, self._device = take_device(folder, config.standby[kind])  # until this process ends
            self._device_id = f"{kind}-{node_id()}-{number}"
            if config.backend != VIRTUAL and not is_cpu(kind):
                os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
        self._wire, self._weights = wire_of(config), weights_in(config, directory)
        self._holdings = Holdings()
        self._exchange = Exchange(self._holdings)
        with as_computing():  # libraries start threads as they load
            model = load_model(config, kind, directory, warm := dict[Hashable, int]())
        self._replica = SplitReplica(model, self._holdings)
        self._cold_launches = cold_launches(config, kind, directory, model, warm)
        self._warming = asyncio.Lock()
        self._workers = LocalWorkers({_WORKER: self._replica})
        held_after_s = max(HELD_AFTER_S, config.drain_s)
        self._orders = OrderServer(self.run, self.warm_up, self.end_if_stuck, self._holdings, held_after_s)
        if is_cpu(kind) and config.backend != VIRTUAL:
            self.compute_on_own_cores(config.cpus_per_replica / whole_kind(kind)[1])
        self._opening = asyncio.Lock()
        self._whereabouts: ReplicaAddress | None = None

    async def whereabouts(self) -> ReplicaAddress:
        """The address at which fronts reach this replica. The first call makes the replica take orders."""
        async with self._opening:
            if not self._whereabouts:
                self._whereabouts = await self._open()
                gc.freeze()  # the network is never freed, so the garbage collector need not scan it
        return self._whereabouts

    async def _open(self) -> ReplicaAddress:
        await self._exchange.open(self._wire)
        try:
            address = await self._orders.open(self._wire)
        except BaseException:
            self._exchange.close()  # the next call opens both
            raise
        return ReplicaAddress(replica_name(), address, self._orders.gate.key, self._weights, self._device_id)

    async def drain(self) -> None:
        """Returns when all orders are answered and all survivors fetched: no other replica has these survivors.

        Serve tells the fronts that this replica ends. Each front closes its connection once its orders are answered.
        """
        while self._orders.gate.authorized or len(self._holdings):
            await asyncio.sleep(HAND_OVER_CHECK_S)

    def end_if_stuck(self, after_s: float) -> None:
        """End this process if its current launch has taken longer than `after_s`; Serve then starts another replica."""
        if self._workers.computes_for_s(_WORKER) >= after_s:
            os._exit(1)  # a thread that hangs would block a normal exit

    async def warm_up(self, plan: str) -> None:
        """Run a full batch of each split of a plan, in JSON, that has not run here. Launches may come in between."""
        async with self._warming:  # other fronts that need the same launches wait until these have run
            for run in self._cold_launches(Plan.from_json(plan)):
                await self._workers.between_launches(_WORKER, run)

    async def run(self, order: Order) -> AsyncIterator[Departed | Stayed]:
        """Run a launch. Survivors held elsewhere are fetched first, while the previous launch still computes."""
        uploaded: list[str] = []
        with part_of(self._tracing, order.trace, "hop", {"parts": len(order.parts)}):
            local_order = replace(order, parts=await self._exchange.gather(order.parts))
            if self._replica.gpu:
                local_order, uploaded = await self._uploaded(local_order)
        try:
            with part_of(self._tracing, order.trace, "compute"):
                async for reply in self._workers.run(_WORKER, local_order):
                    yield reply
        finally:
            self._holdings.drop(uploaded)

    async def _uploaded(self, order: Order) -> tuple[Order, list[str]]:
        try:
            return await asyncio.to_thread(self._replica.uploaded, order)
        except Exception:
            await self._workers.between_launches(_WORKER, end_if_gpu_failed)
            raise
