"""A virtual device takes the table's time; inputs leave by the profile, or after the block that they name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.deployments.transport.packed import pack, take, unpack
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from tests.helpers.virtual_device import BLOCKS, SURVIVAL, table

pytestmark = pytest.mark.filterwarnings("ignore::isobatch.profiles.latency.ExtrapolationWarning")


class Machine:
    """A clock whose sleeps are all too long by the same time."""

    def __init__(self, overslept_s: float = 0.0) -> None:
        self.now_s, self.overslept_s = 0.0, overslept_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.overslept_s

    def device(self, length: int | None = None) -> VirtualModel:
        return VirtualModel(
            table(),
            ExitProfile(SURVIVAL),
            sleep=self.sleep,
            clock=lambda: self.now_s,
            slower=lambda: 1.0,
            length=length,
        )


def device() -> VirtualModel:
    return Machine().device()


LAUNCH_S = 0.0005 + 4 * (0.001 + 0.002 + 0.003) + 0.0001


def test_many_launches_take_the_time_in_the_table_although_sleeps_are_too_long() -> None:
    machine = Machine(overslept_s=0.002)
    model = machine.device()
    for _ in range(10):
        model.run(model.encode([None] * 4), 3, ramps=(1, 3))
    assert machine.now_s == pytest.approx(10 * LAUNCH_S + 0.002)


def test_exits_follow_the_profile() -> None:
    model = device()
    exits = model.run(model.encode([None] * 20_000), BLOCKS, ramps=model.ramp_blocks).exits
    left = np.bincount(exits.blocks, minlength=BLOCKS) / 20_000
    assert left == pytest.approx([0.2, 0.3, 0.0, 0.5], abs=0.015)


@given(
    st.lists(st.integers(0, BLOCKS - 1), min_size=1), st.sets(st.integers(0, BLOCKS - 2)), st.integers(1, BLOCKS - 1)
)
def test_an_input_may_name_the_block_after_which_it_is_sure(blocks: list[int], ramps: set[int], cut: int) -> None:
    model = device()
    first = model.run(model.encode([{"exit_block": block} for block in blocks]), cut, ramps)
    later = model.run(first.survivors, BLOCKS, ramps).exits if first.survivors else None
    left = sorted([*first.exits.blocks.tolist(), *(later.blocks.tolist() if later else [])])
    assert left == sorted(min([ramp for ramp in ramps if ramp >= block], default=BLOCKS - 1) for block in blocks)


def test_inputs_leave_at_sets_of_ramps_that_the_profile_knows() -> None:
    """Half of them at ramp 1 only: with ramp 1 closed, they go on to the end."""
    survival = (1.0, 1.0, *[0.5] * (BLOCKS - 2))
    model = VirtualModel(table(), ExitProfile(survival, (((1,), 0.5), ((), 0.5))), sleep=lambda _: None)
    batch = model.encode([None] * 2000)
    for ramps, share in (({1, 2}, 0.5), ({2}, 0.0)):
        exits = model.run(batch, BLOCKS - 1, ramps).exits
        assert len(exits.rows) / 2000 == pytest.approx(share, abs=0.05), "4.5 standard deviations"


def test_survivors_have_the_size_in_the_table() -> None:
    model = device()
    after = model.run(model.encode([{"exit_block": 3}] * 5), 2, ramps=()).survivors
    assert after is not None
    assert after.arrays["hidden"].nbytes == 5 * 200


def test_wrong_inputs_and_tables_are_reported() -> None:
    with pytest.raises(UserError, match=r"exit_block = 7 must lie in 0..3"):
        device().encode([{"exit_block": 7}])
    with pytest.raises(UserError, match="cannot be a list of inputs"):
        device().encode([[{"exit_block": 1}, {"exit_block": 2}]])
    with pytest.raises(UserError, match="the table has 4 blocks, the exit profile 2"):
        VirtualModel(table(), ExitProfile((1.0, 0.5)))


def test_texts_take_the_time_for_their_tokens() -> None:
    machine = Machine()
    model = machine.device(length=10)
    batch = model.encode(["a text of five words", {"exit_block": 3, "tokens": 23}, None])
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [7, 23, 10]
    model.run(batch, 3, ramps=(1, 3))
    assert machine.now_s == pytest.approx(LAUNCH_S)
    with pytest.raises(UserError, match="tokens = 0"):
        model.encode([{"tokens": 0}])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=8), st.data())
def test_texts_keep_their_tokens_when_selected_and_merged(texts: list[tuple[int, int]], data: st.DataObject) -> None:
    model = Machine().device(length=10)
    parts = [model.encode([{"exit_block": block, "tokens": tokens}]) for block, tokens in texts]
    merged = model.merge([unpack([pack(part)]) for part in parts])
    launched = model.run(merged, 2, ramps=(0, 1))
    staying = [number for number, (block, _) in enumerate(texts) if block > 1]
    assert sorted(launched.exits.rows.tolist()) == [number for number in range(len(texts)) if number not in staying]
    if launched.survivors is None:
        assert not staying
        return
    assert launched.survivors.lengths is not None
    assert launched.survivors.lengths.tolist() == [texts[number][1] for number in staying]
    rows = np.array(data.draw(st.permutations(range(len(staying)))))
    taken = unpack([take(pack(launched.survivors), rows)])
    exits = model.run(taken, 4, ramps=()).exits
    assert taken.arrays["hidden"].shape[0] == sum(texts[number][1] for number in staying)
    assert len(exits) == len(staying)
