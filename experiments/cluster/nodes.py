"""Faults of nodes, in a network namespace of this process's own: `python -m experiments.cluster.nodes OUT FAULTS SEED`.

OUT gets what every fault did, as JSON, and is written at the end.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.chaos.faults import DEVICES, PROFILE, SLO_MS, START, Fault
from experiments.chaos.run import console, struck_under_load, table
from experiments.shared.live import Live, application, bare, kill_node, node
from isobatch.deployments.processes import descendants

FAR = "127.0.0.3"  # the node that is lost, and whose network is cut
REMOTE = 2  # of the devices
CUT_S = 7.0  # longer than a connection may be silent, shorter than Ray takes to give a node up
CUT = "the network to a node is cut for 7 s"
FAULT_S = 6.0  # from one fault to the next at least, which shows how requests fare after it
WHOLE_WITHIN_S = 180.0  # a fault after which replicas are missing for longer fails the run


def main(out: str, faults: str, seed: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with TemporaryDirectory() as folder, application_with_a_far_node(Path(folder)) as (here, kinds):
        with redirect_stdout(StringIO()):  # Ray prints much about every process that has died
            result = asyncio.run(struck_under_load(here, kinds, int(faults), whole, FAULT_S, int(seed)))
        console.print(table(result))
    Path(out).write_text(json.dumps([asdict(each) for each in result]))


@contextmanager
def application_with_a_far_node(folder: Path) -> Iterator[tuple[Live, dict[str, Fault]]]:
    """Fronts and most devices near, the others on a node that can be reached over one address only."""
    near = DEVICES["v100"] - REMOTE
    with bare("0.0.0.0") as here, ExitStack() as nodes:
        nodes.enter_context(node(here.ray.address, {"v100": near}, cpus=0))
        far = FarNode(here.ray.address, nodes)
        here.deploy(application(START, PROFILE, folder, slo_ms=SLO_MS, front_replicas=2, cpus_per_replica=0))
        yield here, far.faults


class FarNode:
    """The node that is lost, and another one in its place."""

    def __init__(self, address: str, nodes: ExitStack) -> None:
        self._address, self._nodes = address, nodes
        self._join()

    def _join(self) -> None:
        joining = node(self._address, {"v100": REMOTE}, cpus=0, host=FAR)
        self._process = self._nodes.enter_context(joining)

    @property
    def faults(self) -> dict[str, Fault]:
        return {
            "a node is killed, and another joins": self.killed,
            CUT: self.cut,
            "a node joins, and another is killed": self.replaced,
            "a node falls silent and is gone, and another joins": self.vanished,
        }

    async def killed(self, here: Live, chance: random.Random) -> None:
        kill_node(self._process)
        await asyncio.to_thread(self._join)

    async def cut(self, here: Live, chance: random.Random) -> None:
        """What is sent to the node vanishes; what it sends arrives, and is confirmed in vain."""
        with _unreachable():
            await asyncio.sleep(CUT_S)

    async def replaced(self, here: Live, chance: random.Random) -> None:
        before = self._process
        await asyncio.to_thread(self._join)
        kill_node(before)

    async def vanished(self, here: Live, chance: random.Random) -> None:
        """As a machine that is taken away without notice: no process of it says or hears anything, nor does its kernel
        end connections. Ray learns of it when it is killed, after which nobody can tell the difference."""
        before = self._process
        with _unreachable():
            for process in (*descendants(before), before):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(CUT_S)
            kill_node(before)
        await asyncio.to_thread(self._join)


async def whole(here: Live) -> None:
    """All replicas run, on nodes that are there."""
    async with asyncio.timeout(WHOLE_WITHIN_S):
        while sum(map(_runs, (await asyncio.to_thread(here.processes, "split")).values())) < DEVICES["v100"]:
            await asyncio.sleep(0.2)


def _runs(process: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "T")
    return False


@contextmanager
def _unreachable() -> Iterator[None]:
    _route("add")
    try:
        yield
    finally:
        _route("del")


def _route(what: str) -> None:
    subprocess.run(["ip", "route", what, "blackhole", FAR, "table", "local"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
