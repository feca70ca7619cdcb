"""Plans for decoders: every way to decode, its estimated pace, and the plans for the best ones.

A way to decode has few parameters: the block at which the network is cut, the launches of the first part for each one
of the deep part, the number of resident sequences, and the prompt positions of one launch. A cost model rates all
combinations, the best are simulated, and the promise comes from the simulator (cluster/simulator/text_choice.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import ceil
from typing import Any

from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, Split
from isobatch.profiles.devices import Device
from isobatch.profiles.exits import LEAST
from isobatch.profiles.text_profile import PROJECT, DecoderProfile, DecodingTable, LaunchSize

RHYTHMS = (1, 2, 3, 4, 6, 8)  # launches of the first part for one of the deep part
# Sequences that one replica decodes at once.
RESIDENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPT_ROWS = (64, 256, 1024)  # prompt positions of one launch
USED_MEMORY = 0.9  # the share of a device's memory for weights and KV; the rest is for intermediate results
MEGABYTE = 2**20
# A way with fewer residents is preferred if it has at least this share of the best tokens per second.
NEARLY_BEST = 0.95
OFF = "off"
PAGE = 32  # positions that a text may leave empty in its last pages


@dataclass(frozen=True)
class DecodingGoal:
    """The goal: most texts per second in time, or a rate at the least cost.

    `share_in_time`: the share of texts that must begin within `ttft_s`, and the share that must have at most `tpot_s`
    between tokens. `kv_megabytes`: the most memory for KV on a replica; None: all that the weights leave free.
    `kv_megabytes_of`: the same for single kinds of devices. `texts`: the least number of texts to simulate.
    """

    ttft_s: float = 1.0
    tpot_s: float = 0.2
    texts_per_s: float = 0.0
    exits: str = "recompute"
    share_in_time: float = 0.99
    kv_megabytes: int | None = None
    texts: int = 200
    kv_megabytes_of: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class DecodingWay:
    """How one replica decodes: `launches` of the blocks before `cut`, then one of the deep part after it.

    Without a deep part `cut` is `num_blocks`.
    """

    cut: int
    launches: int
    residents: int
    prompt_rows: int


@dataclass(frozen=True)
class ExpectedPace:
    """The estimated pace of a replica that is never idle, and the waits of a text there."""

    way: DecodingWay
    tokens_per_s: float
    ttft_s: float  # of a text that joins all other residents
    tpot_s: float


@dataclass(frozen=True)
class DecodingFacts:
    """One kind of device, and the network on it."""

    profile: DecoderProfile
    device: Device

    @property
    def table(self) -> DecodingTable:
        return self.profile.table(self.device.kind)

    @property
    def position_bytes(self) -> int:
        """KV of one position, in all blocks."""
        return self.table.kv_bytes * self.profile.num_blocks

    def kv_bytes(self, goal: DecodingGoal) -> int:
        """Memory that a replica has for KV."""
        room = int(USED_MEMORY * self.device.memory_bytes) - self.table.weights_bytes
        most = dict(goal.kv_megabytes_of).get(self.device.kind, goal.kv_megabytes)
        return room if most is None else min(room, most * MEGABYTE)

    def texts_held(self, goal: DecodingGoal) -> int:
        """How many texts of mean length fit into the memory for KV."""
        workload = self.profile.workload
        return int(self.kv_bytes(goal) // (self.position_bytes * (workload.prompt + workload.output)))

    def longest_held(self, goal: DecodingGoal) -> int:
        """The tokens of the longest text that fits into the memory for KV; with an encoder, its source has KV, too."""
        return self.kv_bytes(goal) // (self.position_bytes * (1 + self.profile.has_encoder)) - PAGE


def cuts_of(profile: DecoderProfile, goal: DecodingGoal) -> list[int]:
    """The blocks before which the network may be cut: after each ramp, or at its end, which is no cut."""
    ramps = [] if goal.exits == OFF else [block + 1 for block, _ in profile.workload.survival]
    return [*ramps, profile.num_blocks]


def ways(facts: DecodingFacts, goal: DecodingGoal) -> Iterator[DecodingWay]:
    """All ways to decode whose residents fit into memory, and are no more than in any timed launch."""
    most = min(facts.texts_held(goal), facts.table.residents or RESIDENTS[-1])
    residents = [each for each in RESIDENTS if each <= max(most, 1)]
    for cut, launches, count, rows in product(cuts_of(facts.profile, goal), RHYTHMS, residents, PROMPT_ROWS):
        if launches == 1 or cut < facts.profile.num_blocks:
            yield DecodingWay(cut, launches, count, rows)


def expected_pace(facts: DecodingFacts, way: DecodingWay, projects: bool = False) -> ExpectedPace:
    """The pace of one cycle: `way.launches` launches of the first part, and one of the deep part.

    A token continues after the cut with probability p, so 1 - (1 - p)^k of the residents wait for the deep part after k
    launches. The deep part also runs all rows that it has not seen, prompts among them, unless their text has ended.
    Where exits project KV (`projects`), rows of tokens that have left do not run.
    """
    workload, num_blocks = facts.profile.workload, facts.profile.num_blocks
    p = workload.after(way.cut - 1) if way.cut < num_blocks else 1.0
    p = p if p > LEAST else 0.0  # of a smaller share the powers below would round to 1
    waiting = way.residents * (1.0 - (1.0 - p) ** way.launches) if p else 0.0
    tokens = waiting / p if p else float(way.residents * way.launches)
    prompts = tokens * workload.prompt / workload.output  # prompt positions that come with this number of tokens
    first = _launch(facts.profile, way.cut, tokens / way.launches, prompts / way.launches, tokens / way.launches)
    seconds = [facts.table.seconds(first)] * way.launches
    if way.cut < num_blocks:
        rows = max(waiting, tokens * (1.0 - _unseen(p, workload.output)))
        projected = rows - waiting if projects else 0.0
        deep = _launch(facts.profile, num_blocks - way.cut, max(waiting, 1.0), prompts, rows - projected, projected)
        seconds.append(facts.table.seconds(deep))
    tokens_per_s = tokens / sum(seconds)
    return ExpectedPace(way, tokens_per_s, _begins_s(facts, way, max(seconds)), way.residents / tokens_per_s)


def _unseen(p: float, output: float) -> float:
    """The share of a text's tokens that leave after its last deep token, so that the deep part never runs them.

    >>> _unseen(1.0, 10), round(_unseen(0.5, 10), 2), _unseen(0.0, 10)
    (0.0, 0.1, 1.0)
    """
    return (1.0 - p) * (1.0 - (1.0 - p) ** output) / (p * output) if p else 1.0


def _launch(
    profile: DecoderProfile, blocks: int, sequences: float, prompts: float, rows: float, projected: float = 0.0
) -> LaunchSize:
    """A launch through `blocks`, of `rows` positions of `sequences` and of `prompts` positions of prompts.

    Of `projected` further positions only the KV is made.
    """
    workload = profile.workload
    context = workload.prompt + workload.output / 2
    begin = prompts / workload.prompt  # texts
    encoded = profile.has_encoder
    halves = begin * workload.prompt * (1 if encoded else workload.prompt / 2)
    read = begin if encoded else prompts
    return LaunchSize(
        launches=1,
        pieces=sequences + begin,
        blocks=blocks,
        bands=blocks * (1.0 + min(1.0, begin)),
        rows=blocks * (rows + read),
        read=blocks * (sequences * context + read),
        seen=blocks * (rows * context + halves),
        heads=1,
        asked=sequences,
        sources=min(1.0, begin) if encoded else 0.0,
        source_rows=prompts if encoded else 0.0,
        source_seen=prompts * workload.prompt if encoded else 0.0,
        projections=blocks * min(1.0, projected),
        projected=blocks * projected,
    )


def _begins_s(facts: DecodingFacts, way: DecodingWay, launch_s: float) -> float:
    """Seconds until the longest prompt is read while other texts are written, and its first token is known."""
    longest, _ = facts.profile.readable.longest
    chunks = ceil(longest / way.prompt_rows) if not facts.profile.has_encoder else 1
    chunk = _launch(facts.profile, facts.profile.num_blocks, 1, min(longest, way.prompt_rows), 0)
    return chunks * (launch_s + facts.table.seconds(chunk))


def expected_paces(facts: DecodingFacts, goal: DecodingGoal) -> list[ExpectedPace]:
    return [expected_pace(facts, way, goal.exits == PROJECT) for way in ways(facts, goal)]


def most_promising(paces: Iterable[ExpectedPace], goal: DecodingGoal, count: int) -> list[ExpectedPace]:
    """The ways that are worth simulating, the fastest first: one of each cut and rhythm.

    A way whose mean is above a limit cannot keep the limit for nearly all texts. Of ways that are nearly as fast, the
    one with the fewest residents is taken, as each resident then waits less.
    """
    by_rhythm: dict[tuple[int, int], list[ExpectedPace]] = {}
    for pace in paces:
        if pace.tpot_s <= goal.tpot_s and pace.ttft_s <= goal.ttft_s:
            by_rhythm.setdefault((pace.way.cut, pace.way.launches), []).append(pace)
    leanest = []
    for alike in by_rhythm.values():
        nearly_best = NEARLY_BEST * max(each.tokens_per_s for each in alike)
        fast = (each for each in alike if each.tokens_per_s >= nearly_best)
        leanest.append(min(fast, key=lambda each: each.way.residents))
    return sorted(leanest, key=lambda pace: pace.tokens_per_s, reverse=True)[:count]


def misfit(facts: DecodingFacts, goal: DecodingGoal) -> str | None:
    """Why this device cannot serve the workload for this goal; None if it can."""
    workload, device = facts.profile.workload, facts.device
    if goal.exits == PROJECT and not facts.table.projects:
        return f"exits = 'project': the time of projection on {device.kind} is not known: measure with isobatch profile"
    lengths = list(map(facts.profile.length, workload.prompts, workload.outputs))
    too_long = sum(length > facts.profile.reads for length in lengths)
    if len(lengths) - too_long < goal.share_in_time * len(lengths):
        return (
            f"{too_long} of {len(lengths)} texts have more than the {facts.profile.reads} tokens that the network reads"
        )
    needed = facts.table.weights_bytes
    room = USED_MEMORY * device.memory_bytes
    if needed > room:
        return f"the weights need {needed / 1e9:.3g} GB, and {device.kind} has {room / 1e9:.3g} GB"
    read = facts.profile.readable
    positions = max(map(sum, zip(read.prompts, read.outputs, strict=True))) + PAGE
    if facts.profile.has_encoder:  # the encoder may read as many tokens as are written
        prompt, output = read.longest
        positions = 2 * (max(prompt, output + 1) + PAGE)
    if positions * facts.position_bytes > (kv_room := facts.kv_bytes(goal)):
        megabytes = ceil(positions * facts.position_bytes / MEGABYTE)
        return f"the longest text needs {megabytes} MB for KV, and {device.kind} has {kv_room / MEGABYTE:.0f} MB left"
    return None


def plan_of(way: DecodingWay, facts: DecodingFacts, goal: DecodingGoal, replicas: int) -> Plan:
    """The plan for this way to decode; it promises nothing yet."""
    profile = facts.profile
    cuts, waits = tuple[int, ...](), way.residents
    if way.cut < profile.num_blocks:
        survival, cuts = profile.workload.after(way.cut - 1), (way.cut,)
        waits = min(way.residents, max(1, round(way.residents * (1 - (1 - survival) ** way.launches))))
    splits = splits_at(cuts, profile.num_blocks, way.residents, waits)
    prompt, output = profile.readable.longest
    position_bytes = facts.position_bytes * (1 + profile.has_encoder)  # with an encoder, of its source and of the text
    longest_bytes = profile.reads * position_bytes + PAGE * facts.position_bytes
    room = facts.kv_bytes(goal)
    kv_bytes = min(room, max(way.residents * (prompt + output + PAGE) * facts.position_bytes, longest_bytes))
    fitting = max(2, kv_bytes // position_bytes // PAGE * PAGE)  # the longest text whose KV fits, in whole pages
    terms = DecodingTerms(
        exits=goal.exits,  # without a cut, too: a controller may cut later
        prompt_rows=way.prompt_rows,
        kv_megabytes=ceil(kv_bytes / MEGABYTE),
        ttft_s=goal.ttft_s,
        tpot_s=goal.tpot_s,
        max_context=None if room >= longest_bytes else fitting,
        threads=facts.table.threads,
    )
    table = facts.table
    return Plan(
        (Placement(facts.device.kind, replicas, splits, local=len(splits) > 1),),
        model=profile.model,
        weights=profile.weights,
        backend="torch",
        dtype=table.dtype,
        origin="estimated" if table.estimated else "measured",
        decoding=terms,
    )


def splits_at(cuts: Sequence[int], num_blocks: int, residents: int, deep: int) -> tuple[Split, ...]:
    """The splits of a network that is cut after the ramps before these blocks; `deep`: the batch of all but the first
    split."""
    return tuple(
        Split(start, stop, deep if start else residents, (stop - 1,) if stop < num_blocks else ())
        for start, stop in pairwise((0, *cuts, num_blocks))
    )


def terms_of(plan: Plan) -> DecodingTerms:
    """How a pipeline's replicas decode."""
    assert plan.decoding, "This is a bug: it is a plan for a network that classifies."
    return plan.decoding


