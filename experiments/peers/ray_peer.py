"""Plain Ray Serve, batched by `@serve.batch`: `python -m experiments.peers.ray_peer FOLDER PORT [DTYPE]`."""

import signal
import sys
import threading
from typing import Any

from experiments.peers.network import BATCH, READY, WAIT_S, FullNetwork, options


def _stage() -> Any:
    from ray import serve

    class Batched:
        def __init__(self, folder: str, exits_dtype: str) -> None:
            self._network = FullNetwork(folder, exits_dtype)

        async def __call__(self, request: Any) -> Any:
            return await self.answer((await request.json())["inputs"])

        @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)  # type: ignore[untyped-decorator]
        async def answer(self, inputs: list[Any]) -> list[Any]:
            return [{"label": label} for label in self._network.labels(inputs)]

    return Batched


def main(folder: str, port: int, exits_dtype: str) -> None:
    """Serve on a Ray of its own, and end all at the first signal."""
    import ray
    from ray import serve

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = {"num_replicas": 1, "max_ongoing_requests": 512, "ray_actor_options": {"num_cpus": 1}}
    stage = serve.deployment(**settings)(_stage()).bind(folder, exits_dtype)
    serve.run(stage, name="default", route_prefix="/predict")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(READY, flush=True)
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*options(sys.argv[1:]))
