"""Wrong files, by the thousand: each is read, or refused in one line."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from isobatch.cluster.serving.serve_file import serve_file
from isobatch.deployments.models.ramps import read_rules
from isobatch.optimizer.plan import read_plan
from isobatch.profiles import files
from isobatch.profiles.errors import UserError
from tests.fuzz import cases
from tests.fuzz.attack import attack, within_memory

ROOT = Path(__file__).parents[2]
FILES: dict[str, tuple[Path, Callable[[Path], object]]] = {
    "serve.yaml": (ROOT / "cluster" / "demo.yaml", lambda path: serve_file(path, {})),
    "plan": (ROOT / "cluster" / "demo" / "plan.json", read_plan),
    "profile": (ROOT / "cluster" / "demo" / "profile.json", files.load),
    "exits": (ROOT / "deployments" / "demo" / "demo-float32" / "exits.json", read_rules),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path: Path, kind: str) -> None:
    """A file is read, or refused in one line."""
    valid, read = FILES[kind]
    path = tmp_path / f"case{valid.suffix}"
    content = valid.read_bytes()

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

    case = partial(cases.file, content, yaml.safe_load(content))
    within_memory(kind, lambda: asyncio.run(attack(kind, 0.01, case, act)))
