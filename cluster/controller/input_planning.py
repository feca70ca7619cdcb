"""The planning problem of a classifier: it is solved in every window, with new survival and devices."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.survival import with_all_ramps
from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.planning import device, largest_batch, usable
from isobatch.deployments.precision import check_precision
from isobatch.deployments.sources import local
from isobatch.optimizer import Objective, Plan, Problem, Score, evaluate, optimize, problem, read_plan
from isobatch.optimizer.goals import GOALS, Goal
from isobatch.profiles.devices import Device, Link, links_between, whole_kind
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.lengths import Lengths, rescaled

LEAST_SHARE = 1e-3  # the share of inputs that must reach a block for plans to count them


@dataclass(frozen=True)
class LaunchTableCosts:
    """Scores plans by latency tables."""

    facts: Problem

    @property
    def ramp_blocks(self) -> Collection[int]:
        return self.facts.ramp_blocks

    def score(self, plan: Plan) -> Score:
        return evaluate(plan, self.facts)

    def with_all_ramps(self, plan: Plan) -> Plan:
        """The same plan with every ramp open."""
        return with_all_ramps(plan, self.facts.ramp_blocks)


@dataclass(frozen=True)
class ClassifierPlanningProblem:
    """A classifier, the devices that plans may use, and the goal of the controller."""

    profile: Profile
    fleet: tuple[Device, ...]  # that plans may use, whether or not they are present now
    objective: Objective
    one_machine: bool = False
    gap: float = 0.01
    goal: str = "goodput"  # of the controller, by its name
    reserve: float = 0.1  # the share by which a plan must sustain more than the expected rate, for some goals
    gbit_per_s: Mapping[str, float] | None = None  # declared rates of links, by KIND>KIND

    @property
    def prior(self) -> ExitProfile:
        """The survival before any window was observed."""
        return self.profile.exits_of(self.profile.length)

    def updated_by(self, observed: Observed) -> "ClassifierPlanningProblem":
        """The same problem: a window of a classifier changes the survival estimate only."""
        return self

    @property
    def aim(self) -> Goal:
        """What a decision compares: goodput, the time of answers, or the goal's value at the expected rate."""
        return GOALS[self.goal]

    @property
    def answers_early(self) -> bool:
        """Whether plans run the whole network and differ in their ramps only (optimizer/early_answers.py)."""
        return self.objective.ramp_budget is not None

    def in_units_of(self, plan: Plan) -> "ClassifierPlanningProblem":
        """The same problem, counted in the units of this plan: inputs, or tokens in texts of its length."""
        if plan.length == self.profile.length:
            return self
        lengths = None if plan.length is None else Lengths((plan.length,))
        return replace(self, profile=replace(self.profile, lengths=lengths))

    def with_text_length(self, inputs_per_text: float | None) -> "ClassifierPlanningProblem":
        """The same problem for texts of this mean length: attention takes longer in longer texts."""
        length, measured = self.profile.length, {table.length for table in self.profile.tables}
        if length is None or inputs_per_text is None or len(measured) < 2:
            return self
        long = max(1, round(length * inputs_per_text))
        tables = tuple(rescaled(self.profile.table_of(kind, long), length) for kind in self.profile.kinds)
        return replace(self, profile=replace(self.profile, tables=tables))

    def present(self, counts: Mapping[str, int]) -> tuple[Device, ...]:
        """The devices of the fleet that are present; all devices of a kind that was not counted."""
        return tuple(replace(each, count=min(each.count, counts.get(each.kind, each.count))) for each in self.fleet)

    def facts(self, survival: Sequence[float], corrections: Corrections) -> Problem:
        """The tables and links by which any plan for the fleet can be scored, whichever devices are present.

        Where answers are early, every input runs to the end.
        """
        links = self._links(self.fleet)
        profile, length = corrections.applied(self.profile), self.profile.length
        exits = self.prior.with_survival(_worth_planning(survival))
        facts = problem(profile, self.fleet, links, length=length, exits=exits)
        return facts.without_exits if self.answers_early else facts

    def _links(self, devices: Sequence[Device]) -> tuple[Link, ...]:
        return links_between(
            devices, one_machine=self.one_machine, gbit_per_s=self.gbit_per_s, measured=self.profile.links
        )

    def cost_model(self, survival: Sequence[float], corrections: Corrections) -> LaunchTableCosts:
        return LaunchTableCosts(self.facts(survival, corrections))

    def corrected(
        self, corrections: Corrections, observed: Observed, plan: Plan, survival: Sequence[float], rate: float
    ) -> Corrections:
        facts = self.facts(survival, Corrections())
        return corrections.learned(observed, plan, facts.for_plan(plan), rate)

    def best(self, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]) -> Plan:
        """The plan of most goodput. Where no plan keeps the SLO on the present devices, the fastest plan."""
        try:
            return self._optimize(survival, corrections, self.present(counts), self.objective)
        except UserError:
            if self.objective.slo_s is None or not any(device.count for device in self.present(counts)):
                raise
            fastest = replace(self.objective, goal="latency", slo_s=None)
            return self._optimize(survival, corrections, self.present(counts), fastest)

    def sustaining(
        self, rate_per_s: float, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]
    ) -> Plan | None:
        """The best plan by the goal (for goodput: the quickest) that sustains this rate; None if no plan does."""
        goal = "latency" if self.aim.adds_up else self.goal
        objective = replace(self.objective, goodput_per_s=rate_per_s, goal=goal)
        with suppress(UserError):
            return self._optimize(survival, corrections, self.present(counts), objective)
        return None

    def _optimize(
        self, survival: Sequence[float], corrections: Corrections, devices: tuple[Device, ...], objective: Objective
    ) -> Plan:
        links = self._links(devices)
        profile = corrections.applied(self.profile)
        return optimize(
            profile, devices, links, objective, exits=self.prior.with_survival(_worth_planning(survival)),
            gap=self.gap, side_by_side=objective.aim.adds_up,
        )  # fmt: skip


