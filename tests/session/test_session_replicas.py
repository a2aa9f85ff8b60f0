"""Two registries over one PostgreSQL: they are one."""

import asyncio

from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import InvalidField, KvplaneError
from kvplane.session.domain import SessionConfig
from session.session_requests import OK, begin, complete, digest


async def test_turns_opened_at_both_at_once_are_numbered_apart(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]
    begun = await asyncio.gather(
        *(replicas[i % 2].BeginTurn(begin(f"r{i}", "chat")) for i in range(60))
    )
    assert len({answer.session.session_id for answer in begun}) == 1
    assert sorted(answer.turn for answer in begun) == list(range(1, 61))
    assert await postgres.execute("SELECT turns FROM sessions") == [(60,)]


async def test_a_found_conversation_is_numbered_apart_too(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]
    first = await replicas[0].BeginTurn(begin("r"))
    await replicas[0].CompleteTurn(complete(first, history_digest=digest("1")))
    begun = await asyncio.gather(
        *(replicas[i % 2].BeginTurn(begin(f"r{i}", history=[digest("1")])) for i in range(40))
    )
    assert {answer.session.session_id for answer in begun} == {first.session.session_id}
    assert sorted(answer.turn for answer in begun) == list(range(2, 42))


async def test_first_sight_at_both_at_once_makes_one_session_a_name(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]
    names = [f"chat{i}" for i in range(25)]
    ask = [
        replica.BeginTurn(begin(f"{who}-{name}", name))
        for who, replica in enumerate(replicas)
        for name in (names if who else reversed(names))
    ]
    begun = await asyncio.gather(*ask)
    by_name = {}
    for answer in begun:
        by_name.setdefault(answer.session.name, []).append(answer)
    assert len(by_name) == 25
    for answers in by_name.values():
        assert len({answer.session.session_id for answer in answers}) == 1
        assert sorted(answer.turn for answer in answers) == [1, 2]
    assert await postgres.execute("SELECT count(*) FROM sessions") == [(25,)]


async def test_create_and_begin_at_both_at_once_make_one_session(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]
    create = pb.CreateSessionRequest(name="chat", model="m")
    answers = await asyncio.gather(
        *(replica.CreateSession(create) for replica in replicas * 5),
        *(replicas[i % 2].BeginTurn(begin(f"r{i}", "chat")) for i in range(10)),
    )
    assert len({answer.session.session_id for answer in answers}) == 1
    assert sum(answer.created for answer in answers[:10]) <= 1


async def test_one_request_sent_to_both_gets_one_answer(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]
    requests = [begin("named", "chat"), begin("unnamed"), begin("lost", history=[digest("1")])]
    for request in requests:
        answers = await asyncio.gather(*(r.BeginTurn(request) for r in replicas * 10))
        assert all(answer == answers[0] for answer in answers)
        assert answers[0].turn == 1
    assert await postgres.execute("SELECT count(*) FROM turns") == [(3,)]
    assert await postgres.execute("SELECT count(*) FROM sessions") == [(3,)]


async def test_one_request_id_for_two_sessions_at_once_is_given_to_one(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]

    async def attempt(replica, request):
        try:
            return await replica.BeginTurn(request)
        except KvplaneError as error:
            return error

    for round_ in range(30):
        answers = await asyncio.gather(
            *(attempt(r, begin(f"r{round_}", f"{i}-{round_}")) for i, r in enumerate(replicas))
        )
        refused = [answer for answer in answers if isinstance(answer, KvplaneError)]
        assert len(refused) == 1
        assert isinstance(refused[0], InvalidField)
    assert await postgres.execute("SELECT count(*) FROM turns") == [(30,)]
    # And the one refused leaves no session behind.
    assert await postgres.execute("SELECT count(*) FROM sessions") == [(30,)]


async def test_one_turn_completed_at_both_at_once_counts_once(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]
    begun = [await replicas[0].BeginTurn(begin(f"r{i}", f"chat{i % 3}")) for i in range(12)]
    reports = [complete(answer, prompt_tokens=10, tokens_reused=4) for answer in begun]
    await asyncio.gather(
        *(replicas[0].CompleteTurn(report) for report in reports),
        *(replicas[1].CompleteTurn(report) for report in reversed(reports)),
    )
    rows = await postgres.execute("SELECT tokens_reused, tokens_recomputed FROM sessions")
    assert rows == [(16, 24)] * 3


async def test_turns_and_ends_at_both_leave_at_most_one_active_session_a_name(postgres):
    replicas = [postgres.replica().servicer, postgres.replica().servicer]

    async def play(replica, who):
        for number in range(15):
            begun = await replica.BeginTurn(begin(f"{who}-{number}", "chat"))
            await replica.CompleteTurn(complete(begun, prompt_tokens=1))
            if number % 3 == who:
                await replica.EndSession(pb.EndSessionRequest(name="chat"))

    await asyncio.gather(*(play(replica, who) for who, replica in enumerate(replicas)))
    active = await postgres.execute("SELECT count(*) FROM sessions WHERE state = 1")
    assert active[0][0] <= 1
    assert await postgres.execute("SELECT count(*), min(outcome) FROM turns") == [(30, 1)]
    total = await postgres.execute("SELECT sum(tokens_recomputed), sum(turns) FROM sessions")
    assert total == [(30, 30)]


async def test_replicas_share_the_sweeping(postgres):
    config = SessionConfig(idle_expiry_s=0.0)
    parts = [postgres.replica(config), postgres.replica(config)]
    for number in range(40):
        await parts[0].servicer.BeginTurn(begin(f"r{number}", f"chat{number}"))
    await asyncio.gather(*(part.service.sweep() for part in parts * 2))
    assert await postgres.execute("SELECT count(*) FROM sessions WHERE state = 3") == [(40,)]
    freed = postgres.leases.freed
    assert len(freed) == len(set(freed)) == 40


async def test_a_conversation_goes_on_at_either_replica_and_without_one(postgres):
    """R-06: no replica keeps anything to itself."""
    parts = [postgres.replica(), postgres.replica()]
    history, owners, session_ids = [], [], set()
    for turn in range(1, 7):
        if turn == 4:  # the first one dies
            await postgres.databases[0].close()
            parts = [parts[1]]
        service = parts[turn % len(parts)].servicer
        begun = await service.BeginTurn(begin(f"r{turn}", history=history[::-1]))
        assert begun.turn == turn
        assert begun.previous_completed == (turn > 1)
        owners.append(begun.session.last_decode_worker_id)
        session_ids.add(begun.session.session_id)
        history.append(digest(str(turn)))
        worker = begun.session.last_decode_worker_id or "d7"
        await service.CompleteTurn(
            complete(begun, OK, decode_worker_id=worker, history_digest=history[-1])
        )
    assert len(session_ids) == 1
    assert owners == ["", "d7", "d7", "d7", "d7", "d7"]
