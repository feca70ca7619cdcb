"""OpenTelemetry spans of requests, queues, launches and hops, if the environment asks for them.

The variables are OpenTelemetry's own (docs/watching.md). The decision to trace a request comes before any work for it:
by default, 99 of 100 requests cost only a look at a header and a random number.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from isobatch.profiles.errors import UserError

EXPORTER = "OTEL_TRACES_EXPORTER"
SAMPLER = "OTEL_TRACES_SAMPLER"
SHARE = "OTEL_TRACES_SAMPLER_ARG"
DEFAULT_SAMPLER = "parentbased_traceidratio"
DEFAULT_SHARE = "0.01"
PARENT = "traceparent"  # the header of W3C Trace Context
_EXPORTERS = {
    "otlp": "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter",
    "console": "opentelemetry.sdk.trace.export:ConsoleSpanExporter",
}
_SHARES = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}  # by sampler; None: the value of SHARE
About = Mapping[str, str | int]  # attributes of a span
_NO_ATTRIBUTES: About = {}
_PARENT_HEADER = PARENT.encode()
_REQUEST_ID = b"x-request-id"
_ids = random.Random()  # not the shared generator: if a program seeded that, all processes would draw the same ids
_current: ContextVar["Span | None"] = ContextVar("isobatch_span", default=None)


def current() -> "Span | None":
    """The span of the request that is being handled, if it is traced."""
    return _current.get()


@dataclass(frozen=True)
class TraceSampling:
    """The share of requests that are traced, and whether the decision in a caller's header comes first."""

    share: float
    parent_based: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "TraceSampling":
        """
        >>> TraceSampling.read({}), TraceSampling.read({"OTEL_TRACES_SAMPLER": "always_on"})
        (TraceSampling(share=0.01, parent_based=True), TraceSampling(share=1.0, parent_based=False))
        """
        sampler = environment.get(SAMPLER) or DEFAULT_SAMPLER
        name = sampler.removeprefix("parentbased_")
        if name not in _SHARES:
            known = ", ".join(f"{prefix}{suffix}" for prefix in ("", "parentbased_") for suffix in _SHARES)
            raise UserError(f"{SAMPLER} is {sampler!r}: there are: {known}")
        share = _SHARES[name]
        return cls(_share(environment) if share is None else share, sampler != name)

    def samples(self, parent: str | None, chance: Callable[[], float] = random.random) -> bool:
        """
        >>> wanted, unwanted = "00-" + 32 * "1" + "-" + 16 * "2" + "-01", "00-" + 32 * "1" + "-" + 16 * "2" + "-00"
        >>> [TraceSampling(0.0, True).samples(each) for each in (wanted, unwanted, "nonsense", None)]
        [True, False, False, False]
        """
        if self.parent_based and parent is not None and (match := _PARENT.fullmatch(parent)):
            return int(match[3], 16) % 2 == 1
        return self.share > 0 and chance() < self.share


# A header with an id of zeros or with version ff is invalid and ignored (W3C Trace Context).
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


def _parent_in(headers: Mapping[bytes, bytes]) -> str | None:
    header = headers.get(_PARENT_HEADER)
    return None if header is None else header.decode("latin-1")


def _share(environment: Mapping[str, str]) -> float:
    value = environment.get(SHARE) or DEFAULT_SHARE
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"{SHARE} is {value!r}: it must be a share, from 0 to 1")
    return share


