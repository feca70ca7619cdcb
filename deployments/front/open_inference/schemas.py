"""The schemas of the protocol: they validate requests, and describe the interface. Field names are the protocol's."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from isobatch.deployments.front.answers import shown
from isobatch.deployments.front.bodies import LONGEST_NAME, MOST_DIMENSIONS, MOST_NAMED
from isobatch.deployments.front.openapi import examples, fits, json_body, schema_of
from isobatch.deployments.front.schemas import Schema

BYTES = "BYTES"
NUMBERS = {
    "BOOL": "?",
    **{f"{'U' * unsigned}INT{8 * size}": f"<{'iu'[unsigned]}{size}" for unsigned in (0, 1) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
_OCTETS = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
# The binary form of an answer, for requests that ask for it.
AS_BYTES: dict[str, Any] = {"content": _OCTETS}


def dtype_of(kind: str) -> "np.dtype[Any]":
    return np.dtype(NUMBERS[kind])


def _known_type(datatype: str) -> str:
    if datatype != BYTES and datatype not in NUMBERS:
        raise ValueError(f"datatype {shown(datatype)} is not known; there are: {BYTES}, {', '.join(NUMBERS)}")
    return datatype


def _check_single(inputs: object) -> object:
    if not (isinstance(inputs, list) and len(inputs) == 1):
        raise ValueError("'inputs' must be a list with one tensor, whose first dimension is the number of inputs")
    return inputs


Name = Annotated[str, Field(max_length=LONGEST_NAME)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class TensorParameters(_Part):
    binary_data_size: int | None = Field(None, ge=0, description="Bytes of this tensor that follow the JSON.")


class InputTensor(_Part):
    name: Name = ""
    datatype: Annotated[str, AfterValidator(_known_type)] = Field(
        description=f"{BYTES} for texts, or {', '.join(NUMBERS)}."
    )
    shape: list[int] = Field(max_length=MOST_DIMENSIONS, description="The first dimension is the number of inputs.")
    parameters: TensorParameters | None = None
    data: Any = Field(None, description="The values as a list, flat or nested, unless they follow as bytes.")


class OutputParameters(_Part):
    binary_data: bool | None = None  # None: the request's `binary_data_output` decides
    classification: int | None = Field(None, description="This many of the best labels, as score:label:name.")


class WantedOutput(_Part):
    name: Name
    parameters: OutputParameters | None = None


class RequestParameters(_Part):
    binary_data_output: bool = False
    timeout: int | None = Field(None, description="Microseconds until the answer is useless; 0: the server's SLO.")


class InferRequest(_Part):
    """Unknown fields are ignored, like in other servers of this protocol."""

    id: Name | None = None
    parameters: RequestParameters | None = None
    inputs: Annotated[list[InputTensor], BeforeValidator(_check_single)] = Field((), validate_default=True)
    outputs: list[WantedOutput] | None = Field(None, max_length=MOST_NAMED)


class OutputTensor(_Part):
    name: str
    datatype: str
    shape: list[int]
    parameters: TensorParameters | None = None
    data: list[Any] | None = None


class InferResponse(_Part):
    model_name: str
    id: str | None = None
    outputs: list[OutputTensor]


class ServerLive(Schema):
    live: bool


class ServerReady(Schema):
    ready: bool


class ModelReady(ServerReady):
    name: str


class ServerMetadata(Schema):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Schema):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1: any size.")


class ModelMetadata(Schema):
    name: str
    versions: list[str]
    platform: Literal["isobatch"]
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    properties: dict[Literal["promise"], str] = Field(description="The most that early exits may lose.")


class ModelConfiguration(Schema):
    """The part of Triton's configuration that its tools read."""

    name: str
    platform: Literal["isobatch"]
    max_batch_size: int
    input: list[dict[Literal["name"], str]]
    output: list[dict[Literal["name"], str]]
    parameters: dict[Literal["promise"], dict[Literal["string_value"], str]]


class CountAndTime(Schema):
    count: int
    ns: int


_STATISTICS = Literal[
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"
]


class ModelStatistics(Schema):
    name: str
    version: str
    inference_count: int = Field(description="Answered inputs.")
    execution_count: int = Field(description="Launches that began at the first block.")
    inference_stats: dict[_STATISTICS, CountAndTime]


class ServerStatistics(Schema):
    model_stats: list[ModelStatistics]


def infer_body(example: Any | None) -> dict[str, Any]:
    """The body of an inference: JSON, or JSON followed by binary tensors; `example`: an input for the network."""
    bodies = examples(one_input={"inputs": [_tensor(example)]}) if fits(example) else {}
    return json_body(schema_of(InferRequest), bodies, **_OCTETS)


def _tensor(example: Any) -> dict[str, Any]:
    if isinstance(example, str):
        return {"name": "inputs", "datatype": BYTES, "shape": [1, 1], "data": [example]}
    values = np.array([example], np.float32)
    return {"name": "inputs", "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}
