"""What the controller asks of a running application: the live one and the simulated one offer the same."""

from typing import Protocol

from deployments.front.observed import Observed
from optimizer.plan import Plan


class RolloutError(Exception):
    """A plan could not be brought to run. The plan from before runs again."""


class Application(Protocol):
    """An application that serves requests by a plan and can be led to another one meanwhile."""

    async def observe(self) -> Observed:
        """What happened since this was last asked (at first: since the application began), and the devices of now."""
        ...

    async def plan(self) -> Plan:
        """The plan that runs, whoever rolled it out."""
        ...

    async def roll_out(self, plan: Plan) -> None:
        """Returns when the plan runs and the one from before takes no more work.

        Raises RolloutError when it could not be brought to run: then the plan from before was restored.
        """
        ...
