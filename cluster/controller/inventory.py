"""Counts the devices that are present: how many of those that plans may use fit on the nodes of Ray."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from deployments.resources import Resources, declared, first_fit
from profiles.devices import Device

FRONT: Resources = {"CPU": 1.0}  # a front takes one CPU of some node


class Inventory:
    """Counts devices when called. `most` holds the devices that plans may use, `needs` the resources of a replica.

    `nodes` lists the resources of each node for this application.

    A node may declare devices as a resource with the name of the kind (`ray start --resources '{"v100": 2}'`). So
    virtual devices belong to a node and are lost with it. Nodes that may still join declare the kinds in `known`.
    """

    def __init__(
        self,
        most: Mapping[str, int],
        needs: Callable[[str], Resources],
        nodes: Callable[[], list[Resources]],
        known: Collection[str] = (),
    ) -> None:
        self._most, self._needs, self._nodes = dict(most), needs, nodes
        self._declared: dict[str, Resources] = {kind: {kind: 1.0} for kind in known}  # kept when nodes are gone

    def __call__(self) -> dict[str, int]:
        nodes = self._nodes()
        self._declared |= {kind: need for kind in self._most if (need := declared(kind, nodes))}
        needs = {kind: {**self._needs(kind), **self._declared.get(kind, {})} for kind in self._most}
        return fitting(self._most, needs, nodes)


def fitting(most: Mapping[str, int], needs: Mapping[str, Resources], nodes: Iterable[Resources]) -> dict[str, int]:
    """How many devices of each kind fit on the nodes beside a front, if nothing else runs there.

    >>> gpu = {"GPU": 1.0, "accelerator_type:V100": 0.001}
    >>> fitting({"v100": 4}, {"v100": gpu}, [{"CPU": 8, "GPU": 2, "accelerator_type:V100": 1}, {"CPU": 8, "GPU": 4}])
    {'v100': 2}
    """
    wanted = [(kind, needs[kind]) for kind, count in most.items() for _ in range(count)]
    _, *fit = first_fit([FRONT, *(need for _, need in wanted)], nodes)
    counts = Counter(kind for (kind, _), fits in zip(wanted, fit, strict=True) if fits)
    return {kind: counts[kind] for kind in most}


class PresentDevices:
    """The devices that decisions count on, from one look to the next.

    A lost device is left out at once. A device that came back counts when it is still present one look later.

    >>> present = PresentDevices((Device("v100", 4, 1, 0.0),))
    >>> [present.update({"v100": count}) for count in (4, 3, 4, 4)], present.counts
    ([False, True, False, True], {'v100': 4})
    """

    def __init__(self, fleet: tuple[Device, ...]) -> None:
        self._most = {device.kind: device.count for device in fleet}
        self._before = dict(self._most)
        self.counts = dict(self._most)

    def update(self, devices: Mapping[str, int]) -> bool:
        """Whether the counts have changed. Without any counts, all devices count as present."""
        now = {kind: min(most, devices.get(kind, most if not devices else 0)) for kind, most in self._most.items()}
        steady = {kind: min(count, self._before[kind]) for kind, count in now.items()}
        changed, self.counts, self._before = steady != self.counts, steady, now
        return changed
