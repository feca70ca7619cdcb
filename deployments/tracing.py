"""OpenTelemetry's spans of requests, queues, launches and hops; none unless the environment asks for them.

The variables are OpenTelemetry's own (docs/watching.md). Whether a request is traced is decided here, before anything
is made for it: ninety-nine of a hundred cost a look at a header and a random number.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from profiles.errors import UserError

EXPORTER, SAMPLER, SHARE = "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
USUAL_SAMPLER, USUAL_SHARE = "parentbased_traceidratio", "0.01"
PARENT = "traceparent"
_EXPORTERS = {
    "otlp": "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter",
    "console": "opentelemetry.sdk.trace.export:ConsoleSpanExporter",
}
_SHARES = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}  # None: as SHARE says
About = Mapping[str, str | int]
_NOTHING: About = {}
_PARENT_HEADER = PARENT.encode()
_now: ContextVar["Span | None"] = ContextVar("isobatch_span", default=None)


def current() -> "Span | None":
    """The span of the request that is handled, if it is traced."""
    return _now.get()


@dataclass(frozen=True)
class TraceSampling:
    """Which requests are traced: this share of those that nobody else traces, and whether a caller's wish counts."""

    share: float
    heeds_parent: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "TraceSampling":
        """
        >>> TraceSampling.read({}), TraceSampling.read({"OTEL_TRACES_SAMPLER": "always_on"})
        (TraceSampling(share=0.01, heeds_parent=True), TraceSampling(share=1.0, heeds_parent=False))
        """
        told = environment.get(SAMPLER) or USUAL_SAMPLER
        name = told.removeprefix("parentbased_")
        if name not in _SHARES:
            known = ", ".join(f"{prefix}{each}" for prefix in ("", "parentbased_") for each in _SHARES)
            raise UserError(f"{SAMPLER} is {told!r}: there are: {known}")
        share = _SHARES[name]
        return cls(_share(environment) if share is None else share, told != name)

    def takes(self, parent: str | None, chance: Callable[[], float] = random.random) -> bool:
        """
        >>> wanted, unwanted = "00-" + 32 * "1" + "-" + 16 * "2" + "-01", "00-" + 32 * "1" + "-" + 16 * "2" + "-00"
        >>> [TraceSampling(0.0, True).takes(each) for each in (wanted, unwanted, "nonsense", None)]
        [True, False, False, False]
        """
        if self.heeds_parent and parent is not None and (found := _PARENT.fullmatch(parent)):
            return int(found[3], 16) % 2 == 1
        return self.share > 0 and chance() < self.share


_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2}).*")


def _parent_in(headers: Mapping[bytes, bytes]) -> str | None:
    told = headers.get(_PARENT_HEADER)
    return None if told is None else told.decode("latin-1")


def _share(environment: Mapping[str, str]) -> float:
    told = environment.get(SHARE) or USUAL_SHARE
    try:
        share = float(told)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"{SHARE} is {told!r}: it must be a share, from 0 to 1")
    return share


class Tracing:
    """Makes the spans of one process. `clock` is the one that its times are told by."""

    def __init__(
        self, exporter: Any, sampling: TraceSampling, clock: Callable[[], float], simple: bool = False
    ) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self.sampling, self._clock = sampling, clock
        # Read once: two clocks that are read for every span are never read at the same moment, and its end may then
        # lie before that of a span inside.
        self._began_ns = time.time_ns() - round(1e9 * clock())
        # Not the provider of the whole process, which may be somebody else's. It reads OTEL_SERVICE_NAME and others.
        self._provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(exporter) if simple else BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("isobatch")

    def takes(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the request with these headers is traced."""
        return self.sampling.takes(_parent_in(headers))

    @contextmanager
    def request(self, kind: str, headers: Mapping[bytes, bytes]) -> Iterator["Span"]:
        """The span of a request that is traced, from here to the end of the block."""
        parent = _parent_in(headers) if self.sampling.heeds_parent else None
        span = self.span(f"request {kind}", parent, "SERVER")
        before = _now.set(span)
        try:
            yield span
        except BaseException as error:
            span.failed(error)
            raise
        finally:
            _now.reset(before)
            span.end()

    def span(
        self,
        name: str,
        parent: "Span | str | None",
        kind: str = "INTERNAL",
        begun_s: float | None = None,
        links: Sequence["Span"] = (),
        about: About = _NOTHING,
    ) -> "Span":
        """A span that begins now, or began then; `parent` is a span here, or what another process says of one."""
        from opentelemetry.trace import Link, SpanKind

        made = self._tracer.start_span(
            name,
            _context_of(parent),
            SpanKind[kind],
            {f"isobatch.{each}": value for each, value in about.items()},
            [Link(each.made.get_span_context()) for each in links],
            start_time=self.at_ns(begun_s),
        )
        return Span(made, self)

    def at_ns(self, moment_s: float | None) -> int:
        """A moment by the clock of the process as nanoseconds since 1970."""
        return self._began_ns + round(1e9 * (self._clock() if moment_s is None else moment_s))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


@dataclass(frozen=True, eq=False)
class Span:
    """A span that somebody will see."""

    made: Any
    tracing: Tracing

    def end(self, ended_s: float | None = None) -> None:
        self.made.end(self.tracing.at_ns(ended_s))

    def failed(self, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.made.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))

    @property
    def traceparent(self) -> str:
        """What another process is told, so that its spans belong to this one."""
        context = self.made.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def _context_of(parent: Span | str | None) -> Any:
    from opentelemetry import trace
    from opentelemetry.context import Context

    if isinstance(parent, Span):
        return trace.set_span_in_context(parent.made, Context())
    if not parent or not (found := _PARENT.fullmatch(parent)):
        return Context()
    told = trace.SpanContext(int(found[1], 16), int(found[2], 16), True, trace.TraceFlags(trace.TraceFlags.SAMPLED))
    return trace.set_span_in_context(trace.NonRecordingSpan(told), Context())


@contextmanager
def part_of(tracing: Tracing | None, trace: str, name: str, about: About = _NOTHING) -> Iterator[None]:
    """The span of what is done inside for an order that is traced."""
    if tracing is None or not trace:
        yield
        return
    span = tracing.span(name, trace, "CONSUMER", about=about)
    try:
        yield
    except Exception as error:
        span.failed(error)
        raise
    finally:
        span.end()


def tracing_here(clock: Callable[[], float], environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """What the environment asks for; None: nothing."""
    told = environment.get(EXPORTER) or "none"
    if told == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if told not in _EXPORTERS:
        raise UserError(f"{EXPORTER} is {told!r}: there are: none, {', '.join(_EXPORTERS)}")
    from pkgutil import resolve_name

    try:
        exporter = resolve_name(_EXPORTERS[told])()
    except ImportError as error:
        raise UserError(f"{EXPORTER}={told} needs a package: pip install 'isobatch[tracing]'") from error
    return Tracing(exporter, TraceSampling.read(environment), clock)
