"""The client's trace goes on through the gateway, to the services and to the engines."""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

# W3C trace context. What has another form stays here.
_HEADERS: Final = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z"),
    "tracestate": re.compile(r"[\x20-\x7e]{1,512}\Z"),
}


@contextlib.contextmanager
def span(name: str, headers: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Continue the trace of an HTTP request; yield the headers that continue it further.

    Without OpenTelemetry, and without a trace that came or a tracer that runs, it costs
    nothing and passes the client's headers on.
    """
    came = {
        header: headers[header]
        for header, form in _HEADERS.items()
        if form.match(headers.get(header, ""))
    }
    if "traceparent" not in came:
        came = {}
    telemetry = _telemetry() if came or "opentelemetry.sdk.trace" in sys.modules else None
    if telemetry is None:
        yield came
        return
    trace, propagate = telemetry
    tracer = trace.get_tracer("kvplane.gateway")
    parent = propagate.extract(came)
    with tracer.start_as_current_span(name, context=parent, kind=trace.SpanKind.SERVER):
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        yield carrier


def _telemetry() -> tuple[Any, Any] | None:
    try:
        from opentelemetry import propagate, trace  # noqa: PLC0415
    except ImportError:
        return None
    return trace, propagate
