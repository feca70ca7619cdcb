"""Each of our settings is still read by the installed Ray."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from isobatch.deployments import ray_settings
from tests.helpers.toy_graph import application, cut_at

RAY = Path(importlib.util.find_spec("ray").origin).parent  # type: ignore[union-attr, arg-type]  # imported in tests only
ROOT = Path(__file__).parents[3]
LIBRARIES = {"air", "data", "llm", "rllib", "thirdparty_files", "train", "tune"}  # what they read, we do not set


def test_every_setting_is_still_read() -> None:
    names = {*ray_settings.SETTINGS, *ray_settings.WITHOUT_PROXY["env_vars"]}
    names |= set(ray_settings.haproxy_settings("folder", "program", 1, "1", "2", "3"))
    sources = [path for part in RAY.iterdir() if part.name not in LIBRARIES for path in part.rglob("*.py")]
    words = {word.decode() for path in sources for word in _settings_in(path.read_bytes())}
    core = (RAY / "_raylet.so").read_bytes()  # it reads settings as RAY_ and the name that they have there
    unread = {name for name in names - words if name.removeprefix("RAY_").encode() not in core}
    assert not unread, f"Ray reads no {', '.join(sorted(unread))} any more: mend ray_settings.SETTINGS"


def test_the_processes_of_an_application_import_nothing_heavy_and_may_import_it_later(tmp_path: Path) -> None:
    script = """
import json, sys
from isobatch.deployments.ray_settings import SETTINGS
module, _, name = SETTINGS["__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"].rpartition(".")
getattr(sys.modules[module], name)()
import ray.serve
from ray._private.serialization import SerializationContext, serialization_addons
serialization_addons.apply(object.__new__(SerializationContext))  # as each process does that sends anything
import isobatch.deployments.app, isobatch.deployments.replica.serve_replica  # a front, a deployer, a replica
import isobatch.deployments.replica.virtual
from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.examples import example_of
from isobatch.deployments.replica import loading
config = AppConfig.model_validate(json.loads(sys.argv[1]))
print(example_of(config.model).value or "")
for load in (loading.load_front_model, lambda config, at: loading.load_model(config, "cpu", at)):
    load(config, config.model).run  # a network of a user's own, which needs numpy only
print(*[name for name in ("pandas", "pyarrow", "pydantic.v1", "torch", "transformers", "scipy") if name in sys.modules])
import isobatch.cluster.controller.app
print(*[name for name in ("torch", "transformers", "statsmodels", "sklearn") if name in sys.modules])
import pandas
"""
    arguments = json.dumps(application(tmp_path, cut_at(2), model=str(tmp_path))["args"])
    command = [sys.executable, "-c", script, arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def _settings_in(source: bytes) -> list[bytes]:
    """Search word by word only in files that contain a setting at all."""
    return re.findall(rb"\b_*RAY_\w+", source) if b"RAY_" in source else []
