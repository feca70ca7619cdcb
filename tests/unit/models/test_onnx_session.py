"""The options that ONNX Runtime gets for a GPU: compared as data, since the tests have no GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isobatch.deployments.models import onnx_session
from isobatch.deployments.models.onnx_session import check_providers, providers, run_options
from isobatch.profiles.errors import UserError

CUDA, HOST = torch.device("cuda:1"), torch.device("cpu")


def test_a_session_that_records_has_one_provider_and_a_stream_of_its_own() -> None:
    (name, options), host = providers(CUDA, stream=4711, records=True)
    assert name == "CUDAExecutionProvider"
    assert options["enable_cuda_graph"] == "1"
    assert (options["device_id"], options["user_compute_stream"]) == ("1", "4711")
    assert host == ("CPUExecutionProvider", {})


def test_other_sessions_do_not_record_and_never_use_tensorrt() -> None:
    given = dict(providers(CUDA, stream=4711, records=False))
    assert list(given) == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert "enable_cuda_graph" not in given["CUDAExecutionProvider"]
    assert (given["CUDAExecutionProvider"]["use_tf32"] == "1") == torch.backends.cuda.matmul.allow_tf32


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

    def refuse(path: str, options: object, providers: list[onnx_session.Provider]) -> object:
        if "enable_cuda_graph" in providers[0][1]:
            raise onnx_session.ort.capi.onnxruntime_pybind11_state.Fail("cannot use the graph capture feature")
        return SimpleNamespace(get_inputs=list, get_outputs=list, get_providers=lambda: ["CUDAExecutionProvider"])

    monkeypatch.setattr(onnx_session, "SideStream", lambda device: SimpleNamespace(handle=4711))
    monkeypatch.setattr(onnx_session.ort, "InferenceSession", refuse)
    session = onnx_session.Session(tmp_path / "graph.onnx", CUDA, records=True)
    assert not session.records
    assert "is not recorded as CUDA graphs" in caplog.text
