"""Without a plan, the front runs the whole network in its own process, one batch at a time."""

from collections.abc import Callable
from dataclasses import replace

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.split import SplitReplica
from isobatch.profiles.model import SplitModel, edges_of

_GROUP = _REPLICA = "here"
# The planned time of a launch: nothing was measured, so late inputs are dropped when batches form, not at admission.
_UNKNOWN_S = 0.0


async def in_process(config: AppConfig, model: SplitModel, clock: Callable[[], float]) -> Driver:
    ramps = frozenset(model.ramp_blocks if config.exits else ())
    times = (_UNKNOWN_S,) * config.max_batch
    stage = Stage(0, model.num_blocks, config.max_batch, _GROUP, times, ramps=ramps)
    route = Route((stage,), edges=edges_of(model))
    # No batch waits at the busy thread: it could have been merged with inputs that arrive meanwhile.
    limits = replace(config.limits(1 / config.front_replicas), retries=0, ahead=0)
    dispatcher = Dispatcher(route, {_GROUP: [_REPLICA]}, limits)
    return Driver(dispatcher, LocalWorkers({_REPLICA: SplitReplica(model)}), clock)
