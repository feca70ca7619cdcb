"""A network in the front's own process: its copies, which compute at once."""

import time
from collections.abc import Collection
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.front.service import Content, Service
from isobatch.deployments.models.backends import share_threads
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import NOBODY, Batch, Launched
from tests.helpers.toy_model import Toy

both = Barrier(2, timeout=30)


class Together(Toy):
    """A launch ends only while another copy computes, too."""

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        if batch.cursor == 0:
            both.wait()
        return super().run(batch, stop, ramps, kept)


def load(directory: str, device: str, dtype: str) -> Toy:
    return Together()


async def test_copies_in_one_process_compute_at_once() -> None:
    config = AppConfig(model="/models/toy", loader=f"{__name__}:load", slo_ms=60_000, max_batch=1, replicas=2)
    service = Service(config, time.perf_counter)
    await service.open()
    inputs = service.encoded([[0, 3], [3, 5]])
    answers = await service.answer(service.register("", 0, {}), lambda: Content(inputs, list))
    assert [answer.label for answer in answers] == [3, 5]
    (split,) = (await service.stats())["splits"]
    assert (split["replicas"], split["launches"]) == (2, 2)
    await service.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"plan": "plan.json", "profile": "profile.json"}, "replicas is for serving without a plan"),
        ({"devices": "auto", "profile": "profile.json"}, "replicas is for serving without a plan"),
        ({"device": "cuda"}, "replicas is for a CPU, not for device: cuda: for several GPUs make a plan"),
    ],
)
def test_copies_are_refused_where_a_plan_or_a_gpu_says_otherwise(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        checked(AppConfig, {"replicas": 2, **fields})


def test_ray_reserves_a_cpu_for_each_copy() -> None:
    assert checked(AppConfig, {"replicas": 3}).front_cpus == 3


def test_copies_divide_the_threads_once() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        for _ in range(2):
            share_threads(4)
        assert torch.get_num_threads() == 1
        share_threads.cache_clear()
        torch.set_num_threads(6)
        for _ in range(2):
            share_threads(3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        share_threads.cache_clear()
