"""A network in the front's own process, and several such processes."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.in_process import InProcess, NamedState
from isobatch.deployments.front.service import Content, Service
from isobatch.profiles.errors import UserError
from tests.helpers.toy_model import Toy


def load_toy(directory: str, device: str, dtype: str) -> Toy:
    return Toy()


def returned(content: Content[Any]) -> Content[Any]:
    return content


CONFIG = AppConfig(model="/models/toy", loader=f"{__name__}:load_toy", slo_ms=60_000, max_batch=1, replicas=2)


async def test_any_replica_has_the_counts_of_all() -> None:
    networks: list[InProcess] = []

    async def ask_all() -> list[NamedState]:
        return [network.state() for network in networks]

    networks += [InProcess(CONFIG, ask_all) for _ in range(CONFIG.replicas)]
    services = [Service(CONFIG, time.perf_counter, network) for network in networks]
    for service in services:
        await service.open()
    for service, times in zip(services, (1, 2), strict=True):
        for label in range(times):
            inputs = service.encoded([[0, label]])
            await service.answer(service.register("", 0, {}), partial(Content, inputs, list))
    for service in services:
        stats = await service.stats()
        (split,) = stats["splits"]
        assert (split["replicas"], split["launches"], len(stats["fronts"])) == (2, 3, 2)
        assert len({each["replica"] for each in stats["replicas"]}) == 2
        await service.close()


def test_max_inside_is_for_all_replicas() -> None:
    config = CONFIG.model_copy(update={"max_inside": 10})
    assert (config.max_inside_all, config.most_inputs) == (10, 5)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"plan": "plan.json", "profile": "profile.json"}, "replicas is for serving without a plan"),
        ({"devices": "auto", "profile": "profile.json"}, "replicas is for serving without a plan"),
    ],
)
def test_replicas_are_refused_beside_a_plan(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        checked(AppConfig, {"replicas": 2, **fields})


async def test_an_input_that_breaks_the_network_fails_no_other_request_of_its_batch() -> None:
    service = Service(CONFIG.model_copy(update={"max_batch": 16}), time.perf_counter)
    await service.open()
    contents = [Content(service.encoded([[3, label]]), list) for label in (0, 1, -1, 2, 3, 4, 5, 6)]
    requests = (service.answer(service.register("", 0, {}), partial(returned, each)) for each in contents)
    answers = await asyncio.gather(*requests, return_exceptions=True)
    labels = [answer[0].label for answer in answers if not isinstance(answer, BaseException)]
    assert labels == [0, 1, 2, 3, 4, 5, 6]
    assert isinstance(answers[2], RefusedError)
    await service.close()
