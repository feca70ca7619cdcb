"""Plans of any shape, as the dispatcher sees them, and inputs that arrive: drawn by hypothesis."""

from dataclasses import dataclass

from hypothesis import strategies as st

from isobatch.deployments.dispatch.route import Route, Stage
from tests.helpers.dispatcher_world import Input, linear

BLOCKS = 8
FLEET = {name: [f"{name}{number}" for number in range(3)] for name in ("a", "b", "c", "d")}


@dataclass(frozen=True)
class Layout:
    """A plan: its route, and the replicas that each of its groups has."""

    route: Route
    groups: dict[str, list[str]]


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
