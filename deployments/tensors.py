"""The Open Inference Protocol (v2) in bytes: tensors as JSON or, by the binary extension, after the JSON."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.answers import RefusedError

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


def write(asked: Asked, model: str, outputs: Mapping[str, Sequence[Any] | NDArray[Any]]) -> tuple[bytes, int | None]:
    """The body, and how much of it is JSON when tensors follow."""
    wanted = asked.wanted if asked.wanted is not None else dict.fromkeys(outputs, asked.binary)
    if unknown := sorted(wanted.keys() - outputs.keys()):
        raise RefusedError(400, f"there is no output {unknown[0]!r}; there are: {', '.join(outputs)}")
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
    name, kind, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
    if kind != BYTES and kind not in _NUMBERS:
        raise RefusedError(
            400, f"tensor {name!r}: datatype {kind!r} is not known; there are: {BYTES}, {', '.join(_NUMBERS)}"
        )
    if not (isinstance(shape, list) and shape and all(isinstance(size, int) and size >= 0 for size in shape)):
        raise RefusedError(400, f"tensor {name!r}: shape {shape!r} must be a list of sizes")
    size = (tensor.get("parameters") or {}).get("binary_data_size")
    if size is not None and size != len(raw):
        raise RefusedError(400, f"tensor {name!r}: binary_data_size is {size}, but {len(raw)} bytes follow the JSON")
    try:
        flat = _from_json(tensor["data"], kind) if size is None else _from_bytes(raw, kind)
        rows = flat.reshape(shape[:1] if kind == BYTES and shape[1:] == [1] else shape)
        return rows.tolist() if kind == BYTES else list(rows)
    except (KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise RefusedError(400, f"tensor {name!r} does not hold {kind} of shape {shape}: {error}") from error


def _from_json(data: Any, kind: str) -> NDArray[Any]:
    if kind == BYTES:
        return np.array(data, dtype=object).reshape(-1)
    return np.array(data, dtype=_NUMBERS[kind]).reshape(-1)


def _from_bytes(raw: bytes, kind: str) -> NDArray[Any]:
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


def _tensor(name: str, values: Sequence[Any] | NDArray[Any], binary: bool) -> tuple[dict[str, Any], bytes]:
    if isinstance(values, np.ndarray):
        kind = next(kind for kind, code in _NUMBERS.items() if np.dtype(code) == values.dtype)
        raw, data = values.tobytes(), values.tolist()
    else:
        kind, data = BYTES, list(values)
        raw = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in data)
    tensor: dict[str, Any] = {"name": name, "shape": [len(values)], "datatype": kind}
    if binary:
        return tensor | {"parameters": {"binary_data_size": len(raw)}}, raw
    return tensor | {"data": data}, b""
