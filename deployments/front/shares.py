"""Which replicas of a kind work for which group: a plan says how many; which of them are alive decides."""

from collections.abc import Collection, Mapping
from math import inf


def shared_out(replicas: Collection[str], wanted: Mapping[str, int]) -> dict[str, list[str]]:
    """Each group's replicas, in proportion to what it wants, however many there are.

    No memory is needed, so all fronts agree, and a replica that comes or goes moves few of the others. Where there are
    fewer replicas than groups, groups share them: that is slow, but no input waits for ever.

    >>> shared_out("abcdef", {"first": 4, "second": 2})
    {'first': ['a', 'b', 'c', 'd'], 'second': ['e', 'f']}
    >>> shared_out("bcdef", {"first": 4, "second": 2})
    {'first': ['b', 'c', 'd'], 'second': ['e', 'f']}
    >>> shared_out("a", {"first": 4, "second": 2})
    {'first': ['a'], 'second': ['a']}
    """
    ordered = sorted(replicas)
    if len(ordered) < len(wanted):
        return {group: [ordered[index % len(ordered)]] if ordered else [] for index, group in enumerate(wanted)}
    sizes = _sizes(len(ordered), wanted)
    ahead = iter(ordered)
    return {group: [next(ahead) for _ in range(size)] for group, size in sizes.items()}


def _sizes(seats: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """One seat after the other goes to the group that is shortest of what it wants (Adams: each gets one at first)."""
    sizes = dict.fromkeys(wanted, 0)
    for _ in range(seats if wanted else 0):
        neediest = max(wanted, key=lambda group: wanted[group] / sizes[group] if sizes[group] else inf)
        sizes[neediest] += 1
    return sizes
