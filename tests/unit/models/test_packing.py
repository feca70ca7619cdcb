"""Packed, a text gets what it gets alone, whoever keeps it company."""

import tracemalloc
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from isobatch.deployments.models import attention, spans, torch_model
from isobatch.deployments.models import cuda_graphs as graphs
from isobatch.deployments.models.cuda_graphs import GraphModel, RangeInputs, Recording
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.spans import RecordingShape, Spans, in_bands, in_shape, similar_lengths, spans_of
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.transport.packed import pack, take, unpack
from isobatch.profiles.model import Batch
from tests.helpers.backend_parity import Recorder, assert_as_alone
from tests.helpers.tiny_networks import DISTINCT, VOCABULARY, network, with_memory

CPU = torch.device("cpu")
LONGEST = 20
some_lengths = st.lists(st.integers(1, LONGEST), min_size=1, max_size=9)
Exported = Callable[[str], OnnxModel]
BACKENDS = ("torch", "many bands", "graphs", "onnx")


def texts(lengths: list[int], seed: int, model: TorchModel) -> Batch:
    ids = np.random.default_rng(seed).integers(2, VOCABULARY, sum(lengths))
    return with_memory(Batch(0, {"input_ids": ids}, np.zeros((len(lengths), 0), np.float32), np.array(lengths)), model)


@pytest.fixture
def cheap_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of tests are so short that a second band would never pay."""
    monkeypatch.setattr(spans, "PAIRS_PER_BAND", 0)


@pytest.fixture(scope="module")
def exported(cache: Path) -> Exported:
    """The network of a family, with a graph of every block. No other graphs are made meanwhile: whether they were ready
    in time would be chance."""

    @lru_cache
    def export(name: str) -> OnnxModel:
        exact = network(name, "entropy", [0.8])
        made = OnnxModel(exact, name, cache=cache)
        ramps = exact.ramp_blocks
        each = [BlockRange(b, b + 1, tuple(r for r in ramps if r == b)) for b in range(exact.num_blocks)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "PAIRS_PER_BAND", 0)
            made.prepare(each, texts([3], 0, exact))
        made.exported.request = lambda *_: None
        return made

    return export


def served(exact: TorchModel, name: str, backend: str, exported: Exported) -> TorchModel:
    if backend == "onnx":
        return exported(name)
    return GraphModel(exact, Recorder(exact)) if backend == "graphs" else exact


@pytest.mark.usefixtures("cheap_bands")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DISTINCT)
@settings(max_examples=5)
@given(data=st.data(), lengths=some_lengths, seed=st.integers(0, 99), active=st.booleans())
def test_in_any_company_a_text_gets_what_it_gets_alone(
    exported: Exported, name: str, backend: str, data: st.DataObject, lengths: list[int], seed: int, active: bool
) -> None:
    """In any order, cut anywhere, with ramps and without: alone means on torch, the text and nobody else."""
    exact = network(name, "entropy", [0.8])
    with pytest.MonkeyPatch.context() as patch:
        if backend == "torch":
            patch.setattr(spans, "PAIRS_PER_BAND", 512)
        patch.setattr(graphs, "LONGEST_MULTIPLE", 8)
        patch.setattr(graphs, "TOKENS_MULTIPLE", 16)
        model, batch = served(exact, name, backend, exported), texts(lengths, seed, exact)
        ramps = exact.ramp_blocks if active else ()
        alone = [
            exact.run(torch_model.select(batch, np.array([row])), exact.num_blocks, ramps).exits
            for row in range(len(lengths))
        ]
        inside: list[int] = data.draw(st.permutations(range(len(lengths))))
        cut = data.draw(st.integers(1, exact.num_blocks))
        stops = [*range(cut, exact.num_blocks), exact.num_blocks]
        assert_as_alone(model, torch_model.select(batch, np.array(inside)), inside, alone, stops, ramps)


@given(st.lists(some_lengths, min_size=1, max_size=4), st.data())
def test_what_is_merged_can_be_selected_again(parts: list[list[int]], data: st.DataObject) -> None:
    """On the device as on the way: each text's tokens stay together, in order."""
    model = network("bert")
    whole = [texts(lengths, seed, model) for seed, lengths in enumerate(parts)]
    merged = model.merge(whole)
    ends = np.cumsum([len(each) for each in whole])
    for batch, end in zip(whole, ends, strict=True):
        back = model.select(merged, np.arange(end - len(batch), end))
        assert np.array_equal(back.arrays["input_ids"], batch.arrays["input_ids"])
        assert np.array_equal(back.lengths, batch.lengths)
    rows = np.array(data.draw(st.lists(st.integers(0, len(merged) - 1), max_size=6)), np.int64)
    here, there = model.select(merged, rows), unpack([take(pack(merged), rows)])
    assert np.array_equal(here.arrays["input_ids"], there.arrays["input_ids"])
    assert np.array_equal(here.lengths, there.lengths)


