from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.curves.published import published
from experiments.planner.networks import (
    bert_base,
    bert_large,
    distilbert,
    published_shape,
    resnet18,
    resnet50,
    vit_base,
)
from isobatch.profiles.curves import (
    BACKENDS,
    DTYPES,
    Curve,
    Fitted,
    curve_table,
    estimated,
    fitted,
    interval,
    pace,
    peak,
    steady,
)
from isobatch.profiles.datasheet import Kernel, Shape, datasheet_table
from isobatch.profiles.devices import CATALOGUE
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import ESTIMATED, MEASURED, PUBLISHED, mixed_backends_warning
from isobatch.profiles.sweep import whole_s

GPUS = sorted(set(CATALOGUE) - {"cpu"})


def test_a_launch_is_a_call_and_layers_that_take_their_floor_or_their_work() -> None:
    curve = Curve(call_s=1e-4, floor_s=1e-5, bytes_per_s=1e9, flops_per_s=1e9)
    small, large = [Kernel(0, 0, 0)] * 10, [Kernel(flops=1e6, values=0, weights=1e6)]
    assert curve.layer_s(small, 64, "float16") == pytest.approx(1e-4)
    assert curve.layer_s(large, 1, "float16") == pytest.approx(2e-3 + 1e-3)  # two bytes a weight, then the work
    assert curve.layer_s(large, 8, "float32") == pytest.approx(4e-3 + 8e-3)


@given(
    kind=st.sampled_from(GPUS),
    backend=st.sampled_from(BACKENDS),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 99),
)
def test_a_larger_batch_takes_no_less_and_no_more_per_input(kind: str, backend: str, dtype: str, batch: int) -> None:
    table = curve_table(distilbert(), kind, backend=backend, dtype=dtype, batch_sizes=(batch, batch + 1))
    fewer, more = whole_s(table)
    assert fewer <= more <= fewer * (batch + 1) / batch * (1 + 1e-9)
    assert (table.backend, table.dtype, table.kind) == (backend, dtype, kind)


def test_a_table_says_where_its_times_come_from() -> None:
    here = curve_table(bert_base(), "V100", backend="onnx", dtype="float16")
    assert (here.origin, here.source) == (PUBLISHED, "published: bert-base, 128 tokens, onnx, float16")
    there = curve_table(bert_base(), "h200", backend="onnx", dtype="float16")
    assert there.origin == ESTIMATED
    assert here.derived
    assert there.derived
    assert replace(here, source="measured: here").origin == MEASURED
    assert replace(here, source="datasheet: bert-base in float16").origin == ESTIMATED


def test_what_is_estimated_is_what_others_make_of_their_rate() -> None:
    """From one curve: its times, and its share of the pace."""

    curve = Curve(1e-4, 1e-5, 3e11, 4.0 * pace("v100", "onnx", "float16"))
    here = Fitted("v100", "onnx", "float16", "encoder", curve, 9, 0.1, "", "")
    like = ("onnx", "float16", "encoder")
    assert estimated("h100", *like, [here]) == replace(here.curve, flops_per_s=4.0 * pace("h100", "onnx", "float16"))
    assert estimated("h100", "onnx", "float32", "encoder", [here]).bytes_per_s == 2 * here.curve.bytes_per_s


def test_a_device_under_load_runs_between_its_base_clock_and_the_one_of_its_peak() -> None:
    """A T4's clocks are 585 and 1590 MHz. A K80's rates are printed at its base clock."""
    assert steady("t4", "torch", "float16") == pytest.approx(65e12 * (585 / 1590) ** 0.5)
    assert steady("k80", "torch", "float32") == peak("k80", "float32")
    assert all(0.3 < kind.base_clock <= 1 for kind in CATALOGUE.values())
    assert pace("rtx3090", "tensorrt", "float16") == 2 * pace("rtx3090", "graphs", "float16")  # sums in float16


def test_an_interval_is_what_known_devices_are_off_where_they_are_estimated_from_others() -> None:
    """One has twice the other's share of its pace, so one is half as slow as estimated, and one nearly twice as slow.

    Not twice, since no device gets a larger share of its steady rate than any known one.
    """

    def known(kind: str, share: float) -> Fitted:
        curve = Curve(0.0, 1e-9, 1e15, share * pace(kind, "onnx", "float16"))
        return Fitted(kind, "onnx", "float16", "encoder", curve, 9, 0.1, "", "")

    fast, slow = known("a100", 0.02), known("v100", 0.01)
    ((low, high),) = interval(bert_base(), (64.0,), (fast, slow))
    shares = [pace(kind, "onnx", "float16") / steady(kind, "onnx", "float16") for kind in ("a100", "v100")]
    ends = (0.5, 2 * shares[0] / shares[1])
    assert low == pytest.approx(ends[0] + 0.025 * (ends[1] - ends[0]), rel=1e-3)
    assert high == pytest.approx(ends[0] + 0.975 * (ends[1] - ends[0]), rel=1e-3)


def test_only_estimated_tables_have_an_interval_for_each_batch_size() -> None:
    known, unknown = (curve_table(bert_base(), kind, backend="onnx", dtype="float16") for kind in ("v100", "h200"))
    assert known.interval == ()
    assert len(unknown.interval) == len(unknown.batch_sizes)
    assert all(low < 1 < high for low, high in unknown.interval)
    assert unknown.interval == interval(bert_base(), unknown.batch_sizes, fitted())


def test_every_published_latency_is_of_a_known_shape_and_names_its_source() -> None:
    for series in published():
        assert published_shape(series.network, series.length).blocks
        assert " @ " in series.source
        batches = [batch for batch, _ in series.seconds]
        assert batches == sorted(set(batches))
        assert all(0 < seconds < 10 for _, seconds in series.seconds)


def test_what_nobody_knows_is_named() -> None:
    with pytest.raises(UserError, match="there are no times of backend 'tvm': choose among torch"):
        curve_table(bert_base(), "v100", backend="tvm", dtype="float16")
    with pytest.raises(UserError, match="unknown dtype 'int4'"):
        curve_table(bert_base(), "v100", backend="onnx", dtype="int4")
    with pytest.raises(UserError, match="unknown device kind 'v1000'"):
        curve_table(bert_base(), "v1000", backend="onnx", dtype="float16")


def test_tables_of_several_backends_are_told_from_those_of_one() -> None:
    onnx = [curve_table(resnet50(), kind, backend="onnx", dtype="float16") for kind in ("v100", "t4")]
    eager = curve_table(resnet50(), "l4", backend="torch", dtype="float16")
    assert mixed_backends_warning(onnx) is None
    assert "v100 onnx float16, t4 onnx float16, l4 torch float16" in str(mixed_backends_warning([*onnx, eager]))
    assert mixed_backends_warning([onnx[0], replace(eager, backend=None, dtype=None)]) is None  # nobody noted it


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
