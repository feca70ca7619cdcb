"""A rate that grows and falls, on nodes that Ray rents, loses with notice and without, and gives back."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter as now_s
from typing import Any

import numpy as np

from experiments.chaos.faults import SLO_MS, load
from experiments.replan.suite import BATCH, profile
from experiments.serve.fleet import promise_per_s
from experiments.shared.live import answer_at, application, controller, kill_node
from isobatch.cluster.load.generator import LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.optimizer import Objective, optimize
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.errors import UserError
from tests.helpers.ray_cluster import Started, started

KIND, NEVER = "k80", "t4"  # Ray can rent the first; the second costs less, so it is requested first, and never comes
MOST, RENTED = 2, 2  # devices of each kind that plans may use; nodes that Ray may rent: one and its replacement
PROFILE = profile({KIND: 0.030, NEVER: 0.030})
OWN = fleet(f"{KIND}=1")
START = optimize(PROFILE, OWN, links_between(OWN), Objective(slo_s=SLO_MS / 1e3, max_batch=BATCH))
QUIET, MANY = 0.3, 3.0  # rates over the promise of one device
TERMS = {"look_every_s": 1.0, "replan_every_s": 8.0, "hold_windows": 100, "come_within_s": 150.0}
PIECE_S, LOOK_S, NOTICE_S, WITHIN_S = 4.0, 0.5, 20, 300.0
# Writes Ray's nodes to a file: Ray may print warnings among the output.
NODES = """import json, pathlib, sys, ray
ray.init(sys.argv[1], log_to_driver=False)
pathlib.Path(sys.argv[2]).write_text(json.dumps(ray.nodes()))"""
Status = dict[str, Any]


class ChangingLoad:
    """Requests at a rate that may change, sent in pieces of some seconds."""

    def __init__(self, url: str, per_s: float) -> None:
        self.per_s, self._url, self._pieces = per_s, url, list[asyncio.Task[LoadRecord]]()
        self._going = asyncio.create_task(self._go())

    async def _go(self) -> None:
        while True:
            times_s = arrivals("poisson", self.per_s, PIECE_S, len(self._pieces))
            self._pieces.append(asyncio.create_task(load(self._url).at(times_s)))
            await asyncio.sleep(PIECE_S)

    async def ended(self) -> np.ndarray:
        """HTTP's status of every answer, once all are there."""
        self._going.cancel()
        return np.concatenate([each.status for each in await asyncio.gather(*self._pieces)])


def grown_and_shrunk() -> np.ndarray:
    """HTTP's status of every request, while nodes come and go."""
    with TemporaryDirectory() as folder, started({KIND: 1}, cpus=1, kinds={KIND: RENTED}) as cluster:
        deploy(cluster, Path(folder))
        return asyncio.run(_grown_and_shrunk(cluster))


def deploy(cluster: Started, folder: Path) -> None:
    served = application(START, PROFILE, folder, slo_ms=SLO_MS, cpus_per_replica=0)
    grows = {"goal": "cost", "grow_to": {KIND: MOST, NEVER: MOST}, "max_batch": BATCH, "slo_ms": SLO_MS}
    content = {
        "http_options": {"host": "0.0.0.0", "port": cluster.http_port, "location": "HeadOnly"},
        "applications": [served, controller(folder, **grows, **TERMS)],
    }
    (folder / "serve.yaml").write_text(json.dumps(content))  # JSON is YAML
    done = cluster.run("deploy", str(folder / "serve.yaml"), "--address", cluster.address)
    if done.returncode:
        raise RuntimeError(done.stderr)


async def _grown_and_shrunk(cluster: Started) -> np.ndarray:
    base, one_per_s = f"http://127.0.0.1:{cluster.http_port}", promise_per_s(START, PROFILE)
    traffic = ChangingLoad(f"{base}/predict", QUIET * one_per_s)
    await until(base, lambda status: status["window"]["arrivals_per_s"] > 0)
    await asyncio.sleep(2 * TERMS["replan_every_s"])
    traffic.per_s = MANY * one_per_s
    await until(base, lambda status: KIND in (status["asked"] or ""))
    await until(base, enough)
    await reclaimed(cluster, base, with_notice=True)
    await reclaimed(cluster, base, with_notice=False)
    traffic.per_s = QUIET * one_per_s
    await until(base, lambda status: status["devices"][KIND] == 1)
    return await traffic.ended()


def enough(status: Status) -> bool:
    return all(counts.get(KIND, 0) == MOST for counts in (status["devices"], status["plan"]["devices"]))


async def until(base: str, holds: Callable[[Status], bool]) -> None:
    """Wait until this holds of the controller's state. An error lists the controller's latest decisions."""
    begun_s, decisions = now_s(), dict[int, str]()
    while now_s() - begun_s < WITHIN_S:
        with suppress(OSError, UserError):
            status: Status = await asyncio.to_thread(answer_at, f"{base}/controller/status")
            decisions |= {each["number"]: "{number} {what}: {why}".format_map(each) for each in status["events"]}
            if holds(status):
                return
        await asyncio.sleep(LOOK_S)
    raise TimeoutError("\n".join(decisions.values()))


async def reclaimed(cluster: Started, base: str, with_notice: bool) -> None:
    """The cloud takes a rented node away; wait until the plan has another one."""
    (node,) = await until_rented(cluster, lambda nodes: len(nodes) == 1)  # one too many goes by itself
    begun_s = now_s()
    if with_notice:
        words = ["-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address, "--node-id", node]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        words += ["--deadline-remaining-seconds", str(NOTICE_S)]
        done = await asyncio.to_thread(cluster.python, *words)
        assert done.returncode == 0, done.stderr
        await replaced(cluster, node)
        await asyncio.sleep(max(0.0, begun_s + NOTICE_S - now_s()))
    kill(cluster, node)
    await replaced(cluster, node)
    await until(base, enough)


async def replaced(cluster: Started, node: str) -> None:
    """Wait until another node is rented. If it comes between two looks, the controller plans for no fewer devices."""
    await until_rented(cluster, lambda nodes: bool(nodes - {node}))


async def until_rented(cluster: Started, holds: Callable[[set[str]], bool]) -> set[str]:
    """Wait until this holds of the nodes that Ray has rented, and return these nodes."""
    begun_s, nodes = now_s(), set[str]()
    while now_s() - begun_s < WITHIN_S:
        if holds(nodes := await asyncio.to_thread(rented, cluster)):
            return nodes
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(f"rented after {WITHIN_S:.0f} s: {', '.join(sorted(nodes)) or 'no node'}")


def rented(cluster: Started) -> set[str]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "nodes.json"
        done = cluster.python("-c", NODES, cluster.address, str(path))
        if done.returncode:
            raise RuntimeError(done.stderr)
        nodes = json.loads(path.read_text())
    return {node["NodeID"] for node in nodes if node["Alive"] and not node["Resources"].get("CPU")}


def kill(cluster: Started, node_id: str) -> None:
    """Kill the node with all that runs there, at once."""
    for process in cluster.processes():
        with suppress(OSError):
            program, *words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if program.endswith(b"raylet") and f"--node_id={node_id}".encode() in words:
                kill_node(process)
