"""Measures a decoder on this device: the cost of each part of a launch, and of a token in the front.

The real engine runs, and prices are fitted to the times of its launches. The front gets tokens without pauses, which
shows the rate that its processor sustains. For devices that are not here, prices are estimated from datasheets.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.decoding.anatomy import DecoderShape, anatomy_of, shape_of
from isobatch.deployments.decoding.client_meter import ClientMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine import Engine, Runner, size_of
from isobatch.deployments.decoding.engine_setup import engine_for, load_tokenizer
from isobatch.deployments.decoding.front import DecoderFront
from isobatch.deployments.decoding.loop import EngineLoop, WrittenTokens
from isobatch.deployments.decoding.openai_api import create_decoder_api
from isobatch.deployments.decoding.ramp_rules import DecoderRamp, DecoderRules
from isobatch.deployments.decoding.scheduler import DecodingLaunch, NewTokens, Scheduler
from isobatch.deployments.decoding.sequences import Finish, Splits, TextRequest, TokenPrediction
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.metrics import TEXT_FRONT, MetricSeries
from isobatch.deployments.transport.connection import frame
from isobatch.profiles.datasheet import BYTES, COMPUTE_SHARE, KERNEL_S, LAUNCH_S, MEMORY_SHARE
from isobatch.profiles.devices import known_kind
from isobatch.profiles.errors import UserError
from isobatch.profiles.measure import host_clock_for
from isobatch.profiles.text_profile import PARTS, PROJECT, DecodingTable, DecodingWorkload, LaunchSize

Floats = NDArray[np.float64]
RESIDENTS = (1, 8, 32, 128)
DEPTHS = (0.25, 0.5, 0.75, 1.0)  # shares of the blocks in the first part; 1: no cut
SETTINGS = (*product(RESIDENTS, DEPTHS, ("recompute",)), *product(RESIDENTS[1:], (0.5,), ("verified", PROJECT)))
LEAVING_SHARE = 0.5  # of the tokens, at a cut
TEST_EVERY = 4  # one launch of this number tests the prices, which are fitted to the others
WARM_UP = 5  # launches of an engine that are not timed
LEAST_LAUNCHES = 200  # that are timed, however long it takes
LEAST_OF_SETTING = 12  # launches of an engine, however long they take
# Launches whose errors exceed this multiple of the median error were disturbed: prices are fitted again without them.
OUTLIER = 3.0


class TimedLaunch(NamedTuple):
    size: LaunchSize
    seconds: float


@dataclass(frozen=True)
class FittedPrices:
    """Prices, and their errors for launches that they were not fitted to.

    `error`: the median of the relative errors; `bias`: the relative error of the total time. `sequences`: of the
    largest launch. `projects`: some launches projected KV.
    """

    price_s: LaunchSize
    launches: int
    error: float
    bias: float
    sequences: int
    projects: bool

    def __str__(self) -> str:
        return (
            f"prices fitted to {self.launches} launches; of others, half took within {self.error:.1%} of what the "
            f"prices say, and all together {self.bias:+.1%}; {self.sequences} sequences at most"
        )


def measured(
    model: Any,
    workload: DecodingWorkload,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    stopwatch: Callable[[], float] | None = None,
    least: int = LEAST_LAUNCHES,
) -> FittedPrices:
    """Time launches of texts like those of the workload, for about `seconds`, and `least` launches at least.

    Launches are timed by `stopwatch`, which may count the processor time of the thread that computes; another thread
    would read another time, so `clock` says when to end.
    """
    stopwatch = stopwatch or host_clock_for(str(anatomy_of(model).weights.device))
    launches: list[TimedLaunch] = []
    begun_s = clock()

    def has_passed(share: float) -> bool:
        return clock() > begun_s + share * seconds

    # A plan may need the price of each setting. Time that a setting does not need is left to later ones.
    for number, (residents, depth, exits) in enumerate(cycle(SETTINGS)):
        if number >= len(SETTINGS) and has_passed(1.0) and len(launches) >= least:
            break
        if not launches and number == len(SETTINGS):
            raise UserError("texts are too short to time their launches: prepare with longer ones (--max-tokens)")
        texts, share = _texts(model, workload, residents, number), min(1.0, (number + 1) / len(SETTINGS))
        launches += _launches(model, texts, residents, depth, exits, stopwatch, partial(has_passed, share), number)
    return fitted(launches)


def _texts(model: Any, workload: DecodingWorkload, count: int, seed: int) -> list[TextRequest]:
    shape, random = anatomy_of(model).shape, Random(seed)
    context = shape.context(None)
    requests = []
    for _ in range(count + count // 2):  # some begin while others continue
        place = random.randrange(len(workload.prompts))
        prompt = min(workload.prompts[place], context - 1)
        output = min(workload.outputs[place], shape.room(prompt, context))
        requests.append(shape.request([random.randrange(shape.vocabulary) for _ in range(prompt)], output))
    return requests


@dataclass
class _RandomExits:
    """The real network, at whose ramps random tokens leave. It records the sizes of launches."""

    network: Runner
    splits: Splits
    random: Random
    sizes: list[LaunchSize] = field(default_factory=list)

    def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
        self.sizes.append(size_of(launch, self.splits))
        return [
            [replace(prediction, sure=self.random.random() < LEAVING_SHARE) for prediction in predictions]
            for predictions in self.network.run(launch)
        ]

    def drop(self, name: int) -> None:
        self.network.drop(name)

    def spoilt(self, pages: Iterable[int]) -> list[int]:
        return self.network.spoilt(pages)

    def recut(self, splits: Splits) -> None:
        self.splits = splits
        self.network.recut(splits)


def _launches(
    model: Any, texts: Sequence[TextRequest], residents: int, depth: float, exits: str,
    stopwatch: Callable[[], float], is_over: Callable[[], bool], seed: int,
) -> list[TimedLaunch]:  # fmt: skip
    """The launches by which an engine writes these texts, with the network cut at a share of its depth.

    As in a replica, the engine has a thread of its own, and another one sends the tokens meanwhile.
    """
    num_blocks = anatomy_of(model).shape.num_blocks
    cut = max(1, round(depth * num_blocks))
    rules = DecoderRules(ramps=(DecoderRamp(block=cut - 1, threshold=0.5),) if cut < num_blocks else ())
    try:
        made = engine_for(model, rules, texts, residents, exits)
    except RuntimeError:  # torch has no memory for the KV of so many texts, so plans have fewer residents
        if residents == RESIDENTS[0]:
            raise
        return []
    network = _RandomExits(made.network, made.scheduler.splits, Random(seed))
    engine = _TimedEngine(made.scheduler, network, stopwatch, is_over)
    loop = EngineLoop(engine)
    try:
        asyncio.run(_send_all(loop, texts, engine))
    finally:
        loop.end()
        loop.join()  # a thread that still computes disturbs the launches that are timed next
    return engine.launches[WARM_UP:]


async def _send_all(loop: EngineLoop, texts: Iterable[TextRequest], engine: "_TimedEngine") -> None:
    async def send(text: TextRequest) -> None:
        async with aclosing(loop.write(text)) as groups:
            async for group in groups:
                frame(WrittenTokens((group,), 0.0))
                if engine.enough:
                    return

    await asyncio.gather(*map(send, texts))


class _TimedEngine(Engine):
    """Times its launches, until its time is over and some were timed."""

    def __init__(
        self, scheduler: Scheduler, network: _RandomExits, stopwatch: Callable[[], float], is_over: Callable[[], bool]
    ) -> None:
        super().__init__(scheduler, network, time.perf_counter)
        self.launches: list[TimedLaunch] = []
        self._sizes, self._stopwatch, self._is_over = network.sizes, stopwatch, is_over

    @property
    def enough(self) -> bool:
        return len(self.launches) > LEAST_OF_SETTING and self._is_over()

    def step(self) -> list[NewTokens] | None:
        begun_s = self._stopwatch()
        written = super().step()
        if written is not None:
            self.launches.append(TimedLaunch(self._sizes[-1], self._stopwatch() - begun_s))
        return written


def fitted(launches: Sequence[TimedLaunch]) -> FittedPrices:
    """The prices, none below 0, with the least relative errors. Outliers are left out in a second fit.

    Of two launches of one size the shorter has the larger relative error, so such prices are too low for the sum of all
    launches. That sum is what limits a plan's tokens per second, so all prices are raised until the sum is right.
    """
    sizes = np.array([[getattr(each.size, name) for name in PARTS] for each in launches])
    seconds = np.array([each.seconds for each in launches])
    training = (np.arange(len(launches)) % TEST_EVERY) > 0
    prices = _prices(sizes[training], seconds[training])
    errors = np.abs(sizes @ prices / seconds - 1)
    used = training & (errors <= OUTLIER * np.median(errors[training]))
    prices = _prices(sizes[used], seconds[used])
    prices *= seconds[used].sum() / (sizes[used] @ prices).sum()
    predicted_s, measured_s = sizes[~training] @ prices, seconds[~training]
    error = float(np.median(np.abs(predicted_s / measured_s - 1)))
    bias = float(measured_s.sum() / predicted_s.sum() - 1)
    price_s = LaunchSize(*(float(f"{price:.4g}") for price in prices))
    largest, projects = max(each.size.pieces for each in launches), any(each.size.projections for each in launches)
    return FittedPrices(price_s, int(training.sum()), error, bias, int(largest), projects)


def _prices(sizes: Floats, seconds: Floats) -> Floats:
    from scipy.optimize import nnls

    scaled = sizes / seconds[:, None]
    scale = np.abs(scaled).max(axis=0)
    scale[scale == 0] = 1.0
    prices: Floats = nnls(scaled / scale, np.ones(len(seconds)))[0] / scale
    return prices


TEXTS, TOKENS = 32, 64  # streamed side by side, and tokens of each
PATH = "/v1/completions"


class _NotExported:
    """In place of Ray's metric classes, which need a running Ray."""

    def __init__(self, *description: Any) -> None: ...

    def inc(self, more: float, labels: Any) -> None: ...

    def observe(self, value: float) -> None: ...


