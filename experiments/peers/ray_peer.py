"""Plain Ray Serve: one deployment, batched by `@serve.batch`: `python -m experiments.peers.ray_peer FOLDER PORT`."""

import sys
from typing import Any

from experiments.peers.network import BATCH, READY, WAIT_S, FullNetwork, folder_and_port
from experiments.shared.plain_serve import answer_until_stopped


def _stage() -> Any:
    from ray import serve

    class Batched:
        def __init__(self, folder: str) -> None:
            self._network = FullNetwork(folder)

        async def __call__(self, request: Any) -> Any:
            return await self.answer((await request.json())["inputs"])

        @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)  # type: ignore[untyped-decorator]
        async def answer(self, inputs: list[Any]) -> list[Any]:
            return [{"label": label} for label in self._network.labels(inputs)]

    return Batched


def main(folder: str, port: int) -> None:
    options = {"num_replicas": 1, "max_ongoing_requests": 512, "ray_actor_options": {"num_cpus": 1}}
    answer_until_stopped(lambda serve: serve.deployment(**options)(_stage()).bind(folder), port, READY)


if __name__ == "__main__":
    main(*folder_and_port(sys.argv[1:]))
