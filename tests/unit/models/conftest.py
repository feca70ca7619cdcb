from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of exported graphs, for all: what one test has exported of a network, another need not."""
    return tmp_path_factory.mktemp("onnx")
