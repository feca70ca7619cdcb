"""Which batch a group of replicas runs next, and on which of them.

While a replica is idle, waiting buys nothing: it is given what there is, so a lone input is as fast as a batch of one.
Under load replicas are busy, and batches fill up while they are. A full batch may also wait at a busy replica, so that
it starts the moment the one before it ends. A batch that is not full sets out a little before that moment, if few wait;
where many do, the launch that ends may fill a batch deeper inside, which should go first. When several queues want the
same replicas,
1. full and urgent ones come first (urgent: waiting longer would cost somebody the deadline), the deepest before the
   others, so that what was begun gets finished and the memory it holds is let go (but where a cascade may degrade, the
   first level, whose answers were promised, before all others);
2. then the fullest, since a launch of few costs nearly what a full one does; an input that waits for long becomes
   urgent.
"""

from collections.abc import Sequence

from deployments.dispatch.groups import Group, Replica
from deployments.dispatch.lanes import Lane
from deployments.dispatch.queues import Queue, StageQueues, Ticket

# An input is urgent when it has less than this many times what its rest takes in full batches: some of the time to
# spare will go into waiting for those.
URGENT = 1.5

Ranked = tuple[tuple[bool, float], int, Queue, Replica]  # its rank, and a number that decides between equal ranks


def choose(lane: Lane, group: Group, stages: Sequence[StageQueues], now_s: float) -> tuple[Queue, Replica] | None:
    """A queue that a replica should take a batch from. Most often there is none: that must cost little."""
    choices: list[Ranked] = []
    for stage in stages:
        if stage.waiting:
            for queue in stage.shared.values():
                if queue.size and (replica := _replica_for(queue, group, stages, now_s)):
                    choices.append((_rank(queue, now_s), len(choices), queue, replica))
    if group.may_run_kept:
        _add_kept(choices, lane, group, now_s)
    if not choices:
        return None
    _, _, queue, replica = min(choices) if len(choices) > 1 else choices[0]
    return queue, replica


def form_batch(queue: Queue, now_s: float) -> tuple[list[Ticket], list[Ticket]]:
    """Take a batch, the earliest deadlines first, and those that a launch of their own would answer too late."""
    stage = queue.stage
    late = queue.take_late(now_s)
    return queue.take(stage.room), late


def _replica_for(queue: Queue, group: Group, stages: Sequence[StageQueues], now_s: float) -> Replica | None:
    if idle := group.idle(now_s):
        return idle
    if queue.weight >= queue.stage.room or (queue.goes_first and _is_urgent(queue, now_s)):
        return group.soonest()
    soon = group.nearly_idle(now_s)
    return soon if soon and sum(stage.waiting for stage in stages) < queue.stage.room else None


def _add_kept(choices: list[Ranked], lane: Lane, group: Group, now_s: float) -> None:
    """Add the queues of inputs that a replica keeps, which only that replica can run, benched or not."""
    still = set()
    for replica in group.may_run_kept:
        for queue in lane.kept.get(replica, {}).values():
            if queue.size and (not replica.pending_s or (queue.weight >= queue.stage.room and group.has_room(replica))):
                choices.append((_rank(queue, now_s), len(choices), queue, replica))
                still.add(replica)
    group.may_run_kept = still


def _rank(queue: Queue, now_s: float) -> tuple[bool, float]:
    """The rank of a queue: the lowest is launched first."""
    cursor, room = queue.cursor, queue.stage.room
    if queue.weight >= room or _is_urgent(queue, now_s):
        return False, -cursor - (queue.owner.route.num_blocks if queue.goes_first else 0)
    return True, -queue.weight / room


def _is_urgent(queue: Queue, now_s: float) -> bool:
    first = queue.first()
    return first is not None and first.deadline_s - now_s <= URGENT * queue.remaining_s
