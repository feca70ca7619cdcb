"""The application that the faults hit: the network and devices of `experiments/replan`, by the planner's own plan."""

from experiments.replan import timeline
from experiments.replan.suite import BATCH, FAST, profile
from experiments.replan.timeline import PersistentLoad
from experiments.serve.fleet import promise_per_s
from isobatch.optimizer import Objective, Plan, optimize
from isobatch.profiles.devices import Device, links_between

DEVICES = {FAST: 7}
PROFILE = profile({FAST: 0.030})
SLO_MS = 2000.0
AGAIN_S = 10.0  # for how long a client repeats a request whose connection broke
SHARE = 0.5  # of what the plan sustains, so that the devices left after a fault can carry it


def best() -> Plan:
    fleet = [Device(kind, count, 10**12, 1.0) for kind, count in DEVICES.items()]
    return optimize(PROFILE, fleet, links_between(fleet), Objective(slo_s=SLO_MS / 1e3, max_batch=BATCH))


START = best()


def offered_per_s() -> float:
    return SHARE * promise_per_s(START, PROFILE)


def load(url: str, fresh: bool = False) -> PersistentLoad:
    """A load of inputs that say where they are sure; the controller chooses the ramps, and none may leave earlier.

    `fresh`: each request has a connection of its own.
    """
    return timeline.load(url, SLO_MS, AGAIN_S, lambda left_after, sure_after: left_after >= sure_after, fresh)
