"""Simulates a decoder's plan: its own engine and scheduler, with launches that only take time.

As the front does, a text goes to the pipeline with the fewest texts for its share. There, as with Serve, it goes to
that one of two random replicas that has fewer texts. The time of the front and of the network is not simulated.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

import numpy as np

from isobatch.cluster.load.prompts import WrittenText
from isobatch.cluster.load.workloads import Floats
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine import OTHER_TOKEN, TOKEN, Engine, VirtualClock, virtual_engine
from isobatch.deployments.decoding.scheduler import NewTokens, ReplicaFull
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.text_plans import emptiest_first, shares_of
from isobatch.profiles.text_profile import DecoderProfile, DecodingWorkload

CANDIDATES = 2  # random replicas from which one is chosen for a text, as Serve does


@dataclass(frozen=True)
class TextArrival:
    """A text that is requested at `due_s`: the tokens of its prompt, and those to write."""

    due_s: float
    prompt: int
    output: int


@dataclass(frozen=True)
class DecodingRun:
    """The result of a simulation: the times of all texts, and the blocks after which their tokens were known."""

    texts: Sequence[WrittenText]
    ttft_s: float  # the limits of the plan
    tpot_s: float
    exits: dict[int, int]  # tokens by the block after which they were known
    preempted: int
    given_up: bool = False  # whether it ended early, as too many texts were late

    @property
    def answered(self) -> list[WrittenText]:
        return [text for text in self.texts if text.status == 200]

    @property
    def ttft_kept(self) -> float:
        return sum(text.ttft_s <= self.ttft_s for text in self.answered) / max(1, len(self.texts))

    @property
    def tpot_kept(self) -> float:
        """The share of all texts whose tokens came in time, on average."""
        return sum(text.tpot_s <= self.tpot_s for text in self.answered) / max(1, len(self.texts))


def text_arrivals(workload: DecodingWorkload, times_s: Floats, seed: int) -> list[TextArrival]:
    places = np.random.default_rng(seed).integers(len(workload.prompts), size=len(times_s))
    return [
        TextArrival(float(due_s), workload.prompts[place], workload.outputs[place])
        for due_s, place in zip(times_s, places, strict=True)
    ]


def simulate_texts(
    plan: Plan, profile: DecoderProfile, texts: Iterable[TextArrival], seed: int = 0,
    config: DecoderConfig | None = None, may_miss: float = inf,
) -> DecodingRun:  # fmt: skip
    """Simulate these texts, which are in the order of their times. The run is given up once more than `may_miss` texts
    have missed one of the limits."""
    random, config = Random(seed), config or DecoderConfig(model="")
    groups = [
        [SimulatedReplica(profile, kind, own, random) for _ in range(own.replicas)]
        for kind, own in config.by_kind(plan).items()
    ]
    replicas, shares = [replica for group in groups for replica in group], shares_of(plan)
    given_up = False
    for place, text in enumerate(texts):
        group = groups[0]
        if len(groups) > 1:
            for replica in replicas:
                if replica.names and replica.clock.now_s < text.due_s:  # others have nothing to do, and are many
                    replica.run_until(text.due_s)
            group = groups[emptiest_first([sum(len(each.names) for each in group) for group in groups], shares)[0]]
        candidates = random.sample(group, min(len(group), CANDIDATES))
        for replica in candidates:
            replica.run_until(text.due_s)
        min(candidates, key=lambda replica: len(replica.names)).add(place, text)
        # Of the two limits, the one counts that more texts have missed.
        missed = max(sum(each.began_late for each in replicas), sum(each.went_on_late for each in replicas))
        if given_up := missed > may_miss:
            break
    for replica in replicas if not given_up else ():
        replica.run_until(None)
    written = {place: text for replica in replicas for place, text in replica.written.items()}
    return DecodingRun(
        [written[place] for place in sorted(written)],
        replicas[0].limits.ttft_s,
        replicas[0].limits.tpot_s,
        dict(sum((replica.exits for replica in replicas), Counter[int]())),
        sum(replica.engine.scheduler.preempted for replica in replicas),
        given_up,
    )


def request_of(text: TextArrival, profile: DecoderProfile, number: int) -> TextRequest:
    """The request of a client for a text: no other begins with the same token."""
    prompt = (OTHER_TOKEN + 1 + number, *(TOKEN,) * (text.prompt - 1))
    if profile.has_encoder:
        return TextRequest((TOKEN,), text.output, source=prompt)
    return TextRequest(prompt, text.output)


@dataclass
class _Text:
    place: int
    arrival: TextArrival
    first_s: float = 0.0
    tokens: int = 0


@dataclass
class SimulatedReplica:
    """One replica with a clock of its own; `names` has the texts that it writes, by the names of their sequences."""

    profile: DecoderProfile
    kind: str
    config: DecoderConfig
    random: Random
    names: dict[int, _Text] = field(default_factory=dict)
    written: dict[int, WrittenText] = field(default_factory=dict)
    exits: Counter[int] = field(default_factory=Counter)
    began_late: int = 0  # texts, refused ones included
    went_on_late: int = 0

    def __post_init__(self) -> None:
        profile, self.limits = self.profile, self.config.limits()
        position_bytes = profile.num_blocks * profile.table(self.kind).kv_bytes
        self.context = self.config.context(profile.reads, position_bytes, profile.has_encoder)
        self.clock = VirtualClock()
        self.engine: Engine = virtual_engine(self.profile, self.kind, self.config, self.random, self.clock)

    def add(self, place: int, text: TextArrival) -> None:
        text = replace(text, output=min(text.output, self.config.max_tokens))
        if self.profile.length(text.prompt, text.output) > self.context:
            self._refuse(place, text, 400)
            return
        opened = self.engine.open(request_of(text, self.profile, place), self.clock.now_s - text.due_s)
        if isinstance(opened, ReplicaFull):
            self._refuse(place, text, 429)
        else:
            self.names[opened] = _Text(place, text)

    def _refuse(self, place: int, text: TextArrival, status: int) -> None:
        self.written[place] = WrittenText(text.due_s, status)
        self.began_late += 1
        self.went_on_late += 1

    def run_until(self, until_s: float | None) -> None:
        """Run the launches that begin before a time; None: all launches."""
        while until_s is None or self.clock.now_s < until_s:
            news = self.engine.step()
            for name, _ in self.engine.scheduler.take_late():
                late = self.names.pop(name)
                self._refuse(late.place, late.arrival, 429)
            if news is None:
                self.clock.now_s = max(self.clock.now_s, until_s or 0.0)
                return
            self.note(news)

    def note(self, news: Iterable[NewTokens]) -> None:
        now_s = self.clock.now_s
        for group in news:
            text = self.names[group.name]
            if group.tokens and not text.tokens:
                text.first_s = now_s
                self.began_late += now_s - text.arrival.due_s > self.limits.ttft_s
            text.tokens += len(group.tokens)
            self.exits.update(group.depths)
            if group.finish:
                due_s = text.arrival.due_s
                self.written[text.place] = written = WrittenText(due_s, 200, text.first_s, now_s, text.tokens)
                self.went_on_late += written.tpot_s > self.limits.tpot_s
                del self.names[group.name]
