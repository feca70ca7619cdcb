"""A network in the front's own process: its copies, which compute at once."""

import asyncio
import time
from collections.abc import Collection
from functools import cache, partial
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.front.answers import RefusedError
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


def load_toy(directory: str, device: str, dtype: str) -> Toy:
    return Toy()


def returned(content: Content[Any]) -> Content[Any]:
    return content


@cache
def load_once(directory: str, device: str, dtype: str) -> Toy:
    return Toy()


CONFIG = AppConfig(model="/models/toy", loader=f"{__name__}:load", slo_ms=60_000, max_batch=1, replicas=2)


async def test_copies_in_one_process_compute_at_once() -> None:
    service = Service(CONFIG, time.perf_counter)
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
        ({"device": "cuda"}, "replicas is for device: cpu, not for cuda: for several GPUs make a plan"),
    ],
)
def test_copies_are_refused_where_a_plan_or_a_gpu_says_otherwise(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        checked(AppConfig, {"replicas": 2, **fields})


def test_each_copy_that_computes_has_a_cpu_of_its_own() -> None:
    assert checked(AppConfig, {"replicas": 3}).front_cpus == 3
    virtual = {"backend": "virtual", "profile": "profile.json"}
    assert checked(AppConfig, {"replicas": 3, **virtual}).front_cpus == 1


async def test_after_an_input_that_breaks_the_network_every_copy_computes_on() -> None:
    # An audited input would try again without its audit, and change how launches meet at the barrier.
    service = Service(CONFIG.model_copy(update={"audit_share": 0.0}), time.perf_counter)
    await service.open()
    broken = service.answer(service.register("", 0, {}), lambda: Content(service.encoded([[0, -1], [0, -1]]), list))
    with pytest.raises(RefusedError, match="the network failed: RuntimeError"):
        await broken
    began_s = time.monotonic()
    inputs = service.encoded([[0, 3], [3, 5]])
    await service.answer(service.register("", 0, {}), lambda: Content(inputs, list))
    assert time.monotonic() - began_s < 4, "a replica of a plan would be tried again after 5 s"
    await service.close()


async def test_an_input_that_breaks_the_network_fails_no_other_request_of_its_batch() -> None:
    service = Service(CONFIG.model_copy(update={"loader": f"{__name__}:load_toy", "max_batch": 16}), time.perf_counter)
    await service.open()
    contents = [Content(service.encoded([[3, label]]), list) for label in (0, 1, -1, 2, 3, 4, 5, 6)]
    requests = (service.answer(service.register("", 0, {}), partial(returned, each)) for each in contents)
    answers = await asyncio.gather(*requests, return_exceptions=True)
    labels = [answer[0].label for answer in answers if not isinstance(answer, BaseException)]
    assert labels == [0, 1, 2, 3, 4, 5, 6]
    assert isinstance(answers[2], RefusedError)
    await service.close()


async def test_a_loader_that_returns_the_same_network_twice_is_refused() -> None:
    config = CONFIG.model_copy(update={"loader": f"{__name__}:load_once"})
    with pytest.raises(UserError, match=r"load_once: it returned the same network twice: replicas: 2 needs"):
        await Service(config, time.perf_counter).open()


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
