"""The worker's stream: in process over both databases, and over gRPC."""

import asyncio
import itertools

import grpc
import pytest
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.api.lease.v1 import lease_pb2_grpc
from kvplane.kernel.errors import InvalidField, StaleEpoch, Unavailable
from lease.harness import Plane, Replica, seconds, to_seconds, until

LIMIT = 10.0


_numbers = itertools.count(1)


class Worker:
    """A worker's end of the stream."""

    def __init__(self, connect, worker: str = "d1", epoch: int = 1) -> None:
        self.worker, self.epoch = worker, epoch
        self.number = next(_numbers)
        self._outgoing: asyncio.Queue[pb.ConnectRequest | None] = asyncio.Queue()
        self.answers = connect(self._requests())
        self.anchor = 0
        self._sequence = 0

    async def _requests(self):
        while (message := await self._outgoing.get()) is not None:
            yield message

    def send(self, **message) -> None:
        self._outgoing.put_nowait(pb.ConnectRequest(**message))

    def leave(self) -> None:
        self._outgoing.put_nowait(None)

    async def next(self, kind: str):
        """The next message of that kind; ticks in between are skipped."""
        async with asyncio.timeout(LIMIT):
            async for answer in self.answers:
                found = answer.WhichOneof("message")
                if found == kind:
                    return getattr(answer, kind)
                assert found == "tick", answer
        raise AssertionError(f"the stream ended without {kind}")

    async def hello(self, *held: str) -> pb.Welcome:
        handles = [pb.OwnedHandle(engine_id="engine-d1", request_id=r) for r in held]
        self.send(
            hello=pb.Hello(
                worker_id=self.worker, epoch=self.epoch, held=handles, number=self.number
            )
        )
        welcome = await self.next("welcome")
        self.anchor = welcome.anchor
        return welcome

    async def report(self, *ownerships: pb.Ownership) -> None:
        self._sequence += 1
        at = pb.TimeAnchor(anchor=self.anchor)
        report = pb.Report(sequence=self._sequence, time_anchor=at, ownerships=ownerships)
        self.send(report=report)
        assert (await self.next("acknowledged")).sequence == self._sequence

    async def command(self, order: str, request: str) -> pb.Command:
        command = await self.next("command")
        assert command.WhichOneof("order") == order
        assert command.handle == pb.OwnedHandle(engine_id="engine-d1", request_id=request)
        return command

    def ack(self, command: pb.Command, *, done: bool = True, hold: float = 0) -> None:
        at = pb.TimeAnchor(anchor=self.anchor)
        ack = pb.CommandAck(command_id=command.command_id, time_anchor=at, done=done)
        if hold:
            ack.hold.CopyFrom(seconds(hold))
        self.send(command_ack=ack)

    async def end(self) -> None:
        """Read on until the stream ends."""
        async with asyncio.timeout(LIMIT):
            async for _ in self.answers:
                pass


@pytest.fixture
async def running(plane: Plane) -> Replica:
    replica = plane.replica()
    await replica.part.start()
    return replica


async def free_session(replica: Replica, session: str = "s1") -> None:
    await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id=session))


async def no_commands(replica: Replica):
    async def condition() -> bool:
        return await replica.commands() == []

    await until(condition)


async def test_a_conversation(running: Replica):
    worker = Worker(running.rpc.Connect)
    welcome = await worker.hello()
    assert welcome.anchor > 0
    assert to_seconds(welcome.tick_interval) == running.plane.unit
    await worker.report(running.ownership("r1"))
    own = (await running.grant("q1")).ownership
    assert own.session_id == "s1"

    worker.send(
        withdraw=pb.Withdraw(
            sequence=7, handles=[pb.OwnedHandle(engine_id="engine-d1", request_id="r1")]
        )
    )
    assert (await worker.next("acknowledged")).sequence == 7
    assert (await running.owned(own)).state == pb.OWNERSHIP_STATE_EXPIRED
    worker.leave()
    await worker.end()
    assert not running.part.streams._open


