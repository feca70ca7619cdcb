"""What the controller asks of decoders: the same as of other networks, where an input is a token that is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from cluster.controller.corrections import Corrections
from cluster.decoding.choice import plan_on_all, sustains
from deployments.decoding.config import OFF, DecoderConfig
from deployments.decoding.scheduler import DEEP_SHARE
from deployments.front.observed import Observed
from optimizer import Objective, Plan, Score
from optimizer.decoding import DecodingGoal
from optimizer.decoding_plans import exits_of, on_terms, terms_of
from optimizer.plan import DecodingTerms, Split
from profiles.decoding import LEAST_OBSERVED, DecoderProfile
from profiles.devices import Device, fleet
from profiles.exits import ExitProfile


@dataclass(frozen=True)
class DecoderFacts:
    """The network on its devices, and the texts that are expected."""

    profile: DecoderProfile
    goal: DecodingGoal

    @property
    def ramp_blocks(self) -> list[int]:
        return [] if self.goal.exits == OFF else [block for block, _ in self.profile.workload.survival]


@dataclass(frozen=True)
class DecoderPlanningProblem:
    """Asks the planner of decoders. What a running replica cannot change is as it is: `running` says it.

    `lengths` are those of the latest texts, of their prompts and of what was written; none: those of the profile.
    """

    profile: DecoderProfile
    fleet: tuple[Device, ...]
    goal: DecodingGoal
    running: Plan
    lengths: tuple[tuple[int, int], ...] = ()

    objective = Objective()  # TTFT and TPOT are kept or not: no plan is preferred for being quicker
    cheapest = quickest = answers_early = False
    reserve = 0.0

    @cached_property
    def prior(self) -> ExitProfile:
        """The share of tokens that enter each block, as far as `isobatch prepare` knows."""
        workload, entering = self.profile.workload, [1.0]
        for block in range(self.profile.num_blocks - 1):
            entering.append(min(entering[-1], workload.after(block)))
        return ExitProfile(tuple(entering))

    def counted_as(self, plan: Plan) -> "DecoderPlanningProblem":
        """Tokens are always counted alike."""
        return self

    def seeing(self, seen: Observed) -> "DecoderPlanningProblem":
        """The same for texts like the latest."""
        return replace(self, lengths=seen.lengths) if len(seen.lengths) >= LEAST_OBSERVED else self

    def of_texts(self, tokens_per_text: float | None) -> "DecoderPlanningProblem":
        """The same for texts that become so long on average."""
        if tokens_per_text is None or not self.lengths:
            return self
        times, reads = tokens_per_text * len(self.lengths) / sum(output for _, output in self.lengths), self._reads
        longer = tuple((prompt, max(1, min(round(times * output), reads(prompt)))) for prompt, output in self.lengths)
        return replace(self, lengths=longer)

    def _reads(self, prompt: int) -> int:
        """How much may be written after a prompt."""
        held = [terms_of(each).max_context or self.profile.reads for each in self.running.pipelines]
        most = min(held)
        return most - 1 if self.profile.has_encoder else most - prompt

    def facts(self, survival: Sequence[float], corrections: Corrections) -> DecoderFacts:
        """Tables of decoders are not corrected: a plan that keeps less than they say shows in what it kept."""
        workload = self.profile.workload
        entering = tuple((block, survival[block + 1]) for block, _ in workload.survival)
        workload = replace(workload, survival=entering)
        if self.lengths:
            prompts, outputs = zip(*self.lengths, strict=True)
            workload = replace(workload, prompts=prompts, outputs=outputs)
        return DecoderFacts(replace(self.profile, workload=workload), self.goal)

    def score(self, plan: Plan, facts: DecoderFacts) -> Score:
        """The tokens per second that a plan keeps when played, of texts that begin and go on in time."""
        profile = facts.profile
        tokens_per_s = sustains(plan, profile, facts.goal) * profile.workload.output
        cost = sum(device.count * device.price_per_hour for device in self.fleet)
        return Score((), tokens_per_s, facts.goal.ttft_s, cost, ())

    def best(self, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]) -> Plan:
        """What `isobatch plan` would choose. While nobody asks, beliefs stay, and nothing is sought again."""
        facts = self.facts(survival, corrections)
        stay = {each.placements[0].kind: terms_of(each) for each in self.running.pipelines}

        def as_it_is(pipeline: Plan) -> DecodingTerms:
            held = stay[pipeline.placements[0].kind]
            return replace(terms_of(pipeline), kv_megabytes=held.kv_megabytes, max_context=held.max_context)

        return on_terms(plan_on_all(facts.profile, self.fleet, facts.goal), as_it_is)

    def carrying(self, *_: object) -> None:
        """None is sought that is quicker: where more goodput is not needed, more of it must be gained."""

    def opened(self, plan: Plan, facts: DecoderFacts) -> Plan:
        """The same plan, cut behind every ramp."""
        first, *others = (self._opened(each, facts) for each in plan.pipelines)
        return replace(first, beside=tuple(others))

    def _opened(self, plan: Plan, facts: DecoderFacts) -> Plan:
        (placement,), splits = plan.placements, plan.splits
        residents = splits[0].batch_size
        deep = splits[-1].batch_size if len(splits) > 1 else max(1, round(DEEP_SHARE * residents))
        edges = [0, *(block + 1 for block in facts.ramp_blocks), plan.num_blocks]
        cut = tuple(
            Split(start, stop, deep if start else residents, (stop - 1,) if stop < plan.num_blocks else ())
            for start, stop in pairwise(edges)
        )
        opened = replace(placement, splits=cut, local=len(cut) > 1)
        return replace(plan, placements=(opened,), decoding=replace(terms_of(plan), exits=self.goal.exits))


def decoder_question(config: DecoderConfig, profile: DecoderProfile, running: Plan) -> DecoderPlanningProblem:
    """The question for a decoder of this configuration, which runs by this plan."""
    terms = terms_of(running)
    held = tuple((each.placements[0].kind, terms_of(each).kv_megabytes) for each in running.pipelines)
    exits = exits_of(running)
    exits = config.exits if exits == OFF else exits
    goal = DecodingGoal(terms.ttft_s, terms.tpot_s, exits=exits, kv_megabytes_of=held)
    devices = fleet(",".join(f"{kind}={count}" for kind, count in running.devices().items()))
    return DecoderPlanningProblem(profile.for_exits(exits), devices, goal, running)
