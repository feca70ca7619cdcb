"""Compares no exits, early exit and constant batches on one device, with its measured tables and the paper's SLOs."""

import numpy as np

from experiments.gpu.tables import TableSetting, inputs, network
from experiments.planner.settings import EARLY, HALF, exits_along
from isobatch.cluster.bench.compare import Bench
from isobatch.cluster.bench.real_device import Source
from isobatch.cluster.bench.setup import drawn
from isobatch.deployments.models.backends import planned_block_ranges
from isobatch.optimizer.plan import Plan
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.measure import stopwatch_for

SLOS_MS = (10.0, 25.0, 50.0, 100.0)
DRAWN = 512
# Survival by depth. MiniLM on SST-2 was measured on 2026-11-20, with light ramps; no command prints it.
SURVIVALS = {
    "paper: half by the middle": HALF,
    "paper: DistilBERT": EARLY,
    "MiniLM on SST-2": ((0.0, 1.0), (1 / 6, 0.21), (2 / 6, 0.15), (3 / 6, 0.08), (4 / 6, 0.05), (5 / 6, 0.01)),
}


def bench(name: str, table: LatencyTable, survival: str, setting: TableSetting) -> Bench:
    """A bench with inputs of one length, each with the block at which it leaves."""
    model = network(name, setting)
    leaving, random = exits_along(SURVIVALS[survival], model.num_blocks), np.random.default_rng(0)
    each = inputs(model, name, table.length)
    source = Source([drawn(each.batch(1), leaving, random) for _ in range(DRAWN)])
    facts = Profile(name, (table,), leaving)
    least = 200 if setting.layers is None else 20
    watch, largest = stopwatch_for(setting.device), table.largest

    def ready(plan: Plan) -> None:
        model.prepare(planned_block_ranges(model, plan, table.kind), each.batch(1))

    return Bench(model, facts, table.kind, source, watch, largest, least, ready)
