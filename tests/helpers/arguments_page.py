"""Writes docs/arguments.md: every field that a user may write under `args:`. `make arguments` makes it anew."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cluster.controller.config import ControllerConfig
from deployments.config import AppConfig
from deployments.decoding.config import DecoderConfig

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"
BEGINNING = """\
# Every field of `args:`

What may stand under `args:` in a Serve file, by what `import_path:` names. A field that is not here is refused by name.
Relative paths are from the folder of the file. This page is made of the code (`make arguments`).
"""
APPLICATIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("A network that classifies", "deployments.app:build", AppConfig),
    ("The controller", "cluster.controller.app:build", ControllerConfig),
    ("A decoder", "deployments.decoding.app:build", DecoderConfig),
)
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "none"}


def page() -> str:
    return "\n".join([BEGINNING, *(line for application in APPLICATIONS for line in _section(*application))])


def _section(title: str, path: str, model: type[BaseModel]) -> Iterator[str]:
    schema = model.model_json_schema()
    yield f"## {title}\n\n`import_path: {path}`\n"
    yield "| field | is | default | what it says |\n|---|---|---|---|"
    for name, field in schema["properties"].items():
        default = _value(field["default"]) if "default" in field else "must be given"
        yield f"| `{name}` | {_kind(field)} | {default} | {field['description'].replace('|', '&#124;')} |"
    yield ""


def _value(default: Any) -> str:
    """
    >>> _value(None), _value(False), _value([]), _value(30.0), _value(16777216), _value("cpu")
    ('none', '`false`', 'none', '`30`', '`16777216`', '`cpu`')
    """
    if default in (None, [], {}) and default is not False:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _kind(field: dict[str, Any]) -> str:
    """
    >>> _kind({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
    'number above 0 and at most 1'
    >>> _kind({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]})
    'list of: whole number'
    >>> _kind({"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}})
    'NAME: whole number at least 1'
    """
    if "anyOf" in field:
        return ", or ".join(_kind(each) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "additionalProperties" in field:
        return f"NAME: {_kind(field['additionalProperties'])}"
    if field["type"] == "array":
        return f"list of: {_kind(field['items'])}"
    bounds = " and ".join(f"{word} {field[bound]:g}" for bound, word in BOUNDS.items() if bound in field)
    return f"{WORDS[field['type']]} {bounds}".strip()


if __name__ == "__main__":
    PAGE.write_text(page())
