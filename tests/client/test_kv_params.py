import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import kv_params
from kvplane.kernel.errors import InvalidField

FROM_DECODE = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2, 3], [7]],
    "remote_engine_id": "engine_dp0",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 339,
    "remote_blocks_expiry_time": 12345.678,
    "transfer_mode": "pull",
}
COLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def round_trip(params):
    wire = kv_params.from_dict(params).SerializeToString()
    return kv_params.to_dict(lease.KvTransferParams.FromString(wire))


@pytest.mark.parametrize(
    "params",
    [
        FROM_DECODE,
        COLD,
        {},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[], [4]]},
        {"remote_block_ids": [1, 2]},
        {"remote_blocks_expiry_time": None},
        {"kvplane": {"tenant": "a", "turn": 9007199254740993}, "new_in_vllm_0_99": [1, {"x": 2}]},
    ],
)
def test_every_shape_survives_the_wire(params):
    assert round_trip(params) == params


def test_integers_stay_integers_and_tuples_are_lists():
    out = round_trip({**FROM_DECODE, "remote_block_ids": ([1], [2]), "extra": 1 << 62})
    assert type(out["remote_port"]) is int
    assert type(out["extra"]) is int
    assert out["extra"] == 1 << 62
    assert out["remote_block_ids"] == [[1], [2]]


def test_the_engines_private_notes_are_dropped_both_ways():
    assert round_trip({"_remote_blocks_processed": True, "_p_side_truncated": True, "x": 1}) == {
        "x": 1
    }
    message = lease.KvTransferParams(extra_json='{"_remote_blocks_processed": true}')
    assert kv_params.to_dict(message) == {}


def test_typed_fields_are_filled():
    message = kv_params.from_dict(FROM_DECODE)
    assert [list(g.ids) for g in message.remote_block_ids] == [[1, 2, 3], [7]]
    assert message.remote_num_tokens == 339
    assert message.extra_json == ""
    assert not message.HasField("remote_registration_generation")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_port": 1 << 31}, "remote_port"),
        ({"remote_num_tokens": 12.0}, "remote_num_tokens"),
        ({"remote_block_ids": [[1], 2]}, "remote_block_ids"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_block_ids": "1,2"}, "remote_block_ids"),
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({"remote_host": 5}, "remote_host"),
        ({"remote_blocks_expiry_time": "soon"}, "remote_blocks_expiry_time"),
        ({"other": float("nan")}, ""),
        ({"other": object()}, ""),
    ],
)
def test_a_wrong_value_is_refused_by_name(params, field):
    with pytest.raises(InvalidField) as caught:
        kv_params.from_dict(params)
    assert caught.value.metadata["field"] == (
        f"kv_transfer_params.{field}" if field else "kv_transfer_params"
    )


def test_bad_extra_json_is_refused():
    for text in ("[1]", "{", "5"):
        with pytest.raises(InvalidField, match="extra_json"):
            kv_params.to_dict(lease.KvTransferParams(extra_json=text))


def test_with_extra_replaces_and_keeps():
    message = kv_params.from_dict({"remote_port": 1, "a": 1, "kvplane": {"turn": 1}})
    other = kv_params.with_extra(message, kvplane={"turn": 2})
    assert kv_params.to_dict(other) == {"remote_port": 1, "a": 1, "kvplane": {"turn": 2}}
    assert kv_params.extra(message)["kvplane"] == {"turn": 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
known = st.fixed_dictionaries(
    {},
    optional={
        "do_remote_decode": st.none() | st.booleans(),
        "remote_block_ids": st.none()
        | st.lists(st.lists(st.integers(0, 1 << 40), max_size=4), max_size=3),
        "remote_engine_id": st.none() | st.text(max_size=8),
        "remote_port": st.none() | st.integers(0, 65535),
        "remote_num_tokens": st.none() | st.integers(0, 1 << 60),
        "remote_blocks_expiry_time": st.none() | st.floats(allow_nan=False),
    },
)


@given(known, st.dictionaries(st.text(min_size=1, max_size=6), json_values, max_size=4))
def test_round_trip_of_anything(params, extra):
    merged = {**extra, **params}
    assert round_trip(merged) == merged
