"""What Prometheus sees of the gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvplane_gateway_requests_total",
            "Requests by path, decision and outcome (ok, cancelled, failed, rejected).",
            ["path", "decision", "outcome"],
            registry=self.registry,
        )
        self.running = Gauge(
            "kvplane_gateway_requests_running",
            "Requests under way.",
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "kvplane_gateway_time_to_first_token_seconds",
            "From the request's arrival to the first bytes of the answer.",
            ["decision"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.route_seconds = Histogram(
            "kvplane_gateway_route_seconds",
            "How long Route took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens_reused = Counter(
            "kvplane_gateway_prompt_tokens_reused_total",
            "Prompt tokens whose KV was read from an earlier turn.",
            registry=self.registry,
        )
        self.tokens_recomputed = Counter(
            "kvplane_gateway_prompt_tokens_recomputed_total",
            "Prompt tokens that were computed.",
            registry=self.registry,
        )
        self.prefills = Counter(
            "kvplane_gateway_prefills_total",
            "Prefill legs that were answered.",
            registry=self.registry,
        )
        self.retries = Counter(
            "kvplane_gateway_retries_total",
            "Legs that were tried again, by leg and reason.",
            ["leg", "reason"],
            registry=self.registry,
        )
        self.without_control_plane = Counter(
            "kvplane_gateway_without_control_plane_total",
            "Requests that went on without a Route.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)
