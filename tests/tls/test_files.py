"""Certificate files: whole, fitting together, and renewed without a restart."""

import dataclasses
import logging
from pathlib import Path

import pytest
from kvplane.client.tls import Renewed, TlsFiles, load
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.errors import InvalidField

from tls.authority import Authority, write


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_all_files_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TlsFiles.of("", "", "") is None
    with pytest.raises(InvalidField, match="key_file: must be set: ca_file, cert_file, key_file"):
        TlsFiles.of("ca", "cert", "")
    with pytest.raises(InvalidField, match="server_name: needs ca_file"):
        TlsFiles.of("", "", "", "kvplane")
    for name in ("CA_FILE", "CERT_FILE", "KEY_FILE", "SERVER_NAME"):
        monkeypatch.setenv(f"KVPLANE_TLS_{name}", name)
    assert TlsFiles.from_environment() == TlsFiles(
        "CA_FILE", "CERT_FILE", "KEY_FILE", "SERVER_NAME"
    )


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("ca", b"nothing", "ca_file: .*ca.pem has no certificate in PEM"),
        ("ca", b"", "ca_file: .*ca.pem has no certificate in PEM"),
        ("cert", b"\xff\x00", "cert_file: .*cert.pem has no certificate in PEM"),
        ("key", b"", "key_file: .*key.pem has no private key in PEM"),
        ("key", "another", "key_file: .*key.pem is not the key of .*cert.pem"),
        ("key", None, "key_file: .*key.pem: No such file or directory"),
    ],
)
def test_a_wrong_file_is_named(
    authority: Authority, tmp_path: Path, name: str, content: bytes | str | None, problem: str
) -> None:
    files = write(tmp_path, authority.issue())
    path = tmp_path / f"{name}.pem"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(authority.issue().key if isinstance(content, str) else content)
    with pytest.raises(InvalidField, match=problem):
        load(files)


def test_a_key_does_not_show(authority: Authority) -> None:
    assert "PRIVATE" not in repr(authority.issue())


def test_renewed_files_are_seen_a_second_later(
    authority: Authority, tmp_path: Path, clock: FakeClock
) -> None:
    first, second = authority.issue(), authority.issue()
    newest = Renewed(write(tmp_path, first), clock)
    write(tmp_path, second)
    clock.advance(0.9)
    assert newest.current() == first
    clock.advance(0.2)
    assert newest.current() == second
    clock.advance(5)
    assert newest.current() is newest.current()


@pytest.mark.parametrize("broken", ["cert", "key", "half", "gone", "ca"])
def test_what_does_not_fit_leaves_the_old_in_use_and_is_said_once(
    authority: Authority,
    tmp_path: Path,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    caplog.set_level(logging.INFO, logger="kvplane.client.tls")
    first, second = authority.issue(), authority.issue()
    newest = Renewed(write(tmp_path, first), clock)
    if broken in ("cert", "key"):  # one of the two is there already
        write(tmp_path, dataclasses.replace(first, **{broken: getattr(second, broken)}))
    elif broken == "half":
        (tmp_path / "cert.pem").write_bytes(second.cert[: len(second.cert) // 2])
    elif broken == "gone":
        (tmp_path / "key.pem").unlink()
    else:
        bundle = first.ca + Authority().pem
        (tmp_path / "ca.pem").write_bytes(bundle[: len(bundle) - 60])
    for _ in range(3):
        clock.advance(1.1)
        assert newest.current() == first
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "the files of before stay in use" in said[0]

    write(tmp_path, second)
    clock.advance(1.1)
    assert newest.current() == second
    assert caplog.messages[1:] == [f"tls: {tmp_path}/cert.pem is renewed"]


def test_files_that_came_back_are_no_reason_to_complain(
    authority: Authority, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    pem = authority.issue()
    newest = Renewed(write(tmp_path, pem), clock)
    for _ in range(2):  # each time anew
        (tmp_path / "cert.pem").unlink()
        clock.advance(1.1)
        assert newest.current() == pem
        write(tmp_path, pem)
        clock.advance(1.1)
        assert newest.current() == pem
    assert len(caplog.messages) == 2
