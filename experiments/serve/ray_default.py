"""The usual program for plain Ray Serve: one stage batched by `@serve.batch`, six replicas, default settings."""

import asyncio
import signal
import sys
import threading
from typing import Any

from experiments.serve.fleet import BATCH, PASS_S

READY = "ready"
REPLICAS = 6


class RayStage:
    """A virtual device of 10 ms per batch of 16."""

    def __init__(self) -> None:
        self._device = asyncio.Lock()

    async def __call__(self, request: Any) -> Any:
        return await self.answer(await request.json())

    async def answer(self, body: Any) -> Any:
        raise NotImplementedError("serve.batch is put in place where Ray is imported")


def _stage() -> Any:
    from ray import serve

    class Batched(RayStage):
        @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=PASS_S)  # type: ignore[untyped-decorator]
        async def answer(self, bodies: list[Any]) -> list[Any]:
            async with self._device:
                await asyncio.sleep(PASS_S)
            return [{"label": 0} for _ in bodies]

    return Batched


def main(port: int) -> None:
    import ray
    from ray import serve

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"num_replicas": REPLICAS, "max_ongoing_requests": 512, "ray_actor_options": {"num_cpus": 0}}
    serve.run(serve.deployment(**options)(_stage()).bind(), name="default", route_prefix="/predict")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(READY, flush=True)
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
