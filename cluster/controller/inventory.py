"""Counts the devices that are there: how many of those that may be used fit on the nodes of Ray."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from deployments.resources import Resources, declared, first_fit
from profiles.devices import Device

FRONT: Resources = {"CPU": 1.0}


class Inventory:
    """Counts devices when called. `most` are the devices that may be used, `needs` what a replica on a kind asks for.

    `nodes` tells what there is for this application, on each node.

    Where nodes declare a resource by the name of a kind (`ray start --resources '{"v100": 2}'`), they hold so many of
    it: that is how virtual devices belong to a node, and are lost with it. Of `known` kinds it is so
    though no node that has them is there yet.
    """

    def __init__(
        self,
        most: Mapping[str, int],
        needs: Callable[[str], Resources],
        nodes: Callable[[], list[Resources]],
        known: Collection[str] = (),
    ) -> None:
        self._most, self._needs, self._nodes = dict(most), needs, nodes
        self._declared: dict[str, Resources] = {kind: {kind: 1.0} for kind in known}  # kept when the nodes are gone

    def __call__(self) -> dict[str, int]:
        nodes = self._nodes()
        self._declared |= {kind: need for kind in self._most if (need := declared(kind, nodes))}
        needs = {kind: {**self._needs(kind), **self._declared.get(kind, {})} for kind in self._most}
        return fitting(self._most, needs, nodes)


def fitting(most: Mapping[str, int], needs: Mapping[str, Resources], nodes: Iterable[Resources]) -> dict[str, int]:
    """How many of each kind fit on the nodes beside a front, if nothing else runs there.

    >>> gpu = {"GPU": 1.0, "accelerator_type:V100": 0.001}
    >>> fitting({"v100": 4}, {"v100": gpu}, [{"CPU": 8, "GPU": 2, "accelerator_type:V100": 1}, {"CPU": 8, "GPU": 4}])
    {'v100': 2}
    """
    wanted = [(kind, needs[kind]) for kind, count in most.items() for _ in range(count)]
    _, *fit = first_fit([FRONT, *(need for _, need in wanted)], nodes)
    counts = Counter(kind for (kind, _), fits in zip(wanted, fit, strict=True) if fits)
    return {kind: counts[kind] for kind in most}


class Present:
    """The devices that are believed to be there, from one look to the next.

    A device that is gone is believed gone at once; one that came back is believed when it is still there one look
    later.

    >>> here = Present((Device("v100", 4, 1, 0.0),))
    >>> [here.look({"v100": seen}) for seen in (4, 3, 4, 4)], here.counts
    ([False, True, False, True], {'v100': 4})
    """

    def __init__(self, fleet: tuple[Device, ...]) -> None:
        self._most = {device.kind: device.count for device in fleet}
        self._before = dict(self._most)
        self.counts = dict(self._most)

    def look(self, devices: Mapping[str, int]) -> bool:
        """Whether the belief has changed. A kind that nobody counted is believed to be there."""
        seen = {kind: min(most, devices.get(kind, most if not devices else 0)) for kind, most in self._most.items()}
        believed = {kind: min(count, self._before[kind]) for kind, count in seen.items()}
        changed, self.counts, self._before = believed != self.counts, believed, seen
        return changed