async def test_an_order_is_repeated_until_it_is_acknowledged(running: Replica):
    worker = Worker(running.rpc.Connect)
    await worker.hello()
    await worker.report(running.ownership("r1"))
    await free_session(running)
    first = await worker.command("free_now", "r1")
    worker.leave()
    await worker.end()

    worker = Worker(running.rpc.Connect)
    await worker.hello("r1")
    again = await worker.command("free_now", "r1")
    assert again.command_id == first.command_id
    worker.ack(again)
    await no_commands(running)
    worker.leave()
    await worker.end()


async def test_holding_longer(running: Replica):
    worker = Worker(running.rpc.Connect)
    await worker.hello()
    await worker.report(running.ownership("r1", hold=100))
    ask = pb.ExtendHoldRequest(session_id="s1", hold=seconds(900))
    assert (await running.rpc.ExtendHold(ask)).asked == 1
    command = await worker.command("hold_longer", "r1")
    assert 890 < to_seconds(command.hold_longer.hold) <= 900
    worker.ack(command, hold=900)
    await no_commands(running)
    own = (await running.grant("q1")).ownership
    assert 890 < to_seconds(own.hold) <= 900
    worker.leave()
    await worker.end()


async def test_ticks_carry_anchors(sqlite: Plane):
    replica = sqlite.replica()
    await replica.part.start()
    worker = Worker(replica.rpc.Connect)
    welcome = await worker.hello()
    for _ in range(2):
        await asyncio.sleep(0.02)
        sqlite.clock.advance(1)
        tick = await worker.next("tick")
        assert tick.anchor > welcome.anchor
    worker.leave()
    await worker.end()


async def test_hello_reconciles_what_both_believe(running: Replica):
    vanished = await running.held("vanished", "s1")
    kept = await running.held("kept", "s2")
    ended = await running.held("ended", "s3")
    await running.held("read", "s4")
    await running.reading("q4", session_id="s4")
    await free_session(running, "s3")
    await running.execute("DELETE FROM lease_commands")
    read_and_lost = await running.held("lost", "s5")
    await running.reading("q5", session_id="s5")
    await running.rpc.RevokeLease(
        pb.RevokeLeaseRequest(lease_id=(await running.owned(read_and_lost)).lease_id)
    )

    worker = Worker(running.rpc.Connect)
    await worker.hello("kept", "ended", "never-reported", "lost")

    await worker.command("free_now", "ended")
    assert (await running.owned(vanished)).state == pb.OWNERSHIP_STATE_EXPIRED
    assert (await running.owned(kept)).state == pb.OWNERSHIP_STATE_HELD
    assert (await running.owned(ended)).state == pb.OWNERSHIP_STATE_RELEASED
    assert (await running.grant("q6", session_id="s4")).refusal_reason == (
        pb.REFUSAL_REASON_NOT_HELD
    )
    assert [r for _, r, _ in await running.commands()] == ["ended"]  # "lost" drains
    worker.leave()
    await worker.end()


async def test_a_stale_epoch_ends_the_stream(running: Replica):
    await running.end_epoch("d1", 2)
    late = Worker(running.rpc.Connect)
    with pytest.raises(StaleEpoch):
        await late.hello()

    worker = Worker(running.rpc.Connect, epoch=2)
    await worker.hello()
    await running.end_epoch("d1", 3)
    with pytest.raises(StaleEpoch):
        await worker.end()


async def test_a_hello_that_was_long_under_way_withdraws_nothing(plane: Plane, replica: Replica):
    """It was sent before the newer stream's, by a replica that stood still, and says less."""
    late = Worker(replica.rpc.Connect)
    newer = Worker(replica.rpc.Connect)
    await newer.hello("r1")
    own = await replica.held("r1")
    lease = await replica.reading()
    with pytest.raises(Unavailable):
        await late.hello()
    assert (await replica.owned(own)).state == pb.OWNERSHIP_STATE_LEASED
    assert (await replica.renew(lease))[0].renewed
    await newer.report(replica.ownership("r2", "s2"))

    await replica.end_epoch("d1", 2)
    again = Worker(replica.rpc.Connect, epoch=2)
    again.number = 1
    await again.hello()


