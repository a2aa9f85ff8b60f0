"""Names of conversations: two that differ by a bit are two, in whatever way they come."""

import json
import unicodedata
from urllib.parse import quote

import pytest
from gateway.bench import Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from kvplane.gateway.app import _last
from kvplane.gateway.session_key import HEADERS, MAX_BYTES, session_name
from kvplane.kernel.errors import InvalidField
from multidict import CIMultiDict
from yarl import URL

few = settings(max_examples=200, deadline=None)
LIKE = ["a", "A", "é", "e\u0301", "\u00e9", "ß", "ss", "\u0131", "i", "\u0130", "\ufb01", "fi",
        "\uff10", "0", " ", "\u00a0", "\u200b", "\t", "\0", "/", "%", "%2F", "%2f", "+", "..", ".",
        ":", "\\", "'", '"', "\u202e", "🦀", "\ud83e", "-", "_", "%ff", "\x7f", "\u212a",
        "K"]  # fmt: skip
names = st.lists(st.sampled_from(LIKE) | st.characters(codec="utf-8"), min_size=1, max_size=6).map(
    "".join
)


class Http:
    """A request for a path, as much of it as is needed."""

    def __init__(self, path):
        self.rel_url = URL.build(path=path, encoded=True)


def by_body(name):
    return session_name(CIMultiDict(), {"session_id": name})


def by_header(raw):
    """The name of a header's bytes, read as the server reads them."""
    return session_name(CIMultiDict({"x-session-id": raw.decode("utf-8", "surrogateescape")}), {})


def by_path(name):
    return _last(Http(f"/v1/sessions/{quote(name, safe='')}"))


@few
@given(names, names)
def test_two_names_are_one_only_when_their_bytes_are(one, other):
    try:
        raws = [name.encode() for name in (one, other)]
    except UnicodeEncodeError:  # half a character, which is no text
        for name in (one, other):
            if not name.isascii() and any("\ud800" <= c <= "\udfff" for c in name):
                with pytest.raises(InvalidField):
                    by_body(name)
        return
    keys = [by_body(name).encode() for name in (one, other)]
    assert keys == raws
    assert [by_path(name) for name in (one, other)] == [one, other]
    assert (keys[0] == keys[1]) == (one == other)
    for name in (one, other):
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            like = unicodedata.normalize(form, name)
            assert (by_body(like) == by_body(name)) == (like == name)
        for like in (
            name.upper(),
            name.lower(),
            name.casefold(),
            name + " ",
            name.replace(" ", ""),
        ):
            if like:
                assert (by_body(like) == by_body(name)) == (like == name)


@few
@given(st.binary(min_size=1, max_size=12))
def test_a_headers_bytes_are_a_text_or_refused(raw):
    """Latin-1 is not taken for UTF-8, nor the other way round."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        with pytest.raises(InvalidField) as caught:
            by_header(raw)
        assert caught.value.metadata["field"] == "x-session-id"
        assert _last(Http("/v1/sessions/" + quote(raw))) is None
        return
    assert by_header(raw).encode() == raw == by_body(text).encode()


@pytest.mark.parametrize("name", ["x" * MAX_BYTES, "é" * (MAX_BYTES // 2), "🦀" * (MAX_BYTES // 4)])
def test_bytes_are_counted_not_characters(name):
    assert by_body(name) == name
    for more in (name + "x", name + "🦀"):
        with pytest.raises(InvalidField):
            by_body(more)


@pytest.mark.parametrize("path", ["%2e%2e", "a%2Fb", "a/b", "%252F", "%25", "%C3%A9", "a+b", "%00"])
async def test_a_path_names_what_a_header_names(path):
    """Ended is the conversation that was talked in, and no other."""
    from urllib.parse import unquote

    bench = Bench()
    try:
        await bench.pair()
        await bench.start()
        name = unquote(path)
        if "\0" not in name:
            await bench.chat(headers={HEADERS[0]: name})
            assert bench.control.routes[0][1].session.name == name
        url = URL(f"{bench.url}/v1/sessions/{path}", encoded=True)
        async with bench.http.delete(url) as response:
            assert response.status == 200
            assert (await response.json())["id"] == name
        assert bench.control.ended == [("default", name)]
    finally:
        await bench.stop()


async def test_a_name_is_the_tenants_own(bench):
    """The tenant is not part of the text, so no text can reach into another's."""
    await bench.pair()
    await bench.start(auth="api_key")
    for key, name in (("kvp_a", "x"), ("kvp_b", "x"), ("kvp_a", "tenant-b/x"), ("kvp_a", "x\0")):
        headers = {"Authorization": f"Bearer {key}"}
        status, raw, _ = await bench.chat(headers=headers, session_id=name)
        assert status == 200, json.loads(raw)
    asked = [(tenant, request.session.name) for tenant, request in bench.control.routes]
    assert asked == [
        ("tenant-a", "x"),
        ("tenant-b", "x"),
        ("tenant-a", "tenant-b/x"),
        ("tenant-a", "x\0"),
    ]
