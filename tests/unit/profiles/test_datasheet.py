import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.planner.networks import bert_base, bert_large, distilbert, resnet18, resnet50, vit_base
from isobatch.profiles.datasheet import Shape, datasheet_table
from isobatch.profiles.devices import CATALOGUE
from isobatch.profiles.errors import UserError

# Parameters in millions and blocks, as their authors count them.
KNOWN = [(bert_base(), 109, 12), (bert_large(), 335, 24), (distilbert(), 66, 6), (vit_base(), 86, 12)]
KNOWN += [(resnet50(), 25.6, 16), (resnet18(), 11.7, 8)]
GFLOPS = [(bert_base(), 22.4), (resnet50(), 8.2), (resnet18(), 3.6), (vit_base(), 35.1)]


@pytest.mark.parametrize(("shape", "millions", "blocks"), KNOWN, ids=lambda value: getattr(value, "name", None))
def test_weights_and_blocks_are_those_of_the_real_network(shape: Shape, millions: float, blocks: int) -> None:
    weights = shape.embedding + sum(block.weights for block in shape.blocks)
    assert weights / 1e6 == pytest.approx(millions, rel=0.02)
    assert (len(shape.blocks), len(shape.ramps)) == (blocks, blocks)


@pytest.mark.parametrize(("shape", "gflops"), GFLOPS, ids=lambda value: getattr(value, "name", None))
def test_arithmetic_is_that_of_the_real_network(shape: Shape, gflops: float) -> None:
    flops = sum(kernel.flops for block in shape.blocks for kernel in block.kernels)
    assert flops / 1e9 == pytest.approx(gflops, rel=0.03)


@given(kind=st.sampled_from(sorted(CATALOGUE)), batch=st.integers(1, 127))
def test_a_larger_batch_takes_longer_but_never_longer_per_input(kind: str, batch: int) -> None:
    table = datasheet_table(distilbert(), kind, batch_sizes=(batch, batch + 1))
    fewer, more = np.asarray(table.block_s)
    assert (more >= fewer).all()
    assert (more / (batch + 1) <= fewer / batch * (1 + 1e-9)).all()


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(UserError, match="unknown dtype 'int4'"):
        datasheet_table(bert_base(), "v100", dtype="int4")
