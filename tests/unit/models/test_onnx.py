"""On ONNX Runtime a network gives what it gives on torch: every family, every cut, every way in which it is served."""

import dataclasses
import logging
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.models import attention, onnx_model, onnx_session
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.onnx_session import check_providers, providers, run_options
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Batch
from tests.helpers.backend_parity import assert_same, batch_for, check_cuts
from tests.helpers.tiny_networks import IMAGE, network

THRESHOLD = 0.8


@pytest.mark.parametrize("name", ["albert", *IMAGE])
def test_a_family_equals_torch_wherever_it_is_cut(name: str, cache: Path) -> None:
    """Each block of every family of texts is exported and compared in test_packing.py."""
    exact = network(name, "entropy", [THRESHOLD])
    served = OnnxModel(exact, name, cache=cache)
    check_cuts(served, exact, name, {3: 5})
    assert not served.exported.requested, "every block range was exported in time"


@lru_cache
def partly_exported(policy: str, cache: Path) -> tuple[TorchModel, OnnxModel]:
    """A network on torch, and with graphs of two of its ranges."""
    exact = network("distilbert", policy, [THRESHOLD if policy == "entropy" else 2])
    served = OnnxModel(exact, "distilbert", cache=cache)
    served.exported.request = lambda *_: None
    served.prepare([BlockRange(0, 2, (0, 1)), BlockRange(3, 5, (3,))], batch_for(exact, "distilbert"))
    return exact, served


@settings(max_examples=10)
@given(
    count=st.integers(1, 7),
    seed=st.integers(0, 99),
    stops=st.sets(st.integers(1, 4)),
    active=st.sets(st.integers(0, 3)),
    policy=st.sampled_from(["entropy", "patience"]),
)
def test_whatever_is_ready_any_batch_gets_what_torch_gives(
    cache: Path, count: int, seed: int, stops: set[int], active: set[int], policy: str
) -> None:
    """Few ranges are exported, and launches are longer than one of them, shorter, or have other ramps."""
    exact, served = partly_exported(policy, cache)
    here: Batch | None = batch_for(exact, "distilbert", count, seed)
    for stop in [*sorted(stops), 5]:
        expected = exact.run(here, stop, active)
        assert_same(expected, served.run(here, stop, active))
        if (here := expected.survivors) is None:
            return


def test_torch_serves_until_a_piece_is_made_in_the_background(cache: Path) -> None:
    exact = network("vit", "entropy", [THRESHOLD])
    served, batch = OnnxModel(exact, "another vit", cache=cache), batch_for(exact, "vit")
    wanted = BlockRange(0, 2, (0, 1))
    expected = exact.run(batch, 2, exact.ramp_blocks)
    assert_same(expected, served.run(batch, 2, exact.ramp_blocks))
    served.exported.requested[wanted].result()
    assert served.exported.get(wanted)
    served.inner.through = lambda *_: pytest.fail("torch was asked")
    assert_same(expected, served.run(batch, 2, exact.ramp_blocks))


def test_ready_ranges_that_make_up_a_longer_one_run_in_its_place(cache: Path) -> None:
    """So weights are held once, also while launches without ramps run beside launches that stop at them."""
    exact = network("bert", "entropy", [THRESHOLD])
    served, batch = OnnxModel(exact, "bert, in pieces", cache=cache), batch_for(exact, "bert")
    stops = (0, *(ramp + 1 for ramp in exact.ramp_blocks), exact.num_blocks)
    served.prepare([BlockRange(start, stop) for start, stop in pairwise(stops)], batch)
    assert_same(exact.run(batch, exact.num_blocks, ()), served.run(batch, exact.num_blocks, ()))
    assert not served.exported.requested
    served.warm_up(0, [exact.num_blocks], (), batch)
    assert [*served.exported.requested] == [BlockRange(0, exact.num_blocks)], "a plan's own ranges are exported"
    served.exported.requested[BlockRange(0, exact.num_blocks)].result()