async def test_a_newer_stream_replaces_the_older(running: Replica):
    older = Worker(running.rpc.Connect)
    await older.hello()
    newer = Worker(running.rpc.Connect)
    await newer.hello()
    with pytest.raises(Unavailable):
        await older.end()
    await newer.report(running.ownership("r1"))
    await free_session(running)
    await newer.command("free_now", "r1")
    newer.leave()
    await newer.end()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"report": pb.Report(sequence=1)}, r"report\.time_anchor\.anchor"),
        ({"withdraw": pb.Withdraw(handles=[pb.OwnedHandle()])}, r"handles\[0\]\.engine_id"),
        ({"command_ack": pb.CommandAck()}, r"command_ack\.command_id"),
        ({"hello": pb.Hello(worker_id="d1", epoch=1, number=2)}, "message"),
        ({}, "message"),
    ],
)
async def test_a_wrong_message_ends_the_stream(sqlite: Plane, message, field: str):
    worker = Worker(sqlite.replica().rpc.Connect)
    await worker.hello()
    worker.send(**message)
    with pytest.raises(InvalidField, match=field):
        await worker.end()


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        ({"report": pb.Report(sequence=1)}, "hello"),
        ({"hello": pb.Hello(epoch=1)}, r"hello\.worker_id"),
        ({"hello": pb.Hello(worker_id="d1")}, r"hello\.epoch"),
        ({"hello": pb.Hello(worker_id="d1", epoch=1)}, r"hello\.number"),
        (
            {"hello": pb.Hello(worker_id="d1", epoch=1, held=[pb.OwnedHandle(engine_id="e")])},
            r"hello\.held\[0\]\.request_id",
        ),
        (
            {"hello": pb.Hello(worker_id="d1", epoch=1, number=1, hold_limit_blocks=-1)},
            r"hello\.hold_limit_blocks",
        ),
    ],
)
async def test_the_first_message_must_be_a_good_hello(sqlite: Plane, hello, field: str):
    worker = Worker(sqlite.replica().rpc.Connect)
    worker.send(**hello)
    with pytest.raises(InvalidField, match=field):
        await worker.end()


async def test_stopping_ends_the_streams(running: Replica):
    worker = Worker(running.rpc.Connect)
    await worker.hello()
    await running.part.stop()
    with pytest.raises(Unavailable):
        await worker.end()


