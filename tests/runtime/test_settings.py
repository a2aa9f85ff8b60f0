"""Where settings come from, what a wrong one says, and the reference of all."""

import dataclasses
import json
import tomllib

import pytest
from kvplane.gateway.config import GatewayConfig
from kvplane.lease.domain import LeaseConfig
from kvplane.routing.domain import RoutingConfig
from kvplane.runtime.settings import (
    Settings,
    WrongSettings,
    config_of,
    each_setting,
    flags,
    load,
    variable,
)
from kvplane.runtime.settings_text import as_toml, as_values, reference
from kvplane.session.domain import SessionConfig

CONFIGS = {
    "lease": LeaseConfig,
    "session": SessionConfig,
    "routing": RoutingConfig,
    "gateway": GatewayConfig,
}
# Where a service listens or is found; not a matter of its config.
PLACES = {"address", "host", "port"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("KVPLANE_"):
            monkeypatch.delenv(name)


def test_flag_over_variable_over_file_over_default(tmp_path, monkeypatch):
    file = tmp_path / "kvplane.toml"
    file.write_text(
        "[lease]\nttl_s = 5\nmargin_s = 1\nretention_s = 60\n[grpc]\nhost = '0.0.0.0'\n"
    )
    monkeypatch.setenv("KVPLANE_LEASE_MARGIN_S", "3")
    monkeypatch.setenv("KVPLANE_LEASE_RETENTION_S", "70")
    settings = load(file, lease={"retention_s": 80})
    assert (settings.lease.retention_s, settings.lease.margin_s) == (80, 3)
    assert (settings.lease.ttl_s, settings.lease.max_ttl_s) == (5, 60)
    assert settings.grpc.host == "0.0.0.0"


def test_the_file_may_be_named_by_a_variable(tmp_path, monkeypatch):
    file = tmp_path / "kvplane.toml"
    file.write_text("[lease]\nttl_s = 5\n")
    monkeypatch.setenv("KVPLANE_CONFIG", str(file))
    assert load().lease.ttl_s == 5


def test_variables_of_others_are_left_alone(monkeypatch):
    monkeypatch.setenv("KVPLANE_SERVER", "127.0.0.1:7700")
    monkeypatch.setenv("KVPLANE_TENANT", "acme")
    assert load().model_dump() == Settings.model_construct().model_dump()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("KVPLANE_LEASE_TTL_S", "soon", "lease.ttl_s (KVPLANE_LEASE_TTL_S): Input should be"),
        ("KVPLANE_LEASE_TTL_S", "100", "lease.ttl_s (KVPLANE_LEASE_TTL_S): must be from min_ttl_s"),
        ("KVPLANE_LEASE_TLL_S", "5", "lease.tll_s (KVPLANE_LEASE_TLL_S): there is no such"),
        ("KVPLANE_GRPC_PORT", "70000", "grpc.port (KVPLANE_GRPC_PORT): "),
        ("KVPLANE_AUTH_MODE", "maybe", "auth.mode (KVPLANE_AUTH_MODE): Input should be 'none'"),
        ("KVPLANE_AUTH_MODE", "api_key", "auth.internal_token (KVPLANE_AUTH_INTERNAL_TOKEN): must"),
        ("KVPLANE_DATABASE_URL", "mysql://u:hidden@h/x", "database.url (KVPLANE_DATABASE_URL): "),
        (
            "KVPLANE_DATABASE_URL",
            "postgresql://u:hidden@one:5432,two:5432/x",
            "database.url (KVPLANE_DATABASE_URL): has a wrong port; several hosts go into ?host=",
        ),
        (
            "KVPLANE_DATABASE_URL",
            "postgresql://u:hidden@h/x?ssl=require",
            "database.url (KVPLANE_DATABASE_URL): ssl is not known; known are host,",
        ),
        (
            "KVPLANE_DATABASE_URL",
            "postgresql://u:hidden@h/x?sslmode=on",
            "database.url (KVPLANE_DATABASE_URL): sslmode must be one of disable,",
        ),
        (
            "KVPLANE_DATABASE_URL",
            "postgresql://u:hidden@h/x?sslmode=verify-full",
            "database.url (KVPLANE_DATABASE_URL): sslmode=verify-full needs sslrootcert",
        ),
        (
            "KVPLANE_DATABASE_URL",
            "postgresql://u:hidden@h/x?sslrootcert=/nowhere/ca.pem",
            "database.url (KVPLANE_DATABASE_URL): sslrootcert: there is no file /nowhere/ca.pem",
        ),
        (
            "KVPLANE_AUTH_INTERNAL_TOKEN",
            "hiddenë",
            "auth.internal_token (KVPLANE_AUTH_INTERNAL_TOKEN): must be printable ASCII",
        ),
        (
            "KVPLANE_GATEWAY_UPSTREAM_API_KEY",
            "hidden\nx",
            "gateway.upstream_api_key (KVPLANE_GATEWAY_UPSTREAM_API_KEY): must be printable",
        ),
        ("KVPLANE_GATEWAY_STATIC_WORKERS", "{", "gateway.static_workers (KVPLANE_GATEWAY_STATIC"),
        ("KVPLANE_ROUTING_HEARTBEAT_INTERVAL_S", "4", "routing.heartbeat_interval_s (KVPLANE_ROU"),
    ],
)
def test_a_wrong_value_is_named_with_the_reason(monkeypatch, name, given, said):
    monkeypatch.setenv(name, given)
    with pytest.raises(WrongSettings) as caught:
        load()
    (problem,) = caught.value.problems
    assert problem.startswith(said)
    assert "hidden" not in problem


