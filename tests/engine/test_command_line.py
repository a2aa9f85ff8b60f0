"""What the engine makes of its command line."""

import pytest
from kvplane.engine.__main__ import control_plane_of, parser

REPLICAS = "10.0.0.1:7703,10.0.0.2:7703"
LEASES = "10.0.0.3:7702,10.0.0.4:7702"


def plane(address: str):
    return control_plane_of(parser().parse_args(["--control-plane", address]))


@pytest.mark.parametrize(
    ("given", "routing", "lease"),
    [
        ("one:7700", "one:7700", "one:7700"),
        (REPLICAS, REPLICAS, REPLICAS),
        ("routing=r:7703,lease=l:7702", "r:7703", "l:7702"),
        (f"routing={REPLICAS},lease={LEASES}", REPLICAS, LEASES),
        (f"lease=l:7702,routing={REPLICAS}", REPLICAS, "l:7702"),
    ],
)
def test_the_control_plane_may_have_replicas(given, routing, lease):
    found = plane(given)
    assert (found.routing, found.lease) == (routing, lease)


@pytest.mark.parametrize("given", ["nowhere", "routing=r:1", "routing=r,lease=l:1", "a:1,b"])
def test_a_wrong_control_plane_is_named(given):
    with pytest.raises(SystemExit, match="--control-plane"):
        plane(given)


def test_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("KVPLANE_TOKEN", "kvp_secret\n")
    assert plane("one:1").token == "kvp_secret"
    monkeypatch.setenv("KVPLANE_TOKEN", "kvp_é")
    with pytest.raises(SystemExit, match="KVPLANE_TOKEN: must be printable ASCII"):
        plane("one:1")


def test_waits_are_taken_over_and_must_not_be_negative():
    args = ["--control-plane", "one:1", "--begin-wait", "2", "--grant-wait", "3"]
    found = control_plane_of(parser().parse_args(args))
    assert found is not None
    assert (found.begin_wait_s, found.grant_wait_s) == (2, 3)
