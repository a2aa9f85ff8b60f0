"""Turns with several choices."""

import pytest

from fleet.books import Books
from fleet.client import Client
from fleet.cluster import TOY
from fleet.words import sentence

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [2, 4])
async def test_all_choices_are_right_and_the_next_turn_reads_what_is_held(
    client: Client, books: Books, n: int, stream: bool
) -> None:
    session = f"choices-{n}-{stream}"
    body = {
        "model": TOY,
        "max_tokens": 8,
        "n": n,
        "stream": stream,
        "return_token_ids": True,
        "messages": [{"role": "user", "content": sentence(session, 60)}],
    }
    first = await client.ask(body, session)
    assert first.reason == "first_turn"
    for turn in range(2, 5):
        messages = body["messages"]
        messages.append({"role": "assistant", "content": first.texts[turn % n]})
        messages.append({"role": "user", "content": sentence(f"{session}{turn}", 20)})
        reads = (await books.stats(books.fleet.names(TOY, "prefill")))["nixl_reads"]
        first = await client.ask(body, session, gateway=turn % 2)
        assert first.decision == "reuse; reason=owner_holds"
        assert first.reused >= 60
        after = (await books.stats(books.fleet.names(TOY, "prefill")))["nixl_reads"]
        assert after == reads + 1
