"""Every endpoint of the gateway with every kind of credential, written down by hand."""

from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from access.plane import TOKEN, Credentials, Guarded
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from wire.seed import Seed, sow

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY: Final = {
    "model": "unknown",
    "messages": [{"role": "user", "content": "x"}],
    "prompt": "x",
}

# Status by who asks: nobody (also an unknown, an expired and a revoked key), the tenant whose
# session is named, another tenant, a worker, an operator, a service of ours. There is no such
# model, which is told only to who may ask for one.
MATRIX: Final[dict[str, tuple[int, int, int, int, int, int]]] = {
    #                            nobody tenant other worker operator service
    "POST /v1/chat/completions":  (401, 404, 404, 403, 403, 404),
    "POST /v1/completions":       (401, 404, 404, 403, 403, 404),
    "GET /v1/models":             (401, 200, 200, 403, 403, 200),
    "GET /v1/models/tiny":        (401, 200, 200, 403, 403, 200),
    "DELETE /v1/sessions/{name}": (401, 200, 404, 403, 403, 200),
    "GET /health":                (200, 200, 200, 200, 200, 200),
    "GET /healthz":               (200, 200, 200, 200, 200, 200),
    "GET /readyz":                (200, 200, 200, 200, 200, 200),
    "GET /metrics":               (401, 403, 403, 403, 200, 200),
    "GET /openapi.json":          (200, 200, 200, 200, 200, 200),
}  # fmt: skip
WHO: Final = ("nobody", "tenant", "other", "worker", "operator", "service")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(plane: Guarded) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=plane.gateway_url, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seed(plane: Guarded, credentials: Credentials) -> Seed:
    return await sow(plane, "acme", "acme")


async def ask(
    http: httpx.AsyncClient, endpoint: str, credential: str, name: str = "held-acme", **headers: str
) -> httpx.Response:
    method, path = endpoint.format(name=name).split(" ")
    given = {"Authorization": f"Bearer {credential}"} if credential else {}
    body: Any = BODY if method == "POST" else None
    return await http.request(method, path, json=body, headers={**given, **headers})


async def test_every_endpoint_is_in_the_matrix(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    described = {
        f"{method.upper()} {path}" for path, found in document["paths"].items() for method in found
    }
    ours = {endpoint.replace("/tiny", "/{model}") for endpoint in MATRIX}
    assert described <= ours
    assert ours - described <= {"GET /openapi.json"}


@pytest.mark.parametrize("endpoint", MATRIX)
async def test_who_may(
    plane: Guarded,
    credentials: Credentials,
    seed: Seed,
    http: httpx.AsyncClient,
    endpoint: str,
) -> None:
    given: dict[str, list[tuple[str, str]]] = {
        "nobody": [
            (one, seed.tenant)
            for one in ("", "kvp_nobodys", credentials.expired, credentials.revoked, TOKEN[:-1])
        ],
        "other": [(credentials.stranger, seed.tenant)],
        "worker": [(await plane.worker_key(seed.decode), seed.tenant)],
        "operator": [(credentials.operator, seed.tenant)],
    }
    before = plane.dump()
    for who, several in given.items():
        for credential, named in several:
            headers = {"X-Kvplane-Tenant": named}
            answer = await ask(http, endpoint, credential, **headers)
            assert answer.status_code == MATRIX[endpoint][WHO.index(who)], (who, answer.text)
            if answer.status_code in (401, 403):
                code = {401: "invalid_api_key", 403: "permission_denied"}[answer.status_code]
                assert answer.json()["error"]["code"] == code
                assert ("www-authenticate" in answer.headers) == (answer.status_code == 401)
    after = plane.dump()
    if endpoint.startswith("POST"):  # a stranger's own turn, which finds no worker
        before, after = _of(before, "acme"), _of(after, "acme")
    assert after == before
    # What is allowed may change something, so it is about something of its own.
    for who, credential in (("tenant", ""), ("service", TOKEN)):
        tag = f"{who}{list(MATRIX).index(endpoint)}"
        own = await sow(plane, tag, tag)
        answer = await ask(
            http, endpoint, credential or own.secret, f"held-{tag}", **{"X-Kvplane-Tenant": tag}
        )
        assert answer.status_code == MATRIX[endpoint][WHO.index(who)], (who, answer.text)


def _of(rows: dict[str, list[Any]], tenant_id: str) -> dict[str, list[Any]]:
    return {name: [row for row in found if tenant_id in row] for name, found in rows.items()}


async def test_a_key_that_is_nobodys_any_more_is_told_what_nobodys_is(
    http: httpx.AsyncClient, credentials: Credentials
) -> None:
    told = {
        (await ask(http, "GET /v1/models", credential)).text
        for credential in ("kvp_nobodys", credentials.expired, credentials.revoked)
    }
    assert len(told) == 1


async def test_only_who_has_the_internal_token_names_a_tenant(
    plane: Guarded, http: httpx.AsyncClient, credentials: Credentials
) -> None:
    theirs = await sow(plane, "named", "named")
    end = "DELETE /v1/sessions/{name}"
    headers = {"X-Kvplane-Tenant": "named"}
    refused = await ask(http, end, credentials.stranger, "held-named", **headers)
    assert refused.status_code == 404
    # Without the header it is the default tenant's.
    assert (await ask(http, end, TOKEN, "held-named")).status_code == 404
    odd = await ask(http, end, TOKEN, "held-named", **{"X-Kvplane-Tenant": "a/b"})
    assert odd.status_code == 400
    assert odd.json()["error"]["param"] == "X-Kvplane-Tenant"
    assert (await ask(http, end, TOKEN, "held-named", **headers)).status_code == 200
    again = await ask(http, end, theirs.secret, "leased-named", **{"X-Kvplane-Tenant": "stranger"})
    assert again.status_code == 200


async def test_a_flood_of_guesses_is_told_when_to_come_back_and_shuts_nobody_out(
    plane: Guarded, http: httpx.AsyncClient, credentials: Credentials
) -> None:
    key = (await plane.key(tenant.ROLE_TENANT, tenant_id="stranger")).secret
    assert (await ask(http, "GET /v1/models", key)).status_code == 200
    told = [await ask(http, "GET /v1/models", f"kvp_guess{n}") for n in range(300)]
    assert {answer.status_code for answer in told} == {401}
    late = [answer for answer in told if "retry-after" in answer.headers]
    assert late
    assert {answer.headers["retry-after"] for answer in late} == {"1"}
    assert (await ask(http, "GET /v1/models", key)).status_code == 200
