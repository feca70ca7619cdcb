"""The protocol in bytes: tensors as JSON, raw after the JSON (its binary extension), or raw in a gRPC message."""

import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.front.answers import RefusedError

Values = Sequence[Any] | NDArray[Any]  # texts, or numbers

HEADER = "inference-header-content-length"  # how much of a body is JSON; the tensors follow
BYTES = "BYTES"
_NUMBERS = {
    "BOOL": "?",
    **{f"{'U' * unsigned}INT{8 * size}": f"<{'iu'[unsigned]}{size}" for unsigned in (0, 1) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}


@dataclass(frozen=True)
class Asked:
    """An inference request: the values of its one tensor, and how the answer is to look."""

    values: Sequence[Any]  # one per input: a text, or an array
    id: str | None
    wanted: Mapping[str, bool] | None  # output -> as binary; None: all of them
    binary: bool  # where `wanted` says nothing


def read(body: bytes, header: str | None) -> Asked:
    """Whatever is wrong is a `RefusedError` that names it."""
    content, raw = _parts(body, header)
    inputs = content.get("inputs")
    if not (isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], dict)):
        raise RefusedError(400, "'inputs' must be a list with one tensor, whose first dimension counts the inputs")
    wanted = {each["name"]: _is_binary(each) for each in content.get("outputs") or [] if "name" in each}
    binary = bool((content.get("parameters") or {}).get("binary_data_output", False))
    return Asked(_values(inputs[0], raw), content.get("id"), wanted or None, binary)


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
    text = json.dumps(heading | {"outputs": tensors}).encode()
    return text + raw, (len(text) if any(wanted.values()) else None)


def _parts(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    if header is not None and not (header.isdecimal() and int(header) <= len(body)):
        raise RefusedError(400, f"{HEADER} is {header!r}: it must be a number up to the body's {len(body)} bytes")
    end = len(body) if header is None else int(header)
    try:
        content = json.loads(body[:end])
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RefusedError(400, "the body must be a JSON object with 'inputs'")
    return content, body[end:]


def _is_binary(output: Mapping[str, Any]) -> bool:
    return bool((output.get("parameters") or {}).get("binary_data", False))


def _values(tensor: Mapping[str, Any], raw: bytes) -> Sequence[Any]:
    size = (tensor.get("parameters") or {}).get("binary_data_size")
    if size is not None and size != len(raw):
        raise RefusedError(
            400, f"tensor {tensor.get('name')!r}: binary_data_size is {size}, but {len(raw)} bytes follow the JSON"
        )

    def load(kind: str) -> NDArray[Any]:
        return _from_json(tensor["data"], kind) if size is None else from_bytes(raw, kind)

    return rows(tensor.get("name"), tensor.get("datatype"), tensor.get("shape"), load)


def rows(name: object, kind: object, shape: object, load: Callable[[str], NDArray[Any]]) -> Sequence[Any]:
    """A tensor's values, one per input; `load` gives them flat."""
    if not isinstance(kind, str) or (kind != BYTES and kind not in _NUMBERS):
        raise RefusedError(
            400, f"tensor {name!r}: datatype {kind!r} is not known; there are: {BYTES}, {', '.join(_NUMBERS)}"
        )
    if not (isinstance(shape, list) and shape and all(isinstance(size, int) and size >= 0 for size in shape)):
        raise RefusedError(400, f"tensor {name!r}: shape {shape!r} must be a list of sizes")
    try:
        found = load(kind).reshape(shape[:1] if kind == BYTES and shape[1:] == [1] else shape)
        return found.tolist() if kind == BYTES else list(found)
    except (KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise RefusedError(400, f"tensor {name!r} does not hold {kind} of shape {shape}: {error}") from error


def _from_json(data: Any, kind: str) -> NDArray[Any]:
    if kind == BYTES:
        return np.array(data, dtype=object).reshape(-1)
    return np.array(data, dtype=_NUMBERS[kind]).reshape(-1)


def dtype_of(kind: str) -> "np.dtype[Any]":
    return np.dtype(_NUMBERS[kind])


def from_bytes(raw: bytes, kind: str) -> NDArray[Any]:
    """Flat; texts each with their length before them."""
    return np.array(_texts(raw), dtype=object) if kind == BYTES else np.frombuffer(raw, _NUMBERS[kind])


def _texts(raw: bytes) -> list[str]:
    """Each with its length before it.

    >>> _texts(b"\\x02\\0\\0\\0ab\\x01\\0\\0\\0c")
    ['ab', 'c']
    """
    found, at = [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        text = raw[at + 4 : at + 4 + size]
        if len(text) != size:
            raise ValueError(f"a text of {size} bytes ends after {len(text)}")
        found.append(text.decode())
        at += 4 + size
    return found


def check_outputs(wanted: Collection[str], outputs: Collection[str]) -> None:
    if unknown := sorted(set(wanted) - set(outputs)):
        raise RefusedError(400, f"there is no output {unknown[0]!r}; there are: {', '.join(outputs)}")


def described(name: str, values: Values) -> dict[str, Any]:
    """A tensor without what it holds."""
    kind = BYTES
    if isinstance(values, np.ndarray):
        kind = next(kind for kind, code in _NUMBERS.items() if np.dtype(code) == values.dtype)
    return {"name": name, "shape": [len(values)], "datatype": kind}


def to_bytes(values: Values) -> bytes:
    """
    >>> to_bytes(["ab", "c"])
    b'\\x02\\x00\\x00\\x00ab\\x01\\x00\\x00\\x00c'
    """
    if isinstance(values, np.ndarray):
        return values.tobytes()
    texts = [text.encode() for text in values]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _tensor(name: str, values: Values, binary: bool) -> tuple[dict[str, Any], bytes]:
    tensor = described(name, values)
    if binary:
        raw = to_bytes(values)
        return tensor | {"parameters": {"binary_data_size": len(raw)}}, raw
    return tensor | {"data": values.tolist() if isinstance(values, np.ndarray) else list(values)}, b""
