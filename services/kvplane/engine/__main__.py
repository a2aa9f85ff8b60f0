"""Command line of the reference engine: `python -m kvplane.engine --help`."""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplane.engine.config import EngineConfig
from kvplane.engine.process import ControlPlane, run

if TYPE_CHECKING:
    from kvplane.client.tls import TlsFiles

_DEFAULT = EngineConfig()
_UNDER_LEASES = ControlPlane(routing="", lease="")


def parser() -> argparse.ArgumentParser:
    """Return the argument parser; its help is the documentation of the settings."""
    made = argparse.ArgumentParser(
        prog="python -m kvplane.engine",
        description="A small engine with vLLM's HTTP face, vLLM's KV reuse semantics and real "
        "NIXL reads. Its model is a toy: deterministic text that changes when any KV block is "
        "wrong. For tests, fault injection and laptops.",
        epilog="UCX_TLS and UCX_NET_DEVICES are tcp,sm and lo when they are not set: reads stay on "
        "this machine. KVPLANE_TOKEN is the key for the control plane, if it wants one; the "
        "--tls options can also be given as KVPLANE_TLS_CA_FILE and so on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add(
        "--role",
        choices=("prefill", "decode", "both"),
        default=_DEFAULT.role,
        help="what it registers as; either leg is served in any case",
    )
    add("--host", default=_DEFAULT.host, help="address of the HTTP face")
    add("--port", type=int, default=8100, help="port of the HTTP face; 0 takes a free one")
    add("--kv-host", default=_DEFAULT.kv_host, help="side channel address, as peers reach it")
    add("--kv-port", type=int, default=0, help="side channel port; 0 takes a free one")
    add("--model", default=_DEFAULT.model, help="model name; another name is another model")
    add("--revision", default=_DEFAULT.revision, help="model revision")
    add("--block-size", type=int, default=_DEFAULT.block_size, help="tokens in a block")
    add("--num-blocks", type=int, default=_DEFAULT.num_blocks, help="blocks of KV memory")
    add("--max-model-len", type=int, default=_DEFAULT.max_model_len, help="prompt and answer")
    add(
        "--default-max-tokens",
        type=int,
        default=_DEFAULT.default_max_tokens,
        help="length of an answer when the request does not say",
    )
    add(
        "--prefill-us-per-token",
        type=float,
        default=_DEFAULT.prefill_us_per_token,
        help="pretended cost of a computed prompt token, microseconds",
    )
    add(
        "--decode-us-per-token",
        type=float,
        default=_DEFAULT.decode_us_per_token,
        help="pretended cost of a generated token, microseconds",
    )
    add(
        "--prefix-caching",
        action="store_true",
        help="keep a local prefix cache; without it every reuse is a read",
    )
    add(
        "--no-bidirectional",
        action="store_true",
        help="as vLLM without bidirectional_kv_xfer: a decode holds nothing, and a prefill that "
        "is given a handle hangs",
    )
    add(
        "--kv-lease-duration",
        type=float,
        default=_DEFAULT.kv_lease_duration_s,
        help="seconds that a prefill holds for its decode",
    )
    add(
        "--decoder-kv-blocks-ttl",
        type=float,
        default=_DEFAULT.decoder_kv_blocks_ttl_s,
        help="seconds that a decode holds for the next turn",
    )
    add(
        "--kv-recompute-threshold",
        type=int,
        default=_DEFAULT.kv_recompute_threshold,
        help="a prefill reads no fewer tokens than this",
    )
    add(
        "--kv-load-failure-policy",
        choices=("fail", "recompute"),
        default="fail",
        help="without a control plane: a failed read is a 500, or recomputed (which hangs in a "
        "prefill, as in vLLM). With one it is always recomputed",
    )
    add(
        "--stream-kv-params",
        action="store_true",
        help="put kv_transfer_params into streams, as vLLM 0.33 does",
    )
    add(
        "--control-plane",
        default="",
        metavar="ADDRESS",
        help="host:port, or routing=host:port,lease=host:port, each with ,ip:port for more "
        "replicas: reads under leases. Without it the engine believes kv_transfer_params, as "
        "plain vLLM does",
    )
    for option, meaning in (
        ("ca-file", "PEM file of the CA of the control plane; the TLS files belong together"),
        ("cert-file", "PEM file of this worker's certificate, kvplane:worker/WORKER-ID"),
        ("key-file", "PEM file of its private key"),
        ("server-name", "name in the control plane's certificate, where it is not its address"),
    ):
        variable = f"KVPLANE_TLS_{option.upper().replace('-', '_')}"
        add(f"--tls-{option}", default=os.environ.get(variable, ""), help=meaning)
    add("--worker-id", default="", help="stable name of this worker; the default is ROLE-HOST-PORT")
    add(
        "--url",
        default="",
        help="HTTP address as the gateway reaches it; the default is made of --host and --port",
    )
    add(
        "--read-limit",
        type=float,
        default=_UNDER_LEASES.read_limit_s,
        help="under leases: seconds after which a read is given up and computed",
    )
    add(
        "--begin-wait",
        type=float,
        default=_UNDER_LEASES.begin_wait_s,
        help="under leases: seconds that a prefill waits for leave to read",
    )
    add(
        "--grant-wait",
        type=float,
        default=_UNDER_LEASES.grant_wait_s,
        help="under leases: seconds that a decode waits for a lease",
    )
    add(
        "--max-held-share",
        type=float,
        default=_UNDER_LEASES.max_held_share,
        help="under leases: share of the blocks that may be held after requests; beyond that "
        "the cheapest holds are freed",
    )
    add("--debug", action="store_true", help="serve /debug: faults, freezing, state")
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to log, on stderr",
    )
    return made  # fmt: skip