_NO_RAY = SimpleNamespace(Counter=_NotExported, Gauge=_NotExported, Histogram=_NotExported)


def front_s_per_token(folder: Path, shape: DecoderShape) -> float:
    """Seconds of a front's processor for a token of a stream, from its arrival to the bytes for the client. The socket
    and the proxy before it are not counted."""
    most = shape.room(1, shape.context(None))
    return asyncio.run(_measured_s(folder, shape, min(TOKENS, most)))


async def _measured_s(folder: Path, shape: DecoderShape, tokens: int) -> float:
    async def write(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        for place in range(request.max_tokens):
            await asyncio.sleep(0)
            finish = Finish.LENGTH if place + 1 == request.max_tokens else None
            yield NewTokens(0, ((7 + 31 * place) % shape.vocabulary,), (0,), finish)

    async def state() -> dict[str, Any]:
        return {}

    texts = TextTokens(load_tokenizer(folder), shape.context(None))
    meter = ClientMeter(MetricSeries(TEXT_FRONT, _NO_RAY), time.perf_counter, 1.0, 1.0)
    front = DecoderFront(DecoderConfig(model=str(folder)), "timed", shape, texts, frozenset(), write, meter, state)
    api = create_decoder_api(front)
    body = json.dumps({"prompt": [0], "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    took_s = []
    for _ in range(3):  # the first one warms up
        begun_s = time.thread_time()
        await asyncio.gather(*(_stream(api, body) for _ in range(TEXTS)))
        took_s.append(time.thread_time() - begun_s)
    return min(took_s) / (TEXTS * tokens)


async def _stream(api: Any, body: bytes) -> None:
    """Have one text streamed, as the server before the application does."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": PATH,
        "raw_path": PATH.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if message := next(messages, None):
            return message
        await asyncio.Event().wait()  # the client listens until the end
        return {"type": "http.disconnect"}

    status = 0

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    await api(scope, receive, send)
    if status != 200:
        raise RuntimeError(f"This is a bug: the front that is timed answered with status {status}.")


KERNELS = 10  # of one block
PROJECTION_KERNELS = 4  # of one block that only makes keys and values


def estimated_table(config: Any, kind: str, dtype: str | None = None) -> DecodingTable:
    """The table of a network by its Hugging Face config, for a device that is not here: a roofline.

    A launch reads the weights of each block once, and the KV of its sequences, and it multiplies every row with the
    weights. The longer of the two times hides the other. Nothing is measured, so the table is marked as estimated.
    `dtype`: the precision; None: the device's fastest.
    """
    device = known_kind(kind)
    dtype = dtype or device.best_dtype
    wide, shape = BYTES.get(dtype, 2), shape_of(config)  # bfloat16 is as wide as float16
    peak = COMPUTE_SHARE * (device.fp32_flops if dtype == "float32" else device.fp16_flops)
    stream = MEMORY_SHARE * device.memory_bytes_per_s
    block, attended, width = _block(config)
    encoder, crossed, layers = _encoder(config)
    head = shape.vocabulary * width
    price = LaunchSize(
        launches=LAUNCH_S,
        blocks=block * wide / stream,
        bands=KERNELS * KERNEL_S,
        rows=2 * block / peak,
        read=2 * shape.kv_width * wide / stream,
        seen=4 * attended / peak,
        heads=head * wide / stream,
        asked=2 * head / peak,
        sources=(encoder + crossed) * wide / stream + layers * KERNELS * KERNEL_S,
        source_rows=2 * (encoder + crossed) / peak,
        source_seen=4 * attended * layers / peak,
        projections=PROJECTION_KERNELS * KERNEL_S,
        projected=4 * shape.kv_width * width / peak,
    )
    tied = getattr(config, "tie_word_embeddings", False)
    weights = shape.num_blocks * block + encoder + crossed + head * (1 if tied else 2)
    return DecodingTable(
        kind.lower(),
        price,
        f"estimated: roofline of {kind.lower()}'s datasheet in {dtype}, nothing measured",
        kv_bytes=2 * shape.kv_width * wide,
        weights_bytes=weights * wide,
        dtype=dtype,
        overlaps=True,
        projects=True,
    )


def _block(config: Any) -> tuple[int, int, int]:
    """The weights of one block of the decoder that a row is multiplied with, the width of all heads, and of a row."""
    if config.is_encoder_decoder:
        heads = config.num_heads * config.d_kv
        return 6 * config.d_model * heads + _t5_inner(config), heads, config.d_model
    width, shape = config.hidden_size, shape_of(config)
    heads = config.num_attention_heads * shape.width
    return 2 * width * (heads + shape.kv_width) + 3 * width * config.intermediate_size, heads, width


def _encoder(config: Any) -> tuple[int, int, int]:
    """The weights that a position of the source is multiplied with: the encoder's, and those that make its KV for the
    decoder; and the number of the encoder's layers."""
    if not config.is_encoder_decoder:
        return 0, 0, 0
    heads = config.num_heads * config.d_kv
    layers = config.num_layers * (4 * config.d_model * heads + _t5_inner(config))
    return layers, config.num_decoder_layers * 2 * config.d_model * heads, config.num_layers


def _t5_inner(config: Any) -> int:
    gated = str(config.feed_forward_proj).startswith("gated")
    return int((3 if gated else 2) * config.d_model * config.d_ff)
