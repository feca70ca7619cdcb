"""The OpenAPI schemas of the Open Inference Protocol. Field names are those of the protocol."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from isobatch.deployments.front.open_inference.requests import BYTES, InferRequest
from isobatch.deployments.front.openapi import examples, fits, schema_of
from isobatch.deployments.front.schemas import Schema

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
    promise: str = Field(description="The most that early exits may lose.")


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
    """The part of Triton's configuration that its tools read."""

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
    inference_count: int = Field(description="Answered inputs.")
    execution_count: int = Field(description="Launches that began at the first block.")
    inference_stats: InferenceStatistics


class ServerStatistics(Schema):
    model_stats: list[ModelStatistics]


def infer_body(example: Any | None) -> dict[str, Any]:
    """The body of an inference: JSON, or JSON followed by binary tensors; `example`: an input for the network."""
    content: dict[str, Any] = {"schema": schema_of(InferRequest)}
    if fits(example):
        content["examples"] = examples(one_input={"inputs": [_tensor(example)]})
    return {"requestBody": {"required": True, "content": {"application/json": content, _BINARY: _OCTETS}}}


_BINARY = "application/octet-stream"
# The binary form of an answer, for requests that ask for it.
AS_BYTES: dict[str, Any] = {"content": {_BINARY: _OCTETS}}


def _tensor(example: Any) -> dict[str, Any]:
    if isinstance(example, str):
        return {"name": "inputs", "datatype": BYTES, "shape": [1, 1], "data": [example]}
    values = np.array([example], np.float32)
    return {"name": "inputs", "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}
