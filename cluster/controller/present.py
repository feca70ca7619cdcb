"""Which devices are believed to be there, from one look to the next."""

from collections.abc import Mapping

from profiles.devices import Device


class Present:
    """A device that is gone is gone at once; one that came back is believed when it is still there at the next look.

    >>> here = Present((Device("v100", 4, 1, 0.0),))
    >>> [here.look({"v100": seen}) for seen in (4, 3, 4, 4)], here.counts
    ([False, True, False, True], {'v100': 4})
    """

    def __init__(self, fleet: tuple[Device, ...]) -> None:
        self._most = {device.kind: device.count for device in fleet}
        self._before = dict(self._most)
        self.counts = dict(self._most)

    def look(self, devices: Mapping[str, int]) -> bool:
        """Whether what is believed has changed. A kind that nobody counted is believed to be there."""
        seen = {kind: min(most, devices.get(kind, most if not devices else 0)) for kind, most in self._most.items()}
        believed = {kind: min(count, self._before[kind]) for kind, count in seen.items()}
        changed, self.counts, self._before = believed != self.counts, believed, seen
        return changed
