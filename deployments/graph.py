"""The serving graph: what fronts and the deployer know of the plan that runs."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import count
from math import inf
from pathlib import Path

from deployments.config import AppConfig
from deployments.dispatch.route import Route, named_groups, placements_of, route_of
from deployments.folders import weights_of
from deployments.named import AUTO, VIRTUAL
from deployments.planning import first_plan
from optimizer.plan import Plan, read_plan
from optimizer.problem import Problem, problem
from optimizer.tuning import opened
from profiles.devices import Device, links_between
from profiles.errors import UserError
from profiles.files import Profile, differ, load


@dataclass(frozen=True)
class Graph:
    """A plan, the facts that it was made from, and a name for each of its groups of replicas.

    `version` grows with every plan that the application is led to. `fleet` is the prefix of the Serve applications that
    hold the replicas, one for each kind of device. `benched` replicas are too slow for the plan to count on them.
    """

    plan: Plan
    facts: Problem
    version: int = 0
    fleet: str = ""
    benched: frozenset[str] = frozenset()

    @cached_property
    def groups(self) -> list[str]:
        """The group of each placement: kind and number, so that changes within one kind keep the names of the others.

        One kind under several names has groups together.
        """
        numbers = {kind: count() for kind in self.plan.devices()}
        return named_groups(self.plan, self.facts, lambda each: f"{each.kind}-{next(numbers[each.kind])}")

    @property
    def fleets(self) -> dict[str, str]:
        """The Serve application that holds the replicas of each kind."""
        return {kind: f"{self.fleet}.{kind}" for kind in self.plan.devices()}

    @cached_property
    def route(self) -> Route:
        return route_of(self.plan, self.facts, self.groups)

    def members(self, alive: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
        """The replicas of each group, when these are alive in each fleet."""
        members: dict[str, list[str]] = {group: [] for group in self.groups}
        placed = list(zip(self.groups, placements_of(self.plan), strict=True))
        for kind, fleet in self.fleets.items():
            wanted = Counter[str]()
            for group, placement in placed:
                wanted[group] += placement.replicas * (placement.kind == kind)
            for group, replicas in shared_out(alive.get(fleet, ()), +wanted, self.benched).items():
                members[group] += replicas
        return members


def shared_out(
    replicas: Collection[str], wanted: Mapping[str, int], benched: Collection[str] = ()
) -> dict[str, list[str]]:
    """Each group's replicas, in proportion to what the plan wants for it, however many are alive.

    No memory is needed, so all fronts agree, and a replica that comes or goes moves few of the others. Where there are
    fewer replicas than groups, groups share them: that is slow, but no input waits for ever. Those that are benched do
    no group's work; they stay with the largest one, which tries them now and then.

    >>> shared_out("abcdef", {"first": 4, "second": 2})
    {'first': ['a', 'b', 'c', 'd'], 'second': ['e', 'f']}
    >>> shared_out("bcdef", {"first": 4, "second": 2})
    {'first': ['b', 'c', 'd'], 'second': ['e', 'f']}
    >>> shared_out("a", {"first": 4, "second": 2})
    {'first': ['a'], 'second': ['a']}
    >>> shared_out("abcd", {"first": 2, "second": 1}, benched="b")
    {'first': ['a', 'c', 'b'], 'second': ['d']}
    """
    ordered = sorted(set(replicas) - set(benched))
    if len(ordered) < len(wanted):
        ordered = sorted(replicas)
    if len(ordered) < len(wanted):
        return {group: [ordered[index % len(ordered)]] if ordered else [] for index, group in enumerate(wanted)}
    sizes = _sizes(len(ordered), wanted)
    ahead = iter(ordered)
    shares = {group: [next(ahead) for _ in range(size)] for group, size in sizes.items()}
    if shares:
        shares[max(wanted, key=lambda group: wanted[group])] += sorted(set(replicas) - set(ordered))
    return shares


def _sizes(seats: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """One seat after the other goes to the group that is shortest of what it wants (Adams: each gets one at first)."""
    sizes = dict.fromkeys(wanted, 0)
    for _ in range(seats if wanted else 0):
        neediest = max(wanted, key=lambda group: wanted[group] / sizes[group] if sizes[group] else inf)
        sizes[neediest] += 1
    return sizes


def read_graph(config: AppConfig) -> Graph:
    """The graph of the plan that the configuration names, or that is made for its devices."""
    profile = profile_of(config)
    return graph_of(first_plan(config, profile), profile, config)


def graph_of(
    plan: Plan, profile: Profile, config: AppConfig, version: int = 0, fleet: str = "",
    benched: frozenset[str] = frozenset(),
) -> Graph:  # fmt: skip
    """The graph of a plan. A plan that does not fit the profile is refused in one sentence."""
    for kind in plan.devices():
        profile.table(kind)  # says what it has, if not this one
    if plan.num_blocks != profile.num_blocks:
        raise UserError(f"{config.plan} covers {plan.num_blocks} blocks, {config.profile} has {profile.num_blocks}")
    if differ(plan.weights, profile.weights):
        raise UserError(
            f"{config.plan} is for {plan.model} (weights {plan.weights}), {config.profile} is of {profile.model} "
            f"(weights {profile.weights}): plan from the profile of the network that is served"
        )
    facts = _facts(plan, profile, config)
    return Graph(plan, facts if config.early_budget is None else facts.without_exits, version, fleet, benched)


def profile_of(config: AppConfig) -> Profile:
    """The profile that the configuration names, with the times that its plan was made from, or of its backend."""
    assert config.profile, "This is a bug: AppConfig asks for it."
    profile = load(Path(config.profile))
    if config.plan:
        plan = read_plan(Path(config.plan))
        return profile.on(plan.backend, plan.dtype)
    return profile if config.backend in (VIRTUAL, AUTO) else profile.on(config.backend, config.dtype)


def check_depth(config: AppConfig, num_blocks: int) -> None:
    """Refuse a plan or profile of another depth now, as Serve would not tell the reason of a failure later."""
    path, read = (config.plan, read_plan) if config.plan else (config.profile, load)
    covered = read(Path(path or "")).num_blocks
    if covered != num_blocks:
        raise UserError(f"{path} covers {covered} blocks, the network has {num_blocks}: plan from its own profile")


def check_weights(config: AppConfig) -> None:
    """Refuse the profile of another network of the same depth: its plan would run, and keep nothing it promises."""
    if not (config.profile and config.model) or config.backend == VIRTUAL:
        return
    profile, weights = profile_of(config), weights_of(Path(config.model))
    if differ(profile.weights, weights):
        raise UserError(
            f"{config.profile} is of {profile.model} (weights {profile.weights}), the weights in {config.model} are "
            f"others ({weights}): profile and plan the network that is served"
        )


# What depends on each field of the configuration: every field is in one of these.
OF_PLANS = {"plan", "devices", "rate_per_s", "slo_ms", "max_batch", "answers", "ramp_budget", "links"}
OF_PLANS_AND_REPLICAS = {"model", "loader", "backend", "dtype", "cpus_per_replica"}
OF_REPLICAS = {"profile", "device", "exits", "ports", "drain_s", "log_format"}
OF_FRONTS = {
    "name", "front_replicas", "max_waiting", "max_inputs", "max_body_bytes", "by_value_bytes", "api_key_variable",
    "allowed_origins", "grpc_port", "grpc_host", "too_long", "on_deadline", "replan", "audit_share", "audit_cost",
    "agreement",
}  # fmt: skip


def mark_of(config: AppConfig) -> str:
    """A hash of all that replicas depend on: where it changes, new replicas are started beside the old ones."""
    assert config.profile, "This is a bug: AppConfig asks for it."
    said = config.model_dump_json(include=OF_REPLICAS | OF_PLANS_AND_REPLICAS)
    return sha256(said.encode() + Path(config.profile).read_bytes()).hexdigest()[:6]


def origin_of(config: AppConfig) -> str:
    """A hash of what the user says of plans and of the network that they are for, with the contents of his files.

    While it stays, a restarted deployer goes on with the plan that runs.
    """
    said = config.model_dump_json(include=OF_PLANS | OF_PLANS_AND_REPLICAS)
    files = [Path(path).read_bytes() for path in (config.plan, config.profile) if path]
    return sha256(b"".join([said.encode(), *files])).hexdigest()


def _facts(plan: Plan, profile: Profile, config: AppConfig) -> Problem:
    """The problem with just the plan's devices; their price and memory mattered only to the planner."""
    devices = [Device(kind, count, memory_bytes=1, price_per_hour=0.0) for kind, count in plan.devices().items()]
    survival = profile.exits_of(plan.length).planning_survival(opened(plan))
    return problem(profile, devices, links_between(devices, gbit_per_s=config.links), survival, length=plan.length)
