"""The protocol's gRPC methods about a server and its one model, and what inferences on every network share."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.bodies import LONGEST_NAME, MOST_NAMED
from isobatch.deployments.front.grpc_server import Methods
from isobatch.deployments.front.open_inference import protocol
from isobatch.deployments.front.open_inference.calls import Fields, read_message, unary
from isobatch.deployments.front.open_inference.protocol import DescribedModel
from isobatch.deployments.front.open_inference.tensors import Values, check_outputs, described, to_bytes
from isobatch.deployments.front.served import GuardedNetwork

Answering = Callable[[Any], Awaitable[Fields]]  # the fields of the response to a message


class Questions:
    """Answers questions about a model. A request of more than `most_fields` fields is refused."""

    def __init__(self, served: GuardedNetwork, model: DescribedModel, most_fields: int) -> None:
        self._served, self._model, self._most_fields = served, model, most_fields

    def methods(self, **others: Answering) -> Methods:
        """The methods, with `others` by their names."""
        answers = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "ModelConfig": self._configuration,
        }
        return {name: unary(name, self._reading(name, answer)) for name, answer in (answers | others).items()}

    def _reading(self, name: str, answer: Answering) -> Callable[[bytes, Any], Awaitable[Fields]]:
        return lambda sent, _: answer(read_message(f"{name}Request", sent, self._most_fields))

    async def _live(self, _: Any) -> Fields:
        return {"live": True}

    async def _ready(self, _: Any) -> Fields:
        return {"ready": not await self._served.missing()}

    async def _server(self, _: Any) -> Fields:
        return protocol.server(self._model)

    async def _model_ready(self, request: Any) -> Fields:
        """Like Triton: an unknown model is not ready."""
        try:
            protocol.check(self._model, request.name, request.version)
        except RefusedError:
            return {"ready": False}
        return await self._ready(request)

    async def _metadata(self, request: Any) -> Fields:
        protocol.check(self._model, request.name, request.version)
        return protocol.metadata(self._model)

    async def _configuration(self, request: Any) -> Fields:
        protocol.check(self._model, request.name, request.version)
        configuration = protocol.configuration(self._model)
        parameters = [{"key": key, "value": value} for key, value in configuration.get("parameters", {}).items()]
        return {"config": configuration | {"parameters": parameters}}


def check_infer(model: DescribedModel, request: Any) -> None:
    """Raise `RefusedError` for an inference on another model, and for too much in the request."""
    protocol.check(model, request.model_name, request.model_version)
    if len(request.id) > LONGEST_NAME or len(request.outputs) > MOST_NAMED:
        raise RefusedError(400, f"an id may have {LONGEST_NAME} characters, and a request {MOST_NAMED} outputs")
    check_outputs([output.name for output in request.outputs], model.outputs)


def outputs_of(model: DescribedModel, request: Any) -> list[str]:
    """The outputs that a request names, or the usual ones."""
    return [output.name for output in request.outputs] or model.usual_outputs


def infer_fields(model: DescribedModel, request: Any, values: Mapping[str, Values]) -> Fields:
    """The fields of a response."""
    names = outputs_of(model, request)
    return {
        "model_name": model.name,
        "model_version": protocol.VERSION,
        "id": request.id,
        "outputs": [described(name, values[name]) for name in names],
        "raw_output_contents": [to_bytes(values[name]) for name in names],
    }
