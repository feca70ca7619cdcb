"""What stands between HTTP and the network: check the inputs, encode them, wait for the answers, count."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from deployments.config import DEMO, AppConfig, named
from deployments.driver import Driver
from deployments.front.answers import Answer, RefusedError
from deployments.front.keys import key_in
from deployments.front.stats import Seen, seen_by, told
from deployments.in_process import in_process
from deployments.replicas.placed import load_front_model
from deployments.replicas.wire import Packed, pack
from profiles.model import SplitModel

log = logging.getLogger(__name__)


def directory_of(config: AppConfig) -> str:
    """Where the network lies; the demo's is trained at first use."""
    return config.model or str(named(DEMO)())


async def _nobody() -> list[Seen]:
    return []


Connect = Callable[[AppConfig, SplitModel, Callable[[], float]], Awaitable[Driver]]


class Service:
    """One network, ready to answer between `open` and `close`.

    `connect` makes what runs it; `others` says what other fronts of it have seen, `plan` what
    is followed now.
    """

    def __init__(
        self,
        config: AppConfig,
        clock: Callable[[], float],
        connect: Connect = in_process,
        others: Callable[[], Awaitable[list[Seen]]] = _nobody,
        plan: Callable[[], str | None] = lambda: None,
    ) -> None:
        directory = directory_of(config)
        self.name = config.name or ("demo" if config.model is None else Path(directory).name)
        self.config = config
        self.key = key_in(config.api_key_variable)
        self._model = load_front_model(config, directory)
        # What the network calls its labels, if it says so; their numbers otherwise.
        self.labels = tuple(getattr(self._model, "labels", None) or map(str, range(self._model.num_labels)))
        # What every answer says of the network.
        self.heading: dict[str, Any] = {"model": self.name} | ({"virtual": True} if config.backend == "virtual" else {})
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
        """What was admitted is answered first."""
        await self._driver.close()

    @property
    def reads_text(self) -> bool:
        return bool(getattr(self._model, "reads_text", False))

    async def predict(self, inputs: object, within_s: float | None = None) -> list[Answer]:
        """The answers to one input or to a list of them. Whatever is wrong with them is a `RefusedError`."""
        return await self._answer(self._encoded, inputs, within_s)

    async def predict_each(self, inputs: Sequence[Any], within_s: float | None = None) -> list[Answer]:
        """The same where it is known that there are many."""
        return await self._answer(self._encode, inputs, within_s)

    async def _answer(self, encode: Callable[[Any], Packed], inputs: Any, within_s: float | None) -> list[Answer]:
        tally, started_s = self._driver.tally, self._clock()
        try:
            answers = await self._driver.answer(encode(inputs), within_s or self.config.slo_ms / 1e3)
        except RefusedError:
            tally.ended("refused")
            raise
        except asyncio.CancelledError:
            tally.ended("abandoned")
            raise
        except Exception as error:
            tally.ended("failed")
            log.exception("a batch could not be computed")
            raise RefusedError(
                500, f"the network failed: {type(error).__name__}; the replica's log says where"
            ) from error
        tally.answered(answers, self._clock() - started_s)
        return answers

    async def everywhere(self) -> list[Seen]:
        """By every front, this one first."""
        return [seen_by(self._driver), *await self._others()]

    async def missing(self) -> list[str]:
        """The groups of replicas that have none now, as any front sees it."""
        return sorted({group for seen in await self.everywhere() for group in seen.missing})

    async def stats(self) -> dict[str, Any]:
        """Since the start: requests by outcome, latencies, batches per split, inputs by the block they left after."""
        return {"model": self.name, "plan": self._plan()} | told(await self.everywhere())

    def _encoded(self, inputs: object) -> Packed:
        """Texts in a list are many. Any other list may be one input (an image, a pair of texts) or many."""
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
        if not len(inputs):
            raise RefusedError(422, "'inputs' is empty: give one input or a list of them")
        if len(inputs) > self.config.max_inputs:
            raise RefusedError(422, f"{len(inputs)} inputs in one request: {self.config.max_inputs} are allowed")
        try:
            return pack(self._model.encode(inputs))
        except (ValueError, TypeError, OverflowError) as error:
            raise RefusedError(422, str(error)) from error
