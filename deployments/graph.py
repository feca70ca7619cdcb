"""What is to run: a plan, the facts it was made from, and a name for each placement."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from deployments.config import AppConfig
from deployments.dispatch.route import Route
from deployments.planned import placements_of, route_of
from deployments.planning import first_plan
from optimizer.plan import Placement, Plan, read_plan
from optimizer.problem import Problem, problem
from profiles.devices import Device, links_between
from profiles.errors import UserError
from profiles.files import Profile, load


@dataclass(frozen=True)
class Graph:
    """Placements by the name of the application that runs each."""

    plan: Plan
    facts: Problem
    placements: dict[str, Placement]

    @property
    def route(self) -> Route:
        return route_of(self.plan, self.facts, list(self.placements))


def read_graph(config: AppConfig, application: str) -> Graph:
    """From the profile that the configuration names, and the plan that it names or that is made for its devices."""
    profile = profile_of(config)
    plan = first_plan(config, profile)
    for kind in plan.devices():
        profile.table(kind)  # says what it has, if not this one
    if plan.num_blocks != profile.num_blocks:
        raise UserError(f"{config.plan} covers {plan.num_blocks} blocks, {config.profile} has {profile.num_blocks}")
    # Another plan or configuration gets other names: the old placements finish their work beside the new ones.
    mark = sha256(f"{config.model_dump_json()} {plan.to_json()}".encode()).hexdigest()[:6]
    placements = {f"{application}.{mark}.{index}-{p.kind}": p for index, p in enumerate(placements_of(plan))}
    return Graph(plan, _facts(plan, profile), placements)


def profile_of(config: AppConfig) -> Profile:
    assert config.profile, "This is a bug: AppConfig asks for it."
    return load(Path(config.profile))


def check_depth(config: AppConfig, num_blocks: int) -> None:
    """Of what fails later Serve tells no reason."""
    path, read = (config.plan, read_plan) if config.plan else (config.profile, load)
    covered = read(Path(path or "")).num_blocks
    if covered != num_blocks:
        raise UserError(f"{path} covers {covered} blocks, the network has {num_blocks}: plan from its own profile")


def _facts(plan: Plan, profile: Profile) -> Problem:
    """The plan's own devices; what they cost and hold was the planner's concern."""
    devices = [Device(kind, count, memory_bytes=1, price_per_hour=0.0) for kind, count in plan.devices().items()]
    return problem(profile, devices, links_between(devices))
