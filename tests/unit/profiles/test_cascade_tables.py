"""The tables of levels as one: each block takes what it took, and an edge costs what the next level reads."""

from dataclasses import replace

import pytest

from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable, cascade_table

SMALL = LatencyTable("cpu", (1, 8), ((1.0, 2.0), (3.0, 4.0)), ((0.1, 0.0),) * 2, 0.5, (100, 4), (7, 8), "measured: a")
LARGE = LatencyTable("cpu", (1, 4, 16), ((5.0,), (8.0,), (20.0,)), ((0.0,),) * 3, 0.2, (4,), (9,), "measured: b")


def test_blocks_stand_side_by_side_at_every_size_that_both_know() -> None:
    both = cascade_table([SMALL, LARGE], carried_bytes=30)
    assert both.batch_sizes == (1, 4, 8)
    assert both.block_s[0] == (1.0, 2.0, 5.0)
    assert both.block_s[2] == (3.0, 4.0, 12.0)
    assert (both.ramp_s[0], both.launch_s, both.memory_bytes) == ((0.1, 0.0, 0.0), 0.5, (7, 8, 9))
    assert both.source == "measured: a; measured: b"


def test_the_text_of_the_next_level_travels_up_to_the_edge_and_then_nothing_else_does() -> None:
    assert cascade_table([SMALL, LARGE], carried_bytes=30).hidden_bytes == (130, 30, 4)


def test_levels_on_two_kinds_or_at_two_lengths_are_no_one_table() -> None:
    for other in (replace(LARGE, kind="v100"), replace(LARGE, length=9)):
        with pytest.raises(UserError, match="one kind and at one length"):
            cascade_table([SMALL, other], carried_bytes=30)