@pytest.fixture
async def served(running: Replica):
    """A channel to the servicer on a real server."""
    server = grpc.aio.server()
    lease_pb2_grpc.add_LeaseServiceServicer_to_server(running.rpc, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield lease_pb2_grpc.LeaseServiceStub(channel)
    await server.stop(None)


async def test_over_the_wire(running: Replica, served):
    worker = Worker(served.Connect)
    await worker.hello()
    await worker.report(running.ownership("r1"), running.ownership("r2", "s2"))
    answer = await served.GrantLease(
        pb.GrantLeaseRequest(
            request_id="q1",
            holder=pb.Holder(worker_id="p1", epoch=1, compatibility='{"model":"m"}'),
            handle=pb.OwnedHandle(engine_id="engine-d1", request_id="r1"),
            begin_read=True,
        )
    )
    assert answer.lease.state == pb.LEASE_STATE_READING
    await free_session(running, "s2")
    worker.ack(await worker.command("free_now", "r2"))
    await no_commands(running)

    newer = Worker(served.Connect)
    await newer.hello("r1")
    with pytest.raises(grpc.aio.AioRpcError):
        await worker.end()
    newer.answers.cancel()

    async def closed() -> bool:
        return not running.part.streams._open

    await until(closed)


async def test_an_order_given_to_another_replica_reaches_the_stream(real_postgres: Plane):
    one, other = real_postgres.replica(), real_postgres.replica()
    await one.part.start()
    worker = Worker(one.rpc.Connect)
    await worker.hello()
    await worker.report(one.ownership("r1"))
    await free_session(other)
    await worker.command("free_now", "r1")

    moved = Worker(other.rpc.Connect)
    await moved.hello("r1")
    with pytest.raises(Unavailable):
        await worker.end()
    await one.end_epoch("d1", 2)
    await other.part.start()
    with pytest.raises(StaleEpoch):
        await moved.end()


async def test_hello_frees_nothing_under_a_read_of_a_lost_ownership(plane: Plane):
    replica = plane.replica()
    await replica.held("read", "s1")
    await replica.held("idle", "s2")
    await replica.reading()
    worker = Worker(replica.rpc.Connect, epoch=2)
    await worker.hello("read", "idle")
    assert [r for _, r, _ in await replica.commands()] == ["idle"]
    worker.leave()
    await worker.end()

    await plane.sleep(11)
    await replica.sweep()
    worker = Worker(replica.rpc.Connect, epoch=2)
    await worker.hello("read")
    assert sorted(r for _, r, _ in await replica.commands()) == ["idle", "read"]
    worker.leave()
    await worker.end()


async def test_a_late_report_on_a_replaced_stream_changes_nothing(plane: Plane):
    """A replica that was frozen goes on with what a worker said before it went elsewhere."""
    frozen, other = plane.replica(), plane.replica()
    before = Worker(frozen.rpc.Connect)
    await before.hello()
    after = Worker(other.rpc.Connect)
    await after.hello()  # it holds nothing any more
    at = pb.TimeAnchor(anchor=before.anchor)
    report = pb.Report(sequence=1, time_anchor=at, ownerships=[frozen.ownership("r1")])
    before.send(report=report)
    with pytest.raises(Unavailable, match="newer stream"):
        await before.end()
    refused = await other.grant("q1")
    assert refused.refusal_reason == pb.REFUSAL_REASON_NOT_HELD
    after.leave()
    await after.end()


async def test_a_reader_that_waits_has_the_blocks_held_longer(running: Replica):
    """Each renewal that the hold cuts short asks the owner, once until it has answered."""
    worker = Worker(running.rpc.Connect)
    await worker.hello()
    await worker.report(running.ownership("r1", hold=12))
    lease = (await running.grant("q1", ttl=10)).lease
    await running.plane.sleep(3)
    for _ in range(2):
        (cut,) = await running.renew(lease, ttl=10)
        assert cut.renewed
        assert to_seconds(cut.ttl) < 10
    assert len(await running.commands()) == 1
    command = await worker.command("hold_longer", "r1")
    worker.ack(command, hold=to_seconds(command.hold_longer.hold))
    await no_commands(running)
    (whole,) = await running.renew(lease, ttl=10)
    assert to_seconds(whole.ttl) == pytest.approx(10, abs=0.5)
    assert await running.commands() == []
    worker.leave()
    await worker.end()


async def test_a_reader_that_waits_for_long_has_them_held_again_and_again(running: Replica):
    worker = Worker(running.rpc.Connect)
    await worker.hello()
    await worker.report(running.ownership("r1", hold=5))
    lease = (await running.grant("q1", ttl=2)).lease
    known: set[str] = set()
    for hold in (8, 10, 12):
        await running.renew(lease, ttl=10)
        command = await worker.command("hold_longer", "r1")
        # To its owner an id that it knows is the order that it has carried out.
        assert command.command_id not in known
        known.add(command.command_id)
        worker.ack(command, hold=hold)
        await no_commands(running)
        for _ in range(2):
            await running.plane.sleep(1)
            (renewed,) = await running.renew(lease, ttl=2)
            assert renewed.renewed
    worker.leave()
    await worker.end()