@given(some_lengths, st.integers(1, 4), st.sampled_from([0, 30, 512]))
def test_bands_hold_everybody_once_and_cost_the_least(lengths: list[int], most: int, a_band: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "PAIRS_PER_BAND", a_band)
        bands = similar_lengths(np.array(lengths), most)
        assert sorted(np.concatenate(bands)) == list(range(len(lengths)))
        assert len(bands) <= most
        ascending = sorted(lengths)
        assert cost([[lengths[row] for row in band] for band in bands], a_band) == least(ascending, most, a_band)


def test_thousands_of_texts_take_no_memory_for_each_pair_of_them() -> None:
    lengths = np.random.default_rng(5).integers(1, 512, 4096)
    tracemalloc.start()
    bands = similar_lengths(lengths, 4)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(bands) == 4
    assert most_bytes < 20e6


def cost(bands: list[list[int]], a_band: int) -> int:
    return sum(len(band) * max(band) * (max(band) + spans.PAIRS_PER_TOKEN) + a_band for band in bands)


def least(ascending: list[int], most: int, a_band: int) -> int:
    """By trying every way."""
    together = cost([ascending], a_band)
    if most == 1 or len(ascending) == 1:
        return together
    cuts = range(1, len(ascending))
    return min([together, *(cost([ascending[:at]], a_band) + least(ascending[at:], most - 1, a_band) for at in cuts)])


def rows_without_texts(spans: Spans) -> int:
    return sum(len(band.places) for band in spans.bands) - spans.count


@given(some_lengths, st.integers(1, 4))
def test_every_token_finds_its_way_back(lengths: list[int], count: int) -> None:
    result = in_bands(np.array(lengths), CPU, count)
    assert len(result.bands) == count
    rows = torch.cat([band.places.flatten() for band in result.bands])
    present = torch.cat([band.present.flatten() for band in result.bands])
    assert (present.sum(), present[result.back].sum()) == (sum(lengths) + rows_without_texts(result), sum(lengths))
    for band in result.bands:
        assert torch.equal(band.places.where(band.present, band.places[:, :1]), band.places), "padding repeats a token"
    assert rows[result.back].tolist() == list(range(sum(lengths)))
    hidden = torch.rand(sum(lengths), 2)
    expected = torch.stack([each.mean(dim=0) for each in hidden.split(lengths)])
    for each in (result, spans_of(np.array(lengths), CPU)):
        assert torch.allclose(each.mean(hidden), expected, atol=1e-6)
        assert each.positions.tolist() == [place for length in lengths for place in range(length)]


def fake_kernel(
    tokens: attention.QueryKeyValue, edges: torch.Tensor, longest: int, scaling: float | None
) -> torch.Tensor:
    """Text by text, as torch's kernel on CUDA sees them."""
    assert edges.dtype == torch.int32
    assert max(np.diff(edges)) <= longest
    result = torch.zeros_like(tokens[0])
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        query, key, value = (each[start:stop].transpose(0, 1)[None] for each in tokens)
        attended = functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        result[start:stop] = attended[0].transpose(0, 1)
    return result


def as_on_cuda(patch: pytest.MonkeyPatch, kernel: Callable[..., torch.Tensor]) -> None:
    """In half precision, for which torch has a fused kernel."""
    patch.setattr(attention, "varlen", kernel)
    for module in ("torch_model", "cuda_graphs"):
        patch.setattr(f"isobatch.deployments.models.{module}.is_fused", lambda device, dtype: True)


