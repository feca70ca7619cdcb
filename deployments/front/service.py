"""The service between the protocols and the driver: it checks and encodes inputs, and counts requests."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.answers import Answer, RefusedError, finite
from isobatch.deployments.front.bodies import Sizes, is_packed
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.examples import example_of
from isobatch.deployments.front.headers import RequestHeaders, key_in
from isobatch.deployments.front.in_process import InProcess, RunningNetwork
from isobatch.deployments.front.incoming import Content, Format, IncomingRequest, Pictures, ReadRequest, no_clock
from isobatch.deployments.front.load import FadingPeak, LongWork, Made, RequestCosts, RequestQueue, RetryTimes
from isobatch.deployments.front.messages import FrontState
from isobatch.deployments.front.proxy import Burden
from isobatch.deployments.front.schemas import STATS_VERSION
from isobatch.deployments.front.stats import state_of, stats_of
from isobatch.deployments.models.encode import ImageEncoder, check_together, is_picture, texts_of
from isobatch.deployments.named import DEMO_NAME, VIRTUAL
from isobatch.deployments.replica.loading import load_front_model
from isobatch.deployments.sources import name_of
from isobatch.deployments.tasks import relevant_label, task_of
from isobatch.deployments.tracing import Span, span_of_request, tracing_here
from isobatch.deployments.transport.packed import Packed, pack
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import label_names, reads_text
from isobatch.profiles.promise import NOTHING, agreement_in, promise_in

log = logging.getLogger(__name__)
HAND_OVER_S = 0.002  # the time from writing an answer until the client has it: through the operating system
# A front is overloaded if requests wait unread for longer than both this time and this share of their deadline.
_LONG_WAIT_S = 0.05
_LONG_WAIT_SHARE = 0.2
_ENOUGH = 0.9  # a client waits for "as long as" some time if its deadline is at least this share of it
_USUAL_RATE = 0.02  # the weight of one request in the usual deadline: about the last fifty matter
_MEASURED_ONE_OF = 8  # one request of 8 has its processor time measured: the clock costs more than a small request
_PICTURES_AT_ONCE = 2  # pictures that are read at once, each of which may take over 100 MB
_PACKED = "packed "  # before the kind of requests whose bodies are compressed, since their costs per byte differ
_NO_HEADERS: Mapping[bytes, bytes] = {}
LONG_BYTES = 2**16  # texts of a longer request are read in a thread: that takes tens of milliseconds


class Service:
    """Serves one network, which `network` runs, between `open` and `close`. `opened` is called with its driver."""

    def __init__(
        self,
        config: AppConfig,
        clock: Callable[[], float],
        network: RunningNetwork | None = None,
        opened: Callable[[Driver], None] = lambda driver: None,
    ) -> None:
        self.name = config.name or (DEMO_NAME if config.model is None else name_of(config.model))
        self.config = config
        self.key = key_in(config.api_key_variable)
        self.sizes = Sizes(config.most_inputs, config.max_body_bytes)
        self._model = load_front_model(config, str(config.folder))
        self.num_blocks, self.reads_text = self._model.num_blocks, reads_text(self._model)
        self.labels, self.task = label_names(self._model), task_of(self._model)
        # The number of the label that says that a document is relevant; None: there is none.
        self.relevant = relevant_label(self.labels, config.relevant_label)
        encoder = getattr(self._model, "encoder", None)
        self.texts = texts_of(encoder)  # the encoder with the network's tokenizer; None: it has no known one
        self.reads_pictures = isinstance(encoder, ImageEncoder)  # inputs may be JPEG, PNG or WebP
        # Whether each text has one answer, or several labels, as the interfaces of other servers expect.
        self.classifies_texts = self.reads_text and not self.task.by_token
        # Whether POST /predict has the form of text-embeddings-inference.
        self.predicts_as_tei = self.classifies_texts and config.predict_form == "tei"
        if config.predict_form == "tei" and not (self.predicts_as_tei or config.backend == VIRTUAL):
            reads = self.task.answered if self.reads_text else "images"
            raise UserError(
                f"predict_form: tei is for networks that classify texts, and this one labels {reads}: leave it out"
            )
        self._knows_best: bool = getattr(getattr(self._model, "ramps", None), "knows_best", False)
        self.example = example_of(config.model and config.folder)
        promising = config.prepared_folder
        self.promised = str((promising and promise_in(promising)) or NOTHING)
        self._agreement = config.agreement or (agreement_in(promising) if promising else None)
        # The fields of every response that describe the network.
        self.heading: dict[str, Any] = {"model": self.name} | ({"virtual": True} if config.backend == VIRTUAL else {})
        self._clock, self._network, self._opened = clock, network or InProcess(config), opened
        self._slo_s = config.slo_ms / 1e3
        self._usual_s = self._slo_s  # the mean of recent deadlines, of which none counts as longer than the SLO
        self._request_queue = RequestQueue(clock)
        self._costs: defaultdict[str, RequestCosts] = defaultdict(RequestCosts)  # by the kind of request
        self._writing = FadingPeak()
        self._retry_times = RetryTimes()
        self._inside = self._strained = 0  # requests
        self.long_work = LongWork(1 if self.texts else _PICTURES_AT_ONCE, clock)
        self._tracing = tracing_here(clock)

    async def open(self) -> None:
        self._driver = await self._network.open(self._model, self._clock)
        self.proxies = self._driver.proxies
        self._driver.counts.promised = self._agreement
        if texts := self.texts:  # the thread copies the tokenizer, for which no request should wait
            await self.long_work.run(lambda: texts.tokenizer.is_fast)
        self._opened(self._driver)

    async def close(self) -> None:
        """End when every admitted input has been answered."""
        await self._driver.close()
        self.long_work.close()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)

    def register(
        self, kind: str, size: int, headers: Mapping[bytes, bytes], left_s: float | None = None, part: float = 1.0,
        body_s: float = 0.0,
    ) -> IncomingRequest:  # fmt: skip
        """Register a request that arrives now. Raises `RefusedError` if it cannot be answered in time.

        `left_s`: the longest time that the client waits from now on, whatever the headers say. `part`: as in
        `IncomingRequest`. `body_s`: the time in which its body has come to this process.
        """
        within_s, waited_s, sent_s, full, priority = RequestHeaders.of(headers)
        kind = f"{_PACKED}{kind}" if is_packed(headers) else kind
        now_s, queue = self._clock(), self._request_queue
        arrived_s = now_s - (waited_s or queue.unseen_s())
        until_s = inf if left_s is None else now_s + left_s
        deadline_s = min(arrived_s + (within_s or self._slo_s), until_s)
        self._usual_s += _USUAL_RATE * (min(self._slo_s, (deadline_s - arrived_s) / part) - self._usual_s)
        costs, remaining_s = self._costs_of(kind, size), deadline_s - now_s
        work_s, weight = costs.work_s.expected(size), max(1, round(costs.weight.expected(size)))
        latest_s = deadline_s - self._network_s(now_s, remaining_s, work_s, weight)
        latest_s -= self._long_work_s(costs, size, remaining_s) + self._sending_s(deadline_s)
        long_wait_s, read_s = max(_LONG_WAIT_S, _LONG_WAIT_SHARE * (deadline_s - arrived_s)), now_s - sent_s - body_s
        incoming = IncomingRequest(
            kind, size, arrived_s, within_s, until_s, work_s, weight, latest_s, long_wait_s, read_s, full, priority,
            part,
        )  # fmt: skip
        threads_busy = costs.long_s.expected(size) and self.long_work.busy
        try:
            if self._driver.dispatcher.inside or not queue.idle or threads_busy:
                queue.check(work_s, latest_s)
            else:  # an idle front admits the request, so that estimates that are too high are corrected
                queue.check(0.0, deadline_s)
        except RefusedError as refused:
            waits = self._waits(incoming, deadline_s, self._usual_s)
            refused.shows_overload = waits and now_s + work_s <= latest_s
            self._count_unread(incoming, deadline_s)
            raise
        return incoming

    def wake_if_parked(self) -> bool:
        """Whether the application is parked. If it is, an input counts as arrived, so that replicas start."""
        if parked := self._driver.dispatcher.parked:
            self._driver.counts.refused_unread(1, self.config.most_inputs, waits=False)
        return parked

    async def answer(self, incoming: IncomingRequest, read: Callable[[], Content[Format]], size: int = 0) -> Format:
        """Read a request with `read`, and return its written answers. Raises `RefusedError` without enough time.

        `size`: that of the body as it was sent, which may have come without a length.
        """
        self._inside += 1
        came_in_time = self._clock() <= incoming.deadline_s(self._slo_s)
        try:
            if size > incoming.size:
                work_s = self._costs_of(incoming.kind, size).work_s.expected(size)
                incoming = incoming._replace(size=size, work_s=work_s)
            return await self._answer(incoming, read)
        except RefusedError as refused:
            refused.shows_overload = refused.shows_overload and came_in_time  # else its client has sent it too slowly
            raise
        finally:
            self._inside -= 1

    async def _answer(self, incoming: IncomingRequest, read: Callable[[], Content[Format]]) -> Format:
        request = await self._read_in_turn(incoming, read)
        inputs, best, deadline_s = request.inputs, request.content.best, request.deadline_s
        if incoming.full or not self._knows_best or best >= len(inputs):
            best = 0
        waits = self._waits(incoming, deadline_s, self._slo_s)
        within_s = deadline_s - self._sending_s(deadline_s) - self._clock()
        try:
            answers = await self._driver.answer(inputs, within_s, incoming.full, waits, incoming.priority, best)
            written = await self._written(incoming, request, answers)
            if (now_s := self._clock()) > deadline_s:
                raise RefusedError(504, "the deadline passed before the answer was ready")
        except RefusedError as refused:
            refused.shows_overload = refused.shows_overload and self._waits(incoming, deadline_s, self._usual_s)
            raise
        took_s = now_s - incoming.arrived_s
        self._driver.counts.answers_known(answers, took_s)
        self._driver.observe_latency_ms(1e3 * took_s)
        return written

    async def _read_in_turn(
        self, incoming: IncomingRequest, read: Callable[[], Content[Format]]
    ) -> ReadRequest[Format]:
        """Read a request when its turn has come. If it is too late then, its inputs count as arrived."""
        deadline_s, whole_s = incoming.deadline_s(self._slo_s), self._clock()
        try:
            await self._request_queue.turn(incoming.work_s, incoming.latest_s, incoming.weight)
            now_s = self._clock()
            if now_s > incoming.gives_up_s:
                raise RefusedError(503, "refused: the deadline had passed before the whole request arrived")
            body_s = whole_s - incoming.registered_s  # as fast as its client sends: no sign of overload
            self._strained += now_s - incoming.arrived_s - body_s > incoming.long_wait_s
            return await self._read(incoming, read)
        except RefusedError as refused:
            if refused.status == 503:  # it is late; a wrong request has other statuses
                refused.shows_overload = self._waits(incoming, deadline_s, self._usual_s)
                self._count_unread(incoming, deadline_s)
            raise

    async def _read(self, incoming: IncomingRequest, read: Callable[[], Content[Format]]) -> ReadRequest[Format]:
        """Read a request now: long texts, compressed bodies and pictures in threads, all else at once."""
        costs = self._costs_of(incoming.kind, incoming.size)
        work_clock = no_clock if next(costs.numbers) % _MEASURED_ONE_OF else time.thread_time
        began_s = work_clock()
        if self._is_long(incoming.kind, incoming.size):
            content, read_s = await self._in_thread(incoming, read, incoming.latest_s), 0.0
        else:
            content, read_s = read(), work_clock() - began_s
        deadline_s = incoming.deadline_s(content.within_s or self._slo_s)
        inputs = content.inputs
        if isinstance(inputs, Pictures):
            latest_s = deadline_s if content.within_s else incoming.latest_s
            inputs = await self._in_thread(incoming, partial(self.packed, inputs), latest_s)
        return ReadRequest(content, inputs, deadline_s, read_s, work_clock)

    async def _in_thread(self, incoming: IncomingRequest, work: Callable[[], Made], latest_s: float) -> Made:
        """Do long work of a request, and learn how long that takes."""
        long_s, size = self._costs_of(incoming.kind, incoming.size).long_s, incoming.size
        return await self.long_work.run(work, latest_s, long_s.expected(size), partial(long_s.learn, size))

    async def _written(self, incoming: IncomingRequest, request: ReadRequest[Format], answers: list[Answer]) -> Format:
        """Write the answers, and learn the cost of such requests."""
        known_s, began_s = self._clock(), request.work_clock()
        answers = finite(_with_facts_of(request.inputs, answers))
        if self.task.by_map:  # maps take long to write: meanwhile this thread works for other requests
            own_s = request.work_clock() - began_s
            written = await self.long_work.run(partial(request.content.write, answers), request.deadline_s)
        else:
            written = request.content.write(answers)
            own_s = request.work_clock() - began_s
        now_s = self._clock()
        self._writing.add(now_s, now_s - known_s)
        if request.work_clock is not no_clock:
            costs = self._costs_of(incoming.kind, incoming.size)
            costs.weight.learn(incoming.size, sum(self._driver.weights(request.inputs)))
            costs.work_s.learn(incoming.size, request.read_s + own_s)
        return written

    def _is_long(self, kind: str, size: int) -> bool:
        """Whether a request of this kind and size may hold long texts, or grow as it is decompressed."""
        return kind.startswith(_PACKED) or (size >= LONG_BYTES and self.texts is not None)

    def _costs_of(self, kind: str, size: int) -> RequestCosts:
        """Long requests have costs of their own, since the event loop does not read them."""
        return self._costs[f"long {kind}" if self._is_long(kind, size) else kind]

    def _network_s(self, now_s: float, left_s: float, work_s: float, weight: int) -> float:
        """The expected time that the network takes for a request once it is read."""
        queue, needed_s = self._request_queue, self._driver.dispatcher.needed_s
        own_s = needed_s(now_s, left_s, weight)
        if not queue.weight:
            return own_s
        # The network also computes the inputs that wait to be read, and begins while this request waits.
        return max(own_s, needed_s(now_s, left_s, queue.weight + weight) - queue.expected_s(work_s))

    def _long_work_s(self, costs: RequestCosts, size: int, left_s: float) -> float:
        """The expected time until the long work of a request is done. While a thread is free, it is at most half of the
        time left: the request is then read, and an estimate that is too high is corrected."""
        if (own_s := costs.long_s.expected(size)) and self.long_work.busy:
            return self.long_work.ahead_s + own_s
        return min(own_s, max(0.0, left_s) / 2)

    def gives_up_s(self, headers: Mapping[bytes, bytes]) -> float:
        """Until when a request that computes nothing waits: until its client gives up, or until the SLO has passed,
        since such requests are not admitted, and would wait by the thousand."""
        within_s, waited_s, *_ = RequestHeaders.of(headers)
        return self._clock() - waited_s + min(within_s or self._slo_s, self._slo_s)

    def left_s(self, incoming: IncomingRequest) -> float:
        """The time until the deadline of a request, or until the SLO has passed."""
        return max(0.0, min(incoming.gives_up_s, incoming.arrived_s + self._slo_s) - self._clock())

    def _waits(self, incoming: IncomingRequest, deadline_s: float, as_long_s: float) -> bool:
        """Whether a client waits for about `as_long_s` or longer. Refusals of clients that wait less show no overload.

        For the proxy's limit this is the usual wait, for the controller the SLO.
        """
        return deadline_s - incoming.arrived_s >= incoming.part * _ENOUGH * as_long_s

    def _count_unread(self, incoming: IncomingRequest, deadline_s: float) -> None:
        waits = self._waits(incoming, deadline_s, self._slo_s)
        self._driver.counts.refused_unread(incoming.weight, self.config.most_inputs, waits, incoming.full)

    def _sending_s(self, deadline_s: float) -> float:
        """The expected time from an answer until it is sent: the recent peak, but at most half of the time left."""
        now_s = self._clock()
        sending_s = self._driver.lag.at(now_s) + self._writing.at(now_s) + HAND_OVER_S
        return min(sending_s, max(0.0, deadline_s - now_s) / 2)

    @contextmanager
    def counted(self, kind: str = "", headers: Mapping[bytes, bytes] = _NO_HEADERS) -> Iterator[Span | None]:
        """Count the outcome of the request handled in this context, and raise every failure as a `RefusedError`.

        Yields the request's span, if it is traced.
        """
        outcomes = self._driver.counts.outcomes
        try:
            with span_of_request(self._tracing, kind, headers) as span:
                yield span
            outcomes["answered"] += 1
            self._retry_times.answered(self._clock())
        except RefusedError as refused:
            outcomes["failed" if refused.status == 500 else "refused"] += 1
            self._strained += refused.shows_overload and refused.status in (503, 504)
            if refused.status == 503:
                self._retry_times.refused(self._clock())
                refused.retry_after_s = self._retry_times.retry_after_s(refused.retry_after_s or 0.0)
            raise
        except asyncio.CancelledError:
            outcomes["abandoned"] += 1
            raise
        except Exception as error:
            outcomes["failed"] += 1
            log.exception("a batch could not be computed")
            reason = f"the network failed: {type(error).__name__}; the replica's log says where"
            raise RefusedError(500, reason) from error

    def burden(self) -> Burden:
        """The load of this front, for the proxy's limit."""
        return Burden(self._inside, self._strained, self._driver.counts.outcomes["answered"])

    async def all_fronts(self) -> list[FrontState]:
        """The states of all fronts, this one first."""
        return [state_of(self._driver), *await self._network.others()]

    async def missing(self) -> list[str]:
        """The groups for which any front has no replica now."""
        return sorted({group for front in await self.all_fronts() for group in front.missing})

    async def stats(self) -> dict[str, Any]:
        """The content of /stats."""
        application = {
            "schema_version": STATS_VERSION,
            "model": self.name,
            "plan": self._network.plan,
            "slo_ms": self.config.slo_ms,
            "promise": self.promised,
        }
        return application | stats_of(await self.all_fronts(), self._agreement, self.config.canary)

    def encoded(self, inputs: object) -> Packed | Pictures:
        """Encode the inputs. A list of texts is several inputs; any other list may be one (an image) or several."""
        if not isinstance(inputs, list):
            return self.encoded_each([inputs])
        if all(isinstance(item, str) for item in inputs) or (self.reads_pictures and any(map(is_picture, inputs))):
            return self.encoded_each(inputs)
        try:
            return self.encoded_each([inputs])
        except RefusedError as as_single:
            single = str(as_single)
        try:
            return self.encoded_each(inputs)
        except RefusedError as as_list:
            sentence = f"'inputs' is neither one input ({single}) nor a list of them ({as_list})"
            raise RefusedError(422, sentence) from None

    def encoded_each(self, inputs: Sequence[Any]) -> Packed | Pictures:
        """Encode a list of inputs, each of which may itself be a list. Pictures are read later."""
        if self.reads_pictures and any(map(is_picture, inputs)):
            self.sizes.check_count(len(inputs))
            return Pictures(inputs)
        return self.packed(inputs)

    def packed(self, inputs: Sequence[Any], as_configured: bool = True) -> Packed:
        """Encode a list of inputs now. Unless `as_configured`, texts that are too long are cut, whatever `too_long`."""
        self.sizes.check_count(len(inputs))
        try:
            if self.reads_pictures:
                check_together(inputs)
            packed = pack(self._model.encode(inputs))
        except (ValueError, TypeError, OverflowError) as error:
            raise RefusedError(422, str(error)) from error
        except Exception as error:  # errors of the preprocessor count as faults of the input
            log.warning("inputs could not be encoded", exc_info=True)
            raise RefusedError(422, f"the inputs cannot be read: {type(error).__name__}: {error}") from error
        if packed.truncated and as_configured and self.config.too_long == "refuse":
            problem = f"input {min(packed.truncated)} is longer than the network reads"
            raise RefusedError(422, f"{problem}: shorten it (this server has too_long: refuse)")
        return packed


def _with_facts_of(inputs: Packed, answers: list[Answer]) -> list[Answer]:
    """The answers with facts about their inputs: whether a text was cut off, its words, a picture's sides."""
    if not inputs.truncated and not inputs.words:
        return answers
    facts = enumerate(zip(answers, inputs.words or [None] * len(answers), strict=True))
    return [replace(answer, truncated=place in inputs.truncated, words=words) for place, (answer, words) in facts]
