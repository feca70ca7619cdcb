"""The schemas of an inference request and its response: they validate requests and describe the interface."""

from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.deployments.front.bodies import LONGEST_NAME, MOST_DIMENSIONS, MOST_NAMED
from isobatch.profiles.errors import first_wrong

BYTES = "BYTES"
NUMBERS = {
    "BOOL": "?",
    **{f"{'U' * unsigned}INT{8 * size}": f"<{'iu'[unsigned]}{size}" for unsigned in (0, 1) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}


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


Part = TypeVar("Part", bound=BaseModel)
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


def checked(part: type[Part], content: object) -> Part:
    """Validate the content as a `part`; raises a `RefusedError` that names the first wrong value."""
    try:
        return part.model_validate(content)
    except ValidationError as error:
        wrong = first_wrong(error)
        place = f"{wrong.place} = {shown(wrong.value)}: " if wrong.place else ""
        raise RefusedError(400, f"{place}{wrong.reason}") from error
