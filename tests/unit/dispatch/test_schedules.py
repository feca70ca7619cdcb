"""Under any plan, load and failures, every input ends exactly once.

All events of an example are drawn before it runs, as one `Schedule`. Hypothesis makes a failing schedule as small as
possible and prints it, so that it can be repeated.
"""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.dispatch.messages import Limits, Outcome
from isobatch.deployments.dispatch.route import Stage
from tests.helpers.dispatcher_world import Input, World
from tests.helpers.layouts import FLEET, Layout, arrivals, layouts


@dataclass
class Schedule:
    """The first layout is there from the start; the others, and all else that happens, come at their times."""

    layouts: list[Layout]
    inputs: list[Input]
    reroutes_s: list[float]  # to each layout after the first
    leaves: dict[str, float] = field(default_factory=dict)  # a replica of this group goes, in seconds from the start
    abandons: dict[int, float] = field(default_factory=dict)  # when clients go, by the number of their input
    limits: Limits = field(default_factory=Limits)
    broken: set[int] = field(default_factory=set)  # launches that fail
    lost: set[int] = field(default_factory=set)  # those of them that take along what they ran
    slow: dict[str, float] = field(default_factory=dict)

    def play(self) -> World:
        first = self.layouts[0]
        world = World(
            first.route, first.groups, self.limits, self.slow,
            fails=lambda launch: launch.id in self.broken, loses=lambda launch: launch.id in self.lost,
        )  # fmt: skip
        world.arrive(*self.inputs)
        for number, at_s in self.abandons.items():
            world.at(at_s, lambda number=number: world.abandon(number))
        for layout, at_s in zip(self.layouts[1:], self.reroutes_s, strict=True):
            world.at(at_s, lambda layout=layout: world.reroute(layout.route, layout.groups))
        for name, at_s in self.leaves.items():
            world.at(at_s, lambda name=name: without_one(world, name))
        world.run()
        return world


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    max_inside, ahead, early_s = draw(st.integers(1, 50)), draw(st.integers(0, 2)), draw(st.floats(0, 0.02))
    audits = draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.sampled_from([0.0, 0.2]))
    return Limits(
        max_inside, ahead=ahead, early_s=early_s, probe_every_s=0.1, audit_share=audits[0], audit_cost=audits[1]
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    broken = draw(st.sets(st.integers(0, 60), max_size=20))
    plans = draw(st.lists(layouts(), min_size=1, max_size=3))
    return Schedule(
        plans,
        draw(arrivals(0.0, 0.5)),
        [draw(st.floats(0, 0.6)) for _ in plans[1:]],
        draw(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats(0, 0.5))),
        draw(st.dictionaries(st.integers(0, 59), st.floats(0, 0.6), max_size=10)),
        draw(limits()),
        broken,
        {launch for launch in sorted(broken) if draw(st.booleans())},
        {draw(st.sampled_from(FLEET["a"])): draw(st.floats(0.2, 20))},
    )


@settings(deadline=None, max_examples=120)
@given(schedules())
def test_every_input_ends_exactly_once_whatever_happens(schedule: Schedule) -> None:
    world = schedule.play()
    assert len(world.outcomes) + len(world.refusals) == len(schedule.inputs)
    assert sorted(world.outcomes) == sorted(world.depths)
    assert world.dispatcher.inside == 0
    assert world.dispatcher.waiting() == {}
    assert owed(world) < 1e-9
    slowest_s = max(stage.seconds(1) for layout in schedule.layouts for stage in stages(layout))
    for ticket, outcome in world.outcomes.items():
        if outcome is Outcome.EXPIRED:
            assert world.ended_s[ticket] >= world.deadlines[ticket] - slowest_s


@settings(deadline=None, max_examples=60)
@given(schedules(), st.tuples(*[st.floats(0, 0.5)] * 3))
def test_inputs_with_time_are_answered_during_changes(schedule: Schedule, leaves_s: tuple[float, float, float]) -> None:
    """Nobody starves: with a minute for each, all are answered, however few replicas are left."""
    patient = [Input(each.at_s, each.depth, 60.0) for each in schedule.inputs]
    leaves = dict(zip("abc", leaves_s, strict=True))
    limits = Limits(retries=1000, audit_share=schedule.limits.audit_share, audit_cost=schedule.limits.audit_cost)
    same = replace(schedule, inputs=patient, leaves=leaves, abandons={}, limits=limits, slow={})
    world = same.play()
    assert set(world.outcomes.values()) == {Outcome.ANSWERED}
    assert not world.refusals


def stages(layout: Layout) -> list[Stage]:
    return [stage for lane in layout.route.pipelines for stage in lane.stages]


def without_one(world: World, name: str) -> None:
    """A replica goes, if it is not the last."""
    if len(members := world.groups.get(name, [])) > 1:
        world.reroute(world.dispatcher.route, {**world.groups, name: members[1:]})


def owed(world: World) -> float:
    """Seconds that groups still believe to owe."""
    return max(abs(group.owed_s) for group in world.dispatcher._groups.values())
