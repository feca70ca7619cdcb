"""Serves with plain Ray Serve and its batching: `python -m experiments.peers.ray_peer FOLDER PORT WORKERS EXITS BATCH`.

It has those of isobatch's settings of Ray that make it faster.
"""

import os
import signal
import sys
import threading
from typing import Any

from experiments.peers.network import READY, WAIT_S, PeerNetwork, PeerOptions, options

# Replicas answer HTTP themselves, behind HAProxy.
QUICK = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
MOST_UNDER_WAY = 1024  # requests


def _stage(batch: int) -> Any:
    from ray import serve

    class Batched:
        def __init__(self, folder: str, exits: str) -> None:
            self._network = PeerNetwork(folder, exits)

        async def __call__(self, request: Any) -> Any:
            return await self.answer((await request.json())["inputs"])

        @serve.batch(max_batch_size=batch, batch_wait_timeout_s=WAIT_S)  # type: ignore[untyped-decorator]
        async def answer(self, inputs: list[Any]) -> list[Any]:
            return [{"label": label} for label in self._network.labels(inputs)]

    return Batched


def main(asked: PeerOptions) -> None:
    """Serve on a Ray of its own, and end all processes at the first signal."""
    os.environ |= QUICK  # before Ray is imported
    import ray
    from ray import serve

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": asked.port}, logging_config={"enable_access_log": False})
    settings = {
        "num_replicas": asked.workers,
        "max_ongoing_requests": MOST_UNDER_WAY,
        "ray_actor_options": {"num_cpus": 0},
    }
    stage = serve.deployment(**settings)(_stage(asked.batch)).bind(asked.folder, asked.exits)
    serve.run(stage, name="default", route_prefix="/predict")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(READY, flush=True)
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(options(sys.argv[1:]))
