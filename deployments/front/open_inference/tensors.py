"""Tensors as bytes: in JSON, raw after the JSON (the protocol's binary extension), or raw in a gRPC message."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.front.answers import RefusedError, no_text, shown
from isobatch.deployments.front.bodies import Sizes, json_in, number, validated
from isobatch.deployments.front.headers import LONGEST_MS
from isobatch.deployments.front.open_inference.schemas import BYTES, NUMBERS, InferRequest, InputTensor, dtype_of

Values = Sequence[Any] | NDArray[Any]  # texts, or numbers

MOST_TEXTS = 2  # texts of one input
# The header with the number of bytes of JSON; the binary tensors follow.
JSON_BYTES_HEADER = "inference-header-content-length"
# The fields of a message for values of these kinds, without "_contents".
_FIELDS = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64"}


@dataclass(frozen=True)
class TensorRequest:
    """An inference request: the values of its one tensor, and the form of its answer."""

    values: Sequence[Any]  # one per input: a text, or an array
    id: str | None
    outputs: Mapping[str, bool] | None  # whether each requested output is binary; None: all outputs
    binary: bool  # whether outputs are binary, if `outputs` is None
    within_s: float | None = None  # the deadline, if the request tells it
    best: Mapping[str, int] = field(default_factory=dict)  # by output: how many of its best labels are wanted


def read(body: bytes, header: str | None, sizes: Sizes, texts: bool = True) -> TensorRequest:
    """Read the body of an inference request; raises a `RefusedError` that names the wrong value.

    `texts`: tensors of BYTES are texts; otherwise they are pictures.
    """
    content, raw = _parts(body, header)
    request = validated(InferRequest, content)
    parameters = request.parameters
    binary = bool(parameters and parameters.binary_data_output)
    requested, best = dict[str, bool](), dict[str, int]()
    for output in request.outputs or ():
        own = output.parameters
        requested[output.name] = binary if own is None or own.binary_data is None else own.binary_data
        if own and own.classification is not None:
            best[output.name] = own.classification
    timeout_us = parameters.timeout if parameters else None
    values = _values(request.inputs[0], raw, sizes, texts)
    return TensorRequest(values, request.id, requested or None, binary, timeout_s(timeout_us), best)


def timeout_s(timeout_us: int | None) -> float | None:
    """Triton's `timeout` parameter in seconds; None if it is not positive."""
    return min(timeout_us, int(1e3 * LONGEST_MS)) / 1e6 if timeout_us and timeout_us > 0 else None


def write(request: TensorRequest, model: str, outputs: Mapping[str, Values]) -> tuple[bytes, int | None]:
    """The body, and the number of its bytes that are JSON if binary tensors follow."""
    requested = request.outputs if request.outputs is not None else dict.fromkeys(outputs, request.binary)
    tensors, raw = [], b""
    for name, binary in requested.items():
        tensor, tensor_bytes = _tensor(name, outputs[name], binary)
        tensors.append(tensor)
        raw += tensor_bytes
    heading = {"model_name": model} | ({"id": request.id} if request.id is not None else {})
    text = json.dumps(heading | {"outputs": tensors}, allow_nan=False).encode()
    return text + raw, (len(text) if any(requested.values()) else None)


