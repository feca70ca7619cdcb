"""The protocol in bytes: tensors as JSON, raw after the JSON (its binary extension), or raw in a gRPC message."""

import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.front.answers import RefusedError, shown
from deployments.front.bodies import Sizes, json_in, number
from deployments.front.headers import LONGEST_MS
from deployments.front.open_inference.requests import BYTES, NUMBERS, InferRequest, InputTensor, checked, dtype_of

Values = Sequence[Any] | NDArray[Any]  # texts, or numbers

MOST_TEXTS = 2  # that one input consists of
JSON_BYTES_HEADER = "inference-header-content-length"  # how much of a body is JSON; the tensors follow


@dataclass(frozen=True)
class Asked:
    """An inference request: the values of its one tensor, and how the answer is to look."""

    values: Sequence[Any]  # one per input: a text, or an array
    id: str | None
    wanted: Mapping[str, bool] | None  # output -> as binary; None: all of them
    binary: bool  # where `wanted` says nothing
    within_s: float | None = None  # what the request says of its own deadline


def read(body: bytes, header: str | None, sizes: Sizes) -> Asked:
    """Read the body of an inference request; raises a `RefusedError` that names what is wrong."""
    content, raw = _parts(body, header)
    request = checked(InferRequest, content)
    parameters = request.parameters
    binary = bool(parameters and parameters.binary_data_output)
    own = {each.name: each.parameters.binary_data if each.parameters else None for each in request.outputs or ()}
    wanted = {name: binary if told is None else told for name, told in own.items()}
    values = _values(request.inputs[0], raw, sizes)
    return Asked(values, request.id, wanted or None, binary, timeout_s(parameters.timeout if parameters else None))


def timeout_s(told_us: int | None) -> float | None:
    """Triton's `timeout` parameter; what is not positive says nothing."""
    return min(told_us, int(1e3 * LONGEST_MS)) / 1e6 if told_us and told_us > 0 else None


def write(asked: Asked, model: str, outputs: Mapping[str, Values]) -> tuple[bytes, int | None]:
    """The body, and how much of it is JSON when tensors follow."""
    wanted = asked.wanted if asked.wanted is not None else dict.fromkeys(outputs, asked.binary)
    check_outputs(wanted, outputs)
    tensors, raw = [], b""
    for name, binary in wanted.items():
        tensor, after = _tensor(name, outputs[name], binary)
        tensors.append(tensor)
        raw += after
    heading = {"model_name": model} | ({"id": asked.id} if asked.id is not None else {})
    text = json.dumps(heading | {"outputs": tensors}, allow_nan=False).encode()
    return text + raw, (len(text) if any(wanted.values()) else None)


def _parts(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    end = len(body) if header is None else number(header)
    if end is None or end > len(body):
        reason = f"it must be a number up to the body's {len(body)} bytes"
        raise RefusedError(400, f"{JSON_BYTES_HEADER} is {shown(header)}: {reason}")
    content = json_in(body[:end])
    if not isinstance(content, dict):
        raise RefusedError(400, "the body must be a JSON object with 'inputs'")
    return content, body[end:]


def _values(tensor: InputTensor, raw: bytes, sizes: Sizes) -> Sequence[Any]:
    size = tensor.parameters.binary_data_size if tensor.parameters else None
    if size is not None and size != len(raw):
        reason = f"binary_data_size is {shown(size)}, but {len(raw)} bytes follow the JSON"
        raise RefusedError(400, f"tensor {shown(tensor.name)}: {reason}")

    def load(kind: str, count: int) -> NDArray[Any]:
        return _from_json(tensor.data, kind) if size is None else from_bytes(raw, kind, count)

    return rows(tensor, sizes, load)


def rows(tensor: InputTensor, sizes: Sizes, load: Callable[[str, int], NDArray[Any]]) -> Sequence[Any]:
    """A tensor's values, one per input; `load` gives so many of a kind, flat."""
    count, kind, shape = sizes.check_shape(tensor.name, tensor.shape), tensor.datatype, tensor.shape
    try:
        if kind == BYTES and count > MOST_TEXTS * shape[0]:
            raise ValueError(f"an input has {MOST_TEXTS} texts at most")
        with np.errstate(over="ignore"):  # what is too large for the kind is found below
            found = load(kind, count).reshape(shape[:1] if kind == BYTES and shape[1:] == [1] else shape)
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        reason = f"tensor {shown(tensor.name)} does not hold {kind} of shape {shape}: {error}"
        raise RefusedError(400, reason) from error
    _check_finite(found)
    return found.tolist() if kind == BYTES else list(found)


def _check_finite(values: NDArray[Any]) -> None:
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        row = np.argwhere(~finite)[0][0]
        raise RefusedError(422, f"input {row} holds numbers that are not finite")


def _from_json(data: Any, kind: str) -> NDArray[Any]:
    if not isinstance(data, list):
        raise ValueError("its data is no list")
    if kind != BYTES:
        return _numbers(data, kind)
    texts = np.array(data, dtype=object).reshape(-1)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("its data are no texts")
    return texts


def _numbers(data: list[Any], kind: str) -> NDArray[Any]:
    """Numbers of this kind, flat. What numpy would round, cut off or read out of a text is refused."""
    told, wanted = np.array(data).reshape(-1), dtype_of(kind)
    if told.dtype.kind == "U":
        raise ValueError(f"its data are no numbers of {kind}")
    if wanted.kind == "f":
        return np.array(data, wanted).reshape(-1)
    found = told.astype(wanted)
    if (other := found != told).any():
        raise ValueError(f"{told[other][0]} is no {kind}")
    return found


def from_bytes(raw: bytes, kind: str, count: int) -> NDArray[Any]:
    """The values of a raw tensor, flat."""
    return np.array(_texts(raw, count), dtype=object) if kind == BYTES else np.frombuffer(raw, dtype_of(kind))


def _texts(raw: bytes, count: int) -> list[str]:
    """The texts of a raw tensor; each has its length before it.

    >>> _texts(b"\\x02\\0\\0\\0ab\\x01\\0\\0\\0c", 2)
    ['ab', 'c']
    """
    found, at = [], 0
    for _ in range(count):
        (size,) = struct.unpack_from("<I", raw, at)
        text = raw[at + 4 : at + 4 + size]
        if len(text) != size:
            raise ValueError(f"a text of {size} bytes ends after {len(text)}")
        found.append(text.decode())
        at += 4 + size
    if at < len(raw):
        raise ValueError(f"{len(raw) - at} bytes are left after {count} texts")
    return found


def check_outputs(wanted: Collection[str], outputs: Collection[str]) -> None:
    if unknown := sorted(set(wanted) - set(outputs)):
        raise RefusedError(400, f"there is no output {shown(unknown[0])}; there are: {', '.join(outputs)}")


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
