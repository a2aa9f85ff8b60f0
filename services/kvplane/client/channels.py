"""gRPC channels: one for each address and event loop, made at the first use."""

import asyncio
import ipaddress
import json
import weakref
from typing import Final

import grpc

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
            asyncio.AbstractEventLoop, dict[str, grpc.aio.Channel]
        ] = weakref.WeakKeyDictionary()

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the running loop's channel to `address`, see `target`."""
        channels = self._by_loop.setdefault(asyncio.get_running_loop(), {})
        channel = channels.get(address)
        if channel is None:
            channel = channels[address] = grpc.aio.insecure_channel(
                target(address), options=CHANNEL_OPTIONS
            )
        return channel

    async def close(self) -> None:
        """Close the running loop's channels; calls under way end as Unavailable."""
        channels = self._by_loop.pop(asyncio.get_running_loop(), {})
        for channel in channels.values():
            await channel.close()


SHARED: Final = Channels()


def target(address: str) -> str:
    """Return gRPC's name for ``host:port`` or ``ip:port,ip:port,...`` (replicas).

    A host name with several addresses is spread over too. Names of gRPC itself
    (``dns:///``, ``unix:``, ``ipv4:`` ...) pass unchanged.

    Raises InvalidField("address").
    """
    if not address:
        raise InvalidField("address", "must be host:port")
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
