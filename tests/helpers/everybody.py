"""A dispatcher that lets everybody in."""

from deployments.dispatch.admission import soonest
from deployments.dispatch.batching import Ticket
from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.messages import Place, Refusal


class EverybodyDispatcher(Dispatcher):
    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        return self._add(*soonest(self._open, now_s, weight), deadline_s, place, weight, full)
