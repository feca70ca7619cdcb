"""Whether an input is admitted: if its deadline can be met, by what is ahead of it and by how fast replicas are."""

from collections.abc import Sequence

from deployments.dispatch.lanes import Lane
from deployments.dispatch.messages import Limits, Refusal
from deployments.dispatch.queues import StageQueues


def fastest(lanes: Sequence[Lane], now_s: float) -> Lane:
    """The lane where a newcomer is expected to be done first."""
    return lanes[0] if len(lanes) == 1 else min(lanes, key=lambda lane: expected_s(lane, now_s))


def expected_s(lane: Lane, now_s: float, more: int = 0) -> float:
    """How long an input that is admitted now takes to the very end: what is ahead of it, then its own launches.

    Launches count as long as replicas really take. If the table is wrong and all are slower than planned, a promise by
    the table would let in inputs that expire half-way. `more`: so many others of its request are admitted before it.
    """
    ahead_s = own_s = 0.0
    costs = lane.entry.costs_s(more) if more else {}
    for group in lane.groups:
        if (group_s := group.ahead_s(now_s, costs.get(group, 0.0))) > ahead_s:
            ahead_s = group_s
    for stage in lane.stages:
        own_s += _own_s(stage)
    return ahead_s + own_s


def refusal(lane: Lane, now_s: float, deadline_s: float, inside: int, limits: Limits, more: int = 0) -> Refusal | None:
    """Why an input cannot be admitted to this lane, or None if it can. `inside`: how many inputs have not ended.

    `more`: so many others are admitted just before it.
    """
    needed_s = expected_s(lane, now_s, more)
    late_s = now_s + needed_s * (1 + limits.slack) - deadline_s
    # While nobody is inside, the plan's own times decide. Otherwise replicas that were so slow for a while that all are
    # refused would get nothing to do by which they could show that they are fast again.
    if late_s > 0 and (inside or now_s + lane.alone_s * (1 + limits.slack) > deadline_s):
        return Refusal("the deadline cannot be met with what is ahead", late_s)
    if inside + more >= limits.backlog:
        return Refusal(f"the backlog of {limits.backlog} inputs is full", needed_s)
    return None


def _own_s(queues: StageQueues) -> float:
    """How long the launch will take of an input that joins those who wait for this stage now."""
    stage, size = queues.stage, queues.waiting
    if stage.local and stage.start:
        size //= max(1, len(queues.group.members))
    return stage.launch_s[size if size < stage.batch else -1] * queues.group.slowdown
