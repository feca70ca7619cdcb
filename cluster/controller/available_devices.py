"""The devices that are present, and requests to Ray's autoscaler for those that the cheapest plan needs.

No decision waits for requested devices: plans are rolled out on those that are present. Plans do without devices that
do not arrive in time, for a while. Ray's autoscaler rents nothing at all if it cannot serve the whole request (a kind
that no type of node offers, or more nodes than `max_workers`). Then one kind is requested at a time, and fewer of it,
until the autoscaler accepts.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from isobatch.deployments.resources import Resources, declared, first_fit, of_declared
from isobatch.profiles.devices import Device, as_text


@dataclass(frozen=True)
class DeviceRequest:
    """A request to have `count` devices of one kind.

    `before` of them were present when the request was made, `present` are now. `since_s` is when the last of them
    arrived, or when the request was made.
    """

    count: int
    before: int
    present: int
    since_s: float

    @property
    def missing(self) -> int:
        return max(0, self.count - self.present)

    def updated(self, present: int, now_s: float) -> "DeviceRequest":
        progressed = not self.missing or present > self.present or present >= self.count
        since_s = now_s if progressed else min(self.since_s, now_s)  # the clock may have been set back
        return replace(self, before=min(self.before, present), present=present, since_s=since_s)


class DeviceRequests:
    """The open requests by kind. `most` holds how many devices of each kind there may be, present ones included.

    >>> requests = DeviceRequests({"k80": 4}, come_within_s=600.0, again_after_s=1800.0)
    >>> present = {"v100": 1, "k80": 1}
    >>> requests.possible(present, now_s=0.0)
    {'v100': 1, 'k80': 4}
    >>> requests.request({"v100": 1, "k80": 3}, present, now_s=0.0)
    >>> requests.counts, requests.waiting_text(now_s=40.0)
    ({'k80': 3}, 'requested 2 k80 (0 of 2 arrived in 40 s)')
    >>> requests.update(present, now_s=600.0)
    '2 k80 have not arrived within 600 s'
    >>> requests.counts, requests.possible(present, now_s=700.0)
    ({'k80': 1}, {'v100': 1, 'k80': 1})
    >>> requests.request({"k80": 4}, present, now_s=2400.0)
    >>> requests.refuse(present, now_s=2410.0)
    >>> requests.counts, requests.possible(present, now_s=2410.0)
    ({'k80': 3}, {'v100': 1, 'k80': 3})
    """

    def __init__(self, most: Mapping[str, int], come_within_s: float, again_after_s: float) -> None:
        self.most = dict(most)
        self._come_within_s, self._again_after_s = come_within_s, again_after_s
        self._requests: dict[str, DeviceRequest] = {}
        self._limits: dict[str, tuple[int, float]] = {}  # how many of a kind may be requested, and since when
        self._one_kind_since_s = -inf  # when the autoscaler refused a request for several kinds

    @property
    def counts(self) -> dict[str, int]:
        """How many devices of each kind are requested, present ones included."""
        return {kind: request.count for kind, request in self._requests.items()}

    def beyond_use(
        self, uses: Mapping[str, int], present: Mapping[str, int], benched: Mapping[str, int]
    ) -> dict[str, int]:
        """The requests that the autoscaler must know. It counts devices of benched replicas, too.

        Nodes in use stay without a request; with one, the autoscaler may also keep idle nodes.
        """
        return {
            kind: min(count + benched.get(kind, 0), self.most[kind])
            for kind, count in self.counts.items()
            if count > min(uses.get(kind, 0), present[kind])
        }

    def of_growing_kinds(self, devices: Mapping[str, int]) -> dict[str, int]:
        """The same counts, of the kinds that may grow."""
        return {kind: devices.get(kind, 0) for kind in self.most}

    def possible(self, present: Mapping[str, int], now_s: float) -> dict[str, int]:
        """The devices that are present or may arrive."""
        limits = {kind: limit for kind, (limit, since_s) in self._limits.items() if self._lasts(since_s, now_s)}
        growing = {kind: min(most, limits.get(kind, most)) for kind, most in self.most.items()}
        return {**present, **{kind: max(count, present.get(kind, 0)) for kind, count in growing.items()}}

    def request(self, devices: Mapping[str, int], present: Mapping[str, int], now_s: float) -> None:
        """Request this many devices of the kinds that may grow, and release further ones.

        The time after which missing devices are late begins once, however often their number changes.
        """
        waiting = {kind for kind, request in self._requests.items() if request.missing}
        for kind in sorted(self.most, key=lambda kind: kind not in waiting):
            count, has = min(self.most[kind], devices.get(kind, 0)), present.get(kind, 0)
            others_missing = any(request.missing for other, request in self._requests.items() if other != kind)
            if self._lasts(self._one_kind_since_s, now_s) and others_missing:
                count = min(count, has)
            before = self._requests.get(kind)
            self._requests[kind] = (
                replace(before, count=count) if before and before.missing else DeviceRequest(count, has, has, now_s)
            )

    def refuse(self, present: Mapping[str, int], now_s: float) -> None:
        """The autoscaler cannot have all of these devices: request those of one kind, or one device less of it."""
        missing = [kind for kind, request in self._requests.items() if request.missing]
        for kind in missing[1:]:
            self._requests[kind] = replace(self._requests[kind], count=present.get(kind, 0))
        if len(missing) > 1:
            self._one_kind_since_s = now_s
        elif missing:
            (kind,) = missing
            self._limit(kind, self._requests[kind].count - 1, now_s)

    def _lasts(self, since_s: float, now_s: float) -> bool:
        """Whether a refusal still counts. One of a later time is from before the clock was set back."""
        return since_s <= now_s < since_s + self._again_after_s

    def _limit(self, kind: str, count: int, now_s: float) -> None:
        self._limits[kind] = count, now_s
        self._requests[kind] = replace(self._requests[kind], count=count)

    def update(self, present: Mapping[str, int], now_s: float) -> str:
        """Note which devices are present, and withdraw late requests; the text names these, if any."""
        self._requests = {
            kind: request.updated(present.get(kind, 0), now_s) for kind, request in self._requests.items()
        }
        late = {
            kind: request
            for kind, request in self._requests.items()
            if request.missing and now_s - request.since_s >= self._come_within_s
        }
        for kind, request in late.items():
            self._limit(kind, request.present, now_s)
        missing = as_text({kind: request.missing for kind, request in late.items()})
        return f"{missing} have not arrived within {self._come_within_s:g} s" if missing else ""

    def waiting_text(self, now_s: float) -> str | None:
        """The devices that were requested and have not arrived."""
        waits = [
            f"{request.count - request.before} {kind} ({request.present - request.before} of "
            f"{request.count - request.before} arrived in {now_s - request.since_s:.0f} s)"
            for kind, request in self._requests.items()
            if request.missing
        ]
        return f"requested {', '.join(waits)}" if waits else None


def absent_devices(devices: Mapping[str, int], present: Mapping[str, int]) -> str:
    """The devices that are not present, as text.

    >>> absent_devices({"v100": 1, "k80": 3}, {"v100": 1, "k80": 1})
    '2 k80'
    """
    return as_text({kind: count - present.get(kind, 0) for kind, count in devices.items()})


FRONT: Resources = {"CPU": 1.0}  # a front takes one CPU of some node


@dataclass
class Inventory:
    """Counts devices when called. `most` holds the devices that plans may use, `needs` the resources of a replica.

    `nodes` lists the resources of each node for this application.

    A node may declare devices as a resource with the name of the kind (`ray start --resources '{"v100": 2}'`). So
    virtual devices belong to a node and are lost with it. Nodes that may still join declare the kinds in `known`.
    Each of `sharers` applications has a replica on every device. The application has `fronts`.
    """

    most: Mapping[str, int]
    needs: Callable[[str], Resources]
    nodes: Callable[[], list[Resources]]
    known: Collection[str] = ()
    sharers: int = 1
    fronts: int = 1

    def __post_init__(self) -> None:
        # What nodes have declared, also when they are gone.
        self._declared: dict[str, Resources] = {kind: of_declared(kind) for kind in self.known}

    def __call__(self) -> dict[str, int]:
        nodes = self.nodes()
        for kind in self.most:
            if amounts := declared(kind, nodes):
                self._declared[kind] = {name: amount / self.sharers for name, amount in amounts.items()}
        needs = {kind: {**self.needs(kind), **self._declared.get(kind, {})} for kind in self.most}
        return fitting(self.most, needs, nodes, self.fronts)


def fitting(
    most: Mapping[str, int], needs: Mapping[str, Resources], nodes: Iterable[Resources], fronts: int = 1
) -> dict[str, int]:
    """How many devices of each kind fit on the nodes beside the fronts, if nothing else runs there.

    Fronts get what replicas leave, as they can be on any node. If that is too little, they come before replicas that
    need CPUs alone, or else before all.

    >>> gpu = {"GPU": 1.0, "accelerator_type:V100": 0.001}
    >>> fitting({"v100": 4}, {"v100": gpu}, [{"CPU": 8, "GPU": 2, "accelerator_type:V100": 1}, {"CPU": 8, "GPU": 4}])
    {'v100': 2}
    """
    tied = {kind: any(amount for name, amount in needs[kind].items() if name not in FRONT) for kind in most}
    kinds = [kind for kind in sorted(most, key=lambda kind: not tied[kind]) for _ in range(most[kind])]
    wanted, free, fit = [needs[kind] for kind in kinds], list(nodes), list[bool]()
    for before in (len(kinds), sum(tied[kind] for kind in kinds), 0):
        fit = first_fit([*wanted[:before], *[FRONT] * fronts, *wanted[before:]], free)
        at_fronts = slice(before, before + fronts)
        has_fronts = all(fit[at_fronts])
        del fit[at_fronts]
        if has_fronts:
            break
    counts = Counter(kind for kind, fits in zip(kinds, fit, strict=True) if fits)
    return {kind: counts[kind] for kind in most}


class PresentDevices:
    """The devices that decisions count on, from one look to the next.

    A lost device is left out at once. A returned device counts one look later. Devices beyond the `budget` do not
    count, nor do those of the budget whose replicas are benched. `shared`: an arbiter changes the budget.

    >>> present = PresentDevices((Device("v100", 4, 1, 0.0),))
    >>> [present.update({"v100": count}) for count in (4, 3, 4, 4)], present.counts
    ([False, True, False, True], {'v100': 4})
    """

    def __init__(self, fleet: tuple[Device, ...], budget: Mapping[str, int] | None = None) -> None:
        self._most = {device.kind: device.count for device in fleet}
        self._before, self._steady = dict(self._most), dict(self._most)
        self.budget = dict(self._most)
        self.counts = dict(self._most)
        self.shared = budget is not None
        self._granted = set[str]()  # kinds of which the budget has grown, and whose devices are not all present yet
        self.has_granted = False  # whether devices of these kinds have become present with the last change
        self.benched = Counter[str]()
        if budget is not None:
            self.limit(budget)

    def update(self, devices: Mapping[str, int], benched: Collection[tuple[str, str]] = ()) -> bool:
        """Whether the counts have changed. Without any counts, all devices count as present.

        `benched`: slow replicas and their kinds, which are not among the `devices`.
        """
        self.benched = Counter(kind for _, kind in benched)
        now = {kind: min(most, devices.get(kind, most if not devices else 0)) for kind, most in self._most.items()}
        self._steady = {kind: min(count, self._before[kind]) for kind, count in now.items()}
        self._before = now
        return self.limit(self.budget)

    def limit(self, budget: Mapping[str, int]) -> bool:
        """Count no more devices than these from now on; returns whether the counts have changed."""
        before, self.budget = self.budget, {kind: min(most, budget.get(kind, 0)) for kind, most in self._most.items()}
        self._granted |= {kind for kind, count in self.budget.items() if count > before[kind]}
        usable = {kind: max(0, count - self.benched[kind]) for kind, count in self.budget.items()}
        counts = {kind: min(count, usable[kind]) for kind, count in self._steady.items()}
        self.has_granted = any(counts[kind] > self.counts[kind] for kind in self._granted)
        self._granted = {kind for kind in self._granted if counts[kind] < usable[kind]}
        changed, self.counts = counts != self.counts, counts
        return changed
