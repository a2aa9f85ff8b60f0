"""The HTTP face, against what vLLM answers."""

import json

import pytest
from engine.harness import COLD, tokens
from kvplane.engine.tokenizer import encode

pytestmark = pytest.mark.processes

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


def chat(on, **body):
    return on.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})


def stream(on, path, **body):
    with on.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_answer_has_all_its_parts(pair):
    answer = chat(pair.decode, max_tokens=5, return_token_ids=True).json()
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 5
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 5
    text = pair.decode.http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()
    assert text["prompt"] == choice["message"]["content"]
    assert answer["kv_transfer_params"] is None


def test_max_completion_tokens_wins_and_there_is_a_default(pair):
    usage = chat(pair.decode, max_tokens=5, max_completion_tokens=3).json()["usage"]
    assert usage["completion_tokens"] == 3
    assert chat(pair.decode).json()["usage"]["completion_tokens"] == 64


def test_n_choices_are_equal_and_counted(pair):
    answer = chat(pair.decode, max_tokens=4, n=3).json()
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 12


def test_a_chat_stream_says_the_same_as_the_whole_answer(pair):
    whole = chat(pair.decode, max_tokens=9, return_token_ids=True).json()
    chunks = stream(
        pair.decode,
        "/v1/chat/completions",
        messages=MESSAGES,
        max_tokens=9,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    body = chunks[1:-1]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in body)
    ids = [token for chunk in body for token in chunk["choices"][0]["token_ids"]]
    assert text == whole["choices"][0]["message"]["content"]
    assert ids == whole["choices"][0]["token_ids"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in body] == [None] * 8 + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


def test_a_completion_stream_says_the_same_as_the_whole_answer(pair):
    whole = pair.decode.complete("Once upon a time", max_tokens=6)
    chunks = stream(
        pair.decode, "/v1/completions", prompt="Once upon a time", max_tokens=6,
        return_token_ids=True,
    )  # fmt: skip
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole.text
    assert chunks[0]["choices"][0]["prompt_token_ids"] == encode("Once upon a time")
    assert "prompt_token_ids" not in chunks[1]["choices"][0]


def test_a_stop_string_never_shows_in_a_stream(pair):
    text = pair.decode.complete("Stop it", max_tokens=8).text
    chunks = stream(
        pair.decode, "/v1/completions", prompt="Stop it", max_tokens=8, stop=[text[13:17], "zz zz"]
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:13]
    assert chunks[-1]["choices"][0]["stop_reason"] == text[13:17]


def test_a_stream_shows_its_params_only_when_told_to(pair, start):
    prompt = tokens("stream", 100)
    newer = start("--role", "decode", "--stream-kv-params")
    for on, shown in ((pair.decode, False), (newer, True)):
        params = pair.prefill.complete(prompt, COLD, 1).params
        chunks = stream(
            on, "/v1/completions", prompt=prompt, max_tokens=4, kv_transfer_params=params,
            stream_options={"include_usage": True},
        )  # fmt: skip
        carriers = [chunk for chunk in chunks if "kv_transfer_params" in chunk]
        assert bool(carriers) == shown
        for chunk in carriers:
            assert chunk["choices"][0]["finish_reason"] == "length"
            assert chunk["kv_transfer_params"]["remote_num_tokens"] == 103


def test_a_failed_load_in_a_stream_is_an_error_event(pair, start):
    reader = start("--role", "decode")
    reader.http.post("/debug/faults", json={"fail_reads": 1})
    params = pair.prefill.complete(tokens("event", 100), COLD, 1).params
    chunks = stream(
        reader, "/v1/completions", prompt=tokens("event", 100), kv_transfer_params=params
    )
    assert [chunk["error"]["code"] for chunk in chunks] == [500]


def test_tokenize_agrees_with_the_prompt_that_is_served(pair):
    served = chat(pair.decode, max_tokens=1, return_token_ids=True).json()["prompt_token_ids"]
    answer = pair.decode.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert answer["tokens"] == served
    assert answer["count"] == len(served)
    assert answer["max_model_len"] == 65536
    plain = pair.decode.http.post("/tokenize", json={"prompt": "a bako", "return_token_strs": True})
    assert plain.json()["token_strs"] == ["a", " bako"]


def test_prompt_ids_in_the_params_spare_the_tokenizer(pair):
    ids = tokens("given", 50)
    answer = chat(
        pair.decode,
        max_tokens=3,
        return_token_ids=True,
        kv_transfer_params={"prompt_token_ids": ids},
    )
    assert answer.json()["prompt_token_ids"] == ids


def test_logprobs_are_tolerated(pair):
    answer = chat(pair.decode, max_tokens=2, logprobs=True, top_logprobs=2).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2
    answer = pair.decode.complete("x", max_tokens=2, logprobs=1).raw
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 5]


def test_the_request_id_is_part_of_the_answers_id_but_not_the_engines_own(pair):
    answer = pair.decode.http.post(
        "/v1/completions",
        json={"prompt": "id", "max_tokens": 1, "kv_transfer_params": {"x": 1}},
        headers={"X-Request-Id": "abc"},
    ).json()
    assert answer["id"] == "cmpl-abc"
    own = answer["kv_transfer_params"]["remote_request_id"]
    assert own.startswith("cmpl-abc-")
    assert own != "cmpl-abc-"


def test_models_and_health(pair):
    models = pair.decode.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["toy"]
    assert pair.decode.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "x"}]}, "messages[0].role"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"kv_transfer_params": []}, "kv_transfer_params"),
        ({"tools": {}}, "tools"),
        ({"stream_options": 1}, "stream_options"),
    ],
)
def test_a_bad_field_is_named(pair, body, field):
    answer = chat(pair.decode, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("prompt", [None, [], "", [[1], [2]], ["a", "b"], [1, "a"], [99999]])
def test_a_bad_prompt_is_named(pair, prompt):
    answer = pair.decode.http.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_an_unknown_model_and_broken_json_are_refused(pair):
    assert chat(pair.decode, model="gpt").status_code == 404
    answer = pair.decode.http.post("/v1/completions", content=b"{")
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"remote_port": "x"}, "kv_transfer_params.remote_port"),
        ({"remote_num_tokens": 1.5}, "kv_transfer_params.remote_num_tokens"),
        ({"remote_block_ids": [1]}, "kv_transfer_params.remote_block_ids"),
        ({"remote_blocks_expiry_time": "x"}, "kv_transfer_params.remote_blocks_expiry_time"),
        ({"kvplane": 1}, "kvplane"),
        ({"kvplane": {"fencing_token": "x"}}, "kv_transfer_params.kvplane.fencing_token"),
    ],
)
def test_a_bad_handle_is_named(pair, params, field):
    answer = chat(pair.decode, kv_transfer_params=params)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