def test_all_that_a_session_gives_passes_into_torchs_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where streams keep no other memory."""
    model = network("resnet", "entropy", [0.5])
    batch, passed = batch_for(model, "resnet"), list[torch.Tensor]()
    monkeypatch.setattr(onnx_session, "in_torchs_memory", lambda output: passed.append(output) or output)
    served = OnnxModel(model, "resnet, passed", cache=cache)
    wanted = BlockRange(0, 2, (0, 1))
    served.prepare([wanted], batch)
    session = served.exported.get(wanted)
    session.fixed({name: torch.as_tensor(each) for name, each in batch.arrays.items()})
    assert len(passed) == 3, "two ramps and the hidden state"


def test_a_piece_is_exported_once_for_all_replicas(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("resnet")
    batch = batch_for(model, "resnet")
    OnnxModel(model, "resnet, shared", cache=cache).prepare([BlockRange(1, 2)], batch)
    monkeypatch.setattr(onnx_model, "export", lambda *_: pytest.fail("exported again"))
    again = OnnxModel(model, "resnet, shared", cache=cache)
    again.prepare([BlockRange(1, 2)], batch)
    assert again.exported.get(BlockRange(1, 2))


def test_other_weights_are_another_piece() -> None:
    tensors = {"hidden": torch.zeros(1, 2)}
    cpu = torch.device("cpu")
    keys = {
        onnx_model.GraphSource(*origin).key(block_range, tensors)
        for origin in [("a", cpu, torch.float32), ("b", cpu, torch.float32), ("a", cpu, torch.float32, True)]
        for block_range in [BlockRange(0, 1), BlockRange(0, 1, (0,))]
    }
    assert len(keys) == 6


def test_some_stay_on_torch(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(onnx_model, "export", refuse)
    model = network("vit")
    served, batch = OnnxModel(model, "vit, never exported", cache=cache), batch_for(model, "vit")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert_same(model.run(batch, 1, ()), served.run(batch, 1, ()))
            served.exported.requested[BlockRange(0, 1)].result()
    assert caplog.text.count("blocks 0-1 stay on torch") == 1


def test_half_precision_is_as_near_to_full_as_torch_is(cache: Path) -> None:
    """1 % of the largest logit is allowed; ONNX Runtime was seen at 0.2 %, as torch is itself."""
    exact, half = network("bert"), network("bert", dtype=torch.float16)
    served, batch = OnnxModel(half, "bert, half", cache=cache), batch_for(exact, "bert", 32)
    served.prepare([BlockRange(0, 2), BlockRange(2, 4)], batch)
    expected = exact.run(batch, 4, ()).exits
    middle = served.run(batch, 2, ()).survivors
    assert middle.arrays["hidden"].dtype == torch.float16
    exits = served.run(middle, 4, ()).exits
    assert np.abs(exits.logits - expected.logits).max() < 0.01 * np.abs(expected.logits).max()


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_8_bits_change_few_answers(name: str, tmp_path: Path) -> None:
    cache = tmp_path
    exact = network(name, "entropy", [THRESHOLD])
    served, batch = OnnxModel(exact, name, int8=True, cache=cache), batch_for(exact, name, 64)
    everything = BlockRange(0, exact.num_blocks, exact.ramp_blocks)
    served.prepare([everything], batch)
    expected = exact.run(batch, exact.num_blocks, exact.ramp_blocks).exits
    exits = served.run(batch, exact.num_blocks, exact.ramp_blocks).exits
    assert np.abs(exits.logits - expected.logits).max() > 0
    assert (exits.labels == expected.labels).mean() > 0.9
    assert (exits.blocks == expected.blocks).mean() > 0.8


@pytest.mark.parametrize("name", ["distilbert", "mpnet", "deberta-v3", "gpt2", "modernbert", "albert"])
def test_in_8_bits_are_all_layers_of_blocks_and_no_layer_of_ramps_or_head(name: str, tmp_path: Path) -> None:
    """In ALBERT, whose layers run repeatedly, each time; its embeddings have one more."""
    exact = network(name, "entropy", [THRESHOLD])
    served, blocks = OnnxModel(exact, name, int8=True, cache=tmp_path), exact.num_blocks
    layers = {"distilbert": 6, "mpnet": 6, "deberta-v3": 6, "gpt2": 4, "modernbert": 4, "albert": 6}[name]
    served.prepare([BlockRange(0, blocks, (1,))], batch_for(exact, name))
    (graph,) = tmp_path.rglob("graph.onnx")
    nodes = [node.op_type for node in onnx.load(graph).graph.node]
    assert nodes.count("MatMulInteger") == layers * blocks + (name == "albert")


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_ramps_are_made_from_what_the_backend_gives(name: str, cache: Path) -> None:
    """From the first batch on, however far exporting is."""
    exact = network(name)
    batch = batch_for(exact, name, 16)
    expected, logits = exact.features(batch)
    for int8 in (False, True):
        served = OnnxModel(exact, name, int8=int8, cache=cache)
        features, head = served.features(batch)
        assert not served.exported.requested
        assert len(features) == exact.num_blocks - 1
        pairs = zip([*expected, logits], [*features, head], strict=True)
        assert (max(float((one - other).abs().max()) for one, other in pairs) < 1e-4) != int8


@pytest.mark.parametrize("name", ["distilbert", "deberta-v3"])
@pytest.mark.parametrize("as_on_cuda", [True, False])
def test_on_cuda_attention_is_one_node_that_gives_the_same(
    name: str, as_on_cuda: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime has the node for CPUs, too. There graphs have products and softmax of their own, as before."""
    if as_on_cuda:
        monkeypatch.setattr(attention, "is_one_node", lambda query: torch.onnx.is_in_onnx_export())
    exact = network(name, "entropy", [THRESHOLD])
    here = cache / f"attention of {name}, {as_on_cuda}"
    served, batch = OnnxModel(exact, name, cache=here), batch_for(exact, name)
    served.prepare([BlockRange(0, 2, (0, 1))], batch)
    assert_same(exact.run(batch, 2, (0, 1)), served.run(batch, 2, (0, 1)))
    assert not served.exported.requested
    (graph,) = here.rglob("graph.onnx")
    nodes = [node.op_type for node in onnx.load(graph).graph.node]
    each = 2 * onnx_model.BANDS
    counts = nodes.count("MultiHeadAttention"), nodes.count("Softmax")
    assert counts == ((each, 0) if as_on_cuda else (0, each))


