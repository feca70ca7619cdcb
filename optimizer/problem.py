"""The facts of one planning problem, taken from the profile, the fleet and the links."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from isobatch.optimizer.plan import Plan, Split, opened
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import ORIGINS, LatencyTable
from isobatch.profiles.lengths import Lengths


@dataclass(frozen=True)
class Problem:
    """A network, the shares of its inputs that survive, and the devices: `tables[c]` is that of `devices[c]`."""

    survival: tuple[float, ...]
    tables: tuple[LatencyTable, ...]
    devices: tuple[Device, ...]
    links: dict[tuple[str, str], Link]
    length: int | None = None  # tokens of an input, where everything counts tokens; None: inputs have one size
    lengths: Lengths | None = None  # their mean is `length`; None: all inputs have one length
    edges: tuple[int, ...] = ()  # blocks at which a level of a cascade begins: every plan is cut before them
    exits: ExitProfile | None = None  # if set, scores and simulations take the survival of their plan's ramps from here
    keeps_open: bool = False  # a plan opens all ramps at which inputs leave, or none

    def __post_init__(self) -> None:
        for table in self.tables:
            if table.num_blocks != self.num_blocks:
                raise UserError(
                    f"the table of {table.kind} has {table.num_blocks} blocks, the exit profile {self.num_blocks}"
                )

    @property
    def num_blocks(self) -> int:
        return len(self.survival)

    @property
    def ramp_blocks(self) -> frozenset[int]:
        """Blocks with a ramp after them: the ramp takes time on some device, or inputs leave there."""
        before = range(self.num_blocks - 1)
        costs = {block for block in before for table in self.tables if any(row[block] > 0 for row in table.ramp_s)}
        leaving = {block for block in before if self.survival[block + 1] < self.survival[block]}
        return frozenset(costs | leaving)

    @property
    def without_exits(self) -> "Problem":
        """The same problem with no active ramp."""
        return replace(self, survival=(1.0,) * self.num_blocks, exits=None)

    def surviving(self, survival: Sequence[float]) -> "Problem":
        """The same problem with other shares of survivors, whichever ramps a plan opens."""
        return replace(self, survival=ExitProfile(tuple(survival)).survival, exits=None)

    def for_ramps(self, ramps: Collection[int]) -> "Problem":
        """The same problem with the survival that these open ramps cause, if that is known."""
        return replace(self, survival=self.exits.planning_survival(ramps)) if self.exits else self

    def for_plan(self, plan: Plan) -> "Problem":
        """The same problem with the survival that the ramps of this plan cause, if that is known."""
        return self.for_ramps(opened(plan))

    @property
    def given(self) -> "Problem":
        """The same problem with its present survival for every plan, as a search needs it."""
        return replace(self, exits=None)

    def with_devices(self, devices: Sequence[Device]) -> "Problem":
        """The same problem on other devices, of kinds that have a table here."""
        tables = {table.kind: table for table in self.tables}
        return replace(self, devices=tuple(devices), tables=tuple(tables[device.kind] for device in devices))

    def device(self, kind: str) -> Device:
        device = next((device for device in self.devices if device.kind == kind), None)
        if device is None:
            has = ", ".join(device.kind for device in self.devices)
            raise UserError(f"the plan uses device kind {kind!r}, the fleet has {has}")
        return device

    def lanes(self, plan: Plan) -> list[int]:
        """The number of each pipeline's lane. Pipelines that differ only in replicas share one."""
        numbers: dict[object, int] = {}
        return [numbers.setdefault(pipeline.shape, len(numbers)) for pipeline in plan.pipelines]

    def turn_s(self, kind: str) -> float:
        """How long an order takes to a replica of a local placement once the launch before has ended."""
        link = self.links.get((kind, kind))
        return link.turn_s if link else 0.0

    def table(self, kind: str) -> LatencyTable:
        return self.tables[self.devices.index(self.device(kind))]

    def annotated(self, plan: Plan) -> Plan:
        """The plan with its mean input length and the origin of its times: the weakest of the devices that it uses."""
        tables = [table for table in self.tables if table.kind in plan.devices()]
        backends, dtypes = ({getattr(table, name) or "" for table in tables} for name in ("backend", "dtype"))
        return replace(
            plan,
            length=self.length,
            backend=backends.pop() if len(backends) == 1 else "",
            dtype=dtypes.pop() if len(dtypes) == 1 else "",
            origin=max((table.origin for table in tables), key=ORIGINS.index),
        )


def split_with_ramps(facts: Problem, start: int, stop: int, batch_size: int, inner: bool) -> Split:
    """A split with all its ramps at which inputs leave (`inner`), or with only the one at its end."""
    share = facts.survival
    ramps = [block for block in range(start, stop - 1) if inner and share[block + 1] < share[block]]
    if stop < facts.num_blocks:
        before = stop - 1 if inner else start
        ramps += [stop - 1] if share[stop] < share[before] else []
    return Split(start, stop, batch_size, tuple(ramps))


def problem(
    profile: Profile,
    devices: Sequence[Device],
    links: Sequence[Link],
    survival: Sequence[float] | None = None,
    length: int | None = None,
    exits: ExitProfile | None = None,
) -> Problem:
    """Gather the facts of a problem. Kinds without devices are left out; without known exits, all inputs survive.

    `exits`: exits from which the survival of each plan follows. `survival` may be that of one plan.

    With a `length`, everything counts tokens, and an input is a text of this many tokens.
    """
    here = tuple(device for device in devices if device.count)
    if not here:
        raise UserError("the fleet holds no device: give at least one, as in v100=1")
    tables = tuple(profile.table_of(device.kind, length) for device in here)
    if survival is None:
        survival = (exits or profile.exits_of(length)).survival
    ways = {(link.source, link.target): link for link in links}
    known = exits if exits and exits.sure and exits.survival[-1] < 1 else None
    lengths = profile.lengths if profile.length == length else None
    return Problem(ExitProfile(tuple(survival)).survival, tables, here, ways, length, lengths, profile.edges, known)
