"""Several Ray nodes on one machine, to simulate a cluster with several kinds of devices on a laptop.

Each is started by `ray start`, as on a machine of its own. It has its own devices, which are lost with it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deployments.config import checked
from deployments.ray_facts import nodes
from profiles.errors import UserError

STORE_BYTES = 80 << 20  # of Ray's object store, which isobatch does not use
_LOOK_EVERY_S = 0.2  # how often to count the nodes that have started


class LocalNode(BaseModel):
    """An entry of `nodes:` in a Serve file: a node that `isobatch serve` starts in addition to the first one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: dict[str, int] = Field(min_length=1, description="The node's virtual devices, as KIND: COUNT.")
    cpus: int = Field(0, ge=0, description="CPUs that Ray may use there; with 0, fronts stay on the first node.")


class _Nodes(BaseModel):
    nodes: list[LocalNode] = []


def local_nodes(content: dict[str, Any]) -> list[LocalNode]:
    """The nodes under `nodes:` in a Serve file; raises UserError if they are wrong."""
    return checked(_Nodes, {"nodes": content.get("nodes") or []}).nodes


def join(wanted: Sequence[LocalNode], gcs_address: str, folder: Path, within_s: float) -> None:
    """Start the nodes; returns when Ray knows all of them. Each has its own folder below `folder`.

    In its default folder, `ray start` would record that this machine has a cluster, and other programs would use it.
    """
    commands = [_command(node, gcs_address, folder / f"node-{number}") for number, node in enumerate(wanted)]
    started = [subprocess.Popen(command, **_IN_BACKGROUND) for command in commands]
    until_s = time.monotonic() + within_s
    while len(nodes()) <= len(started):
        if any(process.poll() is not None for process in started) or time.monotonic() > until_s:
            raise UserError(f"of {len(started)} more nodes, {len(nodes()) - 1} started: is there enough memory?")
        time.sleep(_LOOK_EVERY_S)


# In its own session: a signal of the terminal must not end a node before waiting requests are answered.
_IN_BACKGROUND: dict[str, Any] = {
    "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True,
}  # fmt: skip


def _command(node: LocalNode, gcs_address: str, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--address", gcs_address, "--node-ip-address", gcs_address.rpartition(":")[0]),
        *("--num-cpus", str(node.cpus), "--resources", json.dumps(node.devices)),
        *("--object-store-memory", str(STORE_BYTES), "--min-worker-port", "0", "--max-worker-port", "0"),
        *("--include-log-monitor", "false", "--temp-dir", str(folder)),
    ]