@pytest.mark.parametrize("name", ["distilbert", "mpnet", "deberta-v3", "gpt2", "modernbert"])
@pytest.mark.parametrize("recorded", [False, True])
@settings(max_examples=4)
@given(st.lists(some_lengths, min_size=2, max_size=3), st.integers(0, 99))
def test_with_a_fused_kernel_there_are_the_same_answers(
    name: str, recorded: bool, batches: list[list[int]], seed: int
) -> None:
    """The kernel takes no bias: texts of families that have one are padded by the device. Only DistilBERT's heads are
    8 wide, as the kernel wants them. Batches of other texts in the same shapes follow each other."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        exact = network(name, "entropy", [0.8])
        expected = [exact.run(texts(each, seed, exact), exact.num_blocks, exact.ramp_blocks).exits for each in batches]
        as_on_cuda(patch, lambda *given: calls.append(1) or fake_kernel(*given))
        model = GraphModel(exact, Recorder(exact)) if recorded else exact
        for lengths, known in zip(batches, expected, strict=True):
            result = model.run(texts(lengths, seed, exact), exact.num_blocks, exact.ramp_blocks).exits
            assert result.blocks.tolist() == known.blocks.tolist()
            assert np.abs(result.logits - known.logits).max() < 1e-4
    assert calls or name != "distilbert"


def test_for_a_fused_kernel_the_host_sends_what_grows_with_tokens_only() -> None:
    """Not what grows with texts times the longest of them."""
    lengths = np.array([500, *([1] * 63)])
    made = in_shape(lengths, CPU, RecordingShape(64, int(lengths.sum()), 500), fused=True)
    assert set(made.tensors()) == {"positions", "starts", "edges"}
    assert made.padded.bands[0].places.shape == (64, 500)


def test_a_kernel_that_takes_no_scale_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.10."""
    for name, parameters in (("varlen_old", "query, key"), ("varlen_new", "query, key, *, scale=None")):
        (tmp_path / f"{name}.py").write_text(f"def varlen_attn({parameters}): ...")
    monkeypatch.syspath_prepend(tmp_path)
    kernels = {name: attention.has_kernel(name) for name in ("varlen_old", "varlen_new", "varlen_absent")}
    assert kernels == {"varlen_old": False, "varlen_new": True, "varlen_absent": False}


@given(some_lengths, st.integers(0, 3), st.integers(0, 9))
def test_the_mean_of_a_texts_own_rows_needs_no_padding(lengths: list[int], missing: int, spare: int) -> None:
    """Also in buffers with room for more texts and tokens, whose rows hold anything."""
    tokens = sum(lengths)
    shape = RecordingShape(len(lengths) + missing, tokens + spare, LONGEST)
    made, hidden = in_shape(np.array(lengths), CPU, shape, fused=True), torch.randn(tokens + spare, 3)
    hidden[tokens:] = torch.nan
    means = [rows.mean(dim=0) for rows in hidden[:tokens].split(lengths)]
    assert torch.allclose(made.mean(hidden)[: len(lengths)], torch.stack(means), atol=1e-6)
    assert made.mean(hidden.half()).dtype == torch.half


def test_full_batches_of_a_split_share_a_recording_that_is_made_before_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_cuda(monkeypatch, fake_kernel)
    exact, recorded = network("distilbert"), list[tuple[BlockRange, RecordingShape]]()

    def record(block_range: BlockRange, buffers: "partial[RangeInputs]") -> Recording:
        made = buffers().spans
        recorded.append((block_range, made.shape))
        return Recorder(exact)(block_range, buffers)

    model = GraphModel(exact, record)

    def launch(lengths: list[int]) -> None:
        middle = exact.run(texts(lengths, 0, exact), 2, ()).survivors
        expected, result = (each.run(middle, 4, ()).survivors for each in (exact, model))
        assert torch.allclose(expected.arrays["hidden"], result.arrays["hidden"], atol=1e-5)

    model.warm_up(2, [4], (), texts([12] * 8, 0, exact))
    of_split = (BlockRange(2, 4), RecordingShape(16, 96, 24))
    for full in ([12] * 8, [6] * 15, [24, 24, 24, 20], [10, 11, 12, 13, 14, 15]):
        launch(full)
    assert recorded == [of_split]
    launch([5] * 4)
    assert recorded == [of_split, (BlockRange(2, 4), RecordingShape(4, 20, 8))]


@given(some_lengths, st.none() | st.integers(LONGEST, 30))
def test_a_shape_for_the_fused_kernel_is_a_quarter_too_large_at_most(lengths: list[int], longest: int | None) -> None:
    count, tokens, most = graphs.fused_shape(np.array(lengths), longest)
    assert len(lengths) <= count < 2 * len(lengths)
    assert sum(lengths) <= tokens <= 1.25 * sum(lengths)
    assert max(lengths) <= most <= (longest or 2 * max(lengths))


def test_the_fused_kernel_has_few_shapes() -> None:
    """Of up to 4,096 tokens, with 8 texts of one length: four to each power of two."""
    shapes = {graphs.fused_shape(np.full(8, length), None) for length in range(1, 513)}
    assert len(shapes) <= 4 * 9 + 1
