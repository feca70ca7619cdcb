"""One local Ray for the whole session, started and stopped as `isobatch serve` does it."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.serving.deploy import deploy
from cluster.serving.local import LocalRay, free_port, local_ray
from deployments.replica.virtual import FAULTS

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRay, str]]:
    """The Ray and the address of its HTTP front; nothing is deployed yet."""
    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ[FAULTS] = str(tmp_path_factory.mktemp("faults"))  # read by virtual devices that play broken ones
    os.environ["RAY_metrics_report_interval_ms"] = "1000"  # noqa: SIM112 (Ray spells it so; ten seconds otherwise)
    port = free_port(0)
    with local_ray({"host": "127.0.0.1", "port": port, "location": "HeadOnly"}) as ray:
        yield ray, f"http://127.0.0.1:{port}"
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def deployed(local: tuple[LocalRay, str]) -> Callable[..., str]:
    """Deploy what a Serve file with these `applications:` says, in place of what was there; returns the address."""

    ray, address = local

    def put(*applications: dict[str, object]) -> str:
        deploy(ray, {"applications": list(applications)}, patience_s=300)
        return address

    return put


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs on one event loop: Serve's handles stay with the one that they were first used on."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(240)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vision transformer with random ramps, at which some inputs leave and some do not."""
    from transformers import ViTImageProcessor

    from deployments.models.ramps import save_ramps
    from tests.helpers.tiny_networks import hugging_face, network

    folder = tmp_path_factory.mktemp("vit")
    hugging_face("vit").save_pretrained(folder)
    ViTImageProcessor(do_resize=False, do_rescale=False, do_normalize=False).save_pretrained(folder)
    ramps = network("vit", "confidence", [0.85]).ramps
    save_ramps(folder, ramps.rules, ramps.heads)
    return folder
