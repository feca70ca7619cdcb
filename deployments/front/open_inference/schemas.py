"""What OpenAPI says of the Open Inference Protocol: answers and requests, with an example of one. Names are its own."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from deployments.front.open_inference.requests import BYTES, InferRequest
from deployments.front.openapi import examples, fits, schema_of
from deployments.front.schemas import Schema

_OCTETS = {"schema": {"type": "string", "format": "binary"}}


class ServerMetadata(Schema):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Schema):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1: any size.")


class PromiseProperty(Schema):
    promise: str = Field(description="What exits lose at most.")


class ModelMetadata(Schema):
    name: str
    versions: list[str]
    platform: Literal["isobatch"]
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    properties: PromiseProperty


class NamedTensor(Schema):
    name: str


class StringParameter(Schema):
    string_value: str


class ModelConfiguration(Schema):
    """As much of Triton's as its tools ask for."""

    name: str
    platform: Literal["isobatch"]
    max_batch_size: int
    input: list[NamedTensor]
    output: list[NamedTensor]
    parameters: dict[Literal["promise"], StringParameter]


class CountAndTime(Schema):
    count: int
    ns: int


class InferenceStatistics(Schema):
    success: CountAndTime
    fail: CountAndTime
    queue: CountAndTime
    compute_input: CountAndTime
    compute_infer: CountAndTime
    compute_output: CountAndTime
    cache_hit: CountAndTime
    cache_miss: CountAndTime


class ModelStatistics(Schema):
    name: str
    version: str
    inference_count: int = Field(description="Inputs that were answered.")
    execution_count: int = Field(description="Launches that began at the first block.")
    inference_stats: InferenceStatistics


class ServerStatistics(Schema):
    model_stats: list[ModelStatistics]


def infer_body(example: Any | None) -> dict[str, Any]:
    """What an inference takes, as JSON or as JSON with bytes behind it; `example`: an input of the network."""
    content: dict[str, Any] = {"schema": schema_of(InferRequest)}
    if fits(example):
        content["examples"] = examples(one_input={"inputs": [_tensor(example)]})
    return {"requestBody": {"required": True, "content": {"application/json": content, _BINARY: _OCTETS}}}


_BINARY = "application/octet-stream"
# An answer has the form that the request asked for.
AS_BYTES: dict[str, Any] = {"content": {_BINARY: _OCTETS}}


def _tensor(example: Any) -> dict[str, Any]:
    if isinstance(example, str):
        return {"name": "inputs", "datatype": BYTES, "shape": [1, 1], "data": [example]}
    values = np.array([example], np.float32)
    return {"name": "inputs", "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}
