"""The options that ONNX Runtime gets for a GPU: compared as data, since the tests have no GPU."""

from pathlib import Path

import pytest
import torch

from deployments.models.onnx_session import providers, run_options

CUDA, HOST = torch.device("cuda:1"), torch.device("cpu")


def test_a_session_that_records_has_one_provider_and_a_stream_of_its_own() -> None:
    (name, options), host = providers(CUDA, Path("cache"), stream=4711, records=True)
    assert name == "CUDAExecutionProvider"
    assert options["enable_cuda_graph"] == "1"
    assert (options["device_id"], options["user_compute_stream"]) == ("1", "4711")
    assert host == ("CPUExecutionProvider", {})


def test_a_run_is_not_waited_for_and_says_which_recording_it_is() -> None:
    assert run_options(CUDA, 3).get_run_config_entry("gpu_graph_id") == "3"
    assert run_options(CUDA, None).get_run_config_entry("disable_synchronize_execution_providers") == "1"
    with pytest.raises(RuntimeError, match="does not have"):
        run_options(HOST, 3).get_run_config_entry("gpu_graph_id")