def _worth_planning(survival: Sequence[float]) -> tuple[float, ...]:
    """Blocks that fewer than one input in a thousand reaches count as unreached.

    A plan covers these blocks anyway. By the cost model, an input there would wait so long for a full batch that no
    plan with a cut before them keeps an SLO.
    """
    return tuple(share if share >= LEAST_SHARE else 0.0 for share in survival)


def classifier_problem(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> ClassifierPlanningProblem:
    """The problem of a controller with the first configuration, for an application with the second."""
    objective = Objective(
        slo_s=(config.slo_ms or app_config.slo_ms) / 1e3,
        slack=config.slack,
        max_batch=config.max_batch or largest_batch(app_config),
        ramp_budget=app_config.early_budget,
    )
    fleet = tuple(device(kind, amount) for kind, amount in allowed(config, app_config, profile).items())
    return ClassifierPlanningProblem(
        profile, fleet, objective, config.one_machine, config.gap, config.goal,
        config.reserve, app_config.links,
    )  # fmt: skip


def allowed(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> dict[str, int]:
    """The devices that plans may use: the configured ones or those of the first plan, and those that may be added."""
    first = _first_devices(config, app_config, profile)
    for kind in config.grow_to:
        profile.table(kind)  # raises UserError if the profile does not have this kind
        check_precision(profile, app_config, kind)
        for other in first.keys() - {kind}:
            if whole_kind(other)[0] == whole_kind(kind)[0]:
                raise UserError(
                    f"grow_to: {kind} are the same devices as {other}, which plans use: name {other} instead"
                )
    return first | {kind: max(most, first.get(kind, 0)) for kind, most in config.grow_to.items()}


def _first_devices(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> dict[str, int]:
    if named := config.devices or config.shared:
        limited = app_config.model_copy(update={"devices": named})
    elif app_config.plan is None:
        limited = app_config
    else:
        return read_plan(local(app_config.plan)).devices()
    return {each.kind: each.count for each in usable(limited, profile)}
