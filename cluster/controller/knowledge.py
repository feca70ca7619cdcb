"""What the controller knows: how many inputs survive, how long launches take, what plans keep of their promises."""

from collections.abc import Collection, Sequence
from typing import Any

from cluster.controller.beliefs import Beliefs
from cluster.controller.config import Patience
from cluster.controller.corrections import Corrections
from cluster.controller.planning import AnyQuestion
from cluster.controller.record import Events, TrackRecord
from deployments.front.observed import Observed, merged
from optimizer.plan import Plan
from profiles.windows import History


class Knowledge:
    """Grows window by window. A restart reads it from the history and from the events."""

    def __init__(
        self, question: AnyQuestion, patience: Patience, history: History, events: Events, running: Plan
    ) -> None:
        self.question = question.counted_as(running)
        self.record = TrackRecord(events, patience)
        self.corrections = events.last.corrections if events.last else Corrections()
        prior = self.question.prior
        ramps = self.question.facts(prior.survival, self.corrections).ramp_blocks
        self.beliefs = Beliefs(history, prior, ramps)
        self._patience = patience

    def count_as(self, running: Plan) -> None:
        """From now on inputs are counted as this plan counts them."""
        self.question = self.question.counted_as(running)

    @property
    def asked(self) -> AnyQuestion:
        """The question for texts as long as they will be."""
        return self.question.of_texts(self.beliefs.inputs_per_text)

    def facts(self) -> Any:
        """The cost model for the inputs and the tables of now."""
        return self.asked.facts(self.beliefs.carried, self.corrections)

    def promises_per_s(self, plan: Plan) -> float:
        """The goodput by the cost model."""
        return self.question.score(plan, self.facts()).goodput_per_s

    def sustains_per_s(self, plan: Plan) -> float:
        """The goodput as far as launches, and what was answered under load, tell."""
        return self.promises_per_s(plan) * self.record.kept(plan)

    def learn(
        self, looks: Sequence[Observed], running: Plan, ramps: Collection[int], latest: Observed | None = None
    ) -> bool:
        """A window has ended; returns whether it had anything to tell.

        `latest` is the part of it that contradicts the forecast, where there is one.
        """
        if not looks or (seen := merged(looks)).seconds <= 0 or not (seen.answered or seen.full):
            return False
        self.beliefs.close(seen, ramps, latest, max(look.arrivals_per_s for look in looks))
        self.question = self.question.seeing(seen)
        by_tables: Any = self.asked.facts(self.beliefs.carried, Corrections())
        self.corrections = self.corrections.learned(seen, running, by_tables, self._patience.learn)
        self.record.keep(looks, running, self.promises_per_s(running))
        return True
