"""Whether an input is admitted: if its deadline can be met, by what is ahead of it and by how fast replicas are."""

from collections.abc import Sequence

from deployments.dispatch.lanes import Lane
from deployments.dispatch.messages import Limits, Refusal
from deployments.dispatch.queues import StageQueues


def fastest(lanes: Sequence[Lane], now_s: float, weight: int = 1) -> Lane:
    """The lane where a newcomer is expected to be done first."""
    return lanes[0] if len(lanes) == 1 else min(lanes, key=lambda lane: expected_s(lane, now_s, weight))


def expected_s(lane: Lane, now_s: float, weight: int = 1, more: int = 0) -> float:
    """How long an input that is admitted now takes to its promised answer: what is ahead of it, then its own launches.

    Launches count as long as replicas really take. If the table is wrong and all are slower than planned, a promise by
    the table would let in inputs that expire half-way. `more`: what others of its request weigh, admitted before it.
    """
    ahead_s = own_s = 0.0
    costs = lane.entry.costs_s(more) if more else {}
    for group in lane.promised_groups:
        if (group_s := group.ahead_s(now_s, costs.get(group, 0.0))) > ahead_s:
            ahead_s = group_s
    for stage in lane.promised:
        own_s += _own_s(stage, weight)
    return ahead_s + own_s


def refusal(
    lane: Lane, now_s: float, deadline_s: float, inside: int, limits: Limits, weight: int = 1, more: int = 0,
    others: int = 0,
) -> Refusal | None:  # fmt: skip
    """Why an input cannot be admitted to this lane, or None if it can. `inside`: how many inputs have not ended.

    So many `others`, which weigh `more`, are admitted just before it.
    """
    needed_s = expected_s(lane, now_s, weight, more)
    late_s = now_s + needed_s * (1 + limits.slack) - deadline_s
    # While nobody is inside, the plan's own times decide. Otherwise replicas that were so slow for a while that all are
    # refused would get nothing to do by which they could show that they are fast again.
    if late_s > 0 and (inside or now_s + lane.alone_s(weight) * (1 + limits.slack) > deadline_s):
        return Refusal("the deadline cannot be met with what is ahead", late_s)
    if inside + others >= limits.backlog:
        return Refusal(f"the backlog of {limits.backlog} inputs is full", needed_s)
    return None


def _own_s(queues: StageQueues, weight: int) -> float:
    """How long the launch will take of an input that joins those who wait for this stage now."""
    stage, beside = queues.stage, queues.waiting
    if stage.local and stage.start:
        beside //= max(1, len(queues.group.members))
    if stage.length is None:  # as below, where all weigh 1: every request asks
        return stage.launch_s[beside if beside < stage.batch else -1] * queues.group.slowdown
    return stage.seconds(max(weight, min(beside + weight, stage.room))) * queues.group.slowdown
