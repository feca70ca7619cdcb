"""What stands between HTTP and the network: check the inputs, encode them, wait for the answers, count."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from deployments.answers import Answer, RefusedError
from deployments.batcher import Batcher
from deployments.config import DEMO, AppConfig, named
from profiles.model import Batch, SplitModel

log = logging.getLogger(__name__)


def directory_of(config: AppConfig) -> str:
    """Where the network lies; the demo's is trained at first use."""
    return config.model or str(named(DEMO)())


class Service:
    """One network, ready to answer."""

    def __init__(self, config: AppConfig, clock: Callable[[], float]) -> None:
        directory = directory_of(config)
        self.name = directory.rstrip("/").rpartition("/")[2]
        self.config = config
        self._model: SplitModel = named(config.loader)(directory, device=config.device, dtype=config.dtype)
        ramps = self._model.ramp_blocks if config.exits else ()
        self._batcher = Batcher(
            self._model, ramps, max_batch=config.max_batch, max_waiting=config.max_waiting, clock=clock
        )
        self._outcomes: Counter[str] = Counter()
        self._exits: Counter[int] = Counter()

    async def predict(self, inputs: object) -> list[Answer]:
        """The answers to one input or to a list of them. Whatever is wrong with them is a `RefusedError`."""
        try:
            answers = await self._batcher.answer(self._encoded(inputs))
        except RefusedError:
            self._outcomes["refused"] += 1
            raise
        except asyncio.CancelledError:
            self._outcomes["abandoned"] += 1
            raise
        except Exception as error:
            self._outcomes["failed"] += 1
            log.exception("a batch could not be computed")
            raise RefusedError(
                500, f"the network failed: {type(error).__name__}; the replica's log says where"
            ) from error
        self._outcomes["answered"] += 1
        self._exits.update(answer.exit_block for answer in answers)
        return answers

    def stats(self) -> dict[str, object]:
        """Counts since the start: requests by outcome, inputs by the block they left after."""
        exits = {str(block): self._exits[block] for block in range(self._model.num_blocks)}
        return {
            "model": self.name,
            "requests": {name: self._outcomes[name] for name in ("answered", "refused", "failed", "abandoned")},
            "waiting": self._batcher.waiting,
            "exits": exits,
        }

    def _encoded(self, inputs: object) -> Batch:
        """Texts in a list are many. Any other list may be one input (an image, a pair of texts) or many."""
        if inputs == []:
            raise RefusedError(422, "'inputs' is empty: give one input or a list of them")
        if not isinstance(inputs, list):
            return self._encode([inputs])
        if all(isinstance(one, str) for one in inputs):
            return self._encode(inputs)
        try:
            return self._encode([inputs])
        except RefusedError as as_one:
            return self._encode_many(inputs, as_one)

    def _encode_many(self, inputs: Sequence[Any], as_one: RefusedError) -> Batch:
        try:
            return self._encode(inputs)
        except RefusedError as as_many:
            sentence = f"'inputs' is neither one input ({as_one}) nor a list of them ({as_many})"
            raise RefusedError(422, sentence) from None

    def _encode(self, inputs: Sequence[Any]) -> Batch:
        if len(inputs) > self.config.max_inputs:
            raise RefusedError(422, f"{len(inputs)} inputs in one request: {self.config.max_inputs} are allowed")
        try:
            return self._model.encode(inputs)
        except (ValueError, TypeError, OverflowError) as error:
            raise RefusedError(422, str(error)) from error

    def close(self) -> None:
        self._batcher.close()