def test_sessions_are_made_from_examples_that_no_block_of_torch_computes(cache: Path) -> None:
    """So a device whose graphs are made holds no weights of torch; what was used to make them is released."""
    exact = network("distilbert")
    released: list[bool] = []
    exact.anatomy = dataclasses.replace(exact.anatomy, release=lambda: released.append(True))
    served = OnnxModel(exact, "distilbert, released", cache=cache)
    wanted = [BlockRange(0, 1), BlockRange(4, 5)]
    served.prepare(wanted, batch_for(exact, "distilbert"))
    assert released == [True]
    again = OnnxModel(exact, "distilbert, released", cache=cache)
    again.inner.compute = again.inner.through = lambda *_: pytest.fail("torch computed")
    again.prepare(wanted, batch_for(exact, "distilbert"))
    assert all(map(again.exported.get, wanted))


CUDA, HOST = torch.device("cuda:1"), torch.device("cpu")


@pytest.mark.parametrize("records", [True, False])
def test_a_session_has_a_stream_of_its_own_and_never_uses_tensorrt(records: bool) -> None:
    (name, options), host = providers(CUDA, stream=4711, records=records)
    assert name == "CUDAExecutionProvider"
    assert options.get("enable_cuda_graph") == ("1" if records else None)
    assert (options["device_id"], options["user_compute_stream"]) == ("1", "4711")
    assert (options["use_tf32"] == "1") == torch.backends.cuda.matmul.allow_tf32
    assert host == ("CPUExecutionProvider", {})


def test_a_gpu_that_onnx_runtime_cannot_use_is_an_error() -> None:
    check_providers(CUDA, ["CUDAExecutionProvider", "CPUExecutionProvider"])
    check_providers(HOST, ["CPUExecutionProvider"])
    with pytest.raises(UserError, match=r"cannot use cuda:1: it loaded only CPUExecutionProvider\."):
        check_providers(CUDA, ["CPUExecutionProvider"])


def test_a_run_is_not_waited_for_and_says_which_recording_it_is() -> None:
    assert run_options(CUDA, 3).get_run_config_entry("gpu_graph_id") == "3"
    assert run_options(CUDA, None).get_run_config_entry("disable_synchronize_execution_providers") == "1"
    with pytest.raises(RuntimeError, match="does not have"):
        run_options(HOST, 3).get_run_config_entry("gpu_graph_id")


def test_what_cannot_be_recorded_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As ONNX Runtime does when a part of a graph can only run on the host."""

    def refuse(path: str, options: object, providers: list[onnx_session.Provider], **others: object) -> object:
        if "enable_cuda_graph" in providers[0][1]:
            raise onnx_session.ort.capi.onnxruntime_pybind11_state.Fail("cannot use the graph capture feature")
        return SimpleNamespace(get_inputs=list, get_outputs=list, get_providers=lambda: ["CUDAExecutionProvider"])

    monkeypatch.setattr(onnx_session, "SideStream", lambda device: SimpleNamespace(handle=4711))
    monkeypatch.setattr(onnx_session.ort, "InferenceSession", refuse)
    session = onnx_session.Session(tmp_path / "graph.onnx", CUDA, records=True)
    assert not session.records
    assert "is not recorded as CUDA graphs" in caplog.text
