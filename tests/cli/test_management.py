"""Tenants' keys, limits, usage and the audit at the command line; what asks first."""

import io
import json
import sys
from datetime import UTC, datetime

import pytest
import typer
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.cli import remote


def test_keys_of_tenants_workers_and_operators(cli):
    cli("tenants", "create", "keyed")
    made = cli("keys", "create", "keyed", "--ttl", "90d", "--json").json
    assert made["secret"].startswith("kvp_")
    assert (made["role"], made["tenant_id"]) == ("tenant", "keyed")
    lasts = [datetime.fromisoformat(made[name]) for name in ("create_time", "expire_time")]
    assert (lasts[1] - lasts[0]).days == 90
    (listed,) = cli("keys", "list", "keyed", "--json").json
    assert made == {**listed, "secret": made["secret"]}
    assert made["secret"] not in json.dumps(listed)
    row = cli("keys", "list", "keyed").rows[1]
    assert row[:4] == [made["key_id"], made["prefix"] + "…", "tenant", "-"]

    shown = cli("keys", "create", "--role", "worker", "--worker", "w1")
    assert "worker id  w1" in shown.out
    assert "not shown again" in shown.err
    operator = cli("keys", "create", "--role", "operator", "--json").json
    platform = {key["key_id"]: key["role"] for key in cli("keys", "list", "--json").json}
    assert platform[operator["key_id"]] == "operator"
    assert sorted(platform.values()) == ["operator", "worker"]

    assert cli("keys", "revoke", made["key_id"], "--yes", "--json").json["revoke_time"]
    assert (
        cli("keys", "revoke", "key-unknown", "--yes").err == "kvplane: no API key 'key-unknown'\n"
    )


def test_quotas(cli):
    cli("tenants", "create", "limited")
    none = cli("quotas", "get", "limited", "--json").json
    assert set(none["hard"].values()) | set(none["soft"].values()) == {None}
    every = {
        "sessions": 10, "held_tokens": 20, "held_blocks": 30, "live_leases": 40,
        "requests_per_second": 0.5, "tokens_per_second": 60.0, "request_bytes": 70,
    }  # fmt: skip
    assert set(every) == set(none["hard"])
    soft = {name: value for name, value in every.items() if name != "live_leases"}
    for level, prefix, wanted in (("hard", "--", every), ("soft", "--soft-", soft)):
        options = [
            word
            for name, value in wanted.items()
            for word in (prefix + name.replace("_", "-"), str(value))
        ]
        told = cli("quotas", "set", "limited", *options, "--json").json[level]
        assert told == {"live_leases": None, **wanted}
    changed = cli("quotas", "set", "limited", "--sessions", "0", "--soft-sessions", "5", "--json")
    assert changed.json["hard"] == {**every, "sessions": None}
    assert changed.json["soft"] == {**soft, "sessions": 5, "live_leases": None}
    assert cli("quotas", "set", "limited", "--soft-live-leases", "1").code == 2
    assert cli("quotas", "get", "limited", "--json").json == changed.json
    assert cli("quotas", "get", "limited").rows[1] == ["sessions", "5", "-"]


def test_usage_of_both_services(cli, monkeypatch):
    used = cli("tenants", "usage", "acme", "--json").json
    assert (used["tenant_id"], used["active_sessions"], used["turns"]) == ("acme", 1, 0)
    unknown = cli("tenants", "usage", "nobody-there")
    assert (unknown.code, unknown.err) == (1, "kvplane: no tenant 'nobody-there'\n")

    class Fake:
        def __init__(self, answer):
            self.answer = answer

        async def GetUsage(self, _request):
            return self.answer

    used = session_pb2.GetUsageResponse(tenant_id="acme", turns=3, tokens_reused=2**40)
    held = lease_pb2.GetUsageResponse(held_tokens=1234, held_token_seconds=0.5)
    monkeypatch.setattr(remote.Remote, "sessions", lambda _: Fake(used))
    monkeypatch.setattr(remote.Remote, "leases", lambda _: Fake(held))
    found = cli("tenants", "usage", "acme", "--json").json
    assert (found["turns"], found["tokens_reused"]) == (3, 2**40)
    assert (found["held_tokens"], found["held_token_seconds"]) == (1234, 0.5)
    assert "held tokens         1,234\n" in cli("tenants", "usage", "acme").out
    cli("tenants", "create", "beta")
    other = cli("tenants", "usage", "beta")  # as acme's key would be answered
    assert (other.code, other.out) == (2, "")
    assert "this API key is tenant acme's" in other.err


