"""Faults of nodes, in a network namespace of this process's own: `python -m experiments.cluster.nodes OUT ROUNDS`."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.chaos.faults import Fault
from experiments.chaos.run import console, figures_of, struck_under_load, table
from experiments.chaos.suite import DEVICES, PROFILE, SLO_MS, START
from experiments.shared.live import Live, application, bare, kill_node, node

FAR = "127.0.0.3"  # the node that is lost, and whose network is cut
REMOTE = 2  # of the devices
CUT_S = 7.0  # longer than a connection may be silent, shorter than Ray takes to give a node up
CUT = "the network to a node is cut for 7 s"


def main(out: str, rounds: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with TemporaryDirectory() as folder, application_with_a_far_node(Path(folder)) as (here, faults):
        with redirect_stdout(StringIO()):  # Ray prints much about every process that has died
            found = asyncio.run(struck_under_load(here, faults, int(rounds)))
        console.print(table(found))
    figures = {f"node_{name}" if name == "faults" else name: value for name, value in figures_of(found).items()}
    figures["partition_recovery_s"] = max((each.recovery_s for each in found if each.what == CUT), default=0.0)
    Path(out).write_text(json.dumps(figures))


@contextmanager
def application_with_a_far_node(folder: Path) -> Iterator[tuple[Live, dict[str, Fault]]]:
    """Fronts and most devices near, the others on a node that can be reached over one address only."""
    near = DEVICES["v100"] - REMOTE
    with bare("0.0.0.0") as here, ExitStack() as nodes:
        nodes.enter_context(node(here.ray.address, {"v100": near}, cpus=0))
        far = [nodes.enter_context(node(here.ray.address, {"v100": REMOTE}, cpus=0, host=FAR))]
        here.deploy(application(START, PROFILE, folder, slo_ms=SLO_MS, front_replicas=2, cpus_per_replica=0))

        async def lost(here: Live, chance: random.Random) -> None:
            kill_node(far.pop())
            again = node(here.ray.address, {"v100": REMOTE}, cpus=0, host=FAR)
            far.append(await asyncio.to_thread(nodes.enter_context, again))

        yield here, {"a node is killed, and another joins": lost, CUT: cut}


async def cut(here: Live, chance: random.Random) -> None:
    """What is sent to the node vanishes; what it sends arrives, and is confirmed in vain."""
    await asyncio.to_thread(_route, "add")
    try:
        await asyncio.sleep(CUT_S)
    finally:
        await asyncio.to_thread(_route, "del")


def _route(what: str) -> None:
    subprocess.run(["ip", "route", what, "blackhole", FAR, "table", "local"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
