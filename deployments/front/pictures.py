"""Bodies that are pictures: JPEG, PNG or WebP as they are, one in a body or several in a form (multipart/form-data)."""

import re
from collections.abc import Mapping

from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.bodies import json_in

_FORM = b"multipart/form-data"
_BOUNDARY = re.compile(rb'boundary="?([^";,\s]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'\bname="([^"]*)"', re.IGNORECASE)
_FILE = re.compile(rb"\bfilename=|^content-type: *image/", re.IGNORECASE | re.MULTILINE)
_FIELDS = (b"scores", b"top_k")  # of a request, which a form may hold beside the pictures


def content_of(headers: Mapping[bytes, bytes], body: bytes) -> object:
    """What a request holds: JSON, or pictures as its `inputs`.

    >>> content_of({b"content-type": b"image/png"}, b"...")
    {'inputs': b'...'}
    """
    kind = headers.get(b"content-type", b"")
    if kind.startswith(b"image/"):
        return {"inputs": body}
    return _form_in(kind, body) if kind.lower().startswith(_FORM) else json_in(body)


def _form_in(kind: bytes, body: bytes) -> dict[str, object]:
    """The parts of a form: every file is an input, in order."""
    boundary = _BOUNDARY.search(kind)
    if not boundary:
        raise RefusedError(400, "Content-Type is multipart/form-data without a boundary")
    inputs, content = list[bytes](), dict[str, object]()
    first, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary[1])
    if not parts or first.strip() or parts[-1][:2] != b"--":
        raise RefusedError(400, "the body is not a complete form: it does not end with its boundary")
    for part in parts[:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if _FILE.search(head):
            inputs.append(value)
        elif name and name[1] in _FIELDS:
            content[name[1].decode()] = value.decode("latin-1") if value.isalpha() else json_in(value)
        else:
            raise RefusedError(400, "a part of the form is neither a file nor 'scores' or 'top_k'")
    return {"inputs": inputs} | content