def test_the_audit_is_listed_and_exported(cli, tmp_path):
    cli("tenants", "create", "watched-over")
    for _ in range(2):
        cli("keys", "create", "watched-over", "--ttl", "1h")
    cli("tenants", "create", "watched-over")
    of_it = ("--tenant", "watched-over")
    listed = cli("audit", "list", *of_it, "--json").json
    assert [(x["action"], x["outcome"], x["reason"]) for x in listed] == [
        ("TenantService/CreateTenant", "refused", "ALREADY_EXISTS"),
        ("TenantService/CreateApiKey", "done", ""),
        ("TenantService/CreateApiKey", "done", ""),
        ("TenantService/CreateTenant", "done", ""),
    ]
    assert {x["actor"] for x in listed} == {"local"}
    assert listed[1]["target"].startswith("key-")
    head, first, *_ = cli("audit", "list", *of_it).rows
    assert head == ["TIME", "WHO", "WHAT", "TARGET", "HOW", "TENANT", "OUTCOME"]
    assert first[1:] == [
        "local", "CreateTenant", "watched-over", "-", "watched-over", "refused ALREADY_EXISTS"
    ]  # fmt: skip
    assert "raise --limit" in cli("audit", "list", *of_it, "--limit", "1").err

    exported = cli("audit", "export", *of_it)
    assert [json.loads(line) for line in exported.out.splitlines()] == listed
    file = tmp_path / "audit.jsonl"
    narrow = ("--action", "TenantService/CreateApiKey", "--actor", "local", "--since", "1h")
    written = cli("audit", "export", *of_it, *narrow, "--output", str(file))
    assert (written.out, written.err) == ("", f"{file}: 2 events\n")
    assert [json.loads(line) for line in file.read_text().splitlines()] == listed[1:3]
    assert cli("audit", "export", *of_it, "--until", listed[-1]["time"]).out == ""
    assert cli("audit", "export", *of_it, "--since", "9999-01-01").out == ""


def test_an_export_has_all_pages(cli, monkeypatch):
    monkeypatch.setattr(remote, "_PAGE", 1)
    cli("tenants", "create", "paged")
    cli("tenants", "create", "paged")
    done = cli("audit", "export", "--tenant", "paged")
    assert len(done.out.splitlines()) == 2
    assert done.err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("keys", "create", "acme", "--role", "cook"), "--role: use one of tenant, worker, oper"),
        (("keys", "create", "acme", "--ttl", "soon"), "--ttl: use a number and s, m, h or d"),
        (("keys", "create", "acme", "--ttl", "999999999d"), "ttl: must be more than 0 and at"),
        (("keys", "create", "acme", "--ttl", "0s"), "ttl: must be more than 0 and at"),
        (("keys", "create"), "tenant_id: must be set"),
        (("keys", "create", "--role", "worker"), "worker_id: must be set"),
        (("keys", "create", "acme", "--role", "operator"), "tenant_id: leave it empty"),
        (("quotas", "set", "default"), "name a limit, such as --sessions 100"),
        (("quotas", "set", "default", "--sessions", "-1"), "quotas.hard.sessions: must be from"),
        (
            ("quotas", "set", "default", "--sessions", str(2**70)),
            "sessions: 1180591620717411303424",
        ),
        (
            ("quotas", "set", "default", "--soft-tokens-per-second", "nan"),
            "quotas.soft.tokens_per_",
        ),
        (
            ("quotas", "set", "default", "--soft-sessions", "2", "--sessions", "1"),
            "quotas.soft.sessions: must be at most the hard limit (1), not 2",
        ),
        (("audit", "list", "--since", "yesterday"), "--since: use a time such as"),
        (("audit", "list", "--since", "999999999d"), "--since: use a time such as"),
        (("audit", "export", "--until", "0001-01-01T00:00+10:00"), "--until: use a time such as"),
        (("audit", "list", "--actor", "x" * 257), "actor: "),
        (("audit", "list", "--since", "1d", "--until", "2d"), "until: must be later than since"),
        (("audit", "export", "--output", "/nowhere/at/all"), "--output: /nowhere/at/all: No such"),
    ],
)
def test_what_was_typed_wrong(cli, arguments, said):
    done = cli(*arguments)
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "revoke", "key-1"),
        ("tenants", "rotate-salt", "acme"),
        ("sessions", "end", "--name", "s"),
        ("leases", "revoke", "lease-1"),
        ("workers", "drain", "w2"),
    ],
)
def test_nothing_is_destroyed_without_a_yes(cli, arguments):
    """Nobody is asked: the server named here is none."""
    done = cli(*arguments, "--server", "127.0.0.1:1")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "kvplane: this is asked first, and there is no terminal to ask at: add --yes\n"
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", None), ("YES\n", None), ("n\n", 1), ("\n", 1), ("", 1)]
)
def test_at_a_terminal_it_is_asked(monkeypatch, capsys, answer, code):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    if code is None:
        remote.sure("Really?", yes=False)
    else:
        with pytest.raises(typer.Exit) as ended:
            remote.sure("Really?", yes=False)
        assert ended.value.exit_code == code
    told = capsys.readouterr()
    assert told.out == ""  # --json stays JSON
    assert "Really? [y/N]" in told.err


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2030-01-31", datetime(2030, 1, 31, tzinfo=UTC)),
        ("2030-01-31T12:00Z", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ("2030-01-31T12:00+02:00", datetime(2030, 1, 31, 10, tzinfo=UTC)),
    ],
)
def test_moments(text, moment):
    assert remote.moment_of(text, "--since") == moment


def test_durations_that_are_typed():
    assert [remote.seconds_of(text, "--ttl") for text in ("5s", "2m", "12h", "90d")] == [
        5, 120, 43_200, 7_776_000
    ]  # fmt: skip
