"""Sends open loops over HTTP or gRPC with the project's load generator; both return the same record."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from experiments.overload.calls import CALLS, CallLoad
from isobatch.cluster.load.generator import Floats, LoadGenerator, LoadRecord
from isobatch.deployments.front.open_inference.messages import message

AT_ONCE = 1024
PATIENCE_S = 5.0


class Asker:
    """Opens connections for each run, since connections belong to an event loop."""

    def __init__(self, load: Callable[[], LoadGenerator]) -> None:
        self._load = load

    async def at(self, due_s: Floats) -> LoadRecord:
        """Send a request at each of these times."""
        return await self._load().at(due_s, PATIENCE_S)


def http_asker(url: str, inputs: Sequence[NDArray[Any]], slo_ms: float) -> Asker:
    bodies = [json.dumps({"inputs": [one.round(1).tolist() for one in each]}).encode() for each in inputs]
    return Asker(lambda: LoadGenerator(url, bodies, AT_ONCE, f"X-Deadline-Ms: {slo_ms:g}\r\n"))


def grpc_asker(target: str, inputs: Sequence[NDArray[Any]], slo_ms: float) -> Asker:
    """Every request has the SLO as its deadline, in gRPC's own header."""
    request = message("ModelInferRequest")
    messages = [
        request(
            model_name="demo",
            inputs=[{"name": "inputs", "datatype": "FP32", "shape": each.shape}],
            raw_input_contents=[each.astype("<f4").tobytes()],
        ).SerializeToString()
        for each in inputs
    ]
    return Asker(lambda: CallLoad(target, messages, slo_ms, AT_ONCE // CALLS))
