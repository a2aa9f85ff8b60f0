"""`kvplane dev` and `kvplane serve` as real processes: start, readiness, drain, refusals."""

import asyncio
import json
import signal
import socket

import pytest
from demo.servers import free_port
from kvplane.api.session.v1 import session_pb2
from kvplane.client import Channels, session_api
from kvplane.kernel.errors import Unavailable
from runtime.processes import get, kvplane, running

pytestmark = pytest.mark.processes


def test_dev_needs_nothing_and_says_how_to_go_on(tmp_path):
    with running("dev", "--port", "0", "--gateway-port", "0", cwd=tmp_path) as dev:
        grpc = dev.wait_for(r"gRPC +(127\.0\.0\.1:\d+)")[1]
        gateway = dev.wait_for(r"gateway +(http://127\.0\.0\.1:\d+)/v1")[1]
        status = dev.wait_for(r"status +(http://127\.0\.0\.1:\d+)")[1]
        said = dev.out.read_text()
        assert f'"control_plane": "{grpc}"' in said
        assert f"curl {gateway}/v1/chat/completions" in said
        dev.wait_until(lambda: get(f"{status}/readyz")[0] == 200)
        assert "kvplane_rpc" in get(f"{status}/metrics")[1]
        assert json.loads(get(f"{gateway}/v1/models")[1])["data"] == []
        assert (tmp_path / "kvplane.db").exists()
        listed = kvplane("workers", "list", "--server", grpc, cwd=tmp_path)
        assert (listed.returncode, listed.stderr) == (0, "no workers have registered\n")
        dev.signal()
        assert dev.ended() == 0
        assert '"message":"stopped"' in dev.err.read_text()


def test_dev_serves_this_machine_only(tmp_path):
    for name in ("KVPLANE_GRPC_HOST", "KVPLANE_GATEWAY_HOST"):
        done = kvplane("dev", cwd=tmp_path, **{name: "0.0.0.0"})
        assert done.returncode == 2
        assert "this machine only" in done.stderr


@pytest.mark.parametrize("command", [("dev",), ("serve", "lease"), ("serve", "gateway")])
def test_a_wrong_setting_stops_the_start_in_one_line(tmp_path, command):
    done = kvplane(*command, cwd=tmp_path, KVPLANE_LEASE_TTL_S="soon")
    assert done.returncode == 2
    assert "lease.ttl_s (KVPLANE_LEASE_TTL_S): " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_worker_of_the_gateway_is_named(tmp_path):
    workers = '[{"worker_id": "w", "url": "nowhere", "role": "both", "model": "m"}]'
    done = kvplane("serve", "gateway", cwd=tmp_path, KVPLANE_GATEWAY_STATIC_WORKERS=workers)
    assert done.returncode == 2
    assert "gateway.static_workers[0].url: must be http://host:port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "option"), [(("serve", "lease"), "--port"), (("serve", "gateway"), "--port")]
)
def test_a_taken_port_is_said_in_one_line(tmp_path, command, option):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = kvplane(*command, option, port, cwd=tmp_path)
        status = kvplane(
            "serve", "lease", "--port", "0", cwd=tmp_path, KVPLANE_GRPC_STATUS_PORT=port
        )
    assert done.returncode == 1
    assert port in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"cannot listen on 127.0.0.1:{port} (grpc.status_port)" in status.stderr


def serve(service, cwd, database, port):
    return running(
        "serve",
        service,
        cwd=cwd,
        KVPLANE_DATABASE_URL=database,
        KVPLANE_GRPC_PORT=str(port),
        KVPLANE_GRPC_STATUS_PORT="0",
        KVPLANE_GRPC_DRAIN_S="5",
    )


