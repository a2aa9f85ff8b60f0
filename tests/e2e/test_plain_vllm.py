"""vLLM with its own NixlConnector: the gateway holds the leases and compares the tokens."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from demo.build_model import build
from demo.servers import Server, free_port, stop_all, wait_for
from demo.vllm_worker import VllmWorker
from e2e.chat import Chat, bytes_read, words
from e2e.cluster import (
    BLOCK,
    HOLD_SECONDS,
    KV_BYTES_PER_TOKEN,
    MODEL,
    default_logs,
    wait_for_model,
)
from e2e.engines import figures
from e2e.waiting import eventually

pytestmark = pytest.mark.vllm


@dataclass
class Plain:
    """What `Chat` needs of a cluster."""

    prefill: Server
    decode: Server
    dev: Server
    url: str

    def gateway(self, _number: int = 1) -> str:
        return self.url


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """Two plain engines and `kvplane dev`."""
    workers = {}
    static = []
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        port, kv_port = free_port(), free_port()
        workers[role] = VllmWorker(
            f"plain-{role}",
            build("tiny"),
            port,
            kv_port,
            kv_role,
            served_name=MODEL,
            kv_cache_bytes=32 << 20,
            prefix_caching=role == "decode",
            failure_policy="recompute",
            connector_config={
                "decoder_kv_blocks_ttl": HOLD_SECONDS,
                "kv_lease_duration": HOLD_SECONDS,
            },
        ).server(default_logs())
        static.append(
            {
                "worker_id": f"plain-{role}",
                "url": workers[role].url,
                "role": role,
                "model": MODEL,
                "block_size": BLOCK,
                "kv_host": "127.0.0.1",
                "kv_port": kv_port,
                "bidirectional": True,
                "decode_hold_s": HOLD_SECONDS,
                "prefill_hold_s": HOLD_SECONDS,
            }
        )
    folder: Path = tmp_path_factory.mktemp("plain")
    http, grpc, status = free_port(), free_port(), free_port()
    dev = Server(
        "plain-dev",
        [sys.executable, "-m", "kvplane.cli", "dev"],
        url=f"http://127.0.0.1:{http}",
        health="/readyz",
        env={
            "KVPLANE_DATABASE_URL": f"sqlite:///{folder}/kvplane.db",
            "KVPLANE_GRPC_PORT": str(grpc),
            "KVPLANE_GRPC_STATUS_PORT": str(status),
            "KVPLANE_GATEWAY_PORT": str(http),
            "KVPLANE_GATEWAY_STATIC_WORKERS": json.dumps(static),
        },
        logs=default_logs(),
    )
    servers = [*workers.values(), dev]
    try:
        for server in servers:
            server.start()
        wait_for(servers, timeout=420)
        wait_for_model(dev.url)
        yield Plain(workers["prefill"], workers["decode"], dev, dev.url)
    finally:
        stop_all(servers)


async def both_are_known(plain: Plain) -> None:
    """Talk until a turn reads: the gateway has then heard of both workers."""

    async def reads() -> bool:
        chat = Chat(plain, session=None)  # type: ignore[arg-type]
        await chat.say("Warm up. " + words(int(plain.prefill.seconds()) * 7, 150))
        before = await bytes_read(plain.prefill.url)
        await chat.say("Go on.")
        return await bytes_read(plain.prefill.url) > before

    await eventually(reads, seconds=60)


async def test_each_next_turn_reads_and_is_right(plain: Plain) -> None:
    await both_are_known(plain)
    chat = Chat(plain, session="plain")  # type: ignore[arg-type]
    for turn in range(1, 5):
        before = await bytes_read(plain.prefill.url)
        await chat.say(words(turn * 320))
        read = await bytes_read(plain.prefill.url) - before
        assert (read > 0) == (turn > 1), f"turn {turn} read {read} bytes"


async def test_an_edited_history_is_cut_to_what_is_equal(plain: Plain) -> None:
    chat = Chat(plain, session="plain-edited")  # type: ignore[arg-type]
    await chat.say("First. " + words(11, 200))
    await chat.say("Second. " + words(211, 150))
    chat.messages[2]["content"] = chat.messages[2]["content"].replace("Second", "Other")
    before = await bytes_read(plain.prefill.url)
    await chat.say("And now?")
    read = (await bytes_read(plain.prefill.url) - before) // KV_BYTES_PER_TOKEN
    assert read > 0
    assert read % BLOCK == 0


async def test_nothing_is_held_once_the_holds_are_over(plain: Plain) -> None:
    """Nobody can tell a plain engine to free; all that it can do is to let a hold end."""

    async def at_rest() -> bool:
        prefill, decode = await figures(plain.prefill.url), await figures(plain.decode.url)
        return prefill.at_rest and decode.at_rest

    await eventually(at_rest, seconds=HOLD_SECONDS + 10)
