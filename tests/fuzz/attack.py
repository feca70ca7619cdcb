"""Runs cases by the thousand, counts what came of each, and says how a failure is repeated."""

import asyncio
import os
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

from tests.fuzz.cases import Case

T = TypeVar("T")
ALL = int(os.environ.get("ISOBATCH_FUZZ", "3000"))  # cases of all kinds together
LONG = ALL >= 10_000  # as `make fuzz` runs it
# Long runs send the same cases each time; short ones send others, so that many short ones become a long one.
SEED = int(os.environ.get("ISOBATCH_FUZZ_SEED", 0 if LONG or "CI" in os.environ else time.time_ns()))
AT_ONCE = 16
MOST_GROWTH_MIB = 64
Counts = Counter[tuple[str, str]]
COUNTS: Counts = Counter()
_begun: Counter[str] = Counter()  # cases of each kind


def within_s() -> float:
    """A second on a core of one's own: on a busy machine, as many times that as there are others for each core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def refused_share() -> float:
    """Of those who mean well, so many may be refused at most: a front that gets few turns has no room for all."""
    return min(0.1, 0.02 * within_s())


async def attack(kind: str, share: float, case: Case[T], act: Callable[[T], Awaitable[str]], at_once: int = 1) -> None:
    """Send so many cases, several at once, none of which may take longer than `within_s`."""
    begin = _begun[kind]
    end = _begun[kind] = begin + max(1, round(share * ALL))
    for first in range(begin, end, at_once):
        numbers = range(first, min(first + at_once, end))
        await asyncio.gather(*(_one(kind, number, case, act) for number in numbers))


async def _one(kind: str, number: int, case: Case[T], act: Callable[[T], Awaitable[str]]) -> None:
    sent = case(Random(f"{SEED} {kind} {number}"))
    try:
        async with asyncio.timeout(within_s()):
            COUNTS[kind, await act(sent)] += 1
    except BaseException as error:
        error.add_note(f"case {number} of {kind}, repeated by ISOBATCH_FUZZ={ALL} ISOBATCH_FUZZ_SEED={SEED}")
        error.add_note(f"it was {sent!r:.1000}")
        raise


def rss_mib(process: int | str = "self") -> float:
    with open(f"/proc/{process}/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def within_memory(kind: str, half: Callable[[], Any]) -> None:
    """Attack twice: what is set aside once is so in the first half, what leaks grows in the second, too."""
    half()
    before_mib = rss_mib()
    half()
    grown_mib = rss_mib() - before_mib
    COUNTS["memory", f"{kind}_grown_mib"] = round(grown_mib)
    assert grown_mib < MOST_GROWTH_MIB
