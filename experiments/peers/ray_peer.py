"""Plain Ray Serve, batched by `@serve.batch`: `python -m experiments.peers.ray_peer FOLDER PORT [DTYPE]`."""

import sys
from typing import Any

from experiments.peers.network import BATCH, READY, WAIT_S, FullNetwork, options
from experiments.shared.plain_serve import answer_until_stopped


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
    settings = {"num_replicas": 1, "max_ongoing_requests": 512, "ray_actor_options": {"num_cpus": 1}}
    answer_until_stopped(lambda serve: serve.deployment(**settings)(_stage()).bind(folder, exits_dtype), port, READY)


if __name__ == "__main__":
    main(*options(sys.argv[1:]))
