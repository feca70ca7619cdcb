"""Live, on virtual devices: one application is flooded, and a device of its idle neighbour changes hands."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import yaml

from experiments.shared.live import bare
from isobatch.cluster.client import json_at
from isobatch.cluster.serving.serve_file import controllers, serve_file

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "isobatch.cluster.cli"]
DEVICES = {"v100": 2, "k80": 4}
SLO_MS, CALM_PER_S, FLOOD_PER_S = 800, 5, 440  # more than the devices of either sustain
WITHIN_S, LOOK_S = 90.0, 0.25


def measure_move(folder: Path) -> dict[str, float]:
    """Seconds from the arbiter's decision until the plan of the flooded application uses a device of the other one."""
    arguments = {"backend": "virtual", "cpus_per_replica": 0}
    profile = str(ROOT / "cluster" / "local" / "profile.json")
    entries = [
        {"name": name, "profile": profile, "slo_ms": SLO_MS, "rate_per_s": 60, "args": arguments}
        for name in ("idle", "flooded")
    ]
    (folder / "fleet.yaml").write_text(yaml.safe_dump({"devices": DEVICES, "applications": entries}))
    subprocess.run([*COMMAND, "plan", "fleet.yaml", "--believed", "--out", "models.yaml"], cwd=folder, check=True)
    content = serve_file(folder / "models.yaml", {})
    for controller in controllers(content):
        controller["args"]["memory"] = str(folder / "memory")
    with bare() as here:
        here.deploy(*content["applications"])
        _until(lambda: len(json_at(f"{here.base}/fleet/status", {})["budgets"]) == len(entries))
        loads = [
            subprocess.Popen(
                [*COMMAND, "load", f"{here.base}/{name}", "--rate", str(per_s), "--seconds", str(WITHIN_S)],
                stdout=subprocess.DEVNULL,
            )
            for name, per_s in (("idle", CALM_PER_S), ("flooded", FLOOD_PER_S))
        ]
        try:
            return _moved(here.base)
        finally:
            for load in loads:
                load.kill()
                load.wait()


def _moved(base: str) -> dict[str, float]:
    before = _devices(base, "flooded")
    _until(lambda: _devices(base, "flooded") > before)
    now_s = time.time()
    decided = [each for each in json_at(f"{base}/fleet/status", {})["decisions"] if each["budgets"]]
    return {"move_s": now_s - decided[0]["at_s"], "moved_devices": _devices(base, "flooded") - before}


def _until(happened: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WITHIN_S
    while time.monotonic() < until_s:
        with suppress(HTTPError):  # the controllers still wait for their applications
            if happened():
                return
        time.sleep(LOOK_S)
    raise TimeoutError(f"no device changed hands within {WITHIN_S:g} s of a flood")


def _devices(base: str, name: str) -> int:
    """How many devices the plan uses that runs."""
    plan: dict[str, Any] = json_at(f"{base}/{name}/controller/status", {})["plan"]
    return sum(plan["devices"].values())
