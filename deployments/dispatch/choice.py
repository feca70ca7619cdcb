"""Which batch a group of replicas should run next.

While a replica is idle, waiting buys nothing: it is given what there is, so a lone input is as fast as a batch of one.
Under load replicas are busy, and batches fill up while they are. A full batch may also wait at a busy replica, so that
it starts the moment the one before it ends. One that is not full sets out a little before that moment, if few wait;
where many do, the launch that ends may fill a batch deeper inside, which should go first. When several pools want the
same replicas,
1. full and urgent ones come first (urgent: waiting longer would cost somebody the deadline), the deepest before the
   others, so that what was begun gets finished and the memory it holds is let go;
2. then the fullest, since a launch of few costs nearly what a full one does; who waits for long becomes urgent.
"""

from collections.abc import Sequence

from deployments.dispatch.lane import Station
from deployments.dispatch.pools import Pool
from deployments.dispatch.replicas import Group, Replica

URGENT = 1.5  # times what the rest takes in full batches without waiting: time to spare for some of that

Choice = tuple[tuple[bool, float], int, Pool, Replica]


def choose(group: Group, stations: Sequence[Station], now_s: float) -> tuple[Pool, Replica] | None:
    """A pool that a replica would take inputs from. Most often there is none: that must cost little."""
    choices: list[Choice] = []
    for station in stations:
        if station.waiting:
            for pool in station.pools.values():
                if pool.size and (replica := _replica_for(pool, group, stations, now_s)):
                    choices.append((_rank(pool, now_s), len(choices), pool, replica))
    if group.stirred:
        _add_kept(choices, group, now_s)
    if not choices:
        return None
    _, _, pool, replica = min(choices) if len(choices) > 1 else choices[0]
    return pool, replica


def _replica_for(pool: Pool, group: Group, stations: Sequence[Station], now_s: float) -> Replica | None:
    if idle := group.idle(now_s):
        return idle
    if pool.size >= pool.stage.batch:
        return group.soonest()
    soon = group.nearly_idle(now_s)
    return soon if soon and sum(station.waiting for station in stations) < pool.stage.batch else None


def _add_kept(choices: list[Choice], group: Group, now_s: float) -> None:
    """What a replica keeps is run by it alone, benched or not. Nothing new can be run before it is stirred again."""
    still = set()
    for replica in group.stirred:
        for pool in replica.pools.values():
            if pool.size and (not replica.queue or (pool.size >= pool.stage.batch and group.has_room(replica))):
                choices.append((_rank(pool, now_s), len(choices), pool, replica))
                still.add(replica)
    group.stirred = still


def _rank(pool: Pool, now_s: float) -> tuple[bool, float]:
    first, cursor, batch = pool.first(), pool.cursor, pool.stage.batch
    needed_s = URGENT * pool.station.lane.route.remaining_s(cursor)
    presses = pool.size >= batch or (first is not None and first.deadline_s - now_s <= needed_s)
    return not presses, -cursor if presses else -pool.size / batch