def test_a_service_waits_for_the_schema_and_says_what_to_run(tmp_path):
    database = f"sqlite:///{tmp_path}/shared.db"
    port, status = free_port(), free_port()

    async def names(timeout=1.0):
        channels = Channels()
        try:
            api = session_api(f"127.0.0.1:{port}", timeout=timeout, channels=channels)
            answer = await api.ListSessions(session_pb2.ListSessionsRequest())
            return [one.name for one in answer.sessions]
        finally:
            await channels.close()

    with running(
        *("serve", "session"),
        cwd=tmp_path / "session",
        KVPLANE_DATABASE_URL=database,
        KVPLANE_GRPC_PORT=str(port),
        KVPLANE_GRPC_STATUS_PORT=str(status),
    ) as service:
        url = f"http://127.0.0.1:{status}"
        service.wait_until(lambda: "run `kvplane migrate up`" in get(f"{url}/readyz")[1])
        assert (get(f"{url}/readyz")[0], get(f"{url}/healthz")[0]) == (503, 200)
        with pytest.raises(Unavailable, match="kvplane migrate up"):
            asyncio.run(names())
        up = kvplane("migrate", "up", cwd=tmp_path, KVPLANE_DATABASE_URL=database)
        assert up.returncode == 0, up.stderr
        service.wait_until(lambda: get(f"{url}/readyz")[0] == 200)
        assert asyncio.run(names(5.0)) == []
        down = kvplane(
            "migrate", "down", "base", "--yes", cwd=tmp_path, KVPLANE_DATABASE_URL=database
        )
        assert down.returncode == 0, down.stderr
        service.wait_until(lambda: get(f"{url}/readyz")[0] == 503)


def test_sigterm_ends_streams_and_the_process(tmp_path):
    database = f"sqlite:///{tmp_path}/shared.db"
    assert kvplane("migrate", "up", "--database", database, cwd=tmp_path).returncode == 0
    port = free_port()
    with serve("session", tmp_path / "session", database, port) as service:
        service.wait_for('"message":"ready"')

        async def watch():
            channels = Channels()
            api = session_api(f"127.0.0.1:{port}", tenant="acme", channels=channels)
            await api.CreateSession(session_pb2.CreateSessionRequest(name="one", model="m"))
            changes = api.WatchSessions(session_pb2.WatchSessionsRequest())
            assert (await anext(changes)).session.name == "one"
            service.signal(signal.SIGTERM)
            with pytest.raises(Unavailable):
                await anext(changes)
            await channels.close()

        asyncio.run(watch())
        assert service.ended() == 0
    logged = [json.loads(line) for line in service.err.read_text().splitlines()]
    (call,) = [line for line in logged if line.get("method") == "SessionService/CreateSession"]
    assert (call["tenant"], call["code"]) == ("acme", "OK")
    assert [line["message"] for line in logged][-1] == "stopped"
    (listening,) = [line for line in logged if line["message"] == "listening"]
    assert listening["grpc"] == f"127.0.0.1:{port}"


def test_services_of_their_own_find_one_another(tmp_path):
    """All four as processes over one database, a turn routed through them."""
    from kvplane.api.routing.v1 import routing_pb2
    from kvplane.client import routing_api, worker_api

    database = f"sqlite:///{tmp_path}/shared.db"
    assert kvplane("migrate", "up", "--database", database, cwd=tmp_path).returncode == 0
    ports = {name: free_port() for name in ("session", "lease", "routing", "gateway")}
    env = {
        "KVPLANE_DATABASE_URL": database,
        "KVPLANE_GRPC_STATUS_PORT": "0",
        "KVPLANE_ROUTING_WORKER_TIMEOUT_S": "300",  # this worker has no heart
        **{f"KVPLANE_{n.upper()}_ADDRESS": f"127.0.0.1:{ports[n]}" for n in list(ports)[:3]},
    }

    def one(name):
        return running("serve", name, "--port", str(ports[name]), cwd=tmp_path / name, **env)

    async def route():
        channels = Channels()
        address = f"127.0.0.1:{ports['routing']}"
        worker = routing_pb2.Worker(
            worker_id="w1",
            role=routing_pb2.WORKER_ROLE_BOTH,
            url="http://127.0.0.1:9",
            engine_id="e1",
            kv_host="127.0.0.1",
            kv_port=5600,
            compatibility=routing_pb2.Compatibility(
                model="m",
                revision="1",
                block_size=16,
                kv_layout="x",
                kv_dtype="x",
                engine_version="1",
            ),
            served_models=["m"],
            managed=True,
        )
        await worker_api(address, channels=channels).RegisterWorker(
            routing_pb2.RegisterWorkerRequest(worker=worker, instance_id="i1")
        )
        answer = await routing_api(address, channels=channels).Route(
            routing_pb2.RouteRequest(request_id="r1", session={"name": "conversation"}, model="m")
        )
        await channels.close()
        return answer

    with one("session") as session, one("lease") as lease, one("routing") as routing:
        for service in (session, lease, routing):
            service.wait_for('"message":"ready"')
        answer = asyncio.run(route())
        assert answer.decode.worker_id == "w1"
        assert answer.session_id  # so the session service was reached
        with one("gateway") as gateway:
            url = f"http://127.0.0.1:{ports['gateway']}"
            gateway.wait_until(lambda: '"m"' in get(f"{url}/v1/models")[1])
            gateway.signal()
            assert gateway.ended() == 0
        for service in (session, lease, routing):
            service.signal()
        assert [service.ended() for service in (session, lease, routing)] == [0, 0, 0]


