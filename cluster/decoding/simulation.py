"""Plays a decoder's plan in virtual time: the engine and the scheduler that would serve it, on launches on paper.

A text comes to the pipeline with the fewest texts for what it promises, as the front sends it, and there to one of two
replicas that are drawn, that with fewer texts, as Serve sends it. Not played: what the front and the way there cost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np

from cluster.load.prompts import WrittenText
from cluster.load.workloads import Floats
from deployments.decoding.config import DecoderConfig
from deployments.decoding.engine import Engine
from deployments.decoding.scheduler import Full, Written
from deployments.decoding.sequences import Wanted
from deployments.decoding.virtual import TOKEN, VirtualClock, virtual_engine
from optimizer.decoding_plans import emptiest_first, shares_of
from optimizer.plan import Plan
from profiles.decoding import DecoderProfile, DecodingWorkload

DRAWN = 2  # that are drawn for a text


@dataclass(frozen=True)
class AskedText:
    """A text that is asked for: tokens of its prompt, and how many are written."""

    due_s: float
    prompt: int
    output: int


@dataclass(frozen=True)
class DecodingRun:
    """What became of all texts, and where their tokens were known."""

    texts: Sequence[WrittenText]
    ttft_s: float  # that were to be kept
    tpot_s: float
    exits: dict[int, int]  # tokens by the block after which they were known
    preempted: int
    given_up: bool = False

    @property
    def answered(self) -> list[WrittenText]:
        return [text for text in self.texts if text.status == 200]

    @property
    def tokens_per_s(self) -> float:
        """From the first text that came to the last token."""
        seconds = max((text.last_s for text in self.answered), default=0.0)
        return sum(text.tokens for text in self.answered) / seconds if seconds else 0.0

    @property
    def ttft_kept(self) -> float:
        """The share of all texts that began in time."""
        return sum(text.first_s - text.due_s <= self.ttft_s for text in self.answered) / max(1, len(self.texts))

    @property
    def tpot_kept(self) -> float:
        """The share of all texts whose tokens followed each other in time."""
        return sum(tpot_of(text) <= self.tpot_s for text in self.answered) / max(1, len(self.texts))


def tpot_of(text: WrittenText) -> float:
    return (text.last_s - text.first_s) / (text.tokens - 1) if text.tokens > 1 else 0.0


def asked_texts(workload: DecodingWorkload, times_s: Floats, seed: int) -> list[AskedText]:
    """Texts like those of the workload, at these times."""
    places = np.random.default_rng(seed).integers(len(workload.prompts), size=len(times_s))
    return [
        AskedText(float(due_s), workload.prompts[place], workload.outputs[place])
        for due_s, place in zip(times_s, places, strict=True)
    ]


def play(
    plan: Plan, profile: DecoderProfile, texts: Iterable[AskedText], seed: int = 0,
    config: DecoderConfig | None = None, may_miss: float = inf,
) -> DecodingRun:  # fmt: skip
    """What becomes of these texts, in the order in which they are due, under a plan. The rest is given up once more
    than `may_miss` have begun, or gone on, too late."""
    luck, config = Random(seed), config or DecoderConfig(model="")
    told = config.by_kind(plan).items()
    groups = [[PaperReplica(profile, kind, own, luck) for _ in range(own.replicas)] for kind, own in told]
    replicas, shares = [replica for group in groups for replica in group], shares_of(plan)
    given_up = False
    for place, text in enumerate(texts):
        group = groups[0]
        if len(groups) > 1:
            for replica in replicas:
                replica.run_until(text.due_s)
            group = groups[emptiest_first([sum(len(each.names) for each in group) for group in groups], shares)[0]]
        drawn = luck.sample(group, min(len(group), DRAWN))
        for replica in drawn:
            replica.run_until(text.due_s)
        min(drawn, key=lambda replica: len(replica.names)).ask(place, text)
        if given_up := _missed(replicas) > may_miss:
            break
    for replica in replicas if not given_up else ():
        replica.run_until(None)
    found = {place: written for replica in replicas for place, written in replica.written.items()}
    exits: dict[int, int] = {}
    for replica in replicas:
        for block, count in replica.exits.items():
            exits[block] = exits.get(block, 0) + count
    return DecodingRun(
        [found[place] for place in sorted(found)],
        replicas[0].limits.ttft_s,
        replicas[0].limits.tpot_s,
        exits,
        sum(replica.engine.scheduler.preempted for replica in replicas),
        given_up,
    )


def _missed(replicas: "Sequence[PaperReplica]") -> int:
    """Texts that kept the one or the other limit least, so far."""
    return max(sum(replica.began_late for replica in replicas), sum(replica.went_on_late for replica in replicas))


def wanted_of(text: AskedText, profile: DecoderProfile) -> Wanted:
    """What a client would ask for."""
    prompt = (TOKEN,) * text.prompt
    return Wanted((TOKEN,), text.output, source=prompt) if profile.has_encoder else Wanted(prompt, text.output)


@dataclass
class _Text:
    place: int
    asked: AskedText
    first_s: float = 0.0
    tokens: int = 0


@dataclass
class PaperReplica:
    """One replica, in virtual time of its own; `names` has the texts that are on it."""

    profile: DecoderProfile
    kind: str
    config: DecoderConfig
    luck: Random
    names: dict[int, _Text] = field(default_factory=dict)
    written: dict[int, WrittenText] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    began_late: int = 0  # texts, those that were refused among them
    went_on_late: int = 0

    def __post_init__(self) -> None:
        self.limits = self.config.limits()
        self.clock = VirtualClock()
        self.engine: Engine = virtual_engine(self.profile, self.kind, self.config, self.luck, self.clock)

    def ask(self, place: int, text: AskedText) -> None:
        if not self._is_readable(text):
            self._refuse(place, text, 400)
            return
        opened = self.engine.open(wanted_of(text, self.profile))
        if isinstance(opened, Full):
            self._refuse(place, text, 429)
        else:
            self.names[opened] = _Text(place, text)

    def _refuse(self, place: int, text: AskedText, status: int) -> None:
        self.written[place] = WrittenText(text.due_s, status)
        self.began_late += 1
        self.went_on_late += 1

    def _is_readable(self, text: AskedText) -> bool:
        context = self.config.max_context or self.profile.reads
        if self.profile.has_encoder:
            return max(text.prompt, text.output + 1) <= context
        return text.prompt + text.output <= context

    def run_until(self, until_s: float | None) -> None:
        """Run the launches that begin before a time; None: all that are left."""
        while until_s is None or self.clock.now_s < until_s:
            news = self.engine.step()
            if news is None:
                self.clock.now_s = max(self.clock.now_s, until_s or 0.0)
                return
            self.note(news)

    def note(self, news: Iterable[Written]) -> None:
        now_s = self.clock.now_s
        for one in news:
            text = self.names[one.name]
            if one.tokens and not text.tokens:
                text.first_s = now_s
                self.began_late += now_s - text.asked.due_s > self.limits.ttft_s
            text.tokens += len(one.tokens)
            for block in one.depths:
                self.exits[block] = self.exits.get(block, 0) + 1
            if one.finish:
                due_s = text.asked.due_s
                self.written[text.place] = written = WrittenText(due_s, 200, text.first_s, now_s, text.tokens)
                self.went_on_late += tpot_of(written) > self.limits.tpot_s
                del self.names[one.name]
