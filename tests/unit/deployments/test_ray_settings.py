"""Each of our settings is still read by the Ray that is installed."""

import importlib.util
import re
from pathlib import Path

from deployments import ray_settings

RAY = Path(importlib.util.find_spec("ray").origin).parent  # type: ignore[union-attr, arg-type]  # imported in tests only


def test_every_setting_is_still_read() -> None:
    names = {*ray_settings.SETTINGS, *ray_settings.WITHOUT_PROXY["env_vars"]}
    names |= set(ray_settings.haproxy_settings("folder", "program", 1, "1", "2", "3"))
    words = {word for path in RAY.rglob("*.py") for word in re.findall(r"\bRAY_\w+", path.read_text())}
    unread = {name for name in names - words if not _is_in_the_core(name)}
    assert not unread, f"Ray reads no {', '.join(sorted(unread))} any more: mend ray_settings.SETTINGS"


def _is_in_the_core(name: str) -> bool:
    """Settings of Ray's core are read as RAY_ and the name that they have there."""
    return name.removeprefix("RAY_").encode() in (RAY / "_raylet.so").read_bytes()
