"""What the controller asks about a network: its plans and their scores. It is alike for inputs and texts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from isobatch.cluster.controller.corrections import Corrections
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer import Objective, Plan, Problem, Score
from isobatch.optimizer.goals import Goal
from isobatch.profiles.devices import Device
from isobatch.profiles.exits import ExitProfile


class CostModel(Protocol):
    """Scores any plan of a network, for one survival and one set of corrections."""

    @property
    def facts(self) -> Problem:
        """The latency tables; there are none for texts, whose plans are simulated."""

    @property
    def ramp_blocks(self) -> Collection[int]: ...

    def score(self, plan: Plan) -> Score: ...

    def with_all_ramps(self, plan: Plan) -> Plan:
        """The same plan with every ramp open."""


class PlanningProblem(Protocol):
    """A network, its devices and its objective: all that the planner needs beside the survival of the moment."""

    @property
    def fleet(self) -> tuple[Device, ...]:
        """The devices that plans may use, whether or not they are present now."""

    @property
    def objective(self) -> Objective: ...

    @property
    def aim(self) -> Goal:
        """What a decision compares: goodput, the time of answers, or the goal's value at the expected rate."""

    @property
    def answers_early(self) -> bool:
        """Whether plans run the whole network and differ in their ramps only (optimizer/early_answers.py)."""

    @property
    def reserve(self) -> float:
        """The share by which a plan must sustain more than the expected rate, unless it is compared otherwise."""

    @property
    def prior(self) -> ExitProfile:
        """The survival before any window was observed."""

    def in_units_of(self, plan: Plan) -> "PlanningProblem":
        """The same problem, counted in the units of this plan: inputs, or tokens in texts of its length."""

    def updated_by(self, observed: Observed) -> "PlanningProblem":
        """The same problem after a window, which may show how long texts are."""

    def with_text_length(self, inputs_per_text: float | None) -> "PlanningProblem":
        """The same problem for texts of this mean length; None: the length is unknown, or inputs are no texts."""

    def cost_model(self, survival: Sequence[float], corrections: Corrections) -> CostModel: ...

    def corrected(
        self, corrections: Corrections, observed: Observed, plan: Plan, survival: Sequence[float], rate: float
    ) -> Corrections:
        """The corrections after a window by this plan."""

    def best(self, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]) -> Plan:
        """The plan of most goodput on these devices."""

    def sustaining(
        self, rate_per_s: float, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]
    ) -> Plan | None:
        """The best plan by the goal that sustains this rate, with goal: goodput the quickest; None if there is none."""
