"""Failures of worker registries, as reported from the field."""

from collections.abc import Callable

import pytest
from demo.servers import Server, wait_for
from e2e.waiting import eventually
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client import KvplaneClient
from kvplane.db.database import postgres_engine
from kvplane.runtime.settings import load
from sqlalchemy import make_url, text

from cases.conftest import Deployment
from cases.processes import CLOCK, MODEL, client, kvplane, registered
from cases.talk import Talk, held, words

pytestmark = pytest.mark.processes

READY = routing.WORKER_STATE_READY
INTERVAL, TIMEOUT = 1.0, 5.0


async def worker(kv: KvplaneClient, worker_id: str) -> routing.Worker:
    return (await kv.workers.GetWorker(routing.GetWorkerRequest(worker_id=worker_id))).worker


async def back_after(kv: KvplaneClient, worker_id: str, restarted: float) -> float:
    """Return how long after `restarted` the registry had a sign of life of that worker."""

    async def beat() -> float:
        found = await worker(kv, worker_id)
        heard = CLOCK.monotonic() - found.silent_for.ToMicroseconds() / 1e6
        return heard - restarted if found.state == READY else -1.0

    async def heard() -> float:
        return max(await beat(), 0.0)

    return await eventually(heard, 10)


def test_a_timeout_that_heartbeats_cannot_meet_is_refused() -> None:
    """T-11: heartbeats slower than the reaper. Such settings do not start."""
    done = kvplane("serve", "routing", KVPLANE_ROUTING_WORKER_TIMEOUT_S="2")
    assert done.returncode == 2
    assert "heartbeat_interval_s" in done.stderr


async def test_a_restarted_control_plane_has_its_workers_back_within_an_interval(
    deployment: Deployment,
) -> None:
    """T-11: after a restart of the registry nobody comes back, or with nothing that it holds."""
    talk = Talk(deployment, deployment.prefill, "t11", MODEL)
    names = [deployment.prefill.name, *(engine.name for engine in deployment.decodes)]
    away: list[Server] = [*deployment.kind("routing"), *deployment.kind("lease")]
    await talk.say("Before. " + words(31))
    async with client(deployment) as kv:
        await eventually(lambda: held(kv, "t11"))
        epochs = {name: (await worker(kv, name)).epoch for name in names}
        for server in away:
            server.kill()
        # And what had been reported is lost, as after going back to an older backup.
        for table in ("ownership_payloads", "ownerships"):
            assert await execute(deployment, f"DELETE FROM {table}") > 0
        await CLOCK.sleep(TIMEOUT + INTERVAL)
        for server in away:
            server.start()
        wait_for(away, 60)
        restarted = CLOCK.monotonic()
        for name in names:
            # One until the beat, and the way.
            assert await back_after(kv, name, restarted) < 2 * INTERVAL
            assert (await worker(kv, name)).epoch == epochs[name]
        # What they hold is reported again: the next turn reads it.
        await eventually(lambda: held(kv, "t11"), INTERVAL)
        assert (await talk.say("After.")).decision == "reuse"


@pytest.mark.parametrize("how", ["deregistered", "deleted"])
async def test_a_worker_removed_by_mistake_registers_again(
    deployment: Deployment, start: Callable[..., None], how: str
) -> None:
    """T-11: who is not known any more is not told, and never comes back."""
    prefill = deployment.engine(f"{how}-p", "prefill", model=how)
    decode = deployment.engine(f"{how}-d", "decode", model=how)
    start(prefill, decode)
    talk = Talk(deployment, prefill, how, how)
    async with client(deployment) as kv:
        await registered(deployment, prefill.name, decode.name)
        # Its second process, so that the service which checks epochs has seen two.
        decode.kill()
        decode.start()
        await eventually(lambda: at_epoch(kv, decode.name, 2))
        await talk.say("Before. " + words(61))
        await eventually(lambda: held(kv, how))

        await REMOVE[how](deployment, kv, decode.name)
        beat = routing.WorkerBeat(worker_id=decode.name, epoch=2)
        told = await kv.workers.Heartbeat(routing.HeartbeatRequest(beats=[beat]))
        assert not told.results[0].known
        removed = CLOCK.monotonic()
        await registered(deployment, decode.name)
        assert CLOCK.monotonic() - removed < 2 * INTERVAL  # one until the beat, and the way
        assert (await worker(kv, decode.name)).epoch > 2

        # And it is of use again: what it held may be void, what it holds from now on is not.
        await talk.say("After.")
        await eventually(lambda: held(kv, how))
        reads = prefill.reads()
        assert (await talk.say("And again.")).decision == "reuse"
        assert prefill.reads() == reads + 1


async def at_epoch(kv: KvplaneClient, worker_id: str, epoch: int) -> bool:
    found = await worker(kv, worker_id)
    return (found.epoch, found.state) == (epoch, READY)


async def deregister(_: Deployment, kv: KvplaneClient, worker_id: str) -> None:
    """Say goodbye for a worker that is there."""
    epoch = (await worker(kv, worker_id)).epoch
    request = routing.DeregisterWorkerRequest(worker_id=worker_id, epoch=epoch)
    await kv.workers.DeregisterWorker(request)


async def delete(deployment: Deployment, _: KvplaneClient, worker_id: str) -> None:
    """Somebody tidies up the table."""
    gone = await execute(deployment, "DELETE FROM workers WHERE worker_id = :one", one=worker_id)
    assert gone == 1


async def execute(deployment: Deployment, statement: str, **values: str) -> int:
    """Do something behind the services' back; return how many rows it changed."""
    engine = postgres_engine(make_url(deployment.database))
    async with engine.begin() as connection:
        done = await connection.execute(text(statement), values)
    await engine.dispose()
    return int(done.rowcount)


REMOVE = {"deregistered": deregister, "deleted": delete}


async def test_idle_workers_stay(deployment: Deployment) -> None:
    """T-11, LMCache#4715: healthy workers without traffic are removed, since they are heard
    only when they serve.
    """
    defaults = load(None).routing
    assert (defaults.heartbeat_interval_s, defaults.worker_timeout_s) == (INTERVAL, TIMEOUT)
    assert defaults.heartbeat_interval_s < defaults.worker_timeout_s / 2
    await CLOCK.sleep(deployment.since + 3 * TIMEOUT - CLOCK.monotonic())
    assert deployment.idle.state()["stats"]["requests"] == 0
    async with client(deployment) as kv:
        listed = await kv.workers.ListWorkers(routing.ListWorkersRequest(states=[READY]))
        (found,) = [one for one in listed.workers if one.worker_id == "idle"]
        # It has never been lost: it would have come back in another epoch.
        assert found.epoch == 1
        assert found.silent_for.ToMicroseconds() / 1e6 < TIMEOUT / 2
        # What a worker is told, by a service with nothing but defaults.
        again = routing.RegisterWorkerRequest(worker=found, instance_id="somebody")
        again.worker.worker_id = again.worker.engine_id = "somebody"
        answer = await kv.workers.RegisterWorker(again)
        assert answer.heartbeat_interval.ToMicroseconds() / 1e6 == INTERVAL
