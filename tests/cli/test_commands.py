"""What the commands show and do, against a real server."""

import json
import re

import pytest
from runtime.processes import running


def test_workers(cli):
    head, *rows = cli("workers", "list").rows
    assert head[:4] == ["WORKER", "ROLE", "STATE", "MODEL"]
    assert [row[:4] for row in rows] == [
        ["w1", "decode", "ready", "m"],
        ["w2", "prefill", "ready", "m"],
    ]
    assert rows[0][8].endswith(" s")
    assert [w["worker_id"] for w in cli("workers", "list", "--role", "decode", "--json").json] == [
        "w1"
    ]
    assert cli("workers", "list", "--model", "none", "--json").json == []


def test_one_worker(cli):
    shown = cli("workers", "get", "w1", "--json").json
    assert shown["compatibility"]["block_size"] == 16
    assert shown["epoch"] == 1
    assert isinstance(shown["silent_for"], float)
    assert "block_size=16" in cli("workers", "get", "w1").out
    assert re.search("^kv port +5600$", cli("workers", "get", "w1").out, re.MULTILINE)


def test_drain_and_undrain(cli):
    assert cli("workers", "drain", "w1", "--yes", "--json").json["state"] == "draining"
    assert cli("workers", "list", "--state", "draining").rows[1][0] == "w1"
    assert cli("workers", "undrain", "w1", "--json").json["state"] == "ready"


def test_sessions(cli, plane):
    head, row = cli("sessions", "list").rows
    assert head[:3] == ["SESSION", "NAME", "STATE"]
    assert row[:4] == [plane.session_id, "the [bold]talk", "active", "0"]
    assert row[7] == "-"  # no turn yet
    by_id = cli("sessions", "get", plane.session_id, "--json").json
    assert cli("sessions", "get", "--name", "the [bold]talk", "--json").json == by_id
    assert by_id["expire_time"].endswith("Z")
    shown = cli("sessions", "get", plane.session_id).out
    # 24 hours less what has passed, rounded.
    assert "in 23 h" in shown or "in 1 d" in shown
    assert " s ago" in shown


def test_leases_and_ownerships(cli, plane):
    (lease,) = cli("leases", "list", "--json").json
    assert (lease["lease_id"], lease["state"]) == (plane.lease_id, "granted")
    assert 0 < lease["ttl"] <= 60
    assert cli("leases", "list", "--worker", "w2").rows[1][3] == "w2"
    assert cli("leases", "list", "--state", "revoked", "--json").json == []
    (held,) = cli("ownerships", "list", "--session", plane.session_id).rows[1:]
    assert held[1] == "leased"
    # Five minutes less what has passed, rounded.
    assert held[2] == "5 min" or held[2].startswith("4 min ")
    assert held[6:8] == ["1,234", "next turn"]
    assert cli("ownerships", "list", "--json").json[0]["digests"] == ""


def test_another_tenant_sees_nothing(cli, plane):
    assert cli("leases", "list", "--tenant", "bolt", "--json").json == []
    done = cli("leases", "get", plane.lease_id, "--tenant", "bolt")
    assert (done.code, done.err) == (1, f"kvplane: no lease '{plane.lease_id}'\n")


def test_revoke(cli, plane):
    assert cli("leases", "revoke", plane.lease_id, "--yes", "--json").json["state"] == "revoked"
    assert "revoked" in cli("leases", "get", plane.lease_id).out


def test_watch_and_end(cli, plane, tmp_path):
    env = {"KVPLANE_SERVER": plane.address, "KVPLANE_TENANT": "watched"}
    asyncio_create(plane.address, "watched", "short")
    with running("sessions", "watch", "--json", cwd=tmp_path, **env) as watch:
        watch.wait_for('"state": "active"')
        ended = cli("sessions", "end", "--name", "short", "--tenant", "watched", "-y", "--json")
        assert ended.json["state"] == "ended"
        watch.wait_for('"state": "ended"')
    lines = [json.loads(line) for line in watch.out.read_text().splitlines()]
    assert {line["name"] for line in lines} == {"short"}


def asyncio_create(address, tenant, name):
    import asyncio

    from kvplane.api.session.v1 import session_pb2
    from kvplane.client import KvplaneClient

    async def create():
        async with KvplaneClient(address, tenant=tenant) as kvplane:
            await kvplane.sessions.CreateSession(
                session_pb2.CreateSessionRequest(name=name, model="m")
            )

    asyncio.run(create())


def test_tenants(cli):
    assert cli("tenants", "create", "nova", "--display-name", "Nova", "--json").json[
        "tenant_id"
    ] == ("nova")
    again = cli("tenants", "create", "nova")
    assert (again.code, again.err) == (1, "kvplane: tenant 'nova' exists already\n")
    assert "nova" in [row[0] for row in cli("tenants", "list").rows]
    assert cli("tenants", "get", "nova", "--json").json["display_name"] == "Nova"
    rotated = cli("tenants", "rotate-salt", "nova", "--yes", "--json").json
    assert rotated == cli("tenants", "get", "nova", "--json").json


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("workers", "list", "--role", "cook"), "--role: use one of prefill, decode, both"),
        (("leases", "list", "--state", "lost", "--state", "x"), "--state: use one of granted"),
        (("sessions", "get"), "give a session id or --name"),
        (("sessions", "get", "s", "--name", "n"), "give a session id or --name"),
        (("tenants", "create", "a b"), "tenant_id: use letters, digits and . _ - only"),
        (("workers", "list", "--tenant", "a b"), "x-kvplane-tenant: "),
        (("workers", "list", "--server", "nonsense"), "address: 'nonsense' is not host:port"),
        (("workers", "list", "--server", "http://127.0.0.1:1"), "is not host:port: leave http://"),
    ],
)
def test_what_was_typed_wrong(cli, arguments, said):
    done = cli(*arguments)
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1


def test_nobody_there(cli):
    done = cli("workers", "list", "--server", "127.0.0.1:1")
    assert done.code == 1
    assert done.err == (
        "kvplane: no answer from 127.0.0.1:1: start a server with `kvplane dev`, or name the right"
        " one with --server, KVPLANE_ROUTING_ADDRESS or KVPLANE_SERVER\n"
    )


def test_a_service_s_own_address_comes_before_the_common_one(cli, plane):
    elsewhere = {"KVPLANE_SERVER": "127.0.0.1:1"}
    assert cli("sessions", "list", KVPLANE_SESSION_ADDRESS=plane.address, **elsewhere).code == 0
    assert cli("leases", "list", KVPLANE_LEASE_ADDRESS=plane.address, **elsewhere).code == 0
    assert cli("workers", "list", KVPLANE_ROUTING_ADDRESS=plane.address, **elsewhere).code == 0
    wrong = {"KVPLANE_ROUTING_ADDRESS": "127.0.0.1:1"}
    assert cli("workers", "list", "--server", plane.address, **wrong).code == 0


def test_more_than_the_limit_is_said(cli):
    done = cli("workers", "list", "--limit", "1")
    assert len(done.rows) == 2
    assert "raise --limit" in done.err
