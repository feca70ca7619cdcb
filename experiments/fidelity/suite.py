"""Plans and loads that run on live virtual devices and in the simulator, with equal arrivals."""

from dataclasses import dataclass, replace

import numpy as np

from experiments.serve.fleet import BLOCKS, KINDS, SURVIVAL, Part, plan
from experiments.shared.machine import data
from isobatch.cluster.load.traces import trace
from isobatch.cluster.load.workloads import Floats, Ints, arrivals, exit_blocks
from isobatch.optimizer.plan import Plan
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable

BATCH = 8
PASS_S = 0.120  # a full batch through the network: so long that the host is not the limit
LONE = 0.5  # the time of a batch of one, as a share of PASS_S
SLO_S = 0.7
LOADS = (0.5, 0.8, 0.95, 1.2)  # of what the plan promises
SECONDS = 6.0
SEED = 0
SIMULATED = 9  # simulated runs, each with other small variations
PROCESSES = ("poisson", "twitter")
TWITTER = "arrivals/twitter/twitter_2021-08_per_second.tbz2"
FASTER = 10  # a minute of the trace passes in six seconds


def profile(slower: float = 1.0) -> Profile:
    tables = tuple(_table(kind, slower * times) for kind, times in KINDS.items())
    return Profile("fidelity", tables, ExitProfile(SURVIVAL))


def _table(kind: str, slower: float) -> LatencyTable:
    whole, none, sizes = (slower * PASS_S / BLOCKS,) * BLOCKS, (0.0,) * BLOCKS, (4096,) * BLOCKS
    alone = tuple(LONE * each for each in whole)
    return LatencyTable(kind, (1, BATCH), (alone, whole), (none, none), 0.0, sizes, sizes, "made up")


def _in_a_row(*parts: Part) -> Plan:
    return plan(*parts, batch=BATCH)


PLANS = {
    "1 split": _in_a_row(Part(8, 4)),
    "2 splits": _in_a_row(Part(4, 2), Part(8, 1)),
    "3 splits": _in_a_row(Part(4, 2), Part(6, 1), Part(8, 1)),
    "1 split, mixed": replace(_in_a_row(Part(8, 2)), beside=(_in_a_row(Part(8, 4, "k80")),)),
    "2 splits, mixed": _in_a_row(Part(4, 2), Part(8, 2, "k80")),
    "3 splits, mixed": _in_a_row(Part(4, 2), Part(6, 1, "k80"), Part(8, 1)),
}


@dataclass(frozen=True)
class Case:
    plan: str
    process: str
    load: float  # of what the plan promises
    seconds: float = SECONDS
    slo_s: float = SLO_S

    def inputs(self, promised_per_s: float) -> tuple[Floats, Ints]:
        """The arrival times, and the block after which each input is sure, the same for both."""
        rate = self.load * promised_per_s
        if self.process == "poisson":
            times_s = arrivals("poisson", rate, self.seconds, SEED)
        else:
            times_s = trace(data(TWITTER), rate / FASTER, self.seconds * FASTER, SEED) / FASTER
        return times_s, exit_blocks(ExitProfile(SURVIVAL), len(times_s), np.random.default_rng([SEED, 1]))


def cases(plan: str) -> list[Case]:
    return [Case(plan, process, load) for process in PROCESSES for load in LOADS]
