"""gRPC channels: one for each address and event loop, made at the first use."""

import asyncio
import ipaddress
import json
import weakref
from collections.abc import Callable
from typing import Any, Final

import grpc

from kvplane.client.tls import Pem, Renewed, TlsFiles
from kvplane.kernel.errors import InvalidField

# A report of a 128k-token prompt's digests is 128 KiB for 16-token blocks; batches
# of them stay well below this.
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

# Pings only while a call runs, so that an idle channel never annoys a server; a dead
# peer under a silent stream is noticed after at most 25 s. Servers must allow a ping
# each 20 s (grpc.http2.min_ping_interval_without_data_ms).
CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The one that counts: without it, a ping may stay unanswered for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # By default a channel sleeps for up to 2 minutes before it tries again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    # Less than a heartbeat's interval, so that a restart costs no worker more than one.
    ("grpc.max_reconnect_backoff_ms", 500),
    # A proxy for the web is not the way to a neighbour.
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
)


class Channels:
    """A set of channels. Share one where several clients talk to the same servers."""

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop,
            dict[tuple[str, TlsFiles | None], grpc.aio.Channel | RenewedChannel],
        ] = weakref.WeakKeyDictionary()

    def get(self, address: str, tls: TlsFiles | None = None) -> "grpc.aio.Channel | RenewedChannel":
        """Return the running loop's channel to `address` (see `target`) for stubs.

        Raises InvalidField for a wrong address, and with `tls` for a wrong file.
        """
        channels = self._by_loop.setdefault(asyncio.get_running_loop(), {})
        channel = channels.get((address, tls))
        if channel is None:
            if tls is None:
                channel = grpc.aio.insecure_channel(target(address), options=CHANNEL_OPTIONS)
            else:
                channel = RenewedChannel(address, tls)
            channels[address, tls] = channel
        return channel

    async def close(self) -> None:
        """Close the running loop's channels; calls under way end as Unavailable."""
        channels = self._by_loop.pop(asyncio.get_running_loop(), {})
        for channel in channels.values():
            await channel.close()


class RenewedChannel:
    """A channel over mutual TLS, for stubs: new calls use the newest files.

    gRPC gives a channel its certificate once. After a renewal this opens another one and
    closes the old one when its calls are over.
    """

    def __init__(self, address: str, files: TlsFiles) -> None:
        """Open lazily. Raises InvalidField."""
        self._target = target(address)
        if self._target.startswith(("ipv4:", "ipv6:")) and not files.server_name:
            # gRPC compares all of their certificates with the first one's address.
            raise InvalidField("server_name", "must be set for several addresses")
        self._options = list(CHANNEL_OPTIONS)
        if files.server_name:
            self._options.append(("grpc.ssl_target_name_override", files.server_name))
        self._files = Renewed(files)
        self._closing: set[asyncio.Task[None]] = set()
        self._line = self._open(self._files.current())
        self._old: set[_Line] = set()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """See grpc.aio.Channel."""
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """See grpc.aio.Channel."""
        return self._method("unary_stream", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """See grpc.aio.Channel."""
        return self._method("stream_stream", args, kwargs)

    async def close(self) -> None:
        """Close it; calls under way end as Unavailable."""
        for line in (self._line, *self._old):
            await line.channel.close()
        await asyncio.gather(*self._closing)

    def _method(self, kind: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        def call(*request: Any, **options: Any) -> Any:
            line = self._newest()
            method = line.methods.get(args[0])
            if method is None:
                method = line.methods[args[0]] = getattr(line.channel, kind)(*args, **kwargs)
            begun = method(*request, **options)
            line.calls += 1
            begun.add_done_callback(lambda _: self._ended(line))
            return begun

        return call

    def _newest(self) -> "_Line":
        pem = self._files.current()
        if pem is not self._line.pem:
            old, self._line = self._line, self._open(pem)
            self._old.add(old)
            self._close_if_over(old)
        return self._line

    def _open(self, pem: Pem) -> "_Line":
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        return _Line(pem, grpc.aio.secure_channel(self._target, credentials, options=self._options))

    def _ended(self, line: "_Line") -> None:
        line.calls -= 1
        self._close_if_over(line)

    def _close_if_over(self, line: "_Line") -> None:
        if line in self._old and not line.calls:
            self._old.discard(line)
            task = asyncio.get_running_loop().create_task(line.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Line:
    """A channel with one content of the files."""

    def __init__(self, pem: Pem, channel: grpc.aio.Channel) -> None:
        self.pem, self.channel = pem, channel
        self.calls = 0
        self.methods: dict[str, Any] = {}


SHARED: Final = Channels()


def target(address: str) -> str:
    """Return gRPC's name for ``host:port`` or ``ip:port,ip:port,...`` (replicas).

    A host name with several addresses is spread over too. Names of gRPC itself
    (``dns:///``, ``unix:``, ``ipv4:`` ...) pass unchanged.

    Raises InvalidField("address").
    """
    if not address:
        raise InvalidField("address", "must be host:port")
    if address.startswith(("http://", "https://")):
        raise InvalidField("address", f"{address!r} is not host:port: leave http:// out")
    if "://" in address or address.startswith(("unix:", "ipv4:", "ipv6:", "dns:")):
        return address
    parts = [part.strip() for part in address.split(",")]
    for part in parts:
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidField("address", f"{part!r} is not host:port")
    if len(parts) == 1:
        return f"dns:///{parts[0]}"
    kinds = {_ip_version(part.rpartition(":")[0]) for part in parts}
    if kinds not in ({4}, {6}):
        raise InvalidField(
            "address", "several addresses must all be IPv4 or all IPv6; or use one DNS name"
        )
    return f"ipv{kinds.pop()}:{','.join(parts)}"


def _ip_version(host: str) -> int:
    try:
        return ipaddress.ip_address(host.strip("[]")).version
    except ValueError:
        return 0