def test_the_newline_of_a_secret_s_file_is_left_out(monkeypatch):
    monkeypatch.setenv("KVPLANE_AUTH_INTERNAL_TOKEN", " secret\n")
    assert load().auth.internal_token.get_secret_value() == "secret"


def test_all_wrong_values_are_named_at_once(monkeypatch):
    monkeypatch.setenv("KVPLANE_GRPC_PORT", "x")
    monkeypatch.setenv("KVPLANE_LOG_LEVEL", "loud")
    with pytest.raises(WrongSettings) as caught:
        load()
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[lease\n", "kvplane.toml: "),
        ("[leese]\nttl_s = 5\n", "leese: there is no such setting"),
        ("[lease]\nttl = 5\n", "lease.ttl (KVPLANE_LEASE_TTL): there is no such setting"),
    ],
)
def test_a_wrong_file(tmp_path, text, said):
    file = tmp_path / "kvplane.toml"
    file.write_text(text)
    with pytest.raises(WrongSettings) as caught:
        load(file)
    assert said in caught.value.problems[0]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(WrongSettings, match="No such file"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize("section", CONFIGS)
def test_a_service_s_settings_are_its_config_s(section):
    """Same names and defaults, so that neither can drift from the other."""
    config = CONFIGS[section]
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, field in type(getattr(load(), section)).model_fields.items():
        if name in PLACES | {"upstream_api_key", "static_workers"}:
            continue
        assert field.get_default() == defaults[name], name


def test_settings_become_a_config(monkeypatch):
    monkeypatch.setenv("KVPLANE_LEASE_TTL_S", "4")
    assert config_of(LeaseConfig, "lease", load().lease) == LeaseConfig(ttl_s=4)
    assert config_of(LeaseConfig, "lease", load().lease, sweep_rows=7).sweep_rows == 7


def test_what_a_config_refuses_is_a_wrong_setting():
    settings = load()
    with pytest.raises(WrongSettings, match=r"routing.*heartbeat_interval_s"):
        config_of(RoutingConfig, "routing", settings.routing, heartbeat_interval_s=9.0)


def test_flags_leave_out_what_was_not_given():
    assert flags(grpc={"port": None, "host": "h"}, lease={"ttl_s": None}) == {"grpc": {"host": "h"}}


def test_every_setting_is_documented():
    text = reference()
    for section, name, field in each_setting():
        assert field.description, (section, name)
        assert f"| `{section}.{name}` | `{variable(section, name)}` |" in text


def test_what_is_printed_is_a_file_with_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPLANE_LEASE_TTL_S", "4")
    monkeypatch.setenv("KVPLANE_GATEWAY_STATIC_WORKERS", '[{"worker_id": "w", "kv_port": 1}]')
    before = load()
    file = tmp_path / "printed.toml"
    file.write_text(as_toml(before))
    monkeypatch.undo()
    after = load(file)
    assert after.model_dump() == before.model_dump()


def test_secrets_are_masked(monkeypatch):
    monkeypatch.setenv("KVPLANE_AUTH_INTERNAL_TOKEN", "hidden1")
    monkeypatch.setenv("KVPLANE_GATEWAY_UPSTREAM_API_KEY", "hidden2")
    monkeypatch.setenv("KVPLANE_DATABASE_URL", "postgresql://u:hidden3@h/x")
    settings = load()
    assert "hidden" not in as_toml(settings)
    assert "hidden" not in json.dumps(as_values(settings))
    assert "hidden" not in repr(settings.auth)
    tomllib.loads(as_toml(settings))


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load().lease.ttl_s = 3
    assert isinstance(load(), Settings)
