"""The shapes of an inference request and its response: by them a request is checked and the interface described."""

from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deployments.front.answers import RefusedError, shown
from deployments.front.bodies import LONGEST_NAME, MOST_DIMENSIONS, MOST_NAMED
from profiles.errors import first_wrong

BYTES = "BYTES"
NUMBERS = {
    "BOOL": "?",
    **{f"{'U' * unsigned}INT{8 * size}": f"<{'iu'[unsigned]}{size}" for unsigned in (0, 1) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}


def dtype_of(kind: str) -> "np.dtype[Any]":
    return np.dtype(NUMBERS[kind])


def _known(datatype: str) -> str:
    if datatype != BYTES and datatype not in NUMBERS:
        raise ValueError(f"datatype {shown(datatype)} is not known; there are: {BYTES}, {', '.join(NUMBERS)}")
    return datatype


def _one(inputs: object) -> object:
    if not (isinstance(inputs, list) and len(inputs) == 1):
        raise ValueError("'inputs' must be a list with one tensor, whose first dimension counts the inputs")
    return inputs


Part = TypeVar("Part", bound=BaseModel)
Name = Annotated[str, Field(max_length=LONGEST_NAME)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class TensorParameters(_Part):
    binary_data_size: int | None = Field(None, ge=0, description="Bytes of this tensor that follow the JSON.")


class InputTensor(_Part):
    name: Name = ""
    datatype: Annotated[str, AfterValidator(_known)] = Field(description=f"{BYTES} for texts, or {', '.join(NUMBERS)}.")
    shape: list[int] = Field(max_length=MOST_DIMENSIONS, description="The first dimension counts the inputs.")
    parameters: TensorParameters | None = None
    data: Any = Field(None, description="The values as a list, flat or nested, unless they follow as bytes.")


class OutputParameters(_Part):
    binary_data: bool | None = None  # None: as the request's `binary_data_output` says


class WantedOutput(_Part):
    name: Name
    parameters: OutputParameters | None = None


class RequestParameters(_Part):
    binary_data_output: bool = False
    timeout: int | None = Field(
        None, description="Microseconds until the answer is of no use; 0: as the server has it."
    )


class InferRequest(_Part):
    """Fields that are not known are ignored, as by other servers of this protocol."""

    id: Name | None = None
    parameters: RequestParameters | None = None
    inputs: Annotated[list[InputTensor], BeforeValidator(_one)] = Field((), validate_default=True)
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
    """The content as such a part; raises a `RefusedError` that names the first thing that is wrong."""
    try:
        return part.model_validate(content)
    except ValidationError as error:
        wrong = first_wrong(error)
        place = f"{wrong.place} = {shown(wrong.value)}: " if wrong.place else ""
        raise RefusedError(400, f"{place}{wrong.reason}") from error
