"""Any plan, any load, and whatever breaks: everyone ends exactly once, and nobody is forgotten."""

from dataclasses import dataclass, field

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deployments.dispatch.messages import Limits, Outcome
from deployments.dispatch.route import Route, Stage
from tests.unit.dispatch.world import Input, World, linear

BLOCKS = 8
FIND = (Phase.explicit, Phase.reuse, Phase.generate)  # making a failure smaller would take minutes
FLEET = {name: [f"{name}{number}" for number in range(3)] for name in ("a", "b", "c", "d")}


@dataclass(frozen=True)
class Layout:
    """A plan: its route, and the replicas that each of its groups has."""

    route: Route
    groups: dict[str, list[str]]


@dataclass
class Schedule:
    layouts: list[Layout]
    inputs: list[Input]
    limits: Limits = field(default_factory=Limits)
    broken: set[int] = field(default_factory=set)  # launches that fail
    lost: set[int] = field(default_factory=set)  # those of them that take along what they ran
    slow: dict[str, float] = field(default_factory=dict)

    def world(self) -> World:
        first = self.layouts[0]
        return World(
            first.route, first.groups, self.limits, self.slow,
            fails=lambda launch: launch.id in self.broken, loses=lambda launch: launch.id in self.lost,
        )  # fmt: skip


@st.composite
def lanes(draw: st.DrawFn, names: tuple[str, ...]) -> Route:
    """One pipeline on these groups; where splits take turns they may keep what they run."""
    cuts = sorted(draw(st.sets(st.integers(1, BLOCKS - 1), max_size=3)))
    bounds = zip([0, *cuts], [*cuts, BLOCKS], strict=True)

    def stage(start: int, stop: int) -> Stage:
        batch, launch_s, survival = draw(st.integers(1, 5)), draw(st.floats(0.001, 0.05)), draw(st.floats(0, 1))
        local = start > 0 and draw(st.booleans())
        return linear(start, stop, batch, draw(st.sampled_from(names)), launch_s, survival, local=local)

    return Route(tuple(stage(*bound) for bound in bounds))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    first, *others = (draw(lanes(names)) for names in draw(st.sampled_from([(("a", "b"),), (("a", "b"), ("c", "d"))])))
    route = Route(first.stages, beside=tuple(others))
    return Layout(route, {name: FLEET[name][: draw(st.integers(1, 3))] for name in route.groups})


def arrivals(least_slack_s: float, most_slack_s: float) -> st.SearchStrategy[list[Input]]:
    one = st.builds(Input, st.floats(0, 0.5), st.integers(1, BLOCKS), st.floats(least_slack_s, most_slack_s))
    return st.lists(one, min_size=1, max_size=60)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    backlog, ahead, early_s = draw(st.integers(1, 50)), draw(st.integers(0, 2)), draw(st.floats(0, 0.02))
    return Limits(backlog, ahead=ahead, early_s=early_s, probe_every_s=0.1)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    broken = draw(st.sets(st.integers(0, 60), max_size=20))
    return Schedule(
        draw(st.lists(layouts(), min_size=1, max_size=3)),
        draw(arrivals(0.0, 0.5)),
        draw(limits()),
        broken,
        {launch for launch in broken if draw(st.booleans())},
        {draw(st.sampled_from(FLEET["a"])): draw(st.floats(0.2, 20))},
    )


@settings(deadline=None, phases=FIND, max_examples=120)
@given(schedules(), st.data())
def test_whatever_happens_everyone_ends_exactly_once(schedule: Schedule, data: st.DataObject) -> None:
    world = schedule.world()
    world.arrive(*schedule.inputs)
    for ticket in data.draw(st.sets(st.integers(0, 59), max_size=10)):
        world.at(data.draw(st.floats(0, 0.6)), lambda ticket=ticket: world.dispatcher.abandon(ticket))
    for layout in schedule.layouts[1:]:
        at_s = data.draw(st.floats(0, 0.6))
        world.at(at_s, lambda layout=layout: world.reroute(layout.route, layout.groups))
    for name in data.draw(st.sets(st.sampled_from(["a", "b", "c"]))):
        world.at(data.draw(st.floats(0, 0.5)), lambda name=name: without_one(world, name))
    world.run()
    assert len(world.outcomes) + len(world.refusals) == len(schedule.inputs)
    assert sorted(world.outcomes) == sorted(world.depths)
    assert world.dispatcher.inside == 0
    assert world.dispatcher.waiting() == {}
    assert owed(world) < 1e-9
    slowest_s = max(stage.seconds(1) for layout in schedule.layouts for stage in stages(layout))
    for ticket, outcome in world.outcomes.items():
        if outcome is Outcome.EXPIRED:
            assert world.ended_s[ticket] >= world.deadlines[ticket] - slowest_s


@settings(deadline=None, phases=FIND, max_examples=60)
@given(schedules(), st.data())
def test_whoever_has_time_is_answered_though_plans_and_replicas_change(schedule: Schedule, data: st.DataObject) -> None:
    """Nobody starves: with a minute for each, all are answered, however few replicas are left."""
    patient = [Input(each.at_s, each.depth, 60.0) for each in schedule.inputs]
    calm = Schedule(schedule.layouts, patient, Limits(retries=1000), schedule.broken, schedule.lost)
    world = calm.world()
    world.arrive(*calm.inputs)
    for layout in calm.layouts[1:]:
        world.at(data.draw(st.floats(0, 0.6)), lambda layout=layout: world.reroute(layout.route, layout.groups))
    for name in ("a", "b", "c"):
        world.at(data.draw(st.floats(0, 0.5)), lambda name=name: without_one(world, name))
    world.run()
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert not world.refusals


def stages(layout: Layout) -> list[Stage]:
    return [stage for lane in layout.route.lanes for stage in lane.stages]


def without_one(world: World, name: str) -> None:
    """A replica goes, if it is not the last."""
    if len(members := world.groups.get(name, [])) > 1:
        world.reroute(world.dispatcher.route, {**world.groups, name: members[1:]})


def owed(world: World) -> float:
    """Seconds that groups still believe to owe."""
    return max(abs(group.owed_s) for group in world.dispatcher._groups.values())
