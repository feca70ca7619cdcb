"""The planning problem of a decoder. Its inputs are the generated tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.simulator.text_choice import plan_on_all, sustains
from isobatch.deployments.config import ServedConfig
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.scheduler import DEEP_SHARE
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.planning import device
from isobatch.optimizer import Objective, Plan, Problem, Score
from isobatch.optimizer.goals import GOALS
from isobatch.optimizer.text_plans import OFF, DecodingFacts, DecodingGoal, exits_of, splits_at, terms_of, with_terms
from isobatch.profiles.devices import Device
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.text_profile import LEAST_OBSERVED, DecoderProfile, load_text_profile


@dataclass(frozen=True)
class DecoderCosts:
    """Scores plans by simulating them with the expected texts."""

    profile: DecoderProfile
    fleet: tuple[Device, ...]
    goal: DecodingGoal

    @property
    def facts(self) -> Problem:
        raise AssertionError("This is a bug: a network that writes texts has no latency tables.")

    @property
    def ramp_blocks(self) -> list[int]:
        return [] if self.goal.exits == OFF else [block for block, _ in self.profile.workload.survival]

    def score(self, plan: Plan) -> Score:
        """The tokens per second that a plan sustains in the simulator, of texts that begin and continue in time."""
        tokens_per_s = sustains(plan, self.profile, self.goal) * self.profile.workload.output
        cost = sum(device.count * device.price_per_hour for device in self.fleet)
        return Score((), tokens_per_s, self.goal.ttft_s, cost, ())

    def with_all_ramps(self, plan: Plan) -> Plan:
        """The same plan, cut after every ramp."""
        return plan.with_each(self._cut_at_ramps)

    def _cut_at_ramps(self, plan: Plan) -> Plan:
        (placement,), splits = plan.placements, plan.splits
        residents = splits[0].batch_size
        deep = splits[-1].batch_size if len(splits) > 1 else max(1, round(DEEP_SHARE * residents))
        cut = splits_at([block + 1 for block in self.ramp_blocks], plan.num_blocks, residents, deep)
        placements = (replace(placement, splits=cut, local=len(cut) > 1),)
        return with_terms(replace(plan, placements=placements), exits=self.goal.exits)


@dataclass(frozen=True)
class DecoderPlanningProblem:
    """A decoder, and its limits.

    Settings that a running replica cannot change are those of the plan `running`.

    `lengths` are the lengths of the latest prompts and outputs; empty: those of the profile.
    """

    profile: DecoderProfile
    fleet: tuple[Device, ...]
    goal: DecodingGoal
    running: Plan
    lengths: tuple[tuple[int, int], ...] = ()

    objective = Objective()  # without an SLO: TTFT and TPOT are limits, and no plan is preferred for being quicker
    aim, answers_early = GOALS["goodput"], False
    reserve = 0.0

    @cached_property
    def prior(self) -> ExitProfile:
        """The share of tokens that enter each block, as `isobatch prepare` measured it."""
        workload, entering = self.profile.workload, [1.0]
        for block in range(self.profile.num_blocks - 1):
            entering.append(min(entering[-1], workload.after(block)))
        return ExitProfile(tuple(entering))

    def in_units_of(self, plan: Plan) -> "DecoderPlanningProblem":
        """The same problem: every plan counts single tokens."""
        return self

    def updated_by(self, observed: Observed) -> "DecoderPlanningProblem":
        """The same problem for texts like the latest."""
        return self._for_texts(observed.lengths) if len(observed.lengths) >= LEAST_OBSERVED else self

    def with_text_length(self, inputs_per_text: float | None) -> "DecoderPlanningProblem":
        """The same problem for outputs of this mean length, in tokens."""
        if inputs_per_text is None or not self.lengths:
            return self
        times = inputs_per_text * len(self.lengths) / sum(output for _, output in self.lengths)
        return self._for_texts((prompt, round(times * output)) for prompt, output in self.lengths)

    def _for_texts(self, lengths: Iterable[tuple[int, int]]) -> "DecoderPlanningProblem":
        """The same problem for texts of these lengths. Long ones are cut, since replicas fill their memory to the last
        position, plans leave some free, and a single text that no plan has memory for would rule out all plans."""
        return replace(self, lengths=tuple(self._cut(*each) for each in lengths))

    def _cut(self, prompt: int, output: int) -> tuple[int, int]:
        """The lengths of as much of a text as every plan has memory for."""
        most, encoded = self._longest, self.profile.has_encoder
        prompt = max(1, min(prompt, most if encoded else most - 1))
        return prompt, max(1, min(output, most - (1 if encoded else prompt)))

    @cached_property
    def _longest(self) -> int:
        """The tokens of the longest text that is served, and that every plan has memory for; with an encoder, of its
        prompt and of its answer."""
        allowed = (terms_of(each).max_context or self.profile.reads for each in self.running.pipelines)
        held = (DecodingFacts(self.profile, each).longest_held(self.goal) for each in self.fleet)
        return min(*allowed, *held)

    def cost_model(self, survival: Sequence[float], corrections: Corrections) -> DecoderCosts:
        """Tables of texts are not corrected: the kept share of a promise shows launches that are slower."""
        workload = self.profile.workload
        entering = tuple((block, survival[block + 1]) for block, _ in workload.survival)
        workload = replace(workload, survival=entering)
        if self.lengths:
            prompts, outputs = zip(*self.lengths, strict=True)
            workload = replace(workload, prompts=prompts, outputs=outputs)
        return DecoderCosts(replace(self.profile, workload=workload), self.fleet, self.goal)

    def corrected(
        self, corrections: Corrections, observed: Observed, plan: Plan, survival: Sequence[float], rate: float
    ) -> Corrections:
        return corrections

    def best(self, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]) -> Plan:
        """The plan that `isobatch plan` would choose. It is cached, so that the same survival is not searched again.

        Devices that can keep no limits with such texts keep their pipeline, since a running decoder gives none back.
        """
        facts = self.cost_model(survival, corrections)
        stay = {each.placements[0].kind: terms_of(each) for each in self.running.pipelines}

        def as_it_is(pipeline: Plan) -> Plan:
            held = stay[pipeline.placements[0].kind]
            return with_terms(pipeline, kv_megabytes=held.kv_megabytes, max_context=held.max_context)

        best = plan_on_all(facts.profile, self.fleet, facts.goal).with_each(as_it_is)
        others = [each for each in self.running.pipelines if each.placements[0].kind not in best.devices()]
        return replace(best, beside=(*best.beside, *others))

    def sustaining(
        self, rate_per_s: float, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]
    ) -> Plan | None:
        """None: no plan is preferred for being quicker or cheaper."""
        return None


def text_problem(config: ServedConfig, running: Plan) -> DecoderPlanningProblem:
    """The problem of an application with this configuration, which runs this plan."""
    assert isinstance(config, DecoderConfig), "This is a bug: this network does not write texts."
    profile, terms = load_text_profile(config.profile_path), terms_of(running)
    held = tuple((each.placements[0].kind, terms_of(each).kv_megabytes) for each in running.pipelines)
    exits = exits_of(running)
    exits = config.exits if exits == OFF else exits
    goal = DecodingGoal(terms.ttft_s, terms.tpot_s, exits=exits, kv_megabytes_of=held)
    devices = tuple(device(kind, count) for kind, count in running.devices().items())
    return DecoderPlanningProblem(profile.for_exits(exits), devices, goal, running)
