"""The ``kvplane`` block: each wrong key is named, with the fix."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from kvplane_vllm.config import ConfigError, PluginConfig
from tls.authority import Authority, write

GOOD = {"control_plane": "127.0.0.1:7700", "url": "http://10.0.0.7:8100"}


def parse(**more: Any) -> PluginConfig:
    return PluginConfig.parse({"bidirectional_kv_xfer": True, "kvplane": {**GOOD, **more}})


def test_one_address_serves_both() -> None:
    agent = parse().agent()
    assert agent.routing == agent.lease == "127.0.0.1:7700"
    assert agent.begin_wait_seconds == 0.3


def test_two_addresses() -> None:
    agent = parse(control_plane={"routing": "r:7703", "lease": "l:7702"}).agent()
    assert (agent.routing, agent.lease) == ("r:7703", "l:7702")


def test_replicas() -> None:
    assert parse(control_plane="10.0.0.1:7700,10.0.0.2:7700").agent().lease.count(":") == 2


def test_the_workers_name_comes_from_its_url() -> None:
    assert parse().worker_id == "10.0.0.7:8100"
    assert parse(worker_id="gpu-7").worker_id == "gpu-7"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("control_plane", "nowhere"),
        ("control_plane", 5),
        ("control_plane", {"routing": "r:1"}),
        ("control_plane.lease", {"routing": "r:1", "lease": "x"}),
        ("url", "10.0.0.7:8100"),
        ("url", 7),
        ("worker_id", 7),
        ("served_models", "one"),
        ("served_models", [1]),
        ("begin_wait_seconds", 0),
        ("begin_wait_seconds", "1"),
        ("lease_ttl_seconds", True),
        ("token", ""),
        ("ca_file", ""),
        ("cert_file", 7),
        ("server_name", ""),
        ("max_held_share", 0),
        ("max_held_share", 1.1),
        ("max_held_share", True),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"kvplane\.{key}: must be "):
        parse(**{key.split(".", maxsplit=1)[0]: value})


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kvplane\.workerid: unknown; known are .*worker_id"):
        parse(workerid="x")


@pytest.mark.parametrize("extra", [{}, {"kvplane": None}, {"kvplane": "x"}])
def test_a_missing_block_shows_an_example(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'kvplane: must be an object, such as \{"control_plane"'):
        PluginConfig.parse(extra)


@pytest.mark.parametrize("key", ["control_plane", "url"])
def test_a_missing_key_is_named(key: str) -> None:
    block = {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(ConfigError, match=rf"kvplane\.{key}: must be set"):
        PluginConfig.parse({"kvplane": block})


def test_a_token_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody on the machine can read a command line."""
    monkeypatch.setenv("KVPLANE_TOKEN", "kvp_secret")
    assert parse().agent().token == "kvp_secret"
    assert parse(token="kvp_other").agent().token == "kvp_other"
    monkeypatch.setenv("KVPLANE_TOKEN", "kvp_secret\n")
    assert parse().agent().token == "kvp_secret"
    monkeypatch.delenv("KVPLANE_TOKEN")
    assert parse().agent().token is None


def test_a_token_that_no_header_can_hold_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kvplane\.token: must be printable ASCII"):
        parse(token="kvp_é").agent()


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kvp_secret" not in repr(parse(token="kvp_secret"))
    assert "kvp_secret" not in repr(parse(token="kvp_secret").agent())


def test_files_of_mutual_tls(tmp_path: Path) -> None:
    files = write(tmp_path, Authority().issue("kvplane:worker/gpu-7"), "kvplane.internal")
    keys = dataclasses.asdict(files)
    assert parse(**keys).agent().tls == files
    assert parse().agent().tls is None

    with pytest.raises(ConfigError, match=r"kvplane\.key_file: must be set: ca_file, cert_file"):
        parse(**{key: value for key, value in keys.items() if key != "key_file"}).agent()
    with pytest.raises(ConfigError, match=r"kvplane\.server_name: needs ca_file"):
        parse(server_name="kvplane.internal").agent()
    with pytest.raises(ConfigError, match=r"kvplane\.ca_file: /nowhere: No such file"):
        parse(**{**keys, "ca_file": "/nowhere"}).agent()
    write(tmp_path, dataclasses.replace(Authority().issue(), key=Authority().issue().key))
    with pytest.raises(ConfigError, match=r"kvplane\.key_file: .* is not the key of"):
        parse(**keys).agent()
