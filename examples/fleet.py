"""A plan for devices that are not here, and what it gains over plans without exits, or without full batches.

Run: python examples/fleet.py [KIND=COUNT,...]
"""

import sys

from isobatch.optimizer import Objective, evaluate, optimize, problem
from isobatch.optimizer.pipelines.baselines import baselines
from isobatch.profiles.datasheet import datasheet_table, encoder
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile

BERT_BASE = encoder("bert-base", layers=12, hidden=768, inner=3072, length=128, vocabulary=30522)
SURVIVAL = (1.0, 1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.32, 0.26, 0.21, 0.17, 0.14)  # the share of inputs that enters a block

if __name__ == "__main__":
    devices = fleet(sys.argv[1] if sys.argv[1:] else "v100=4,t4=4")
    links, objective = links_between(devices), Objective(slo_s=0.1)
    tables = tuple(datasheet_table(BERT_BASE, device.kind) for device in devices)
    profile = Profile("bert-base", tables, ExitProfile(SURVIVAL))
    plan = optimize(profile, devices, links, objective)
    for pipeline in plan.pipelines:
        for placement in pipeline.placements:
            blocks = ", ".join(f"{split.blocks_text} in batches of {split.batch_size}" for split in placement.splits)
            print(f"{placement.replicas} x {placement.kind}: blocks {blocks}")
    facts = problem(profile, devices, links)
    goodput_per_s = evaluate(plan, facts).goodput_per_s
    print(f"{goodput_per_s:.0f} inputs/s")
    for other in baselines(facts, objective):
        if other.score:
            print(f"{goodput_per_s / other.score.goodput_per_s:.2f} times {other.name}")
