"""Measures how long a busy replica waits for its next order, on a virtual device with launches of 2 ms."""

import json

from experiments.serve import measures
from experiments.serve.fleet import BLOCKS, facts_for, profile
from experiments.serve.servers import served
from isobatch.cluster.simulator.sustained import sustained_per_s
from isobatch.deployments.front.counts import BUSY_S
from isobatch.optimizer.plan import Placement, Plan, Split

LAUNCH_S = 0.002  # of half the network
BATCH = 4  # so small that generator and front have time left on the same cores
HALF = BLOCKS // 2
SLO_MS = 250.0
LOADS = {"at_90_percent": 0.9, "in_overload": 1.3}  # of the promise


def figures(seconds: float) -> dict[str, float]:
    """The idle share of one replica that runs both splits in turns and keeps survivors.

    A request holds a batch of inputs. At 90 % of the promise, a replica with full launches is idle for a tenth of the
    time. In overload, inputs always wait, so that the replica is idle only while it waits for an order.
    """
    splits = Split(0, HALF, BATCH, (HALF - 1,)), Split(HALF, BLOCKS, BATCH)
    plan, facts = Plan((Placement("v100", 1, splits, local=True),)), profile(LAUNCH_S)
    leaving = [{"exit_block": BLOCKS - 1 if number % 2 else HALF - 1} for number in range(BATCH)]
    body = json.dumps({"inputs": leaving}).encode()
    promised_per_s = sustained_per_s(plan, facts_for(facts, plan.devices()), SLO_MS / 1e3)
    result: dict[str, float] = {}
    with served(plan, facts, SLO_MS) as url:
        for name, load in LOADS.items():
            measures.under(url, load * promised_per_s / BATCH, max(seconds, BUSY_S), SLO_MS, body)
            seen = measures.stats(url)
            result[f"virtual_2ms_idle_share_{name}"] = 1 - seen["replicas"][0]["busy"]
    return result
