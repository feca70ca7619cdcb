"""Every test is marked by its folder; unit tests may not start Ray."""

from pathlib import Path

import pytest

KINDS = ("unit", "integration", "perf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        kind = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else None
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))
