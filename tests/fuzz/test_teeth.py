"""Planted faults: each kind of them is found."""

from typing import Any
from unittest.mock import patch

import pytest
from kvplane.kernel.context import caller
from kvplane.kernel.errors import InvalidField, NotFound, PermissionDenied
from kvplane.session.servicer import SessionServicer
from kvplane.session.store_sql import SqlSessionStore
from sqlalchemy import text

from fuzz.exchange import Heard
from fuzz.findings import Counts, Finding
from fuzz.front import Front
from fuzz.http_judge import judge
from fuzz.markers import Markers
from fuzz.rpc import replaced
from fuzz.search import RpcSearch

pytestmark = pytest.mark.timeout(300)


def found(calls: RpcSearch, *methods: str) -> set[str]:
    """Search a little, and return the kinds of what was found."""
    counts = Counts()
    calls.methods = methods
    calls.batch(counts, seed=1, examples=15, shrink=False)
    return {finding.kind for finding in counts.found}


def test_without_a_fault_nothing_is_found(all_calls: RpcSearch) -> None:
    methods = ("GetSession", "CreateSession", "EndSession")
    assert found(all_calls, *(f"SessionService/{name}" for name in methods)) == set()


def test_a_bug(all_calls: RpcSearch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    with patch.object(SessionServicer, "GetSession", broken):
        assert found(all_calls, "SessionService/GetSession") == {"internal_errors"}


def test_a_text_of_the_inside(all_calls: RpcSearch) -> None:
    async def telling(*_: Any) -> None:
        raise InvalidField("name", "ValueError in names.py")

    with patch.object(SessionServicer, "GetSession", telling):
        assert found(all_calls, "SessionService/GetSession") == {"internal_errors"}


def test_a_foreign_id_in_an_error(all_calls: RpcSearch) -> None:
    theirs = all_calls.garden.seeds["ours"].session_id

    async def leaking(*_: Any) -> None:
        raise NotFound("session", theirs)

    with patch.object(SessionServicer, "GetSession", leaking):
        assert "leaks" in found(all_calls, "SessionService/GetSession")


def test_another_tenants_session(all_calls: RpcSearch) -> None:
    right = SqlSessionStore.get

    async def of_anybody(self: Any, tenant_id: str, ref: Any) -> Any:
        for seed in all_calls.garden.seeds.values():
            try:
                return await right(self, seed.tenant, ref)
            except NotFound:
                continue
        raise NotFound("session", ref.session_id or ref.name)

    with patch.object(SqlSessionStore, "get", of_anybody):
        assert "leaks" in found(all_calls, "SessionService/GetSession")


def test_another_answer_for_what_exists_elsewhere(all_calls: RpcSearch) -> None:
    right = SessionServicer.GetSession
    ours = all_calls.garden.seeds["ours"]

    async def telling(self: Any, request: Any, context: Any = None) -> Any:
        if request.session_id == ours.session_id and caller().tenant_id != ours.tenant:
            raise PermissionDenied("not yours")
        return await right(self, request, context)

    with patch.object(SessionServicer, "GetSession", telling):
        assert found(all_calls, "SessionService/GetSession") == {"leaks"}


def test_a_refused_call_that_stores(all_calls: RpcSearch) -> None:
    right = SessionServicer.CreateSession

    async def half(self: Any, request: Any, context: Any = None) -> Any:
        await right(self, request, context)
        raise InvalidField("model", "is found to be wrong too late")

    with patch.object(SessionServicer, "CreateSession", half):
        assert found(all_calls, "SessionService/CreateSession") == {"half_stored"}


def test_a_call_that_breaks_an_invariant(all_calls: RpcSearch) -> None:
    right = SqlSessionStore.end

    async def careless(self: Any, tenant_id: str, ref: Any) -> Any:
        ended = await right(self, tenant_id, ref)
        await self._database.run(
            lambda tx: tx.connection.execute(text("UPDATE sessions SET turns = turns + 1"))
        )
        return ended

    with patch.object(SqlSessionStore, "end", careless):
        assert found(all_calls, "SessionService/EndSession") == {"half_stored"}


def test_names_within_names() -> None:
    others = {b"key-1": b"key-2", b"key-1-secret": b"key-9-unheard"}
    assert replaced(b"key-1 key-1-secret", others) == b"key-2 key-9-unheard"


# -- HTTP ---------------------------------------------------------------------------------

SECRET = b"conversation-0123456789abcdef"
ERROR = b'{"error":{"message":"m","type":"t","param":null,"code":null}}'
JSON = {"content-type": "application/json", "x-request-id": "req-1"}


def kind_of(status: int, body: bytes, headers: dict[str, str] = JSON, asked: bytes = b"") -> str:
    """Return how the judge calls such an answer."""
    front = Front(0, "", None, [], None, markers=Markers({SECRET}))  # type: ignore[arg-type]
    front.inside = [b"http://127.0.0.1:8100"]
    heard = Heard(status, headers, body, body)
    try:
        judge(front, Counts(), whose="theirs", asked=asked, heard=heard)
    except Finding as finding:
        return finding.kind
    return ""


def test_answers_that_are_right() -> None:
    assert kind_of(400, ERROR) == ""
    assert kind_of(200, b'{"choices":[]}') == ""
    assert kind_of(404, ERROR.replace(b'"m"', b'"no ' + SECRET + b'"'), asked=SECRET) == ""


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind"),
    [
        (500, ERROR, JSON, "internal_errors"),
        (400, b"Bad Request", {"content-type": "text/plain"}, "internal_errors"),
        (400, b'{"detail":"x"}', JSON, "internal_errors"),
        (404, ERROR, {"content-type": "application/json"}, "internal_errors"),
        (400, ERROR.replace(b'"m"', b'"KeyError: x"'), JSON, "internal_errors"),
        (400, ERROR.replace(b'"m"', b'"Traceback (most"'), JSON, "internal_errors"),
        (0, b"", {}, "internal_errors"),
        (200, b'{"id":"' + SECRET + b'"}', JSON, "leaks"),
        (200, b'{"choices":[],"kv_transfer_params":null}', JSON, "leaks"),
        (200, b'{"choices":[{"x":{"remote_block_ids":[1]}}]}', JSON, "leaks"),
        (503, ERROR.replace(b'"m"', b'"http://127.0.0.1:8100 is away"'), JSON, "leaks"),
    ],
)
def test_answers_that_are_wrong(
    status: int, body: bytes, headers: dict[str, str], kind: str
) -> None:
    assert kind_of(status, body, headers) == kind


def test_an_engines_key_in_a_stream() -> None:
    body = b'data: {"choices":[]}\n\ndata: {"kv_transfer_params":{}}\n\n'
    assert kind_of(200, body, {"content-type": "text/event-stream"}) == "leaks"
