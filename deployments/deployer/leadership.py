"""Who leads the replicas of an application: the deployer that began last, as kept where Serve keeps its own state."""

import json
from uuid import uuid4

from deployments import ray_facts

_LEADERS = "leaders:"  # and the name of an application: the key of who leads its replicas


class Leadership:
    """What one deployer says, and finds out, of who leads.

    A deployer that was replaced lives on while its fronts drain, and meanwhile another may lead the same replicas.
    `fleet` is the prefix of the applications that hold them.
    """

    def __init__(self, application: str, fleet: str) -> None:
        self._key, self._fleet = f"{_LEADERS}{application}", fleet
        self._name = uuid4().hex

    def take(self) -> None:
        """From now on this deployer leads the application, and its fleet."""
        others = {fleet: name for fleet, name in self._leaders().items() if fleet != self._fleet}
        ray_facts.remember(self._key, json.dumps(others | {self._fleet: self._name}))

    def of_application(self) -> bool:
        """Whether no other has begun to lead this application since."""
        return [*self._leaders().values()][-1:] == [self._name]

    def of_fleet(self) -> bool:
        """Whether no other has begun to lead this fleet since."""
        return self._leaders().get(self._fleet) == self._name

    def forget(self) -> None:
        ray_facts.forget(self._key)

    def _leaders(self) -> dict[str, str]:
        """The last leader of each fleet. The application's is the last of them."""
        return dict(json.loads(ray_facts.recall(self._key) or "{}"))
