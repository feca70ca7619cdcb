"""The service between HTTP and the network: it checks inputs, encodes them, waits for the answers, and counts."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from deployments.config import AppConfig
from deployments.front.answers import Answer, RefusedError
from deployments.front.bodies import Sizes
from deployments.front.driver import Driver, Refusing
from deployments.front.examples import example_of
from deployments.front.headers import FULL, STARTED, key_in, waited_s_by, wants_full
from deployments.front.in_process import in_process
from deployments.front.load import FadingPeak, RetryTimes, Trend
from deployments.front.messages import FrontState
from deployments.front.proxy import Burden
from deployments.front.request_queue import RequestQueue
from deployments.front.schemas import STATS_VERSION
from deployments.front.stats import state_of, stats_of
from deployments.named import DEMO, DEMO_NAME, VIRTUAL, function_at
from deployments.replica.loading import load_front_model
from deployments.tasks import task_of
from deployments.tracing import Span, Tracing, tracing_here
from deployments.transport.packed import Packed, pack
from profiles.model import SplitModel, label_names, reads_text
from profiles.promise import NOTHING, agreement_in, promise_in

log = logging.getLogger(__name__)
HAND_OVER_S = 0.002  # of an answer to the operating system, and through it to the client's side
_TYPICAL_S = 0.0002  # what a request costs, before any has shown it
# To be read: a front that lets requests wait longer than that, and than this share of their time, has too many.
_LONG_WAIT_S, _LONG_SHARE = 0.05, 0.2
_ENOUGH_OF_SLO = 0.9
_LOOKS_AT_ONE_OF = 8  # requests, to learn what they cost
_NO_HEADERS: Mapping[bytes, bytes] = {}
Format = TypeVar("Format")


class IncomingRequest(NamedTuple):
    """A request at the door, before anything is read of it."""

    kind: str  # how it comes: what a byte of it costs depends on that
    size: int  # bytes of its body
    arrived_s: float  # its first byte
    within_s: float | None  # how long its client waits since then, as far as its headers say
    until_s: float  # when its client gives up, whatever its content says
    work_s: float  # processor time of this process that it is expected to cost
    weight: int  # what its inputs probably weigh
    latest_s: float  # when it must have been read, to be answered in time
    long_s: float  # a front that lets it wait for longer than that, to be read, has too many
    full: bool  # no input may leave at a ramp

    @property
    def gone_s(self) -> float:
        """When its client has given up, as far as its headers say."""
        return min(self.until_s, self.arrived_s + (inf if self.within_s is None else self.within_s))


@dataclass(frozen=True)
class Content(Generic[Format]):
    """What a request says, once it is read; and what is made of the answers to its inputs."""

    inputs: Packed
    write: Callable[[list[Answer]], Format]
    within_s: float | None = None  # how long its client waits, if only the body says so


class _RequestCosts:
    """What requests of one kind have shown, by their size."""

    def __init__(self) -> None:
        self.work_s = Trend(_TYPICAL_S)  # of this process, to read them and to write their answers
        self.weight = Trend(1.0)  # of their inputs
        self._come = count()

    def looks(self) -> bool:
        """Whether to look at the next one: to ask for the processor time of all costs more than a small one takes."""
        return not next(self._come) % _LOOKS_AT_ONE_OF


def _unasked() -> float:
    """Stands for a clock where nobody needs to know the time."""
    return 0.0


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
        self.name = config.name or (DEMO_NAME if config.model is None else Path(directory).name)
        self.config = config
        self.key = key_in(config.api_key_variable)
        self.sizes = Sizes(config.most_inputs, config.max_body_bytes)
        self._model = load_front_model(config, directory)
        self.labels, self.task = label_names(self._model), task_of(self._model)
        self.example = example_of(config.model)
        promising = config.prepared_folder
        self.promised = str((promising and promise_in(promising)) or NOTHING)
        self._agreement = config.agreement or (agreement_in(promising) if promising else None)
        # The parts of every answer that describe the network.
        self.heading: dict[str, Any] = {"model": self.name} | ({"virtual": True} if config.backend == VIRTUAL else {})
        self._clock, self._work_clock = clock, time.thread_time
        self._request_queue = RequestQueue(clock)
        self._costs_by_kind: dict[str, _RequestCosts] = {}  # by the kind of request
        self._writing = FadingPeak()
        self._crowd = RetryTimes()
        self._inside = self._strained = self._answered = 0  # requests
        self._connect = connect
        self._others = others
        self._plan = plan
        self._tracing = tracing_here(clock)

    @property
    def num_blocks(self) -> int:
        return self._model.num_blocks

    async def open(self) -> None:
        self._driver = await self._connect(self.config, self._model, self._clock)
        self._driver.counts.promised = self._agreement

    async def close(self) -> None:
        """Answer every admitted input, then end."""
        await self._driver.close()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)

    @property
    def reads_text(self) -> bool:
        return reads_text(self._model)

    def visit(
        self,
        kind: str,
        size: int,
        headers: Mapping[bytes, bytes],
        within_s: float | None,
        left_s: float | None = None,
    ) -> IncomingRequest:
        """A request that is seen now. Raises `RefusedError` if there is no time for it, whatever it says.

        `within_s`: how long its client waits, from when it came; `left_s`: from now, at most.
        """
        now_s, queue, dispatcher = self._clock(), self._request_queue, self._driver.dispatcher
        arrived_s = now_s - max(waited_s_by(headers.get(STARTED)), queue.unseen_s())
        until_s = inf if left_s is None else now_s + left_s
        deadline_s = min(arrived_s + (within_s or self.config.slo_ms / 1e3), until_s)
        costs = self._request_costs(kind)
        work_s = costs.work_s.expected(size)
        weight = max(1, round(costs.weight.expected(size)))
        # What is left to be done when it has been read: by the network, and with the answer.
        rest_s = dispatcher.needed_s(now_s, deadline_s - now_s, weight) + self._after_s(deadline_s)
        full = wants_full(headers.get(FULL))
        try:
            if dispatcher.inside or not queue.idle:
                queue.check(work_s, deadline_s - rest_s)
            else:  # nobody is hurt if what was learned is right, and if it is wrong, this is how that shows
                queue.check(0.0, deadline_s)
        except RefusedError:
            waits = self._waits(deadline_s - arrived_s)
            self._driver.counts.refused_unread(weight, self.config.most_inputs, waits, full)
            raise
        long_s = max(_LONG_WAIT_S, _LONG_SHARE * (deadline_s - arrived_s))
        return IncomingRequest(
            kind, size, arrived_s, within_s, until_s, work_s, weight, deadline_s - rest_s, long_s, full
        )

    async def answer(self, visit: IncomingRequest, read: Callable[[], Content[Format]], size: int = 0) -> Format:
        """What is written of the answers to the inputs that `read` finds in the request, if there is time for all.

        `size`: bytes that are to be read, where the visit may not know: a body may be compressed, or tell no length.
        """
        self._inside += 1
        try:
            return await self._answer(self._weighed(visit, size), read)
        finally:
            self._inside -= 1

    def _weighed(self, visit: IncomingRequest, size: int) -> IncomingRequest:
        if size <= visit.size:
            return visit
        return visit._replace(size=size, work_s=self._request_costs(visit.kind).work_s.expected(size))

    async def _answer(self, visit: IncomingRequest, read: Callable[[], Content[Format]]) -> Format:
        costs = self._request_costs(visit.kind)
        try:
            await self._request_queue.turn(visit.work_s, visit.latest_s)
            if self._clock() > visit.gone_s:
                raise RefusedError(503, "refused: the deadline had passed before the whole request was here")
        except RefusedError:
            waits = self._waits(min(visit.within_s or inf, visit.until_s - visit.arrived_s))
            self._driver.counts.refused_unread(visit.weight, self.config.most_inputs, waits, visit.full)
            raise
        self._strained += self._clock() - visit.arrived_s > visit.long_s
        learns = costs.looks()
        work_clock = self._work_clock if learns else _unasked
        began_s = work_clock()
        content = read()
        read_s = work_clock() - began_s
        within_s = visit.within_s or content.within_s or self.config.slo_ms / 1e3
        deadline_s = min(visit.arrived_s + within_s, visit.until_s)
        within_s = deadline_s - self._after_s(deadline_s) - self._clock()
        waits = self._waits(deadline_s - visit.arrived_s)
        answers = await self._driver.answer(content.inputs, within_s, visit.full, waits)
        known_s, began_s = self._clock(), work_clock()
        written = content.write(_finite(_told(answers, content.inputs)))
        now_s = self._clock()
        self._writing.saw(now_s, now_s - known_s)
        if learns:
            costs.weight.learn(visit.size, sum(self._driver.weights(content.inputs)))
            costs.work_s.learn(visit.size, read_s + work_clock() - began_s)
        if now_s > deadline_s:
            raise RefusedError(504, "the deadline passed before the answer was ready")
        self._driver.counts.request_answered(answers, now_s - visit.arrived_s)
        return written

    def _waits(self, within_s: float) -> bool:
        """Whether a client waits for about as long as the SLO: what such clients are refused tells of overload."""
        return within_s >= _ENOUGH_OF_SLO * self.config.slo_ms / 1e3

    def _request_costs(self, kind: str) -> _RequestCosts:
        if kind not in self._costs_by_kind:
            self._costs_by_kind[kind] = _RequestCosts()
        return self._costs_by_kind[kind]

    def _after_s(self, deadline_s: float) -> float:
        """What an answer takes from when it is known until it is on its way, of the time that is left."""
        now_s = self._clock()
        after_s = self._driver.lag.at(now_s) + self._writing.at(now_s) + HAND_OVER_S
        return min(after_s, max(0.0, deadline_s - now_s) / 2)

    def counted(
        self, kind: str = "", headers: Mapping[bytes, bytes] = _NO_HEADERS
    ) -> AbstractContextManager[Span | None]:
        """Count how the request that is handled inside ends; every failure comes out as a `RefusedError`.

        What it yields is the request's span, where it is traced.
        """
        if self._tracing and self._tracing.takes(headers):
            return self._traced(self._tracing, kind, headers)
        return self._counted()

    @contextmanager
    def _traced(self, tracing: Tracing, kind: str, headers: Mapping[bytes, bytes]) -> Iterator[Span]:
        with tracing.request(kind, headers) as span, self._counted():
            yield span

    @contextmanager
    def _counted(self) -> Iterator[None]:
        counts = self._driver.counts
        try:
            yield
            self._answered += 1
            self._crowd.answered(self._clock())
        except RefusedError as refused:
            counts.request_ended("failed" if refused.status == 500 else "refused")
            self._strained += refused.status in (503, 504)
            if refused.status == 503:
                self._crowd.refused(self._clock())
                refused.retry_after_s = self._crowd.retry_after_s(refused.retry_after_s or 0.0)
            raise
        except asyncio.CancelledError:
            counts.request_ended("abandoned")
            raise
        except Exception as error:
            counts.request_ended("failed")
            log.exception("a batch could not be computed")
            reason = f"the network failed: {type(error).__name__}; the replica's log says where"
            raise RefusedError(500, reason) from error

    def watch(self, proxy: Refusing) -> None:
        """Count what a proxy before this front refuses."""
        self._driver.watch(proxy)

    def burden(self) -> Burden:
        """What the proxy's limit depends on."""
        return Burden(self._inside, self._strained, self._answered)

    async def everywhere(self) -> list[FrontState]:
        """The states of all fronts, this one first."""
        return [state_of(self._driver), *await self._others()]

    async def missing(self) -> list[str]:
        """The groups that have no replica now, as seen by any front."""
        return sorted({group for front in await self.everywhere() for group in front.missing})

    async def stats(self) -> dict[str, Any]:
        """Since the start: requests by outcome, latencies, batches per split, inputs by the block they left after."""
        fronts = await self.everywhere()
        about = {"schema_version": STATS_VERSION, "model": self.name, "plan": self._plan()}
        about |= {"slo_ms": self.config.slo_ms, "promise": self.promised}
        return about | stats_of(fronts, self._agreement)

    def encoded(self, inputs: object) -> Packed:
        """Encode the inputs. A list of texts holds many; any other list may be one input (an image, a pair) or many."""
        if not isinstance(inputs, list):
            return self.encoded_each([inputs])
        if all(isinstance(one, str) for one in inputs):
            return self.encoded_each(inputs)
        try:
            return self.encoded_each([inputs])
        except RefusedError as as_one:
            return self._encode_many(inputs, as_one)

    def _encode_many(self, inputs: Sequence[Any], as_one: RefusedError) -> Packed:
        try:
            return self.encoded_each(inputs)
        except RefusedError as as_many:
            sentence = f"'inputs' is neither one input ({as_one}) nor a list of them ({as_many})"
            raise RefusedError(422, sentence) from None

    def encoded_each(self, inputs: Sequence[Any]) -> Packed:
        """Encode a list of inputs, each of which may itself be a list."""
        self.sizes.check_count(len(inputs))
        try:
            packed = pack(self._model.encode(inputs))
        except (ValueError, TypeError, OverflowError) as error:
            raise RefusedError(422, str(error)) from error
        except Exception as error:  # any error of the preprocessor is taken for a fault of the input
            log.warning("inputs could not be encoded", exc_info=True)
            raise RefusedError(422, f"the inputs cannot be read: {type(error).__name__}: {error}") from error
        if packed.truncated and self.config.too_long == "refuse":
            longer = f"input {min(packed.truncated)} is longer than the network reads"
            raise RefusedError(422, f"{longer}: shorten it (too_long: refuse is set here)")
        return packed


def _told(answers: list[Answer], inputs: Packed) -> list[Answer]:
    """The answers, which say so where an input's end was cut off, and which words they answer."""
    if not inputs.truncated and not inputs.words:
        return answers
    words = inputs.words or [None] * len(answers)
    return [
        replace(each, truncated=position in inputs.truncated, words=words[position])
        for position, each in enumerate(answers)
    ]


def _finite(answers: list[Answer]) -> list[Answer]:
    for position, answer in enumerate(answers):
        if not np.isfinite(answer.score).all():
            raise RefusedError(422, f"input {position} has no finite answer: its numbers are too large")
    return answers
