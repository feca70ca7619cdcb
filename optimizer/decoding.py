"""Plans for networks that write token by token: what is expected of each way to decode, by arithmetic.

The space is small: where the network is cut, how many launches of the first part go before one of the deep part, how
many sequences are resident, and how much of prompts runs in one launch. All of it is looked at; what the simulator
makes of the best is what is promised (cluster/decoding/choice.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil

from profiles.decoding import PROJECT, DecoderProfile, DecodingTable, LaunchSize
from profiles.devices import Device

RHYTHMS = (1, 2, 3, 4, 6, 8)  # launches of the first part for one of the deep part
RESIDENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPT_ROWS = (64, 256, 1024)
USED = 0.9  # of a device's memory: the rest is for what is being computed
MEGABYTE = 2**20
NEARLY = 0.95  # of the tokens per second of a way, which another writes with fewer residents
OFF = "off"
PAGE = 32  # positions that a text may leave empty in its last pages


@dataclass(frozen=True)
class DecodingGoal:
    """What is wanted: most texts per second in time, or a rate at the least cost.

    `kept`: the share of texts that begin within `ttft_s`, and of those whose tokens follow each other within `tpot_s`.
    `kv_megabytes`: memory for KV that a replica may have at most; None: what the device has beside the weights. `held`:
    the same for some kinds of devices alone.
    `texts`: how many are played at least to see what is kept.
    """

    ttft_s: float = 1.0
    tpot_s: float = 0.2
    texts_per_s: float = 0.0
    exits: str = "recompute"
    kept: float = 0.99
    kv_megabytes: int | None = None
    texts: int = 200
    held: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class DecodingWay:
    """How one replica decodes: `cut` is the block before which the deep part begins, `num_blocks` where there is none.
    `launches` of the first part go before one of the deep part."""

    cut: int
    launches: int
    residents: int
    prompt_rows: int


@dataclass(frozen=True)
class ExpectedPace:
    """What a replica writes that is never idle, and what a text waits there, by arithmetic."""

    way: DecodingWay
    tokens_per_s: float
    ttft_s: float  # of a text that comes to all other residents
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
        """Memory for KV."""
        room = int(USED * self.device.memory_bytes) - self.table.weights_bytes
        most = dict(goal.held).get(self.device.kind, goal.kv_megabytes)
        return room if most is None else min(room, most * MEGABYTE)

    def texts_held(self, goal: DecodingGoal) -> int:
        """How many texts of mean length have all their KV in memory."""
        workload = self.profile.workload
        return int(self.kv_bytes(goal) // (self.position_bytes * (workload.prompt + workload.output)))


def cuts_of(profile: DecoderProfile, goal: DecodingGoal) -> list[int]:
    """Where the network may be cut: behind each ramp, or nowhere."""
    ramps = [] if goal.exits == OFF else [block + 1 for block, _ in profile.workload.survival]
    return [*ramps, profile.num_blocks]


def ways(facts: DecodingFacts, goal: DecodingGoal) -> Iterator[DecodingWay]:
    """All that may be chosen: no more residents than memory holds, and than launches were timed with."""
    most = min(facts.texts_held(goal), facts.table.residents or RESIDENTS[-1])
    residents = [each for each in RESIDENTS if each <= max(most, 1)]
    for cut, launches, count, rows in product(cuts_of(facts.profile, goal), RHYTHMS, residents, PROMPT_ROWS):
        if launches == 1 or cut < facts.profile.num_blocks:
            yield DecodingWay(cut, launches, count, rows)


def expected(facts: DecodingFacts, way: DecodingWay, projects: bool = False) -> ExpectedPace:
    """What one cycle brings and takes: so many launches of the first part, and one of the deep part.

    A token goes on after the cut with the probability p, so 1 - (1 - p)^k of the residents wait for the deep part at
    the end. It takes all rows along that it has not seen, prompts among them, but for those with which texts end. Where
    it `projects`, rows of tokens that have left do not run.
    """
    workload, num_blocks = facts.profile.workload, facts.profile.num_blocks
    p = workload.after(way.cut - 1) if way.cut < num_blocks else 1.0
    waiting = way.residents * (1.0 - (1.0 - p) ** way.launches) if p else 0.0
    tokens = waiting / p if p else float(way.residents * way.launches)
    prompts = tokens * workload.prompt / workload.output  # positions of prompts that come with so many tokens
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
    """The share of a text's tokens that leave after the last one that goes deep: the deep part never sees them.

    >>> _unseen(1.0, 10), round(_unseen(0.5, 10), 2), _unseen(0.0, 10)
    (0.0, 0.1, 1.0)
    """
    return (1.0 - p) * (1.0 - (1.0 - p) ** output) / (p * output) if p else 1.0


def _launch(
    profile: DecoderProfile, blocks: int, sequences: float, prompts: float, rows: float, projected: float = 0.0
) -> LaunchSize:
    """A launch through so many blocks, of `rows` positions of `sequences`, and of so many positions of prompts; of
    `projected` others only KV is made."""
    workload = profile.workload
    context = workload.prompt + workload.output / 2
    begin = prompts / workload.prompt  # texts
    encoded = profile.has_encoder
    halves = begin * workload.prompt * (1 if encoded else workload.prompt / 2)
    decoded = begin if encoded else prompts
    return LaunchSize(
        launches=1,
        pieces=sequences + begin,
        blocks=blocks,
        bands=blocks * (1.0 + min(1.0, begin)),
        rows=blocks * (rows + decoded),
        read=blocks * (sequences * context + decoded),
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
    """Until a prompt of the longest kind is read beside the others, and its first token known."""
    longest, _ = facts.profile.workload.longest
    whole = ceil(longest / way.prompt_rows) if not facts.profile.has_encoder else 1
    chunk = _launch(facts.profile, facts.profile.num_blocks, 1, min(longest, way.prompt_rows), 0)
    return whole * (launch_s + facts.table.seconds(chunk))


def paces(facts: DecodingFacts, goal: DecodingGoal) -> list[ExpectedPace]:
    """What is expected of all that may be chosen."""
    return [expected(facts, way, goal.exits == PROJECT) for way in ways(facts, goal)]


def screened(found: Iterable[ExpectedPace], goal: DecodingGoal, count: int) -> list[ExpectedPace]:
    """The ways that are worth to be played, those that promise most first: of each cut and rhythm one.

    A way whose mean is above a limit cannot keep it for nearly all texts. Of those that write nearly the same, the one
    with the fewest residents is taken: each waits less.
    """
    alike: dict[tuple[int, int], list[ExpectedPace]] = {}
    for each in found:
        if each.tpot_s <= goal.tpot_s and each.ttft_s <= goal.ttft_s:
            alike.setdefault((each.way.cut, each.way.launches), []).append(each)
    leanest = [_leanest(each) for each in alike.values()]
    return sorted(leanest, key=_speed, reverse=True)[:count]


def _leanest(alike: list[ExpectedPace]) -> ExpectedPace:
    least = NEARLY * max(each.tokens_per_s for each in alike)
    return min((each for each in alike if each.tokens_per_s >= least), key=lambda each: each.way.residents)


def _speed(each: ExpectedPace) -> float:
    return each.tokens_per_s


def fits(facts: DecodingFacts, goal: DecodingGoal) -> str | None:
    """Why texts cannot be written so on this device, or with what the network reads; None where they can."""
    workload, device = facts.profile.workload, facts.device
    if goal.exits == PROJECT and not facts.table.projects:
        return f"exits = 'project': what projection takes on {device.kind} is not known: isobatch profile tells"
    if (shortest := min(workload.prompts) + (0 if facts.profile.has_encoder else 1)) > facts.profile.reads:
        return f"the shortest text has {shortest} tokens, and the network reads {facts.profile.reads}"
    needed = facts.table.weights_bytes
    if needed > USED * device.memory_bytes:
        return (
            f"the weights need {needed / 1e9:.3g} GB, and {device.kind} has {USED * device.memory_bytes / 1e9:.3g} GB"
        )
    positions = sum(workload.longest) + PAGE
    if facts.profile.has_encoder:  # it may read as much as is written at most
        prompt, output = workload.longest
        positions = 2 * (max(prompt, output + 1) + PAGE)
    if positions * facts.position_bytes > (room := facts.kv_bytes(goal)):
        megabytes = ceil(positions * facts.position_bytes / MEGABYTE)
        return f"the longest text needs {megabytes} MB for KV, and {device.kind} has {room / MEGABYTE:.0f} MB left"
    return None
