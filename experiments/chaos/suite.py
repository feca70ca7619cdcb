"""The application that the faults hit: the network and devices of `experiments/replan`, by the planner's own plan."""

import json

import numpy as np

from cluster.load.generator import LoadGenerator
from cluster.load.workloads import exit_blocks
from experiments.replan.suite import BATCH, FAST, SURVIVAL, capacity_per_s, profile
from optimizer import Objective, Plan, optimize
from profiles.devices import Device, links_between
from profiles.exits import ExitProfile

DEVICES = {FAST: 7}
PROFILE = profile({FAST: 0.030})
SLO_MS = 2000.0
AGAIN_S = 10.0  # for how long a client repeats a request whose connection broke
SHARE = 0.5  # of what the plan sustains, so that the devices left after a fault can carry it
KINDS = 500  # of inputs, drawn once and sent in turns


def best() -> Plan:
    fleet = [Device(kind, count, 10**12, 1.0) for kind, count in DEVICES.items()]
    return optimize(PROFILE, fleet, links_between(fleet), Objective(slo_s=SLO_MS / 1e3, max_batch=BATCH))


START = best()


def offered_per_s() -> float:
    return SHARE * capacity_per_s(START, PROFILE)


def load(url: str) -> LoadGenerator:
    """A load of inputs that say where they are sure; the controller chooses the ramps, and none may leave earlier."""
    depths = exit_blocks(ExitProfile(SURVIVAL), KINDS, np.random.default_rng(0)).tolist()
    bodies = [json.dumps({"inputs": {"exit_block": depth}}).encode() for depth in depths]

    def right(body: int, answer: bytes) -> bool:
        outputs = json.loads(answer)["outputs"]
        return len(outputs) == 1 and bool(outputs[0]["exit_block"] >= depths[body])

    return LoadGenerator(url, bodies, headers=f"X-Deadline-Ms: {SLO_MS:g}\r\n", right=right, again_s=AGAIN_S)
