"""Help, settings and migrations at the command line; the small things of the output."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.cli import output
from kvplane.cli.plain import ago, duration, plain, text
from runtime.processes import kvplane


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (86_400 * 5 + 3 * 3600, "5 d 3 h"),
        (-3, "-3.0 s"),
    ],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_times():
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert ago((now - timedelta(minutes=3)).isoformat(), now) == "3 min ago"
    assert ago((now + timedelta(hours=1)).isoformat(), now) == "in 1 h"
    assert ago(None, now) == "-"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        ("", "-"),
        ([], "-"),
        (0, "0"),
        (False, "no"),
        (12345, "12,345"),
        (["a", "b"], "a, b"),
        ({"a": 1}, "a=1"),
        (0.5, "0.5"),
    ],
)
def test_cells(value, shown):
    assert text(value) == shown


def test_messages_become_plain_values():
    lease = lease_pb2.Lease(fencing_token=2**60, state="LEASE_STATE_READING")
    lease.ttl.FromMilliseconds(1500)
    values = plain(lease)
    assert values["fencing_token"] == 2**60
    assert (values["state"], values["ttl"], values["holder"]) == ("reading", 1.5, None)
    assert plain(lease_pb2.Lease(state=99))["state"] == "99"
    target = routing_pb2.Target(headers={"a": "b"})
    assert plain(target)["headers"] == {"a": "b"}
    assert plain(lease_pb2.OwnedHandle())["engine_id"] == ""
    params = lease_pb2.KvTransferParams(remote_block_ids=[lease_pb2.BlockGroup(ids=[1])])
    assert plain(params)["remote_block_ids"] == [{"ids": [1]}]
    assert plain(params)["do_remote_decode"] is None


def test_on_a_terminal_a_table_is_drawn_and_markup_is_not_obeyed(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.show_table(("name",), [("[red]x",)], "none")
    assert "[red]x" in capsys.readouterr().out
    output.show_table(("name",), [], "none")
    assert capsys.readouterr().err == "none\n"


def every_command():
    from kvplane.cli.app import app

    found = [[]]
    stack = [(app, [])]
    while stack:
        typer_app, path = stack.pop()
        found += [[*path, command.name] for command in typer_app.registered_commands]
        for group in typer_app.registered_groups:
            found.append([*path, group.name])
            stack.append((group.typer_instance, [*path, group.name]))
    return [[part for part in path if part] for path in found]


def test_everything_has_a_help_text():
    from kvplane.cli.app import app
    from typer.testing import CliRunner

    for path in every_command():
        result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, path
        assert "Usage: " in result.output, path
        options = [line for line in result.output.splitlines() if line.strip(" │").startswith("--")]
        for line in options:
            assert len(line.strip(" │").split("  ", 1)) == 2, (path, line)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom kvplane.cli.app import app\n"
        "heavy = {'grpc', 'sqlalchemy', 'pydantic_settings', 'aiohttp', 'google.protobuf',"
        " 'asyncio', 'alembic', 'structlog', 'prometheus_client'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_config_version_and_migrate(tmp_path):
    version = kvplane("version", cwd=tmp_path)
    assert version.stdout.startswith("kvplane 0.")
    number = json.loads(kvplane("version", "--json", cwd=tmp_path).stdout)["version"]
    assert version.stdout == f"kvplane {number}\n"

    printed = kvplane("config", cwd=tmp_path, KVPLANE_LEASE_TTL_S="4")
    assert "[lease]" in printed.stdout
    assert "ttl_s = 4.0" in printed.stdout
    assert "| `lease.ttl_s` | `KVPLANE_LEASE_TTL_S` | `10.0` |" in (
        kvplane("config", "--docs", cwd=tmp_path).stdout
    )

    database = ("--database", f"sqlite:///{tmp_path}/x.db")
    behind = kvplane("migrate", "status", *database, cwd=tmp_path)
    assert (behind.returncode, behind.stdout) == (1, "")
    assert behind.stderr == "kvplane: the database has no schema yet: run `kvplane migrate up`\n"
    assert kvplane("migrate", "up", *database, cwd=tmp_path).stdout == "the schema is at 0005\n"
    right = kvplane("migrate", "status", *database, cwd=tmp_path)
    assert (right.returncode, right.stdout) == (0, "up to date at 0005\n")
    asked = kvplane("migrate", "down", "base", *database, cwd=tmp_path)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "add --yes" in asked.stderr
    assert json.loads(kvplane("migrate", "up", *database, "--json", cwd=tmp_path).stdout) == {
        "current": "0005",
        "head": "0005",
        "problem": None,
    }
    wrong = kvplane("migrate", "down", "nowhere", "--yes", *database, cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("kvplane: revision: ")
    down = kvplane("migrate", "down", "base", "--yes", *database, cwd=tmp_path)
    assert down.stdout == "the schema is at base\n"

    away = kvplane("migrate", "up", "--database", "postgresql://x@127.0.0.1:1/x", cwd=tmp_path)
    assert away.returncode == 1
    assert away.stderr.startswith("kvplane: the database cannot be used: ")
    assert away.stderr.count("\n") == 1
    assert "CREATE TABLE leases (" in kvplane("migrate", "sql", cwd=tmp_path).stdout
