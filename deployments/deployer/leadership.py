"""Which deployer leads an application's replicas: the one that started last, stored where Serve stores its state."""

import json
from uuid import uuid4

from deployments import ray_facts

_LEADERS = "leaders:"  # followed by the application's name: the key under which its leaders are stored


class Leadership:
    """Lets one deployer take the lead, and find out whether it still has it.

    A deployer that was replaced lives on while its fronts drain, and meanwhile another may lead the same replicas.
    `fleet` is the prefix of the applications that hold the replicas.
    """

    def __init__(self, application: str, fleet: str) -> None:
        self._key, self._fleet = f"{_LEADERS}{application}", fleet
        self._name = uuid4().hex

    def take(self) -> None:
        """Make this deployer the leader of the application and its fleet."""
        others = {fleet: name for fleet, name in self._leaders().items() if fleet != self._fleet}
        ray_facts.remember(self._key, json.dumps(others | {self._fleet: self._name}))

    def of_application(self) -> bool:
        """Whether this deployer still leads the application."""
        return [*self._leaders().values()][-1:] == [self._name]

    def of_fleet(self) -> bool:
        """Whether this deployer still leads the fleet."""
        return self._leaders().get(self._fleet) == self._name

    def forget(self) -> None:
        ray_facts.forget(self._key)

    def _leaders(self) -> dict[str, str]:
        """The leader of each fleet, the latest last: it also leads the application."""
        return dict(json.loads(ray_facts.recall(self._key) or "{}"))
