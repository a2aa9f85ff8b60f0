"""Failures of registries of conversations, as reported from the field."""

import pytest
from demo.servers import wait_for

from cases.conftest import Deployment
from cases.processes import MODEL, client
from cases.talk import Talk, session_of, words

pytestmark = pytest.mark.processes


async def test_a_conversation_goes_on_when_its_replicas_alternate_and_one_dies(
    deployment: Deployment,
) -> None:
    """R-06, ai-dynamo/dynamo#11035: behind several front ends the turns of a conversation
    scatter, since each keeps a session map of its own.
    """
    talk = Talk(deployment, deployment.prefill, "r06", MODEL)
    owners = []
    try:
        for turn in range(1, 7):
            # A and B by turns; A, a replica of everything, is dead from the fourth turn on.
            talk.gateway = 1 if turn in (1, 3) else 2
            if turn == 4:
                for server in deployment.row(1):
                    server.kill()
            before = deployment.prefill.reads()
            answer = await talk.say(f"Turn {turn}. " + words(turn))
            assert answer.decision == ("reuse" if turn > 1 else "recompute"), answer.reason
            # The params were live: they were read with.
            assert deployment.prefill.reads() - before == (turn > 1), f"turn {turn}"
            async with client(deployment) as kv:
                kept = await session_of(kv, "r06")
            assert kept.turns == turn
            owners.append(kept.last_decode_worker_id)
    finally:
        for server in deployment.row(1):
            server.start()
        wait_for(deployment.row(1), 60)
    assert len(set(owners)) == 1