def test_with_api_keys_a_service_asks_the_session_service_whose_they_are(tmp_path):
    database = f"sqlite:///{tmp_path}/shared.db"
    ports = {name: free_port() for name in ("session", "lease")}
    env = {
        "KVPLANE_DATABASE_URL": database,
        "KVPLANE_GRPC_STATUS_PORT": "0",
        "KVPLANE_AUTH_MODE": "api_key",
        "KVPLANE_AUTH_INTERNAL_TOKEN": "between-us",
        **{f"KVPLANE_{n.upper()}_ADDRESS": f"127.0.0.1:{port}" for n, port in ports.items()},
    }
    assert kvplane("migrate", "up", cwd=tmp_path, **env).returncode == 0

    def one(name):
        return running("serve", name, "--port", str(ports[name]), cwd=tmp_path / name, **env)

    def ask(*command, token):
        return kvplane(*command, cwd=tmp_path, **env, KVPLANE_TOKEN=token)

    with one("session") as session, one("lease") as lease:
        for service in (session, lease):
            service.wait_for('"message":"ready"')
        assert ask("tenants", "create", "acme", token="between-us").returncode == 0
        made = ask("keys", "create", "acme", "--json", token="between-us")
        secret = json.loads(made.stdout)["secret"]
        good = ask("leases", "list", token=secret)
        assert (good.returncode, good.stdout) == (0, "")
        wrong = ask("leases", "list", token="kvp_wrong")
        assert wrong.returncode == 1
        assert wrong.stderr.endswith("(pass it with --token or KVPLANE_TOKEN)\n")
        denied = ask("tenants", "create", "bolt", token=secret)
        assert denied.returncode == 1
        assert "CreateTenant is for operator" in denied.stderr
        logged = [json.loads(line) for line in lease.err.read_text().splitlines()]
        assert [c["tenant"] for c in logged if c.get("code") == "OK"] == ["acme"]


def test_a_second_signal_ends_it_at_once(tmp_path):
    database = f"sqlite:///{tmp_path}/shared.db"
    assert kvplane("migrate", "up", "--database", database, cwd=tmp_path).returncode == 0
    port = free_port()
    with running(
        *("serve", "lease", "--port", str(port)),
        cwd=tmp_path / "lease",
        KVPLANE_DATABASE_URL=database,
        KVPLANE_GRPC_STATUS_PORT="0",
        KVPLANE_GRPC_DRAIN_S="60",
        KVPLANE_LEASE_MAX_HOLD_S="100",
    ) as service:
        service.wait_for('"message":"ready"')

        async def hang():
            """A call that waits for a report, so that the drain has something to wait for."""
            from kvplane.api.lease.v1 import lease_pb2
            from kvplane.client import lease_api

            channels = Channels()
            api = lease_api(f"127.0.0.1:{port}", channels=channels)
            request = lease_pb2.GrantLeaseRequest(
                request_id="g",
                holder={"worker_id": "w", "epoch": 1, "compatibility": "c"},
                handle={"engine_id": "e", "request_id": "r"},
                wait={"seconds": 1},
            )
            call = asyncio.create_task(api.GrantLease(request))
            await asyncio.sleep(0.3)
            service.signal(signal.SIGTERM)
            await asyncio.to_thread(service.wait_for, '"message":"draining"')
            service.signal(signal.SIGTERM)
            code = await asyncio.to_thread(service.ended, 5)
            await asyncio.gather(call, return_exceptions=True)
            await channels.close()
            return code

        assert asyncio.run(hang()) == 128 + signal.SIGTERM
