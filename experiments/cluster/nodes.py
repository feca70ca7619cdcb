"""Lets a node fall silent again and again: `python -m experiments.cluster.nodes OUT FAULTS`, in a network namespace.

At the end, OUT gets the outcome of every fault as JSON.
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

FAR = "127.0.0.3"  # the address of the node that falls silent
REMOTE = 2  # devices of that node
CUT_S = 7.0  # longer than a connection may be silent, shorter than Ray waits for a silent node
CUT = "the network to a node is cut for 7 s"
FAULT_S = 6.0  # at least from one fault to the next
WHOLE_WITHIN_S = 180.0  # the run fails if replicas are missing for longer after a fault


def main(out: str, faults: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with TemporaryDirectory() as folder, application_with_a_far_node(Path(folder)) as (here, kinds):
        with redirect_stdout(StringIO()):  # Ray prints much about every process that has died
            result = asyncio.run(struck_under_load(here, kinds, int(faults), whole, FAULT_S))
        console.print(table(result))
    Path(out).write_text(json.dumps([asdict(each) for each in result]))


@contextmanager
def application_with_a_far_node(folder: Path) -> Iterator[tuple[Live, dict[str, Fault]]]:
    """Fronts and most devices are on one node; the other devices are on a node at the address FAR."""
    near = DEVICES["v100"] - REMOTE
    with bare("0.0.0.0") as here, ExitStack() as nodes:
        nodes.enter_context(node(here.ray.address, {"v100": near}, cpus=0))
        far = FarNode(here.ray.address, nodes)
        here.deploy(application(START, PROFILE, folder, slo_ms=SLO_MS, front_replicas=2, cpus_per_replica=0))
        yield here, far.faults


class FarNode:
    """The node that falls silent, and the nodes that replace it."""

    def __init__(self, address: str, nodes: ExitStack) -> None:
        self._address, self._nodes = address, nodes
        self._join()

    def _join(self) -> None:
        joining = node(self._address, {"v100": REMOTE}, cpus=0, host=FAR)
        self._process = self._nodes.enter_context(joining)

    @property
    def faults(self) -> dict[str, Fault]:
        return {CUT: self.cut, "a node falls silent and is gone, and another joins": self.vanished}

    async def cut(self, here: Live, chance: random.Random) -> None:
        """Messages to the node vanish; its own messages arrive, but their confirmations vanish."""
        with _unreachable():
            await asyncio.sleep(CUT_S)

    async def vanished(self, here: Live, chance: random.Random) -> None:
        """As of a machine that is taken away without notice: its processes are silent, and no kernel ends connections.

        Ray learns of the loss when the processes are killed.
        """
        before = self._process
        with _unreachable():
            for process in (*descendants(before), before):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(CUT_S)
            kill_node(before)
        await asyncio.to_thread(self._join)


async def whole(here: Live) -> None:
    """Wait until a replica runs on every device."""
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
