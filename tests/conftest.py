"""Every test is marked by its folder; unit tests may not start Ray."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import made_once

# A slow or busy machine is no failure. Each run draws other examples, so that few at a time become many; where CI is
# set, all runs draw the same. A failure prints the line that repeats it, and is tried first in the next run.
settings.register_profile(
    "isobatch",
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("isobatch")

# All that is imported and collected stays: to scan it again and again takes a seventh of the processor's time.
gc.disable()

# Before torch is imported: threads that wait for each other make tiny networks ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all processes of this run of tests share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def _made_once(run_folder: Path) -> None:
    made_once.FOLDER = run_folder


# In this order: Ray reads its settings when it is imported, by whichever test.
KINDS = ("integration", "unit", "perf", "fuzz")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A long value is named by its length: the names of tests are sent to the processes that run them."""
    return f"{argname} of {len(val)}" if isinstance(val, str | bytes) and len(val) > 200 else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (kind := _kind(item)) in KINDS:
            item.add_marker(getattr(pytest.mark, kind))
    items.sort(key=lambda item: (*KINDS, _kind(item)).index(_kind(item)))


def _kind(item: pytest.Item) -> str:
    """The folder of `tests` that it is in."""
    here = Path(__file__).parent
    return item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""


def pytest_collection_finish() -> None:
    """Ray reads its settings when it is imported, and the integration tests have settings of their own."""
    if "ray" in sys.modules:
        raise pytest.UsageError("a test file imports ray when it is collected: import it inside the tests")
    gc.freeze()
    gc.enable()
