"""Events and JSON edited in place: properties over all inputs."""

import json

import pytest
from gateway.bench import chunk
from hypothesis import given, settings
from hypothesis import strategies as st
from kvplane.gateway.config import StaticWorker, static_workers_from_json
from kvplane.gateway.jsonedit import with_members, without
from kvplane.gateway.reply import Reply
from kvplane.gateway.stream import EventSplitter, event_data, with_data
from kvplane.kernel.errors import InvalidField

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=5,
)
few = settings(max_examples=60, deadline=None)
names = st.sampled_from(["kv", "id", "usage", 'a"b', "choices", "é", "token_ids"])
objects = st.lists(st.tuples(names, values), max_size=7, unique_by=lambda item: item[0])
spaces = st.sampled_from(["", " ", "\n\t"])


def written(members, space):
    parts = [f"{json.dumps(k)}{space}:{space}{json.dumps(v)}" for k, v in members]
    return (space + "{" + space + f"{space},{space}".join(parts) + space + "}").encode()


@few
@given(objects, spaces, st.sets(st.sampled_from([b"kv", b"usage"])))
def test_members_are_taken_out_and_the_rest_stays(members, space, out):
    data = written(members, space)
    kept = [(k, v) for k, v in members if k.encode() not in out]
    edited = without(data, out)
    assert json.loads(edited, object_pairs_hook=list) == json.loads(
        written(kept, space), object_pairs_hook=list
    )
    if len(kept) == len(members):
        assert edited is data
    for key, value in kept:
        assert f"{json.dumps(key)}{space}:{space}{json.dumps(value)}".encode() in edited


@few
@given(objects, objects)
def test_members_of_choices_are_taken_out_there_only(first, second):
    choices = [dict(first), dict(second), 5]
    whole = {"token_ids": [1], "choices": choices, "x": {"choices": [{"token_ids": 1}]}}
    edited = json.loads(without(json.dumps(whole).encode(), set(), {b"token_ids"}))
    for choice in choices[:2]:
        choice.pop("token_ids", None)
    assert edited == whole


def test_strings_that_look_like_members():
    data = b'{"a":"\\"kv\\":1,","b":{"kv":2},"c":["kv",{"kv":3}],"kv":{"kv":[1,"}"]},"d":"\\\\"}'
    assert without(data, {b"kv"}) == (
        b'{"a":"\\"kv\\":1,","b":{"kv":2},"c":["kv",{"kv":3}],"d":"\\\\"}'
    )


@few
@given(objects, spaces)
def test_members_are_put_in(members, space):
    data = written(members, space)
    parsed = dict(members)
    edited = with_members(data, parsed, {"new": {"x": [1]}})
    assert json.loads(edited) == {**parsed, "new": {"x": [1]}}
    assert edited.startswith(data.rstrip()[:-1])


ends = st.sampled_from(["\n", "\r\n", "\r"])
lines = st.sampled_from(
    ["data: x", "data:y", "data", "data:  z", ": comment", "id: 1", "event: e", "datax: no", "é: ü"]
)


@few
@given(st.lists(st.tuples(st.lists(lines, min_size=1, max_size=4), ends), max_size=5), st.data())
def test_events_are_whole_and_nothing_is_lost(events, data):
    raw = "".join("".join(line + end for line in lines) + end for lines, end in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    splitter = EventSplitter(10_000)
    got, last = [], 0
    for cut in [*cuts, len(raw)]:
        got += splitter.feed(raw[last:cut])
        last = cut
    assert b"".join(got) + splitter.rest == raw
    expected = []
    for lines_, _ in events:
        found = [
            line[4:].removeprefix(":") for line in lines_ if line == "data" or line[:5] == "data:"
        ]
        if found:
            expected.append("\n".join(v.removeprefix(" ") for v in found).encode())
    assert [d for d in map(event_data, got) if d is not None] == expected


def test_an_event_that_ends_with_cr_does_not_wait_for_a_lf():
    splitter = EventSplitter(100)
    assert splitter.feed(b"data: a\r\n\r") == [b"data: a\r\n\r"]
    assert splitter.feed(b"\ndata: b\n\n") == [b"\n", b"data: b\n\n"]


def test_a_byte_order_mark_hides_nothing():
    assert event_data(b"\xef\xbb\xbfdata: a\n\n") == b"a"


def test_data_is_replaced_in_its_place():
    event = b": c\r\nid: 1\r\ndata: a\r\ndata: b\r\nevent: e\r\n\r\n"
    assert with_data(event, b"{\n}") == b": c\r\nid: 1\r\ndata: {\r\ndata: }\r\nevent: e\r\n\r\n"


def test_an_event_may_not_grow_for_ever():
    splitter = EventSplitter(10)
    with pytest.raises(InvalidField):
        splitter.feed(b"data: 123456789")


@few
@given(values)
def test_a_reply_takes_anything(value):
    reply = Reply()
    for odd in (value, {"choices": value}, {"choices": [value]}, {"usage": value, "error": value}):
        reply.add(odd)
    reply.add({"choices": [{"delta": value, "message": value, "text": value}]})
    reply.add({"choices": [{"delta": {"tool_calls": [value, {"function": value}]}}]})
    reply.add(chunk("end", finish="stop"))
    assert reply.finish_reason == "stop"
    assert reply.message()["content"].endswith("end")


GOOD = {"worker_id": "p", "url": "http://h:1", "role": "prefill", "model": "m"}


def test_static_workers_are_read():
    [worker] = static_workers_from_json(json.dumps([{**GOOD, "served_models": ["a", "b"]}]))
    assert worker == StaticWorker("p", "http://h:1", "prefill", "m", served_models=("a", "b"))
    assert static_workers_from_json("") == ()


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ("{", "static_workers"),
        ({}, "static_workers"),
        ([5], "static_workers[0]"),
        ([GOOD, GOOD], "static_workers"),
        ([{**GOOD, "url": "ftp://x"}], "static_workers[0].url"),
        ([{**GOOD, "url": "http://user:word@x:1"}], "static_workers[0].url"),
        ([{**GOOD, "role": "cook"}], "static_workers[0].role"),
        ([{**GOOD, "prot": 1}], "static_workers[0].prot"),
        ([{**GOOD, "worker_id": None}], "static_workers[0].worker_id"),
        ([{**GOOD, "worker_id": "a b"}], "static_workers[0].worker_id"),
        ([GOOD, {**GOOD, "worker_id": "q", "kv_port": 5600}], "static_workers[1].kv_port"),
        ([{**GOOD, "block_size": 0}], "static_workers[0].block_size"),
        ([{**GOOD, "block_size": "x"}], "static_workers[0]"),
        ([{**GOOD, "model": ""}], "static_workers[0].model"),
        ([{**GOOD, "model": "x" * 513}], "static_workers[0].model"),
        ([{**GOOD, "kv_host": "h", "kv_port": 65536}], "static_workers[0].kv_port"),
        ([{**GOOD, "prefill_hold_s": -1}], "static_workers[0].prefill_hold_s"),
        ([{**GOOD, "decode_hold_s": 1e7}], "static_workers[0].decode_hold_s"),
        ([{**GOOD, "served_models": "x"}], "static_workers[0].served_models"),
    ],
)
def test_wrong_static_workers_are_named(items, field):
    with pytest.raises(InvalidField) as caught:
        static_workers_from_json(items if isinstance(items, str) else json.dumps(items))
    assert caught.value.metadata["field"] == field
