from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(run_folder: Path) -> Path:
    """Of exported graphs, for all tests of all processes: what one has exported of a network, another need not."""
    return run_folder / "onnx"
