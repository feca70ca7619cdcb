"""What is to run: a plan, the facts it was made from, and a name for each group of replicas."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import count
from pathlib import Path

from deployments.config import AppConfig
from deployments.dispatch.planned import placements_of, route_of
from deployments.dispatch.route import Route
from deployments.planning import first_plan
from optimizer.plan import Placement, Plan, read_plan
from optimizer.problem import Problem, problem
from profiles.devices import Device, links_between
from profiles.errors import UserError
from profiles.files import Profile, load


@dataclass(frozen=True)
class Graph:
    """A plan's placements by name. `version` grows with every plan that the application was led to.

    `fleet`: what the applications are called that hold the replicas, one for each kind.
    """

    plan: Plan
    facts: Problem
    version: int = 0
    fleet: str = ""

    @cached_property
    def groups(self) -> dict[str, Placement]:
        """Named after the kind and a number: what a plan changes within a kind leaves the names as they are."""
        numbers = {kind: count() for kind in self.plan.devices()}
        return {f"{each.kind}-{next(numbers[each.kind])}": each for each in placements_of(self.plan)}

    @property
    def fleets(self) -> dict[str, str]:
        """Of each kind the application that holds its replicas."""
        return {kind: f"{self.fleet}.{kind}" for kind in self.plan.devices()}

    @cached_property
    def route(self) -> Route:
        return route_of(self.plan, self.facts, list(self.groups))


def read_graph(config: AppConfig) -> Graph:
    """From the profile that the configuration names, and the plan that it names or that is made for its devices."""
    profile = profile_of(config)
    return graph_of(first_plan(config, profile), profile, config)


def graph_of(plan: Plan, profile: Profile, config: AppConfig, version: int = 0, fleet: str = "") -> Graph:
    """One sentence about a plan that this profile says nothing of."""
    for kind in plan.devices():
        profile.table(kind)  # says what it has, if not this one
    if plan.num_blocks != profile.num_blocks:
        raise UserError(f"{config.plan} covers {plan.num_blocks} blocks, {config.profile} has {profile.num_blocks}")
    return Graph(plan, _facts(plan, profile), version, fleet)


def profile_of(config: AppConfig) -> Profile:
    assert config.profile, "This is a bug: AppConfig asks for it."
    return load(Path(config.profile))


def check_depth(config: AppConfig, num_blocks: int) -> None:
    """Of what fails later Serve tells no reason."""
    path, read = (config.plan, read_plan) if config.plan else (config.profile, load)
    covered = read(Path(path or "")).num_blocks
    if covered != num_blocks:
        raise UserError(f"{path} covers {covered} blocks, the network has {num_blocks}: plan from its own profile")


# What replicas of splits know nothing of: when only these change, they go on.
_OF_PLANS = {"plan", "devices", "rate_per_s", "slo_ms", "max_batch"}
_OF_THE_FRONT = {
    "name", "front_replicas", "max_waiting", "max_inputs", "max_body_bytes", "by_value_bytes", "api_key_variable",
    "grpc_port", "grpc_host",
}  # fmt: skip


def mark_of(config: AppConfig) -> str:
    """Of all that a replica is made of: another configuration gets other replicas, beside the old ones."""
    assert config.profile, "This is a bug: AppConfig asks for it."
    made_of = config.model_dump_json(exclude=_OF_PLANS | _OF_THE_FRONT).encode() + Path(config.profile).read_bytes()
    return sha256(made_of).hexdigest()[:6]


def origin_of(config: AppConfig) -> str:
    """What the user says of plans: only where that changes, another plan than the one that runs is meant."""
    file = Path(config.plan).read_bytes() if config.plan else b""
    return sha256(config.model_dump_json(include=_OF_PLANS).encode() + file).hexdigest()


def _facts(plan: Plan, profile: Profile) -> Problem:
    """The plan's own devices; what they cost and hold was the planner's concern."""
    devices = [Device(kind, count, memory_bytes=1, price_per_hour=0.0) for kind, count in plan.devices().items()]
    return problem(profile, devices, links_between(devices))
