"""What the controller has learned: survival, corrections of launch times, and how plans keep their promises."""

from collections import deque
from collections.abc import Collection

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem, LaunchTableCosts
from isobatch.cluster.controller.record import Events, TrackRecord
from isobatch.cluster.controller.sentences import nearly_all_in_time
from isobatch.cluster.controller.survival import SurvivalEstimate
from isobatch.cluster.controller.text_planning import DecoderCosts, DecoderPlanningProblem
from isobatch.deployments.front.observed import Observed, merged
from isobatch.optimizer.plan import Plan
from isobatch.profiles.windows import History

# A network, its devices and its objective: all that the planner needs beside the present survival.
PlanningProblem = ClassifierPlanningProblem | DecoderPlanningProblem
CostModel = LaunchTableCosts | DecoderCosts  # scores plans for one survival and one set of corrections

RECENT_S = 2.0  # the looks of this time show the present rate of arrivals
SHORT_S = 0.5  # a look shorter than this shows no rate of its own


class CurrentWindow:
    """The looks since the last decision, which become one window of the history."""

    def __init__(self, now_s: float) -> None:
        self.latest: Observed | None = None  # the last look, which may belong to the window before
        self._recent = deque[Observed]()  # the looks of the last `RECENT_S`, also of the window before
        self.quiet_s, self.had_inputs = 0.0, False  # seconds since an input was inside; whether one ever was
        self.parked = False  # the application has no replicas
        self.parking = False  # an arbiter has ended the replicas, which fronts may still report
        self.called_for_s = 0.0  # seconds since the first input after parking
        self._added_s = 0.0  # seconds of short looks that were merged into the last of `_recent`
        self.start(now_s)

    def start(self, now_s: float) -> None:
        self.began_s, self.looks = now_s, list[Observed]()

    def park(self, parked: bool) -> None:
        """The latest grant of an arbiter: whether all replicas must end."""
        self.parking, self.parked = parked, self.parked or parked

    def add(self, observed: Observed) -> None:
        if observed.parked:
            self.looks.clear()
        self.looks.append(observed)
        works = observed.arrivals or observed.texts or observed.holds_inputs
        called, self.parked = works or self.called_for_s, observed.parked
        self.called_for_s = self.called_for_s + observed.seconds if self.parked and called else 0.0
        self.quiet_s = 0.0 if called else self.quiet_s + observed.seconds
        self.had_inputs |= bool(works)
        self._added_s += observed.seconds
        if self._recent and self._added_s < SHORT_S:
            observed = merged([self._recent.pop(), observed])
        else:
            self._added_s = 0.0
        self.latest = observed
        self._recent.append(observed)
        while sum(each.seconds for each in self._recent) - self._recent[0].seconds >= RECENT_S:
            self._recent.popleft()

    @property
    def observed(self) -> Observed:
        return merged(self.looks) if self.looks else Observed(self.began_s, 0.0, 0, 0, ())

    @property
    def recent_per_s(self) -> float:
        """The largest rate of the last looks, since a lent device comes back some seconds late."""
        return max((each.arrivals_per_s for each in self._recent), default=0.0)

    @property
    def rush_per_s(self) -> float:
        """The rate at which inputs arrived before the last look, if some were late or refused; else 0."""
        return 0.0 if self.latest is None or nearly_all_in_time(self.latest) else self.latest.arrivals_per_s


class Knowledge:
    """Grows window by window. A controller that restarts reads it from the history and the events."""

    def __init__(
        self, problem: PlanningProblem, patience: Patience, history: History, events: Events, running: Plan
    ) -> None:
        self.problem = problem.in_units_of(running)
        self.record = TrackRecord(events, patience)
        self.corrections = events.last.corrections if events.last else Corrections()
        prior = self.problem.prior
        ramps = self.problem.cost_model(prior.survival, self.corrections).ramp_blocks
        self.estimate = SurvivalEstimate(history, prior, ramps)
        self._patience = patience

    @property
    def next_problem(self) -> PlanningProblem:
        """The problem with texts as long as they are expected to be."""
        return self.problem.with_text_length(self.estimate.inputs_per_text)

    def cost_model(self) -> CostModel:
        """The cost model for the expected inputs and the corrected tables."""
        return self.next_problem.cost_model(self.estimate.carried, self.corrections)

    def promises_per_s(self, plan: Plan) -> float:
        """The goodput of a plan by the cost model."""
        return self.cost_model().score(plan).goodput_per_s

    def sustains_per_s(self, plan: Plan) -> float:
        """The goodput by the cost model, times the share of it that plans reach under load."""
        return self.promises_per_s(plan) * self.record.kept_share

    def learn(
        self, window: CurrentWindow, running: Plan, ramps: Collection[int], latest: Observed | None = None
    ) -> bool:
        """Learn from a window that has ended; returns whether any input was answered in it.

        `latest` is the part of the window that contradicts the forecast, if any does.
        """
        observed = window.observed
        if observed.seconds <= 0 or not (observed.answered or observed.full):
            return False
        rates = (look.arrivals_per_s for look in window.looks if look.seconds >= SHORT_S)
        self.estimate.close(observed, ramps, latest, max(rates, default=observed.arrivals_per_s))
        self.problem = self.problem.updated_by(observed)
        self.corrections = self.next_problem.corrected(
            self.corrections, observed, running, self.estimate.carried, self._patience.learn
        )
        self.record.add_window(window.looks, running, self.promises_per_s(running))
        return True
