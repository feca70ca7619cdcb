"""Measures the cost of moving survivors between two processes of this machine, and between nodes of a running Ray.

A front with the real dispatcher leads inputs through two replicas in processes of their own, which compute nothing. A
hop is the extra time of an answer that needs the second one. So it includes the work of both ends: copies between
device and host, messages, and the front's turn.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from signal import SIG_IGN, SIGINT, signal
from statistics import median
from threading import current_thread, main_thread
from time import perf_counter
from typing import Any

import numpy as np
import uvloop
from msgspec import structs
from numpy.typing import NDArray

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.models.backends import keep_freed_memory
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.exchange import Exchange
from isobatch.deployments.transport.holdings import Holdings
from isobatch.deployments.transport.orders import Departed, Order, Stayed
from isobatch.deployments.transport.packed import pack
from isobatch.deployments.transport.replica_connection import OrderServer, ReplicaAddress, ReplicaConnection, connect_to
from isobatch.deployments.transport.wire import Wire
from isobatch.profiles.devices import Link
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import NOBODY, Batch, Exits, Launched

SIZES = tuple(2**power for power in range(12, 27, 2))  # bytes of a batch: 4 KiB to 64 MiB
LEAST_SIZES = 2
ROUNDS = 25  # of each size, after those that warm up
WARM_UPS = 3
HERE = "127.0.0.1"
START_S = 120.0  # for the process at an end to start: it may import torch
PATIENCE_S = 60.0  # for one answer
NOBODY_LEFT = Exits(NOBODY, NOBODY, np.zeros((0, 1), np.float32))


class Passing:
    """A network of two blocks that computes nothing. The first of an input's numbers says whether it leaves after block
    0; the second is its size after that block, in bytes on the device."""

    num_blocks, num_labels, ramp_blocks, reads_text = 2, 1, (0,), False

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def encode(self, inputs: Sequence[Any]) -> Batch:
        return Batch(0, {"wish": np.array(inputs, np.int64)}, np.zeros((len(inputs), 0), np.float32))

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        if stop == self.num_blocks or batch.arrays["wish"][0, 0]:
            rows = np.arange(len(batch))
            return Launched(Exits(rows, np.full(len(rows), stop - 1), np.zeros((len(rows), 1), np.float32)), None)
        size = int(batch.arrays["wish"][0, 1])
        return Launched(NOBODY_LEFT, Batch(stop, {"hidden": _states(self._device, len(batch), size)}, batch.memory))

    def merge(self, batches: Sequence[Batch]) -> Batch:
        (batch,) = batches
        return batch

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return batch


@cache
def _states(device: str, rows: int, size: int) -> Any:
    """Made once, so that a hop takes no longer for it."""
    if device == "cpu":
        return np.ones((rows, size), np.uint8)
    import torch

    return torch.ones(rows, size, dtype=torch.uint8, device=device)


class LinkEnd:
    """A replica in a process of its own, outside of Serve."""

    def __init__(self, device: str, network: Any = None) -> None:
        keep_freed_memory()  # as replicas do
        self._replica = SplitReplica(network or Passing(device), Holdings())
        if device != "cpu":
            import torch

            self._replica.gpu = torch.empty(0, device=device).device
        self._workers = LocalWorkers({"": self._replica})
        self._exchange = Exchange(self._replica.holdings)

    async def open(self, host: str | None = None) -> ReplicaAddress:
        """Without a host it is that of this node of Ray."""
        wire = Wire(host) if host else _wire()
        orders = OrderServer(self._run, self._warm_up, lambda after_s: None, self._replica.holdings)
        await self._exchange.open(wire)
        return ReplicaAddress("", await orders.open(wire), orders.gate.key)

    async def _run(self, order: Order) -> AsyncIterator[Departed | Stayed]:
        local, uploaded = structs.replace(order, parts=await self._exchange.gather(order.parts)), list[str]()
        if self._replica.gpu:
            local, uploaded = await asyncio.to_thread(self._replica.uploaded, local)
        try:
            async for reply in self._workers.run("", local):
                yield reply
        finally:
            self._replica.holdings.drop(uploaded)

    async def _warm_up(self, plan: str) -> None:
        raise NotImplementedError("an end of a link has no plan")


@contextmanager
def child(run: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A pipe to another process of this machine, which runs `run(pipe, *arguments)` and leaves Ctrl-C to this one."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there, *arguments), daemon=True)
    with _ignoring_ctrl_c():
        process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(START_S)


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """A process that begins meanwhile ignores Ctrl-C from its first moment on."""
    if current_thread() is not main_thread():  # only the main thread may change the handler of a signal
        yield
        return
    before = signal(SIGINT, SIG_IGN)
    try:
        yield
    finally:
        signal(SIGINT, before)


def first_message(pipe: Any) -> Any:
    """The message that a process sends once it is ready."""
    if not pipe.poll(START_S):
        raise RuntimeError(f"a process that measures did not start within {START_S:g} s")
    return pipe.recv()


def _end(pipe: Any, make: Callable[[], LinkEnd]) -> None:
    """The main function of the process at an end of a link: it returns when the other end of its pipe is closed."""

    async def serve() -> None:
        end = make()
        with suppress(EOFError, BrokenPipeError):
            pipe.send(await end.open(HERE))
            await asyncio.to_thread(pipe.recv)

    uvloop.run(serve())


class _Ends:
    """The replicas at both ends, for the driver."""

    def __init__(self, connections: Mapping[str, ReplicaConnection], exchange: Exchange, by_value_bytes: int) -> None:
        self._connections, self._exchange, self._by_value_bytes = connections, exchange, by_value_bytes

    def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        return self._connections[replica].run(structs.replace(order, by_value_bytes=self._by_value_bytes))

    def suspect(self, replica: str) -> None: ...

    def drop(self, address: str, key: str) -> None:
        self._exchange.drop(address, key)

    async def close(self) -> None:
        for connection in self._connections.values():
            connection.retire()
        self._exchange.close()


@dataclass(frozen=True)
class Hops:
    """Median seconds of a hop by the bytes that move, and of a turn, in which they stay on their replica."""

    by_bytes: Mapping[int, float]
    turn_s: float

    def link(self, source: str, target: str, one_machine: bool) -> Link:
        """The line through the hops that is nearest in relation to each of them. Sizes at which other work hid the hop,
        so that an answer seemed to come no later for it, do not count."""
        seen = {size: hop_s for size, hop_s in self.by_bytes.items() if hop_s > 0}
        if len(seen) < LEAST_SIZES:
            raise UserError(
                f"link {source}>{target}: only {len(seen)} of {len(self.by_bytes)} sizes could be measured beside "
                "other work of these devices: run isobatch profile --links again when they are idle"
            )
        sizes, hops_s = np.array([*seen]), np.array([*seen.values()])
        per_byte_s, latency_s = np.polyfit(sizes, hops_s, 1, w=1 / hops_s)
        if per_byte_s <= 0:
            per_byte_s, latency_s = hops_s[-1] / sizes[-1], 0.0
        turn_s = max(0.0, self.turn_s) if source == target else 0.0
        return Link(source, target, float(1 / per_byte_s), max(0.0, float(latency_s)), turn_s, one_machine)

    def __str__(self) -> str:
        return ", ".join(f"{size / 2**10:g} KiB {1e3 * hop_s:.2f} ms" for size, hop_s in self.by_bytes.items())


async def hops(source: ReplicaAddress, target: ReplicaAddress, wire: Wire, sizes: Sequence[int], rounds: int) -> Hops:
    """Measure between two ends, from this process as their front."""
    exchange = Exchange(Holdings())
    await exchange.open(wire)
    connections = {
        name: await connect_to(wire, address, lambda: None) for name, address in (("s", source), ("t", target))
    }
    ends = _Ends(connections, exchange, AppConfig.model_fields["by_value_bytes"].default)
    moving = _driver(ends, {"s": ["s"], "t": ["t"]})
    local = _driver(ends, {"s": ["s"]})
    try:
        by_bytes = {size: await _longer_s(moving, size, rounds) for size in sizes}
        return Hops(by_bytes, await _longer_s(local, sizes[0], rounds))
    finally:
        await moving.close()


def _driver(ends: _Ends, groups: Mapping[str, Collection[str]]) -> Driver:
    first, *others = groups
    last = others[0] if others else first
    ramps = frozenset(Passing.ramp_blocks)
    stages = (Stage(0, 1, 1, first, (0.0,), ramps=ramps, local=not others),
              Stage(1, 2, 1, last, (0.0,), ramps=ramps, local=not others))  # fmt: skip
    return Driver(Dispatcher(Route(stages), groups), ends, perf_counter)


async def _longer_s(driver: Driver, size: int, rounds: int) -> float:
    """How much longer an answer takes if its input continues after block 0, in the median of neighbouring answers."""
    model, longer_s = Passing(), list[float]()
    for _ in range(WARM_UPS + rounds):
        took_s = []
        for leaves in (1, 0):
            begun_s = perf_counter()
            await driver.answer(pack(model.encode([[leaves, size]])), within_s=PATIENCE_S)
            took_s.append(perf_counter() - begun_s)
        longer_s.append(took_s[1] - took_s[0])
    return median(longer_s[WARM_UPS:])


def sizes_up_to(largest_bytes: int) -> tuple[int, ...]:
    """
    >>> sizes_up_to(100_000)
    (4096, 16384, 65536)
    """
    return tuple(size for number, size in enumerate(SIZES) if number < LEAST_SIZES or size <= largest_bytes)


def in_one_machine(device: str, kind: str, sizes: Sequence[int], rounds: int = ROUNDS) -> tuple[Link, str]:
    """The link between two processes of this machine, and a note on it."""
    make = partial(LinkEnd, device)
    with child(_end, make) as source, child(_end, make) as target:
        try:
            ends = first_message(source), first_message(target)
        except EOFError:
            raise UserError("--links: a process at an end was killed: is there memory for two?") from None
        measured = uvloop.run(hops(*ends, Wire(HERE), sizes, rounds))
    return measured.link(kind, kind, True), f"link {kind}>{kind} in one machine: {measured}"


def between_nodes(kinds: Collection[str], sizes: Sequence[int]) -> Iterator[tuple[Link, str]]:
    """The links between these kinds of devices on different nodes of Ray, to which this process is connected."""
    from isobatch.deployments.ray_facts import nodes_by_id
    from isobatch.deployments.resources import devices_on

    by_kind: dict[str, list[str]] = {}
    for node, resources in nodes_by_id().items():
        for kind, count in devices_on([resources]).items():
            if count and kind in kinds:
                by_kind.setdefault(kind, []).append(node)
    for source, sources in by_kind.items():
        for target, targets in by_kind.items():
            pair = next(((a, b) for a in sources for b in targets if a != b), None)
            if pair:
                with _on_node(source, pair[0]) as first, _on_node(target, pair[1]) as second:
                    measured = asyncio.run(hops(first, second, _wire(), sizes, ROUNDS))
                yield measured.link(source, target, False), f"link {source}>{target}: {measured}"


@contextmanager
def _on_node(kind: str, node: str) -> Iterator[ReplicaAddress]:
    """The address of an end on this node of Ray."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    device = "cpu" if kind == "cpu" else "cuda"
    options = {"num_cpus": 1, "num_gpus": float(device == "cuda")}
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(LinkEnd).options(**options, scheduling_strategy=on_node).remote(device)
    try:
        yield ray.get(actor.open.remote(), timeout=START_S)
    except ray.exceptions.GetTimeoutError:
        free = f"no {'CPU' if device == 'cpu' else 'GPU'} of node {node} was free"
        what = f"{free}, or its process did not start, within {START_S:g} s"
        raise UserError(f"{what}: end what runs there, or run isobatch profile --links before you serve") from None
    finally:
        ray.kill(actor)


def _wire() -> Wire:
    """As replicas have it: with TLS where Ray has."""
    from isobatch.deployments.ray_facts import wire_of

    return wire_of(AppConfig(loader=f"{__name__}:Passing"))