def _parts(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    end = len(body)
    if header is not None and body:  # an empty body has an error of its own
        end = number(header) or 0
        if not 0 < end <= len(body):
            reason = f"it must be a number from 1 to {len(body)}, the bytes of the body that are JSON"
            raise RefusedError(400, f"{JSON_BYTES_HEADER} is {shown(header)}: {reason}")
    content = json_in(body[:end])
    if not isinstance(content, dict):
        raise RefusedError(400, "the body must be a JSON object with 'inputs'")
    return content, body[end:]


def _values(tensor: InputTensor, raw: bytes, sizes: Sizes, texts: bool) -> Sequence[Any]:
    size = tensor.parameters.binary_data_size if tensor.parameters else None
    if size is not None and size != len(raw):
        reason = f"binary_data_size is {shown(size)}, but {len(raw)} bytes follow the JSON"
        raise RefusedError(400, f"tensor {shown(tensor.name)}: {reason}")

    def load(kind: str, count: int) -> NDArray[Any]:
        return _from_json(tensor.data, kind) if size is None else from_bytes(raw, kind, count, texts)

    return rows(tensor, sizes, load)


def rows(tensor: InputTensor, sizes: Sizes, load: Callable[[str, int], NDArray[Any]]) -> Sequence[Any]:
    """A tensor's values, one per input; `load(kind, count)` returns its values as a flat array."""
    count, kind, shape = sizes.check_shape(tensor.name, tensor.shape), tensor.datatype, tensor.shape
    try:
        if kind == BYTES and count > MOST_TEXTS * shape[0]:
            raise ValueError(f"an input may have {MOST_TEXTS} texts")
        with np.errstate(over="ignore"):  # values that are too large become infinite, which is checked below
            values = load(kind, count).reshape(shape[:1] if kind == BYTES and shape[1:] == [1] else shape)
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        reason = f"tensor {shown(tensor.name)} does not hold {kind} of shape {shape}: {error}"
        raise RefusedError(400, reason) from error
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        row = np.argwhere(~finite)[0][0]
        raise RefusedError(422, f"input {row} holds numbers that are not finite")
    return values.tolist() if kind == BYTES else list(values)


def _from_json(data: Any, kind: str) -> NDArray[Any]:
    if not isinstance(data, list):
        raise ValueError("its data is not a list")
    if kind != BYTES:
        return _numbers(data, kind)
    texts = np.array(data, dtype=object).reshape(-1)
    if (place := no_text(texts)) is not None:
        raise ValueError(f"value {place} of its data is no text")
    return texts


def _numbers(data: list[Any], kind: str) -> NDArray[Any]:
    """The numbers as a flat array of this kind. Texts, and integers that would be rounded or cut off, are refused."""
    sent, dtype = np.array(data).reshape(-1), dtype_of(kind)
    if sent.dtype.kind == "U":
        raise ValueError(f"its data are not numbers of {kind}")
    if dtype.kind == "f":
        return np.array(data, dtype).reshape(-1)
    numbers = sent.astype(dtype)
    if (changed := numbers != sent).any():
        raise ValueError(f"{sent[changed][0]} is not of type {kind}")
    return numbers


def from_bytes(raw: bytes, kind: str, count: int, texts: bool = True) -> NDArray[Any]:
    """The values of a raw tensor as a flat array."""
    if kind != BYTES:
        return np.frombuffer(raw, dtype_of(kind))
    items = _items(raw, count)
    return np.array(_texts(items) if texts else items, dtype=object)


def from_contents(contents: Any, kind: str, count: int, texts: bool = True) -> NDArray[Any]:
    """The values of a message, from the field for their kind: small integers are sent as 32 bits, and FP16 only raw."""
    if kind == "FP16":
        raise ValueError("FP16 travels in raw_input_contents only")
    field = "bytes" if kind == BYTES else _FIELDS.get(kind) or ("uint" if kind.startswith("U") else "int")
    values = getattr(contents, f"{field}_contents")
    if len(values) != count:
        raise ValueError(f"{field}_contents holds {len(values)} values")
    if kind == BYTES:
        return np.array(_texts(values) if texts else list(values), dtype=object)
    return np.array(values, dtype=dtype_of(kind))


def _texts(values: Iterable[bytes]) -> list[str]:
    texts = list[str]()
    for place, value in enumerate(values):
        try:
            texts.append(value.decode())
        except UnicodeDecodeError:
            raise ValueError(f"value {place} is no text in UTF-8") from None
    return texts


def _items(raw: bytes, count: int) -> list[bytes]:
    """The texts or pictures of a raw tensor; each follows its length.

    >>> _items(b"\\x02\\0\\0\\0ab\\x01\\0\\0\\0c", 2)
    [b'ab', b'c']
    """
    items, at = [], 0
    for _ in range(count):
        (size,) = struct.unpack_from("<I", raw, at)
        item = raw[at + 4 : at + 4 + size]
        if len(item) != size:
            raise ValueError(f"a text of {size} bytes ends after {len(item)}")
        items.append(item)
        at += 4 + size
    if at < len(raw):
        raise ValueError(f"{len(raw) - at} bytes are left after {count} texts")
    return items


def described(name: str, values: Values) -> dict[str, Any]:
    """A tensor's name, shape and kind, without its values."""
    if not isinstance(values, np.ndarray):
        return {"name": name, "shape": [len(values)], "datatype": BYTES}
    kind = next((kind for kind, code in NUMBERS.items() if np.dtype(code) == values.dtype), BYTES)
    return {"name": name, "shape": list(values.shape), "datatype": kind}


def to_bytes(values: Values) -> bytes:
    """
    >>> to_bytes(["ab", "c"])
    b'\\x02\\x00\\x00\\x00ab\\x01\\x00\\x00\\x00c'
    """
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.tobytes()
    texts = [text.encode() for text in np.ravel(values)] if isinstance(values, np.ndarray) else map(str.encode, values)
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _tensor(name: str, values: Values, binary: bool) -> tuple[dict[str, Any], bytes]:
    tensor = described(name, values)
    if binary:
        raw = to_bytes(values)
        return tensor | {"parameters": {"binary_data_size": len(raw)}}, raw
    return tensor | {"data": values.ravel().tolist() if isinstance(values, np.ndarray) else list(values)}, b""
