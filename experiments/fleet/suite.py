"""Six applications on 24 devices of three kinds, each with recorded arrivals."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.planner import networks as shapes
from experiments.planner.settings import EARLY, HALF, Network
from experiments.shared.machine import data
from isobatch.cluster.commands.plan_fleet import HANDOVER_S, LOOK_EVERY_S
from isobatch.cluster.controller.config import ArbiterConfig, MemberTerms, Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.rehearsal import Member
from isobatch.cluster.load.traces import trace
from isobatch.cluster.load.workloads import Floats, exit_blocks, following
from isobatch.cluster.simulator.simulation import World
from isobatch.optimizer import Objective
from isobatch.optimizer.fleets.application import FleetApplication
from isobatch.optimizer.fleets.division import divide
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile

DEVICES = "v100=4,p100=8,k80=12"
AZURE, TWITTER = "arrivals/azure_functions/invitro_1000_inv.csv", "arrivals/twitter/twitter_2021-08_per_second.tbz2"
MAX_BATCH, GAP = 32, 0.03
DAY_S, HOUR_S = 86_400, 3600.0
BURSTY_CV = 1.0  # of a function's calls per minute; 1 is that of one Poisson call a minute
# Replicas stand by. Plans do not give up goodput for latency, since only goodput is counted.
PATIENCE = Patience(notice=1.0, start_s=HANDOVER_S, look_every_s=LOOK_EVERY_S)
STEP_S = 5.0  # step of the arithmetic: a few times the SLO of 1 to 2 s
# Launches of long texts take tenths of a second, so that the inputs of an hour can be simulated.
NETWORKS = {
    "large": (Network("BERT-large, 512 tokens", shapes.bert_large(length=512), HALF), 2.0),
    "base": (Network("BERT-base, 512 tokens", shapes.bert_base(length=512), HALF), 1.0),
    "early": (Network("BERT-large, 384 tokens", shapes.bert_large(length=384), EARLY), 1.5),
}
APPLICATIONS = {f"{network}_{trace}": (network, trace) for network in NETWORKS for trace in ("azure", "twitter")}


@dataclass(frozen=True)
class FleetLoad:
    """A load of `hours`, at `percent` of the rate that the devices of each application sustain, on average.

    `flooded`: this application gets `times` as many inputs in the middle third.
    """

    percent: int
    hours: float
    flooded: str = ""
    times: float = 1.0

    @property
    def seconds(self) -> float:
        return HOUR_S * self.hours


@cache
def question(name: str) -> ClassifierPlanningProblem:
    network, slo_s = NETWORKS[APPLICATIONS[name][0]]
    tables = tuple(datasheet_table(network.shape, kind.kind, dtype="float32") for kind in fleet(DEVICES))
    profile = Profile(network.name, tables, ExitProfile(network.exits.survival))
    return ClassifierPlanningProblem(profile, fleet(DEVICES), Objective(slo_s=slo_s, max_batch=MAX_BATCH), gap=GAP)


@cache
def own_devices() -> Mapping[str, Mapping[str, int]]:
    """The best division of the devices for loads that are equal shares of each application's rate on all devices."""
    kinds = fleet(DEVICES)
    asks = []
    for name in APPLICATIONS:
        problem = question(name)
        facts = problem.facts(problem.prior.survival, Corrections())
        alone = problem.best(problem.prior.survival, Corrections(), {})
        assert alone.promise
        asks.append(FleetApplication(name, facts, problem.objective, rate_per_s=alone.promise.goodput_per_s / 6))
    parts = divide(asks, kinds, "fairness", GAP).parts
    rows = zip(APPLICATIONS, parts, strict=True)
    return {name: {each.kind: count for each, count in zip(kinds, part, strict=True)} for name, part in rows}


def arbiter_config() -> ArbiterConfig:
    members = tuple(
        MemberTerms(name=name, devices=dict(devices), controller=f"{name}-controller")
        for name, devices in own_devices().items()
    )
    devices = {each.kind: each.count for each in fleet(DEVICES)}
    return ArbiterConfig(devices=devices, applications=members, look_every_s=LOOK_EVERY_S)


def member(name: str, load: FleetLoad) -> Member:
    """An application with its first plan, its own devices, and inputs that are always the same for a load."""
    problem, number = question(name), list(APPLICATIONS).index(name)
    survival = problem.prior.survival
    plan = problem.best(survival, Corrections(), own_devices()[name])
    facts = problem.facts(survival, Corrections())
    assert plan.promise
    assert problem.objective.slo_s
    random = np.random.default_rng([number, load.percent])
    per_s = _recorded(APPLICATIONS[name][1], number // 2, load.hours)
    rate_per_s = load.percent / 100 * plan.promise.goodput_per_s
    if name == load.flooded:
        third = len(per_s) // 3
        extra = np.where((np.arange(len(per_s)) // max(1, third)) == 1, load.times, 1.0)
        rate_per_s, per_s = rate_per_s * float((per_s * extra).mean() / per_s.mean()), per_s * extra
    times_s = following(per_s, rate_per_s, load.seconds, random)
    world = World(plan, facts, problem.objective.slo_s)
    return Member(world, problem, [(times_s, exit_blocks(ExitProfile(survival), len(times_s), random))], PATIENCE)


def fluid_over_divided(members: Mapping[str, Member], seconds: float) -> float:
    """The answers of devices that move at once, over those of each application's own devices, by arithmetic.

    Each application first uses its own devices. In each step, the idle ones go to the application that answers most
    with its own, with equal gain. No input waits for the next step.
    """
    steps = np.linspace(0.0, seconds, max(1, round(seconds / STEP_S)) + 1)
    promises = [each.world.plan.promise for each in members.values()]
    own_per_s = np.array([promise.goodput_per_s for promise in promises if promise])
    chunks = [np.concatenate([chunk[0] for chunk in each.inputs]) for each in members.values()]
    offered_per_s = np.array([np.histogram(times_s, steps)[0] for times_s in chunks]) / np.diff(steps)
    divided = np.minimum(offered_per_s, own_per_s[:, None])
    idle, lent_per_s = (1 - divided / own_per_s[:, None]).sum(0), 0.0
    for index in np.argsort(-own_per_s):
        lent = np.minimum(idle, (offered_per_s[index] - divided[index]) / own_per_s[index])
        idle, lent_per_s = idle - lent, lent_per_s + float(lent.sum() * own_per_s[index])
    return 1 + lent_per_s / float(divided.sum())


@cache
def _recorded(name: str, number: int, hours: float) -> Floats:
    """Counts in equal periods: of one Azure function's first hours, or of a whole day of Twitter.

    The functions are those with bursts that are called most, since most others are timers. The days begin eight hours
    apart, as those of users in different parts of the world.
    """
    if name == "twitter":
        times_s = trace(data(TWITTER), None, float(3 * DAY_S))
        per_s = np.bincount(times_s.astype(np.int64), minlength=3 * DAY_S)
        return np.asarray(np.roll(per_s[number * DAY_S : (number + 1) * DAY_S], number * DAY_S // 3), float)
    with data(AZURE).open() as file:
        head, *rows = csv.reader(file)
    first = head.index("minute_1")
    minutes = np.array([[float(cell or 0) for cell in row[first:]] for row in rows])
    called = minutes[np.argsort(-minutes.sum(1)), : max(1, round(60 * hours))]
    bursty = called[called.std(1) >= np.maximum(BURSTY_CV * called.mean(1), 1.0)]
    return np.asarray(bursty[number], float)
