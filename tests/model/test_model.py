"""The exhaustive model: the protocol violates nothing, and each planted fault is found."""

import json
import re
from pathlib import Path

import pytest
from model import check

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@pytest.mark.parametrize("scene", check.SCENES)
def test_no_state_of_the_protocol_violates_a_property(scene: str) -> None:
    result = check.search(check.SCENES[scene])
    assert not result.violated, result.trace
    assert result.unreached == ()
    assert result.states > 500_000


@pytest.mark.parametrize("planted", check.PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_breaks_its_property(planted: check.Planted) -> None:
    assert check.search_planted(planted).violated


def test_every_switch_is_planted_and_explained() -> None:
    switches = set(re.findall(r"(?:#ifdef |defined\()(\w+)", check.FAULT_SWITCHES.read_text()))
    assert switches == {f"{p.kind.upper()}_{p.name}" for p in check.PLANTED}
    page = (check.ROOT / "docs" / "model.md").read_text()
    assert [p.name for p in check.PLANTED if f"`{p.name}`" not in page] == []


def _result(*, violated: bool = False, unreached: tuple[str, ...] = ()) -> check.Result:
    return check.Result(1, 1, 0.1, violated, "the trace", unreached)


@pytest.mark.parametrize(
    ("scene", "planted", "status"),
    [
        (_result(), _result(violated=True), 0),
        (_result(violated=True), _result(violated=True), 1),
        (_result(unreached=("lease.pml:1",)), _result(violated=True), 1),
        (_result(), _result(), 1),
    ],
    ids=["all well", "a violation", "a step never taken", "a fault not found"],
)
def test_the_report_and_the_exit_status_say_what_was_found(
    scene: check.Result,
    planted: check.Result,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "search", lambda defines: scene)
    monkeypatch.setattr(check, "search_planted", lambda fault: planted)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "REPORT", tmp_path / "model" / "report.json")
    assert check.main([]) == status
    report = json.loads(check.REPORT.read_text())
    assert report["ok"] is (status == 0)
    assert len(report["searches"]) == len(check.SCENES) + len(check.PLANTED)


def test_a_missing_spin_is_a_failure_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(check.SpinFailed, match=r"tools/spin\.py"):
        check.search(("AGAIN",))