class Tracing:
    """Creates the spans of one process. Their times are read from `clock`.

    Finished spans are passed to OpenTelemetry's processor, which sends them. OpenTelemetry's tracer is not used: its
    mutable spans, and a sampler that would accept every span, more than doubled the time for a request's spans.
    """

    def __init__(self, sampling: TraceSampling, processor: Any, clock: Callable[[], float]) -> None:
        from opentelemetry.sdk.resources import Resource

        self.sampling, self._processor, self._clock = sampling, processor, clock
        # The offset between the clocks is measured only once. Measured for every span it would vary, and a span could
        # seem to end before a span inside it.
        self._began_ns = time.time_ns() - round(1e9 * clock())
        given = Resource.create()  # reads OTEL_SERVICE_NAME and others
        is_unnamed = str(given.attributes["service.name"]).startswith("unknown_service")
        self._resource = given.merge(Resource({"service.name": "isobatch"})) if is_unnamed else given

    @contextmanager
    def request(self, kind: str, headers: Mapping[bytes, bytes]) -> Iterator["Span"]:
        """The span of a traced request, which lasts until the end of the block."""
        sent = headers.get(_REQUEST_ID)
        about = _NO_ATTRIBUTES if sent is None else {"request_id": sent.decode("latin-1")}
        span = self.span(f"request {kind}", _parent_in(headers), "SERVER", about=about)
        previous = _current.set(span)
        try:
            yield span
        except BaseException as error:
            span.failed(error)
            raise
        finally:
            _current.reset(previous)
            span.end()

    def span(
        self,
        name: str,
        parent: "Span | str | None",
        kind: str = "INTERNAL",
        begun_s: float | None = None,
        links: Sequence["Span"] = (),
        about: About = _NO_ATTRIBUTES,
    ) -> "Span":
        """A span that begins at `begun_s`, or now. `parent` is a span of this process, or the header of another."""
        outer = parent.context if isinstance(parent, Span) else _context_of(parent)
        context = _context(outer.trace_id if outer else _ids.getrandbits(128), _ids.getrandbits(64))
        return Span(self, name, context, outer, kind, self.at_ns(begun_s), links, about)

    def at_ns(self, moment_s: float | None) -> int:
        """A time of `clock` (None: now) as nanoseconds since 1970."""
        return self._began_ns + round(1e9 * (self._clock() if moment_s is None else moment_s))

    def ended(self, span: "Span", ended_ns: int) -> None:
        """Pass a finished span to the processor."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode

        finished = ReadableSpan(
            span.name,
            span.context,
            span.parent,
            self._resource,
            {f"isobatch.{name}": value for name, value in span.about.items()},
            links=[Link(linked.context, {}) for linked in span.links],
            kind=SpanKind[span.kind],
            status=Status(StatusCode.ERROR, span.wrong) if span.wrong else Status(),
            start_time=span.begun_ns,
            end_time=ended_ns,
            instrumentation_scope=InstrumentationScope("isobatch"),
        )
        self._processor.on_end(finished)

    def close(self) -> None:
        """Send the remaining spans."""
        self._processor.shutdown()


@dataclass(eq=False, slots=True)
class Span:
    """A span that will be sent. `context` is OpenTelemetry's word for the ids of a trace and a span."""

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
        """The header that makes the spans of another process part of this one."""
        return f"00-{self.context.trace_id:032x}-{self.context.span_id:016x}-01"


def _context_of(parent: str | None) -> Any:
    """The context in the header of another process; None: there is no valid header."""
    if parent and (match := _PARENT.fullmatch(parent)):
        return _context(int(match[1], 16), int(match[2], 16), is_remote=True)
    return None


def _context(trace: int, span: int, is_remote: bool = False) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace, span, is_remote, TraceFlags(TraceFlags.SAMPLED))


def span_of_request(
    tracing: Tracing | None, kind: str, headers: Mapping[bytes, bytes]
) -> AbstractContextManager[Span | None]:
    if tracing and tracing.sampling.samples(_parent_in(headers)):
        return tracing.request(kind, headers)
    return nullcontext()


@contextmanager
def part_of(tracing: Tracing | None, trace: str, name: str, about: About = _NO_ATTRIBUTES) -> Iterator[None]:
    """A span for the block, which is a part of an order, if the order is traced."""
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
    """The tracing that the environment asks for; None: none."""
    name = environment.get(EXPORTER) or "none"
    if name == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if name not in _EXPORTERS:
        raise UserError(f"{EXPORTER} is {name!r}: there are: none, {', '.join(_EXPORTERS)}")
    from pkgutil import resolve_name

    sampling = TraceSampling.read(environment)
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processor = BatchSpanProcessor(resolve_name(_EXPORTERS[name])())
    except ImportError as error:
        raise UserError(f"{EXPORTER}={name} needs a package: pip install 'isobatch[tracing]'") from error
    except ValueError as error:
        given = ", ".join(f"{key}={value}" for key, value in environment.items() if key.startswith("OTEL_BSP_"))
        raise UserError(f"{given or EXPORTER}: {error}") from error
    return Tracing(sampling, processor, clock)


def check_tracing(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError for variables that every process would refuse."""
    if tracing := tracing_here(time.monotonic, environment):
        tracing.close()
