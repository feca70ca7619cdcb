"""Wrong files, by the thousand: each is read, or refused in one line."""

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.serving.serve_file import APPLICATION, CONTROLLER, serve_file
from isobatch.deployments.config import AppConfig
from isobatch.deployments.models.ramps import read_rules
from isobatch.optimizer.plan import read_plan
from isobatch.profiles import files
from isobatch.profiles.errors import UserError
from tests.fuzz import cases
from tests.fuzz.attack import COUNTS, attack, within_memory

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
ARGUMENTS = {APPLICATION: AppConfig, CONTROLLER: ControllerConfig}


def serve_case(random: Random) -> bytes:
    """The demo's Serve file, mostly with one odd argument: of those that it gives or of those that it might give."""
    text = (CLUSTER / "demo.yaml").read_text().replace("demo/", f"{CLUSTER}/demo/")  # cases are in another folder
    content: dict[str, Any] = yaml.safe_load(text)
    if random.randrange(2):
        return cases.file(text.encode(), content, random, as_yaml)
    application = random.choice(content["applications"])
    name, field = random.choice(sorted(ARGUMENTS[application["import_path"]].model_fields.items()))
    value = application["args"].get(name, field.get_default())
    application["args"][name] = cases.odd(list(value) if isinstance(value, tuple) else value, random)
    return as_yaml(content)


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value).encode()


def json_case(path: Path, random: Random) -> bytes:
    content = path.read_bytes()
    return cases.file(content, json.loads(content), random)


DEMO = CLUSTER / "demo"
RULES = ROOT / "deployments" / "demo" / "demo-float32" / "exits.json"
FILES: dict[str, tuple[str, cases.Case[bytes], Callable[[Path], object]]] = {
    "serve.yaml": ("case.yaml", serve_case, lambda path: serve_file(path, {})),
    "plan": ("case.json", partial(json_case, DEMO / "plan.json"), read_plan),
    "profile": ("case.json", partial(json_case, DEMO / "profile.json"), files.load),
    "exits": ("case.json", partial(json_case, RULES), read_rules),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path: Path, kind: str) -> None:
    """A file is read, or refused in one line; of the cases some are read, so that they reach whatever reads."""
    name, case, read = FILES[kind]
    path = tmp_path / name

    async def act(sent: bytes) -> str:
        path.write_bytes(sent)
        began_s, refusal = time.process_time(), ""
        try:
            read(path)
        except UserError as error:
            refusal = str(error)
        assert time.process_time() - began_s < 1
        assert "\n" not in refusal
        return "refused" if refusal else "read"

    within_memory(kind, lambda: asyncio.run(attack(kind, 0.01, case, act)))
    assert COUNTS[kind, "read"]
    assert COUNTS[kind, "refused"]
