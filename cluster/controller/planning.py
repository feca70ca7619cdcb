"""Asks the planner in every window: for the same network and objective, with another survival and fleet."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.controller.beliefs import with_all_ramps
from cluster.controller.config import ControllerConfig
from cluster.controller.corrections import Corrections
from cluster.controller.decoding import DecoderPlanningProblem
from deployments.config import AppConfig
from deployments.front.observed import Observed
from deployments.planning import device, usable
from optimizer import Objective, Plan, Problem, Score, evaluate, optimize, problem, read_plan
from profiles.devices import Device, links_between
from profiles.errors import UserError
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.lengths import Lengths, rescaled

LEAST_SHARE = 1e-3  # of the inputs that must reach a block to be planned for


@dataclass(frozen=True)
class PlanningProblem:
    """`fleet` are the devices that may be used, whether or not they are there just now.

    `cheapest`: plans are sought that serve the expected inputs, and `reserve` more, for the fewest dollars; `quickest`:
    plans that answer soonest; else those of most goodput.
    """

    profile: Profile
    fleet: tuple[Device, ...]
    objective: Objective
    one_machine: bool = False
    side_by_side: bool = True
    gap: float = 0.01
    cheapest: bool = False
    quickest: bool = False
    reserve: float = 0.1
    links: Mapping[str, float] | None = None  # those that were declared, in Gbit/s

    @property
    def prior(self) -> ExitProfile:
        """Who survives, as far as the profile knows."""
        return ExitProfile(self.profile.survival(self.profile.length))

    def seeing(self, seen: Observed) -> "PlanningProblem":
        """The same after a window: all that plans need of it are the beliefs."""
        return self

    def score(self, plan: Plan, facts: Problem) -> Score:
        return evaluate(plan, facts)

    def opened(self, plan: Plan, facts: Problem) -> Plan:
        """The same plan with every ramp open."""
        return with_all_ramps(plan, facts.ramp_blocks)

    @property
    def answers_early(self) -> bool:
        """Plans run the whole network, and differ in their ramps (optimizer/answers.py)."""
        return self.objective.ramp_budget is not None

    def counted_as(self, plan: Plan) -> "PlanningProblem":
        """The same question, for plans that count as this one does: inputs, or tokens in texts of its length."""
        lengths = None if plan.length is None else Lengths((plan.length,))
        return replace(self, profile=replace(self.profile, lengths=lengths))

    def of_texts(self, inputs_per_text: float | None) -> "PlanningProblem":
        """The same question where texts count for so many inputs on average: in longer ones attention takes longer."""
        length, measured = self.profile.length, {table.length for table in self.profile.tables}
        if length is None or inputs_per_text is None or len(measured) < 2:
            return self
        long = max(1, round(length * inputs_per_text))
        tables = tuple(rescaled(self.profile.table_of(kind, long), length) for kind in self.profile.kinds)
        return replace(self, profile=replace(self.profile, tables=tables))

    def here(self, counts: Mapping[str, int]) -> tuple[Device, ...]:
        """The devices of the fleet that are there; of a kind that nobody counted, all of them."""
        return tuple(replace(each, count=min(each.count, counts.get(each.kind, each.count))) for each in self.fleet)

    def facts(self, survival: Sequence[float], corrections: Corrections) -> Problem:
        """The cost model by which any plan for the whole fleet can be judged, whatever is there just now.

        Where answers are early, every input runs to the end.
        """
        links = links_between(self.fleet, one_machine=self.one_machine, gbit_per_s=self.links)
        profile, length = corrections.applied(self.profile), self.profile.length
        found = problem(profile, self.fleet, links, _worth_planning(survival), length=length)
        return found.without_exits if self.answers_early else found

    def best(
        self,
        survival: Sequence[float],
        corrections: Corrections,
        counts: Mapping[str, int],
    ) -> Plan:
        """The most goodput. Where nothing can keep the SLO on what is left, the fastest plan there is."""
        try:
            return self._optimize(survival, corrections, self.here(counts), self.objective)
        except UserError:
            if self.objective.slo_s is None or not any(device.count for device in self.here(counts)):
                raise
            fastest = replace(self.objective, goal="latency", slo_s=None)
            return self._optimize(survival, corrections, self.here(counts), fastest)

    def carrying(
        self,
        wanted_per_s: float,
        survival: Sequence[float],
        corrections: Corrections,
        counts: Mapping[str, int],
    ) -> Plan | None:
        """The cheapest plan that sustains so much where dollars count, else the quickest one, if there is any."""
        asked = replace(self.objective, goodput_per_s=wanted_per_s)
        with suppress(UserError):
            goal = "cost" if self.cheapest else "latency"
            return self._optimize(survival, corrections, self.here(counts), replace(asked, goal=goal))
        return None

    def _optimize(
        self, survival: Sequence[float], corrections: Corrections, here: tuple[Device, ...], objective: Objective
    ) -> Plan:
        links = links_between(here, one_machine=self.one_machine, gbit_per_s=self.links)
        side_by_side = self.side_by_side and objective.aim.adds_up
        profile = corrections.applied(self.profile)
        return optimize(
            profile, here, links, objective, survival=_worth_planning(survival), gap=self.gap, side_by_side=side_by_side
        )


AnyQuestion = PlanningProblem | DecoderPlanningProblem


def _worth_planning(survival: Sequence[float]) -> tuple[float, ...]:
    """Blocks that fewer than one input in a thousand reaches count as unreached.

    The plan covers them all the same. But by the cost model such an input would wait so long for others to fill its
    batch that no plan with a cut before it would keep an SLO.
    """
    return tuple(share if share >= LEAST_SHARE else 0.0 for share in survival)


def question_of(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> PlanningProblem:
    """The question of a controller with this configuration, for an application with that one."""
    objective = Objective(
        slo_s=(config.slo_ms or app_config.slo_ms) / 1e3,
        slack=config.slack,
        max_batch=config.max_batch,
        ramp_budget=app_config.early_budget,
    )
    fleet = tuple(device(kind, amount) for kind, amount in allowed(config, app_config, profile).items())
    cheapest, quickest = config.goal == "cost", config.goal == "latency"
    return PlanningProblem(
        profile, fleet, objective, config.one_machine, config.side_by_side, config.gap, cheapest, quickest,
        config.reserve, app_config.links,
    )  # fmt: skip


def allowed(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> dict[str, int]:
    """The devices that plans may use: those configured or those the application began with, and those to come."""
    begun = _begun(config, app_config, profile)
    for kind in config.grow_to:
        profile.table(kind)  # says what it has, if not this one
    return begun | {kind: max(most, begun.get(kind, 0)) for kind, most in config.grow_to.items()}


def _begun(config: ControllerConfig, app_config: AppConfig, profile: Profile) -> dict[str, int]:
    if config.devices or app_config.plan is None:
        told = app_config.model_copy(update={"devices": config.devices}) if config.devices else app_config
        return {each.kind: each.count for each in usable(told, profile)}
    return read_plan(Path(app_config.plan)).devices()
