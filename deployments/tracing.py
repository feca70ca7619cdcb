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
_numbers = random.Random()  # of our own: whoever seeds the common one would make the same spans in every process
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


# Numbers that are all zeros, and version ff, name no span: such a header counts as none (W3C Trace Context).
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


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
    """Makes the spans of one process. `clock` is the one that its times are told by.

    Finished spans are handed to OpenTelemetry's processor, which sends them. Its tracer is left out: spans that anybody
    may change at any time, and a sampler that would always say yes, made a request's spans more than twice as dear.
    """

    def __init__(
        self, exporter: Any, sampling: TraceSampling, clock: Callable[[], float], simple: bool = False
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        self.sampling, self._clock = sampling, clock
        # Read once: two clocks that are read for every span are never read at the same moment, and its end may then
        # lie before that of a span inside.
        self._began_ns = time.time_ns() - round(1e9 * clock())
        self._processor = SimpleSpanProcessor(exporter) if simple else BatchSpanProcessor(exporter)
        self._resource = Resource.create()  # reads OTEL_SERVICE_NAME and others

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
        above = parent.context if isinstance(parent, Span) else _context_of(parent)
        context = _context(above.trace_id if above else _numbers.getrandbits(128), _numbers.getrandbits(64))
        return Span(self, name, context, above, kind, self.at_ns(begun_s), links, about)

    def at_ns(self, moment_s: float | None) -> int:
        """A moment by the clock of the process as nanoseconds since 1970."""
        return self._began_ns + round(1e9 * (self._clock() if moment_s is None else moment_s))

    def ended(self, span: "Span", ended_ns: int) -> None:
        """Hand a span on, to be sent with others."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode

        made = ReadableSpan(
            span.name,
            span.context,
            span.parent,
            self._resource,
            {f"isobatch.{each}": value for each, value in span.about.items()},
            links=[Link(each.context, {}) for each in span.links],
            kind=SpanKind[span.kind],
            status=Status(StatusCode.ERROR, span.wrong) if span.wrong else Status(),
            start_time=span.begun_ns,
            end_time=ended_ns,
            instrumentation_scope=InstrumentationScope("isobatch"),
        )
        self._processor.on_end(made)

    def close(self) -> None:
        """Send what is left."""
        self._processor.shutdown()


@dataclass(eq=False, slots=True)
class Span:
    """A span that somebody will see. `context` is OpenTelemetry's word for the numbers of a trace and a span."""

    tracing: Tracing
    name: str
    context: Any
    parent: Any
    kind: str
    begun_ns: int
    links: Sequence["Span"]
    about: About
    wrong: str = ""

    def end(self, ended_s: float | None = None) -> None:
        self.tracing.ended(self, self.tracing.at_ns(ended_s))

    def failed(self, error: BaseException) -> None:
        self.wrong = f"{type(error).__name__}: {error}"

    @property
    def traceparent(self) -> str:
        """What another process is told, so that its spans belong to this one."""
        return f"00-{self.context.trace_id:032x}-{self.context.span_id:016x}-01"


def _context_of(parent: str | None) -> Any:
    """What another process says of its span; None where it says nothing that can be read."""
    if parent and (found := _PARENT.fullmatch(parent)):
        return _context(int(found[1], 16), int(found[2], 16), elsewhere=True)
    return None


def _context(trace: int, span: int, elsewhere: bool = False) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace, span, elsewhere, TraceFlags(TraceFlags.SAMPLED))


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
