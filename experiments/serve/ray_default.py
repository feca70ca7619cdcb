"""The usual program for plain Ray Serve: one stage batched by `@serve.batch`, six replicas, default settings."""

import asyncio
import sys
from typing import Any

from experiments.serve.fleet import BATCH, PASS_S
from experiments.shared.plain_serve import answer_until_stopped

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
    options = {"num_replicas": REPLICAS, "max_ongoing_requests": 512, "ray_actor_options": {"num_cpus": 0}}
    answer_until_stopped(lambda serve: serve.deployment(**options)(_stage()).bind(), port, READY)


if __name__ == "__main__":
    main(int(sys.argv[1]))