def config_of(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings. SystemExit names a wrong one."""
    for name in ("block_size", "num_blocks", "max_model_len", "default_max_tokens"):
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')}: must be at least 1")
    for name in (
        "prefill_us_per_token", "decode_us_per_token", "kv_recompute_threshold",
        "kv_lease_duration", "decoder_kv_blocks_ttl", "read_limit", "begin_wait", "grant_wait",
    ):  # fmt: skip
        if getattr(args, name) < 0:
            raise SystemExit(f"--{name.replace('_', '-')}: must not be negative")
    if not 0 < args.max_held_share <= 1:
        raise SystemExit("--max-held-share: must be above 0 and at most 1")
    return EngineConfig(
        model=args.model,
        revision=args.revision,
        role=args.role,
        host=args.host,
        port=args.port,
        kv_host=args.kv_host,
        kv_port=args.kv_port,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        max_model_len=args.max_model_len,
        default_max_tokens=args.default_max_tokens,
        prefill_us_per_token=args.prefill_us_per_token,
        decode_us_per_token=args.decode_us_per_token,
        prefix_caching=args.prefix_caching,
        bidirectional=not args.no_bidirectional,
        kv_lease_duration_s=args.kv_lease_duration,
        decoder_kv_blocks_ttl_s=args.decoder_kv_blocks_ttl,
        kv_recompute_threshold=args.kv_recompute_threshold,
        recompute_on_load_failure=args.kv_load_failure_policy == "recompute",
        stream_kv_params=args.stream_kv_params,
        debug=args.debug,
    )


def control_plane_of(args: argparse.Namespace) -> ControlPlane | None:
    """Return where the control plane is, if there is one. SystemExit says what is wrong."""
    if not args.control_plane:
        return None
    named = {"routing": args.control_plane, "lease": args.control_plane}
    if "=" in args.control_plane:
        # A comma also separates the replicas of one service.
        parts = re.split(r",(?=\w+=)", args.control_plane)
        named = dict(part.partition("=")[::2] for part in parts)
    replicas = [each for part in named.values() for each in part.split(",")]
    if set(named) != {"routing", "lease"} or not all(":" in each for each in replicas):
        raise SystemExit(
            "--control-plane: give host:port, or routing=host:port,lease=host:port, "
            f"not {args.control_plane!r}"
        )
    if not args.url and args.host in {"0.0.0.0", "::", ""}:
        raise SystemExit(f"--url: say how the gateway reaches this engine; it is not {args.host!r}")
    return ControlPlane(
        routing=named["routing"],
        lease=named["lease"],
        token=_token(),
        tls=tls_of(args),
        worker_id=args.worker_id,
        url=args.url,
        read_limit_s=args.read_limit,
        begin_wait_s=args.begin_wait,
        grant_wait_s=args.grant_wait,
        max_held_share=args.max_held_share,
    )


def _token() -> str | None:
    from kvplane.kernel.errors import InvalidField  # noqa: PLC0415
    from kvplane.kernel.validate import header  # noqa: PLC0415

    try:
        return header("KVPLANE_TOKEN", os.environ.get("KVPLANE_TOKEN", "")) or None
    except InvalidField as error:
        raise SystemExit(error.message) from None


def tls_of(args: argparse.Namespace) -> "TlsFiles | None":
    """Return the files of the --tls options, if there are any. SystemExit says what is wrong."""
    from kvplane.client.tls import TlsFiles, load  # noqa: PLC0415  brings gRPC along
    from kvplane.kernel.errors import InvalidField  # noqa: PLC0415

    try:
        files = TlsFiles.of(
            args.tls_ca_file, args.tls_cert_file, args.tls_key_file, args.tls_server_name
        )
        if files is not None:
            load(files)
    except InvalidField as error:
        name, _, problem = error.message.partition(": ")
        raise SystemExit(f"--tls-{name.replace('_', '-')}: {problem}") from None
    return files


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready(what: dict[str, object]) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    await run(config_of(args), control_plane_of(args), ready, stop)


def main(argv: Sequence[str] | None = None) -> None:
    """Run an engine until SIGTERM; its first line on stdout is JSON and says where it is."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    asyncio.run(_serve(args))


if __name__ == "__main__":
    main()
