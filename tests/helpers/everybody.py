"""A dispatcher that lets everybody in."""

from isobatch.deployments.dispatch.admission import soonest
from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Place, Refusal


class EverybodyDispatcher(Dispatcher):
    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        return self._add(*soonest(self._open, now_s, weight), deadline_s, place, weight, full)
