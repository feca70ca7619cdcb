"""What Ray's autoscaler is asked for: devices that the cheapest plan needs and that are not there. Pure, like the core.

Nobody waits for them: plans are rolled out on what is there. Devices that do not come in time are not counted on for a
while.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DeviceRequest:
    """Of one kind there should be `count` devices. `had` were there when that was asked, `here` are now.

    `since_s` is when the last of them came, or when it was asked.
    """

    count: int
    had: int
    here: int
    since_s: float

    @property
    def missing(self) -> int:
        return max(0, self.count - self.here)


class DeviceRequests:
    """`most` are the devices that there may be of each kind that may come, those that are there included.

    >>> growth = DeviceRequests({"k80": 4}, come_within_s=600.0, again_after_s=1800.0)
    >>> here = {"v100": 1, "k80": 1}
    >>> growth.hoped(here, now_s=0.0)
    {'v100': 1, 'k80': 4}
    >>> growth.ask({"v100": 1, "k80": 3}, here, now_s=0.0)
    >>> growth.asked, growth.told(now_s=40.0)
    ({'k80': 3}, 'asked for 2 k80 (0 of 2 came, 40 s)')
    >>> growth.look(here, now_s=600.0)
    '2 k80 have not come in 600 s'
    >>> growth.asked, growth.hoped(here, now_s=700.0)
    ({'k80': 1}, {'v100': 1, 'k80': 1})
    """

    def __init__(self, most: Mapping[str, int], come_within_s: float, again_after_s: float) -> None:
        self.most = dict(most)
        self._come_within_s, self._again_after_s = come_within_s, again_after_s
        self._wishes: dict[str, DeviceRequest] = {}
        self._not_before_s: dict[str, float] = {}  # of kinds that did not come

    @property
    def asked(self) -> dict[str, int]:
        """How many devices of each kind the autoscaler is asked to have, those that are there included."""
        return {kind: wish.count for kind, wish in self._wishes.items()}

    def beyond_those_used(self, uses: Mapping[str, int], here: Mapping[str, int]) -> dict[str, int]:
        """What the autoscaler must be told, since nodes that are used stay by themselves.

        It may keep any nodes that have what it was told, idle ones beside those that are used.
        """
        return {kind: count for kind, count in self.asked.items() if count > min(uses.get(kind, 0), here[kind])}

    def of_those(self, devices: Mapping[str, int]) -> dict[str, int]:
        """The same, of the kinds that may come."""
        return {kind: devices.get(kind, 0) for kind in self.most}

    def hoped(self, here: Mapping[str, int], now_s: float) -> dict[str, int]:
        """The devices that there are, and those that may come."""
        coming = {kind: most for kind, most in self.most.items() if now_s >= self._not_before_s.get(kind, now_s)}
        return {**here, **{kind: max(most, here.get(kind, 0)) for kind, most in coming.items()}}

    def ask(self, devices: Mapping[str, int], here: Mapping[str, int], now_s: float) -> None:
        """Have so many devices there, of the kinds that may come; those beyond are given back.

        The time until the missing ones count as overdue begins only once, however often their number changes.
        """
        for kind, most in self.most.items():
            count, there = min(most, devices.get(kind, 0)), here.get(kind, 0)
            before = self._wishes.get(kind)
            waits = before is not None and before.missing
            self._wishes[kind] = (
                replace(before, count=count) if before and waits else DeviceRequest(count, there, there, now_s)
            )

    def look(self, here: Mapping[str, int], now_s: float) -> str:
        """Note which devices are there; what has not come in time, in words, is asked for no longer."""
        self._wishes = {kind: _seen(wish, here.get(kind, 0), now_s) for kind, wish in self._wishes.items()}
        overdue = {
            kind: wish
            for kind, wish in self._wishes.items()
            if wish.missing and now_s - wish.since_s >= self._come_within_s
        }
        for kind, wish in overdue.items():
            self._not_before_s[kind] = now_s + self._again_after_s
            self._wishes[kind] = replace(wish, count=wish.here)
        told = _counted((kind, wish.missing) for kind, wish in overdue.items())
        return f"{told} have not come in {self._come_within_s:g} s" if told else ""

    def told(self, now_s: float) -> str | None:
        """What is waited for, in words."""
        waits = [
            f"{wish.count - wish.had} {kind} ({wish.here - wish.had} of {wish.count - wish.had} came, "
            f"{now_s - wish.since_s:.0f} s)"
            for kind, wish in self._wishes.items()
            if wish.missing
        ]
        return f"asked for {', '.join(waits)}" if waits else None


def beyond(devices: Mapping[str, int], here: Mapping[str, int]) -> str:
    """The devices that are not there, in words.

    >>> beyond({"v100": 1, "k80": 3}, {"v100": 1, "k80": 1})
    '2 k80'
    """
    return _counted((kind, count - here.get(kind, 0)) for kind, count in devices.items())


def _seen(wish: DeviceRequest, here: int, now_s: float) -> DeviceRequest:
    begins = not wish.missing or here > wish.here or here >= wish.count
    return replace(wish, had=min(wish.had, here), here=here, since_s=now_s if begins else wish.since_s)


def _counted(devices: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in devices if count > 0)
