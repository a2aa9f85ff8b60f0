"""OpenTelemetry, when it is asked for. Off, nothing of it is imported."""

from typing import Any

from kvplane.runtime.sections import TelemetrySettings
from kvplane.runtime.settings import WrongSettings


def configure(settings: TelemetrySettings, service: str) -> None:
    """Pass traces on; send spans to the endpoint, if there is one. Raises WrongSettings."""
    if not settings.enabled:
        return
    # Where it is loaded, kvplane.client takes the trace along.
    import opentelemetry.propagate  # noqa: F401, PLC0415

    if not settings.otlp_endpoint:
        return
    try:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        raise WrongSettings(
            [
                "telemetry.otlp_endpoint (KVPLANE_TELEMETRY_OTLP_ENDPOINT): run `pip install"
                " opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc`"
            ]
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": f"kvplane-{service}"}))
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def server_interceptors(settings: TelemetrySettings) -> list[Any]:
    """Return what makes each call part of its caller's trace."""
    if not settings.enabled:
        return []
    from opentelemetry.instrumentation.grpc import aio_server_interceptor  # noqa: PLC0415

    return [aio_server_interceptor()]
