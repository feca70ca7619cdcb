"""The resources that replicas request, and their placement on nodes."""

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from isobatch.deployments.config import AppConfig
from isobatch.deployments.resources import Resources, first_fit

amounts = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
some_resources = st.dictionaries(st.sampled_from(["CPU", "GPU"]), amounts, max_size=2)
some_nodes = st.lists(some_resources, max_size=3)


def places(needs: Sequence[Resources], nodes: Sequence[Resources]) -> Iterator[Sequence[int | None]]:
    """By brute force: every placement of the needs on nodes with room (None: not placed)."""
    for chosen in product([None, *range(len(nodes))], repeat=len(needs)):
        taken = [
            {
                name: sum(need.get(name, 0.0) for need, at in zip(needs, chosen, strict=True) if at == n)
                for name in names
            }
            for n, names in enumerate([{"CPU", "GPU"}] * len(nodes))
        ]
        if all(taken[n][name] <= node.get(name, 0.0) for n, node in enumerate(nodes) for name in taken[n]):
            yield chosen


@given(st.lists(some_resources, max_size=4), some_nodes)
@example([{"CPU": 1.0}, {"CPU": 2.0}], [{"CPU": 2.0}, {"CPU": 1.0}])
def test_no_need_is_placed_without_room(needs: list[Resources], nodes: list[Resources]) -> None:
    result = first_fit(needs, nodes)
    assert any([at is not None for at in chosen] == result for chosen in places(needs, nodes))


@given(some_resources, st.integers(0, 4), some_nodes)
def test_as_many_equal_needs_as_possible_fit(need: Resources, count: int, nodes: list[Resources]) -> None:
    most = max(sum(at is not None for at in chosen) for chosen in places([need] * count, nodes))
    assert sum(first_fit([need] * count, nodes)) == most


@given(st.integers(0, 2), st.integers(0, 2), some_nodes)
def test_as_many_needs_of_disjoint_kinds_as_possible_fit(cpus: int, gpus: int, nodes: list[Resources]) -> None:
    needs: list[Resources] = [{"CPU": 1.0}] * cpus + [{"GPU": 1.0}] * gpus
    most = max(sum(at is not None for at in chosen) for chosen in places(needs, nodes))
    assert sum(first_fit(needs, nodes)) == most


@given(st.lists(some_resources, max_size=8), some_nodes)
def test_no_node_with_room_is_skipped(needs: list[Resources], nodes: list[Resources]) -> None:
    """One pass over the nodes places thousands of needs, and asking every node for each need would place no more."""
    free = [dict(node) for node in nodes]
    for need, fits in zip(needs, first_fit(needs, nodes), strict=True):
        fields = {name: amount for name, amount in need.items() if amount}
        room = [node for node in free if all(node.get(name, 0.0) >= amount for name, amount in fields.items())]
        assert fits == bool(room)
        for name, amount in fields.items() if room else ():
            room[0][name] -= amount


def test_a_replica_requests_the_resources_of_its_kind() -> None:
    assert AppConfig(cpus_per_replica=2).replica_needs("cpu") == {"CPU": 2.0, "GPU": 0.0}
    assert AppConfig().replica_needs("a100") == {"CPU": 1.0, "GPU": 1, "accelerator_type:A100": 0.001}
    assert AppConfig().replica_options("a100", labelled=True) == {
        "num_gpus": 1,
        "label_selector": {"isobatch.io/kind": "a100"},
    }
    virtual = AppConfig(backend="virtual", profile="it.json")
    assert virtual.replica_needs("a100") == {"CPU": 0.01, "GPU": 0.0}
