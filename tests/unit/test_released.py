"""Files that a release wrote load for ever, and the JSON Schemas of this version take them.

Each folder of tests/released has the files of one release. Nothing there is ever changed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from isobatch.cluster.serving.serve_file import serve_file
from isobatch.deployments.decoding.ramp_rules import DecoderRules
from isobatch.deployments.models.ramps import Ramps, read_rules
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.errors import read_model
from isobatch.profiles.files import load
from isobatch.profiles.text_profile import load_text_profile
from tests.helpers.arguments_page import SCHEMAS

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "tests" / "released"
READERS: dict[str, Callable[[Path], Any]] = {
    "plan": read_plan,
    "profile": load,
    "decoder-profile": load_text_profile,
    "exits": lambda path: Ramps(read_rules(path), {}).policy,
    "decoder-exits": lambda path: read_model(path, DecoderRules),
    "serve": lambda path: serve_file(path, {}),
}
FILES = sorted(path for path in RELEASED.glob("*/*") if path.is_file())


def content_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.suffix == ".yaml" else json.loads(path.read_text())


def schema_of(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((SCHEMAS / f"{path.name.partition('.')[0]}.json").read_text())
    return result


def test_each_release_has_every_kind_of_file() -> None:
    for release in RELEASED.iterdir():
        assert {path.name.partition(".")[0] for path in release.iterdir() if path.is_file()} == set(READERS)


@pytest.mark.parametrize("path", [pytest.param(path, id=f"{path.parent.name}/{path.name}") for path in FILES])
def test_a_released_file_loads_and_fits_its_schema(path: Path) -> None:
    assert READERS[path.name.partition(".")[0]](path)
    jsonschema.validate(content_of(path), schema_of(path))


def test_the_schemas_refuse_a_misspelt_field() -> None:
    for path in FILES:
        content = content_of(path)
        place = content["applications"][0]["args"] if path.name.startswith("serve") else content
        place["rate_per_sec"] = 1
        with pytest.raises(jsonschema.ValidationError, match="rate_per_sec"):
            jsonschema.validate(content, schema_of(path))


@pytest.mark.parametrize("name", ["serve.yaml", "demo.yaml", "local.yaml", "two-apps.yaml"])
def test_the_serve_files_fit_the_schema(name: str) -> None:
    content = yaml.safe_load((ROOT / "cluster" / name).read_text())
    jsonschema.validate(content, json.loads((SCHEMAS / "serve.json").read_text()))
