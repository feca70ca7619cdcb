"""Writes docs/arguments.md, every field that a user may write under `args:`, and the JSON Schemas of all files.

`make arguments` makes them anew.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from isobatch.cluster.commands.fleet_file import FleetFile
from isobatch.cluster.controller.config import ArbiterConfig, ControllerConfig, MemberTerms
from isobatch.deployments.config import AppConfig, ServedConfig
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.ramp_rules import DecoderRules
from isobatch.deployments.models.ramps import ExitRules
from isobatch.deployments.named import CanaryTerms
from isobatch.optimizer.plan import Plan
from isobatch.profiles.files import Profile
from isobatch.profiles.text_profile import DecoderProfile

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"
SCHEMAS = Path(__file__).parents[2] / "cluster" / "schemas"
_VERSION = {"schema_version": {"const": 1}}
FILES: dict[str, tuple[Any, dict[str, Any]]] = {  # the type of a file, and the fields beside it
    "plan": (Plan, _VERSION),
    "profile": (Profile, _VERSION),
    "decoder-profile": (DecoderProfile, _VERSION | {"profile_of": {"const": "decoder"}}),
    "fleet": (FleetFile, {}),
    "exits": (ExitRules, {}),
    "decoder-exits": (DecoderRules, {}),
}
BEGINNING = """\
# Every field of `args:`

The fields under `args:` in a Serve file, by its `import_path:`. An unknown field is refused by name. Relative paths are
relative to the folder of the file. `make arguments` makes this page from the code, and the JSON Schemas of Serve files,
plans, profiles and exits in `cluster/schemas/`. An editor completes a Serve file that begins with
`# yaml-language-server: $schema=PATH/cluster/schemas/serve.json`, where PATH is the checkout or the folder `isobatch`
of the installed package.
"""
COMMON = """\
## Every network

The fields of classifiers and decoders. A decoder has some of them with other defaults, which its section lists again.
"""
APPLICATIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("A network that classifies", "isobatch.deployments.app:build", AppConfig),
    ("The controller", "isobatch.cluster.controller.app:build", ControllerConfig),
    ("The arbiter of a fleet", "isobatch.cluster.controller.app:arbiter", ArbiterConfig),
    ("A decoder", "isobatch.deployments.decoding.app:build", DecoderConfig),
)
PARTS: tuple[tuple[type[BaseModel], str, type[BaseModel]], ...] = (
    (AppConfig, "Its `canary:`", CanaryTerms),
    (ArbiterConfig, "Each of its `applications:`", MemberTerms),
)
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "null": "none"}


def page() -> str:
    sections = [_section(*application) for application in APPLICATIONS]
    return "\n".join([BEGINNING, COMMON, *_table(_fields(ServedConfig)), *chain.from_iterable(sections)])


def _section(title: str, path: str, model: type[BaseModel]) -> Iterator[str]:
    """The fields of an application, without those that every network has alike."""
    common = _fields(ServedConfig) if issubclass(model, ServedConfig) else {}
    beside = ", and the fields of [every network](#every-network)" if common else ""
    yield f"## {title}\n\n`import_path: {path}`{beside}\n"
    yield from _table({name: field for name, field in _fields(model).items() if common.get(name) != field})
    for whole, title, part in PARTS:
        if model is whole:
            yield f"{title}\n"
            yield from _table(_fields(part))


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return properties


def _table(fields: dict[str, Any]) -> Iterator[str]:
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    for name, field in fields.items():
        default = _value(field["default"]) if "default" in field else "must be given"
        yield f"| `{name}` | {_kind(field)} | {default} | {field['description'].replace('|', '&#124;')} |"
    yield ""


def _value(default: Any) -> str:
    """
    >>> _value(None), _value(False), _value([]), _value(30.0), _value(16777216), _value("cpu")
    ('', '`false`', '', '`30`', '`16777216`', '`cpu`')
    """
    if default in (None, [], {}) and default is not False:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _kind(field: dict[str, Any]) -> str:
    """
    >>> _kind({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
    'number > 0 and ≤ 1'
    >>> _kind({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]})
    'list of: integer'
    >>> _kind({"type": "array", "items": {"$ref": "#/$defs/MemberTerms"}})
    'list of: fields'
    >>> _kind({"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}})
    'NAME: integer ≥ 1'
    """
    if "anyOf" in field:
        return ", or ".join(_kind(each) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "additionalProperties" in field:
        return f"NAME: {_kind(field['additionalProperties'])}"
    if "$ref" in field:
        return "fields"
    if field["type"] == "array":
        return f"list of: {_kind(field['items'])}"
    bounds = " and ".join(f"{word} {_number(field[bound])}" for bound, word in BOUNDS.items() if bound in field)
    return f"{WORDS[field['type']]} {bounds}".strip()


def _number(value: float) -> str:
    """
    >>> _number(0.5), _number(1048576)
    ('0.5', '1,048,576')
    """
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def schemas() -> dict[str, str]:
    """The JSON Schema of each kind of file, by the name of its own file."""
    result = {name: _of_file(kind, fields) for name, (kind, fields) in FILES.items()} | {"serve": _of_serve_file()}
    return {f"{name}.json": json.dumps(_plain(schema)) + "\n" for name, schema in result.items()}


def _of_file(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema()
    if "$ref" in schema:  # a type that refers to itself
        schema |= schema["$defs"][schema.pop("$ref").rpartition("/")[2]]
    return schema | {"properties": fields | schema["properties"], "required": [*fields, *schema.get("required", ())]}


def _of_serve_file() -> dict[str, Any]:
    """Serve's own fields are left to Serve; `args:` are those of the application that `import_path:` names."""
    models, definitions = models_json_schema([(model, "validation") for _, _, model in APPLICATIONS])
    cases = [
        {
            "if": {"properties": {"import_path": {"const": path}}, "required": ["import_path"]},
            "then": {"properties": {"args": models[model, "validation"]}},
        }
        for _, path, model in APPLICATIONS
    ]
    application = {"type": "object", "required": ["import_path"], "allOf": cases}
    applications = {"type": "array", "minItems": 1, "items": application}
    whole = {"type": "object", "properties": {"applications": applications}, "required": ["applications"]}
    return whole | {"title": "A Serve file", "$defs": definitions["$defs"]}


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMAS.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (SCHEMAS / name).write_text(text)
