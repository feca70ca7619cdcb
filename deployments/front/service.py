"""The service between HTTP and the network: it checks inputs, encodes them, waits for the answers, and counts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from deployments.config import DEMO, VIRTUAL, AppConfig, function_at
from deployments.front.answers import Answer, RefusedError
from deployments.front.bodies import Sizes
from deployments.front.driver import Driver
from deployments.front.headers import key_in
from deployments.front.in_process import in_process
from deployments.front.messages import FrontState
from deployments.front.stats import state_of, stats_of
from deployments.replica.loading import load_front_model
from deployments.transport.packed import Packed, pack
from profiles.model import SplitModel, label_names, reads_text

log = logging.getLogger(__name__)


def directory_of(config: AppConfig) -> str:
    """The directory of the network."""
    return config.model or str(function_at(DEMO)())


async def _nobody() -> list[FrontState]:
    return []


Connect = Callable[[AppConfig, SplitModel, Callable[[], float]], Awaitable[Driver]]


class Service:
    """One network, ready to answer between `open` and `close`.

    `connect` makes the driver that runs it; `others` asks the other fronts of the application for their states; `plan`
    returns the current plan in words.
    """

    def __init__(
        self,
        config: AppConfig,
        clock: Callable[[], float],
        connect: Connect = in_process,
        others: Callable[[], Awaitable[list[FrontState]]] = _nobody,
        plan: Callable[[], str | None] = lambda: None,
    ) -> None:
        directory = directory_of(config)
        self.name = config.name or ("demo" if config.model is None else Path(directory).name)
        self.config = config
        self.key = key_in(config.api_key_variable)
        self.sizes = Sizes(config.max_inputs, config.max_body_bytes)
        self._model = load_front_model(config, directory)
        self.labels = label_names(self._model)
        # The parts of every answer that describe the network.
        self.heading: dict[str, Any] = {"model": self.name} | ({"virtual": True} if config.backend == VIRTUAL else {})
        self._clock = clock
        self._connect = connect
        self._others = others
        self._plan = plan

    @property
    def num_blocks(self) -> int:
        return self._model.num_blocks

    async def open(self) -> None:
        self._driver = await self._connect(self.config, self._model, self._clock)

    async def close(self) -> None:
        """Answer every admitted input, then end."""
        await self._driver.close()

    @property
    def reads_text(self) -> bool:
        return reads_text(self._model)

    async def predict(self, inputs: object, within_s: float | None = None) -> list[Answer]:
        """The answers to one input or to a list of them. Raises `RefusedError` if anything is wrong with the inputs."""
        return await self._answer(self._encoded, inputs, within_s)

    async def predict_each(self, inputs: Sequence[Any], within_s: float | None = None) -> list[Answer]:
        """The answers to a list of inputs, each of which may itself be a list."""
        return await self._answer(self._encode, inputs, within_s)

    async def _answer(self, encode: Callable[[Any], Packed], inputs: Any, within_s: float | None) -> list[Answer]:
        started_s = self._clock()
        answers = await self._driver.answer(encode(inputs), within_s or self.config.slo_ms / 1e3)
        for position, answer in enumerate(answers):
            if not isfinite(answer.score):
                raise RefusedError(422, f"input {position} has no finite answer: its numbers are too large")
        self._driver.counts.request_answered(answers, self._clock() - started_s)
        return answers

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count how the request that is handled inside ends; every failure comes out as a `RefusedError`."""
        counts = self._driver.counts
        try:
            yield
        except RefusedError as refused:
            counts.request_ended("failed" if refused.status == 500 else "refused")
            raise
        except asyncio.CancelledError:
            counts.request_ended("abandoned")
            raise
        except Exception as error:
            counts.request_ended("failed")
            log.exception("a batch could not be computed")
            reason = f"the network failed: {type(error).__name__}; the replica's log says where"
            raise RefusedError(500, reason) from error

    async def everywhere(self) -> list[FrontState]:
        """The states of all fronts, this one first."""
        return [state_of(self._driver), *await self._others()]

    async def missing(self) -> list[str]:
        """The groups that have no replica now, as seen by any front."""
        return sorted({group for front in await self.everywhere() for group in front.missing})

    async def stats(self) -> dict[str, Any]:
        """Since the start: requests by outcome, latencies, batches per split, inputs by the block they left after."""
        return {"model": self.name, "plan": self._plan()} | stats_of(await self.everywhere())

    def _encoded(self, inputs: object) -> Packed:
        """Encode the inputs. A list of texts holds many; any other list may be one input (an image, a pair) or many."""
        if not isinstance(inputs, list):
            return self._encode([inputs])
        if all(isinstance(one, str) for one in inputs):
            return self._encode(inputs)
        try:
            return self._encode([inputs])
        except RefusedError as as_one:
            return self._encode_many(inputs, as_one)

    def _encode_many(self, inputs: Sequence[Any], as_one: RefusedError) -> Packed:
        try:
            return self._encode(inputs)
        except RefusedError as as_many:
            sentence = f"'inputs' is neither one input ({as_one}) nor a list of them ({as_many})"
            raise RefusedError(422, sentence) from None

    def _encode(self, inputs: Sequence[Any]) -> Packed:
        self.sizes.check_count(len(inputs))
        try:
            return pack(self._model.encode(inputs))
        except (ValueError, TypeError, OverflowError) as error:
            raise RefusedError(422, str(error)) from error
        except Exception as error:  # any error of the preprocessor is taken for a fault of the input
            log.warning("inputs could not be encoded", exc_info=True)
            raise RefusedError(422, f"the inputs cannot be read: {type(error).__name__}: {error}") from error
