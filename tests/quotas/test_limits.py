"""Tenants' limits, from a client's HTTP request to the database and back."""

import asyncio

import httpx
import openai
import pytest
from aiohttp import web
from quotas.plane import Said, Town

MESSAGES = [{"role": "user", "content": "hi"}]


def refused(said: Said, quota: str) -> None:
    assert said.status == 429, said
    error = said.body["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "quota_exceeded")
    assert quota in error["message"]
    assert int(said.headers["Retry-After"]) >= 1


def requests(place: Town) -> int:
    return sum(len(engine.requests) for engine in place.engines.values())


async def test_a_rate_holds_over_all_replicas_and_for_one_tenant_only(place: Town):
    await place.tenant("a", hard={"requests_per_second": 0.4})  # four at once
    await place.tenant("b")
    said = [await place.say("a", at=i % 2, session="s") for i in range(6)]
    assert [s.status for s in said] == [200] * 4 + [429] * 2
    refused(said[-1], "requests_per_second")
    assert said[-1].headers["Retry-After"] == "3"  # 2.5, rounded up
    for at in (0, 1):
        other = await place.say("b", at=at, session="s")
        assert (other.status, other.headers["X-Kvplane-Turn"]) == (200, str(at + 1))
    await place.pass_time(2.5)
    assert (await place.say("a", at=1, session="s")).headers["X-Kvplane-Turn"] == "5"
    refused(await place.say("a", at=0, session="s"), "requests_per_second")
    assert await place.without_control_plane() == 0


async def test_a_burst_of_refusals_touches_nobody_else(place: Town):
    await place.tenant("a", hard={"requests_per_second": 0.1})
    await place.tenant("b")
    assert (await place.say("a")).status == 200
    before = requests(place)
    burst = [asyncio.create_task(place.say("a", f"hi {i}", at=i % 2)) for i in range(30)]
    turns = [await place.say("b", f"turn {i}", at=i % 2, session="s") for i in range(4)]
    assert [s.headers["X-Kvplane-Turn"] for s in turns] == ["1", "2", "3", "4"]
    assert len({s.session for s in turns}) == 1
    for said in await asyncio.gather(*burst):
        refused(said, "requests_per_second")
    # No engine has heard of them, and nothing is left of them.
    assert requests(place) == before + 2 * 4
    assert len(await place.sessions("a")) == 1
    assert (await place.usage("a")).turns == 1
    used = await place.usage("b", at=1)
    assert (used.turns, used.active_sessions) == (4, 1)
    assert (used.prompt_tokens, used.completion_tokens) == (400, 20)


async def test_limits_that_are_changed_hold_within_seconds_everywhere(place: Town):
    await place.tenant("a")
    for at in (0, 1):
        assert (await place.say("a", at=at, session="s")).status == 200
    await place.limit("a", hard={"requests_per_second": 0.1})
    await place.pass_time(5)

    async def is_refused(at: int) -> bool:
        return (await place.say("a", at=at, session="s")).status == 429

    async with asyncio.timeout(10):
        for at in (0, 1):
            while not await is_refused(at):
                pass
    await place.limit("a", hard={"requests_per_second": 0})
    await place.pass_time(5)
    async with asyncio.timeout(10):
        for at in (0, 1):
            while await is_refused(at):
                pass


async def test_openais_client_waits_and_tries_again(place: Town):
    await place.tenant("a", hard={"requests_per_second": 1, "tokens_per_second": 1000})
    for _ in range(10):
        assert (await place.say("a", session="s")).status == 200
    statuses = []

    async def seen(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if response.status_code == 429:
            await place.pass_time(float(response.headers["Retry-After"]))

    base = {"base_url": f"{place.planes[1].gateway_url}/v1", "api_key": place.keys["a"]}
    async with openai.AsyncOpenAI(**base, max_retries=0) as api:
        with pytest.raises(openai.RateLimitError) as caught:
            await api.chat.completions.create(model="tiny", messages=MESSAGES)
        assert (caught.value.code, caught.value.type) == ("quota_exceeded", "rate_limit_error")
        assert caught.value.response.headers["Retry-After"] == "1"
    http = httpx.AsyncClient(event_hooks={"response": [seen]})
    async with openai.AsyncOpenAI(**base, max_retries=1, http_client=http) as api:
        answer = await api.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello there"
    assert statuses == [429, 200]


async def test_tokens_are_those_that_the_engine_counted(place: Town):
    await place.tenant("a", hard={"tokens_per_second": 10})  # a hundred at once
    assert (await place.say("a", session="s")).status == 200  # 105, by the engine's usage
    refused(await place.say("a", at=1, session="s"), "tokens_per_second")
    await place.pass_time(10.5)
    assert (await place.say("a", at=1, session="s")).status == 200


async def test_more_sessions_than_it_may_have(place: Town):
    await place.tenant("a", hard={"sessions": 1})
    assert (await place.say("a", session="one")).status == 200
    refused(await place.say("a", at=1, session="two"), "sessions")
    assert (await place.say("a", at=1, session="one")).headers["X-Kvplane-Turn"] == "2"
    url = f"{place.planes[0].gateway_url}/v1/sessions/one"
    headers = {"Authorization": f"Bearer {place.keys['a']}"}
    async with place.http.delete(url, headers=headers) as response:
        assert response.status == 200
    assert (await place.say("a", at=1, session="two")).status == 200


async def test_a_request_that_is_too_large_is_not_to_be_tried_again(place: Town):
    await place.tenant("a", hard={"request_bytes": 500})
    assert (await place.say("a", "x" * 300)).status == 200
    said = await place.say("a", "x" * 500)
    assert (said.status, said.body["error"]["code"]) == (413, "request_too_large")
    assert "500" in said.body["error"]["message"]
    assert "Retry-After" not in said.headers


async def test_a_request_that_is_tried_at_another_worker_is_one_request(place: Town):
    await place.tenant("a", hard={"requests_per_second": 0.1})
    await place.add_engine("d1")

    async def fail(_request, _body):
        return web.json_response({"error": {"message": "boom"}}, status=500)

    failing = await place.add_engine("d2")
    failing.behave = place.engines["d0"].behave = fail
    said = await place.say("a", session="s")
    assert (said.status, said.headers["X-Kvplane-Turn"]) == (200, "1")
    assert len(place.engines["d1"].requests) == 1
    refused(await place.say("a", session="s"), "requests_per_second")


async def test_beyond_a_soft_limit_a_request_is_answered_without_reuse(place: Town):
    prefill, decode = place.engines["p0"], place.engines["d0"]
    await place.tenant("a", soft={"requests_per_second": 0.1})
    first = await place.say("a", session="s")
    assert (first.decision, first.headers["X-Kvplane-Turn"]) == (
        "recompute; reason=first_turn",
        "1",
    )
    over = await place.say("a", at=1, session="s")
    assert over.status == 200
    assert over.body["choices"][0]["message"]["content"] == "Hello there"
    assert over.decision == "recompute; reason=over_quota"
    assert over.headers["X-Kvplane-Reused-Tokens"] == "0"
    assert over.session == ""
    # What both engines are told: no lease, and no session to hold anything for.
    for engine in (prefill, decode):
        told = engine.requests[-1]["kv_transfer_params"]["kvplane"]
        assert told == {"tenant": "a", "session": "", "turn": 0}
    await place.pass_time(10)
    again = await place.say("a", at=1, session="s")
    assert (again.session, again.headers["X-Kvplane-Turn"]) == (first.session, "2")
    used = await place.usage("a")
    assert (used.turns, used.prompt_tokens, used.active_sessions) == (3, 300, 1)


async def test_beyond_a_soft_limit_tokens_still_count_for_the_hard_one(place: Town):
    await place.tenant("a", soft={"sessions": 1}, hard={"tokens_per_second": 20})
    assert (await place.say("a", session="one")).session
    over = await place.say("a", session="two")
    assert over.decision == "recompute; reason=over_quota"
    refused(await place.say("a", session="two"), "tokens_per_second")