def exits_of(plan: Plan) -> str:
    """What exits mean in this plan: the same in all pipelines that are cut."""
    return next((exits for each in plan.pipelines if (exits := terms_of(each).exits) != OFF), OFF)


def with_terms(plan: Plan, **changes: Any) -> Plan:
    """The same pipeline with other terms."""
    return replace(plan, decoding=replace(terms_of(plan), **changes))


def tokens_per_s(plan: Plan) -> float:
    """The promised tokens per second of all pipelines."""
    return sum(terms_of(each).tokens_per_s for each in plan.pipelines)


def promising(plan: Plan, tokens: float) -> Plan:
    """The same plan with another promise of tokens per second, shared among its pipelines in the same proportion."""
    factor = tokens / tokens_per_s(plan)
    return plan.with_each(lambda each: with_terms(each, tokens_per_s=factor * terms_of(each).tokens_per_s))


def shares_of(plan: Plan) -> list[float]:
    """The weights by which pipelines share the texts: their promises, or their residents if one has no promise."""
    promised = [terms_of(each).tokens_per_s for each in plan.pipelines]
    return promised if all(promised) else [float(residents_of(each)) for each in plan.pipelines]


def emptiest_first(texts: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The pipelines in the order in which they would finish the next text, given the texts that each has.

    >>> emptiest_first([2, 1], [3.0, 1.0]), emptiest_first([3, 0], [3.0, 1.0])
    ([0, 1], [1, 0])
    """
    return sorted(range(len(texts)), key=lambda place: (texts[place] + 1) / shares[place])


def residents_of(plan: Plan) -> int:
    """Texts that all replicas decode at once."""
    return sum(each.placements[0].replicas * each.splits[0].batch_size for each in plan.pipelines)
