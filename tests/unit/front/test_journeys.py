"""Inputs that are held, fetched, merged and dropped in any way get the answers of the uncut network."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.replica import split
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.holdings import Claim, Holdings, Share
from isobatch.deployments.transport.orders import Departed, Order
from isobatch.deployments.transport.packed import Packed, pack, take
from isobatch.profiles.model import Batch, SplitModel
from tests.helpers.tiny_networks import network, random_inputs, with_memory
from tests.helpers.toy_model import Toy


@dataclass
class Place:
    """Where an input is: a row of what came by value, or of what a replica holds."""

    source: Packed | Claim
    row: int
    holder: Holdings | None = None


class Journey:
    """Inputs on their way through replicas on several devices, whose holdings are their own."""

    def __init__(self, model: SplitModel, inputs: list[Batch], replicas: int = 2) -> None:
        self.replicas = [SplitReplica(model) for _ in range(replicas)]
        self.places = {number: Place(pack(one), 0) for number, one in enumerate(inputs)}
        self.answers: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}

    def before(self, cursor: int) -> list[int]:
        return [number for number, place in self.places.items() if place.source.cursor == cursor]

    def launch(self, who: list[int], where: int, stop: int, ramps: Collection[int], **how: Any) -> None:
        replica = self.replicas[where]
        parts = tuple(self._part(self.places[number], replica) for number in who)
        for reply in replica.run(Order(stop, frozenset(ramps), parts, **how)):
            if isinstance(reply, Departed):
                for row, block, logits in zip(reply.exits.rows, reply.exits.blocks, reply.exits.logits, strict=True):
                    self.answers[who[row]] = int(block), logits
                    del self.places[who[row]]
            elif reply.survivors is not None:
                for index, row in enumerate(reply.rows):
                    self.places[who[row]] = Place(reply.survivors, index, replica.holdings)
        self._drop_what_nobody_needs()

    def held(self) -> int:
        return sum(len(replica.holdings) for replica in self.replicas)

    @staticmethod
    def _part(place: Place, replica: SplitReplica) -> Packed | Share:
        rows = np.array([place.row])
        if isinstance(place.source, Packed):
            return take(place.source, rows)
        assert place.holder is not None
        if place.holder is replica.holdings:
            return Share(place.source, rows)
        return place.holder.packed(place.source.key, rows)  # fetched from another device

    def _drop_what_nobody_needs(self) -> None:
        needed = {place.source.key for place in self.places.values() if isinstance(place.source, Claim)}
        for holdings in {id(replica.holdings): replica.holdings for replica in self.replicas}.values():
            holdings.drop([key for key in list(holdings._states) if key not in needed])


def uncut(model: SplitModel, one: Batch) -> tuple[int, "np.ndarray[Any, Any]"]:
    """Its exit and its logits, alone on a replica that runs everything."""
    (reply, *_) = SplitReplica(model).run(Order(model.num_blocks, frozenset(model.ramp_blocks), (pack(one),)))
    assert isinstance(reply, Departed)
    return int(reply.exits.blocks[0]), reply.exits.logits[0]


def travel(data: st.DataObject, model: SplitModel, inputs: list[Batch]) -> Journey:
    """Any cuts, any company, any replica, any manner of holding."""
    journey = Journey(model, inputs)
    cuts = data.draw(st.sets(st.integers(1, model.num_blocks - 1)))
    for stop in (*sorted(cuts), model.num_blocks):
        for cursor in sorted({place.source.cursor for place in journey.places.values()}):
            waiting = data.draw(st.permutations(journey.before(cursor)))
            while waiting:
                who, waiting = waiting[: (size := data.draw(st.integers(1, 4)))], waiting[size:]
                keep, limit = data.draw(st.booleans()), data.draw(st.sampled_from([0, 2**30]))
                where = data.draw(st.integers(0, 1))
                journey.launch(who, where, stop, model.ramp_blocks, keep=keep, by_value_bytes=limit)
    return journey


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=10))
def test_survivors_held_anywhere_give_the_same_answers(data: st.DataObject, blocks: list[int]) -> None:
    toy = Toy()
    inputs = [toy.encode([[block, number]]) for number, block in enumerate(blocks)]
    journey = travel(data, toy, inputs)
    for number, one in enumerate(inputs):
        block, logits = uncut(toy, one)
        assert journey.answers[number][0] == block
        assert (journey.answers[number][1] == logits).all()
    assert journey.held() == 0


@settings(deadline=None, max_examples=12)
@given(st.data(), st.sampled_from(["bert", "vit"]))
def test_held_survivors_of_a_padding_network_give_the_same_answers(data: st.DataObject, name: str) -> None:
    model = network(name, "entropy", [0.8])
    inputs = [with_memory(one, model) for one in random_inputs(name, 6, seed=data.draw(st.integers(0, 9)))]
    journey = travel(data, model, inputs)
    for number, one in enumerate(inputs):
        block, logits = uncut(model, one)
        assert journey.answers[number][0] == block
        assert np.abs(journey.answers[number][1] - logits).max() < 1e-5
    assert journey.held() == 0


def test_kept_survivors_never_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("bert", "entropy", [0.8])
    journey = Journey(model, [with_memory(one, model) for one in random_inputs("bert", 6, seed=3)], replicas=1)
    journey.launch([0, 1, 2], 0, 1, (), keep=True)
    journey.launch([3, 4, 5], 0, 1, (), keep=True)

    def refuse(*_: object) -> None:
        raise AssertionError("kept inputs went through host memory")

    monkeypatch.setattr(split, "pack", refuse)
    monkeypatch.setattr(split, "unpack", refuse)
    journey.launch([0, 4, 2], 0, 2, (), keep=True)  # rows of two launches, merged where they are
    journey.launch([1, 3, 5], 0, 2, (), keep=True)
    journey.launch([0, 1, 2, 3, 4, 5], 0, model.num_blocks, ())
    assert len(journey.answers) == 6
    assert journey.held() == 0
