"""Triton's own clients, unchanged, against a graph of two splits: the same answers over HTTP and gRPC."""

from typing import Any

import numpy as np
import pytest

from tests.helpers.toy_model import RAMPS, left_at

PAIRS = np.array([[block, label] for block in range(4) for label in range(10)], np.int64)


@pytest.fixture
def served(graph: str, toy: dict[str, Any]) -> tuple[str, str]:
    """Addresses of HTTP and gRPC."""
    return graph.removeprefix("http://"), f"127.0.0.1:{toy['args']['grpc_port']}"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient_gets_what_predict_gives(served: tuple[str, str], protocol: str) -> None:
    triton = pytest.importorskip(f"tritonclient.{protocol}")
    with triton.InferenceServerClient(served[protocol == "grpc"]) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("toy")
        result = client.infer("toy", [tensor(triton)], request_id="9")
        assert result.as_numpy("label").tolist() == PAIRS[:, 1].tolist()
        assert result.as_numpy("exit_block").tolist() == [left_at(block, RAMPS) for block in PAIRS[:, 0]]
        assert [name.decode() for name in result.as_numpy("name")] == [str(label) for label in PAIRS[:, 1]]
        with pytest.raises(Exception, match="there is no model 'other'"):
            client.infer("other", [tensor(triton)])


def test_what_perf_analyzer_asks_before_it_measures(served: tuple[str, str]) -> None:
    """It reads the server's extensions, the model's metadata and configuration, and statistics before and after."""
    triton = pytest.importorskip("tritonclient.grpc")
    with triton.InferenceServerClient(served[1]) as client:
        assert {"model_configuration", "statistics"} <= set(client.get_server_metadata().extensions)
        config = client.get_model_config("toy").config
        assert len(client.get_model_metadata("toy").inputs) == len(config.input)
        assert config.max_batch_size >= len(PAIRS)
        before, after = statistics(client), (client.infer("toy", [tensor(triton)]), statistics(client))[1]
        assert after.inference_count - before.inference_count == len(PAIRS)
        assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns


def statistics(client: Any) -> Any:
    return client.get_inference_statistics("toy").model_stats[0]


def tensor(triton: Any) -> Any:
    made = triton.InferInput("inputs", list(PAIRS.shape), "INT64")
    made.set_data_from_numpy(PAIRS)
    return made
