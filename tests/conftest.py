"""Every test is marked by its folder; unit tests may not start Ray."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A slow or busy machine is no failure. Each run draws other examples, so that few at a time become many.
settings.register_profile("patient", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Before torch is imported: threads that wait for each other make tiny networks ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

KINDS = ("unit", "integration", "perf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        kind = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else None
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))


def pytest_collection_finish() -> None:
    """Ray reads its settings when it is imported, and the integration tests have settings of their own."""
    if "ray" in sys.modules:
        raise pytest.UsageError("a test file imports ray when it is collected: import it inside the tests")
