"""The serving graph: the running plan with everything that fronts and the deployer need to follow it."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import count
from math import inf

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.route import Route, named_groups, route_of
from isobatch.deployments.folders import ramps_of, weights_of
from isobatch.deployments.named import AUTO, VIRTUAL
from isobatch.deployments.planning import first_plan
from isobatch.deployments.precision import in_precision, named_dtype
from isobatch.deployments.sources import local
from isobatch.optimizer.plan import Plan, opened, read_plan
from isobatch.optimizer.problem import Problem, problem
from isobatch.profiles.devices import Device, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, differ, load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Graph:
    """A plan, the facts that it was made from, and a name for each of its groups of replicas.

    `version` grows with every plan that the application follows. `fleet` is the prefix of the Serve applications that
    hold the replicas, one for each kind of device. `benched`: the kinds of replicas that are too slow to be part
    of the plan, by name.
    `device_ids`: those whose replicas are used, where replicas of several applications stand by; None: all.
    `wakes_in_s`: the time from the next input of a parked application until its replicas run; None: it is not parked.
    """

    plan: Plan
    facts: Problem
    version: int = 0
    fleet: str = ""
    benched: Mapping[str, str] = field(default_factory=dict)
    device_ids: frozenset[str] | None = None
    wakes_in_s: float | None = None

    @property
    def parked(self) -> bool:
        return self.wakes_in_s is not None

    @cached_property
    def groups(self) -> list[str]:
        """The group of each placement: its kind and a number. A change within one kind keeps the other kinds' names.

        Pipelines that differ only in replicas share groups.
        """
        numbers = {kind: count() for kind in self.plan.devices()}
        return named_groups(
            self.plan, self.facts, lambda placement: f"{placement.kind}-{next(numbers[placement.kind])}"
        )

    @property
    def fleets(self) -> dict[str, str]:
        """The Serve application that holds the replicas of each kind."""
        return {kind: f"{self.fleet}.{kind}" for kind in self.plan.devices()}

    @cached_property
    def route(self) -> Route:
        return route_of(self.plan, self.facts, self.groups)

    def members(self, alive: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
        """The replicas of each group. `alive`: those that are alive, with the ids of their devices, by their Serve
        application."""
        members: dict[str, list[str]] = {group: [] for group in self.groups}
        placed = list(zip(self.groups, self.plan.all_placements, strict=True))
        for kind, fleet in self.fleets.items():
            wanted = Counter[str]()
            for group, placement in placed:
                wanted[group] += placement.replicas * (placement.kind == kind)
            used = [name for name, device_id in alive.get(fleet, {}).items() if self.uses(device_id)]
            for group, replicas in assigned(used, +wanted, self.benched).items():
                members[group] += replicas
        return members

    def uses(self, device_id: str) -> bool:
        return not self.parked and (self.device_ids is None or device_id in self.device_ids)


def assigned(
    replicas: Collection[str], wanted: Mapping[str, int], benched: Collection[str] = ()
) -> dict[str, list[str]]:
    """Divide the replicas that are alive among the groups, in proportion to the number that the plan wants for each.

    The result depends on nothing else, so all fronts agree, and a replica that joins or leaves moves few of the others.
    If there are fewer replicas than groups, groups share replicas: this is slow, but no input waits for ever. Benched
    replicas are added to the largest group, which tries them now and then.

    >>> assigned("abcd", {"first": 2, "second": 1}, benched="b")
    {'first': ['a', 'c', 'b'], 'second': ['d']}
    """
    ordered = sorted(set(replicas) - set(benched))
    if len(ordered) < len(wanted):
        ordered = sorted(replicas)
    if len(ordered) < len(wanted):
        return {group: [ordered[index % len(ordered)]] if ordered else [] for index, group in enumerate(wanted)}
    sizes = dict.fromkeys(wanted, 0)
    for _ in ordered if wanted else ():  # by Adams's method: to the group with the largest wanted / assigned
        sizes[max(wanted, key=lambda group: wanted[group] / sizes[group] if sizes[group] else inf)] += 1
    remaining = iter(ordered)
    groups = {group: [next(remaining) for _ in range(size)] for group, size in sizes.items()}
    if groups:
        groups[max(wanted, key=lambda group: wanted[group])] += sorted(set(replicas) - set(ordered))
    return groups


def read_graph(config: AppConfig) -> Graph:
    """The graph of the plan that the configuration names, or of the best plan for its devices."""
    profile = profile_of(config)
    return graph_of(first_plan(config, profile), profile, config)


def graph_of(plan: Plan, profile: Profile, config: AppConfig) -> Graph:
    """The graph of a plan. Raises UserError if the plan does not fit the profile."""
    for kind in plan.devices():
        profile.table(kind)  # raises if it has no table for this kind
        profile.check_has(kind, plan.backend, "")
    if plan.num_blocks != profile.num_blocks:
        raise UserError(f"{config.plan} covers {plan.num_blocks} blocks, {config.profile} has {profile.num_blocks}")
    known = range(plan.num_blocks - 1)
    if unknown := sorted({*opened(plan), *dict(plan.thresholds)}.difference(known)):
        last = f"the last one is after block {known.stop - 1}" if known else "a network of one block has none"
        raise UserError(f"{config.plan} has a ramp after block {unknown[0]}: {last}")
    if differ(plan.weights, profile.weights):
        raise UserError(
            f"{config.plan} is for {plan.model} (weights {plan.weights}), {config.profile} is of {profile.model} "
            f"(weights {profile.weights}): plan from the profile of the network that is served"
        )
    # Only the plan's devices matter here; their price and memory mattered to the planner.
    devices = [Device(kind, count, memory_bytes=1, price_per_hour=0.0) for kind, count in plan.devices().items()]
    survival = profile.exits_of(plan.length).planning_survival(opened(plan))
    links = links_between(devices, gbit_per_s=config.links, measured=profile.links)
    facts = problem(profile, devices, links, survival, length=plan.length)
    facts = facts if config.early_budget is None else facts.without_exits
    return Graph(plan, facts)


def profile_of(config: AppConfig) -> Profile:
    """The configuration's profile, with the launch tables that its plan was made from; without a plan's file, with
    those of the backend and the precision in which devices compute."""
    assert config.profile, "This is a bug: AppConfig asks for it."
    profile = load(local(config.profile))
    if config.plan:
        plan = read_plan(local(config.plan))
        noted = profile.on("", named_dtype(config)).on("", plan.dtype)
        return (noted if plan.dtype else in_precision(profile, config)).on(plan.backend, "")
    return in_precision(profile, config).on("" if config.backend in (VIRTUAL, AUTO) else config.backend, "")


def check_depth(config: AppConfig, num_blocks: int) -> None:
    """Refuse a plan or profile of another depth. Serve would hide the reason of a later failure."""
    path, read = (config.plan, read_plan) if config.plan else (config.profile, load)
    covered = read(local(path or "")).num_blocks
    if covered != num_blocks:
        raise UserError(f"{path} covers {covered} blocks, the network has {num_blocks}: plan from its own profile")


def check_weights(config: AppConfig) -> None:
    """Refuse the plan or profile of another network of the same depth, which would run, but break its promises. Warn of
    exits that were counted with other ramps.
    """
    if not (config.profile and config.model) or config.backend == VIRTUAL:
        return
    weights, profile = weights_of(config.folder), profile_of(config)
    made = {config.profile: (profile.model, profile.weights)}
    if config.plan:
        plan = read_plan(local(config.plan))
        made[config.plan] = (plan.model, plan.weights)
    for path, (model, known) in made.items():
        if differ(known, weights):
            raise UserError(
                f"{path} is of {model} (weights {known}), {config.model} has other weights ({weights}): profile and "
                "plan the network that is served"
            )
    if profile.exits and config.exits and differ(profile.ramps, ramps_of(config.folder)):
        counted = f"{config.profile} has exits that were counted with other ramps than {config.model} has now"
        log.warning(f"{counted}, so the plan may promise too much: profile it with --data, and plan again")


# Which parts of the application depend on each field of the configuration. Fields of none of these sets change only
# fronts.
OF_PLANS = {"plan", "devices", "rate_per_s", "slo_ms", "max_batch", "answers", "ramp_budget", "links"}
OF_PLANS_AND_REPLICAS = {"model", "loader", "backend", "dtype", "cpus_per_replica"}
OF_REPLICAS = {"profile", "device", "exits", "ports", "drain_s", "log_format", "standby", "sharers"}


def replica_hash(config: AppConfig) -> str:
    """A hash of everything that replicas depend on. If it changes, new replicas are started beside the old ones."""
    assert config.profile, "This is a bug: AppConfig asks for it."
    fields = config.model_dump_json(include=OF_REPLICAS | OF_PLANS_AND_REPLICAS)
    return sha256(fields.encode() + local(config.profile).read_bytes()).hexdigest()[:6]


def plan_hash(config: AppConfig) -> str:
    """A hash of the fields that plans depend on, and of the contents of the plan's and the profile's file.

    While it is the same, a restarted deployer continues with the running plan.
    """
    fields = config.model_dump_json(include=OF_PLANS | OF_PLANS_AND_REPLICAS)
    files = [local(path).read_bytes() for path in (config.plan, config.profile) if path]
    return sha256(b"".join([fields.encode(), *files])).hexdigest()
