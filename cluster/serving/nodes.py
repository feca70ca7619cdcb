"""Several nodes of Ray on one machine, so that a cluster with devices of several kinds can be played on a laptop.

Each is what `ray start` starts on a machine of its own: it has its devices, and is lost with them.
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

STORE_BYTES = 80 << 20  # for what processes share; nothing of ours travels by it
_LOOK_EVERY_S = 0.2


class LocalNode(BaseModel):
    """An entry of `nodes:` in a Serve file, which `isobatch serve` starts beside the first node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: dict[str, int] = Field(min_length=1, description="Virtual devices that the node holds, as KIND: COUNT.")
    cpus: int = Field(0, ge=0, description="CPUs that Ray gives away there; with none, fronts stay on the first node.")


class _Nodes(BaseModel):
    nodes: list[LocalNode] = []


def local_nodes(content: dict[str, Any]) -> list[LocalNode]:
    """What a Serve file says under `nodes:`, or one line about what is wrong there."""
    return checked(_Nodes, {"nodes": content.get("nodes") or []}).nodes


def join(wanted: Sequence[LocalNode], gcs_address: str, folder: Path, within_s: float) -> None:
    """Start the nodes; returns when Ray knows all of them. Each has a folder of its own below `folder`.

    In the usual one `ray start` would note that this machine has a cluster, which others would heed.
    """
    commands = [_command(each, gcs_address, folder / f"node-{number}") for number, each in enumerate(wanted)]
    started = [subprocess.Popen(command, **_QUIETLY) for command in commands]
    until_s = time.monotonic() + within_s
    while len(nodes()) <= len(started):
        if any(each.poll() is not None for each in started) or time.monotonic() > until_s:
            raise UserError(f"of {len(started)} more nodes, {len(nodes()) - 1} started: is there enough memory?")
        time.sleep(_LOOK_EVERY_S)


# A session of its own: what a terminal signals must not end it before those are answered who wait.
_QUIETLY: dict[str, Any] = {
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
