import pytest
from kvplane.engine.template import render
from kvplane.engine.tokenizer import encode
from kvplane.kernel.errors import InvalidField

USER = {"role": "user", "content": "Where is it?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "find", "arguments": '{"a":1, "b": 2}'}}],
}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "here"}


def test_an_answer_in_the_history_is_what_was_generated():
    prompt = render([USER])
    history = render([USER, {"role": "assistant", "content": " bako dilu"}, USER])
    assert history.startswith(prompt + " bako dilu<|im_end|>\n")
    generated = encode(" bako dilu")
    assert encode(history)[: len(encode(prompt)) + 2] == encode(prompt) + generated


def test_tools_calls_and_results_are_rendered():
    text = render([USER, CALL, TOOL], [{"type": "function", "function": {"name": "find"}}])
    assert text.startswith('<|im_start|>tools\n{"type": "function"')
    assert '<tool_call>\n{"name": "find", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    assert text.endswith("<|im_start|>tool\nhere<|im_end|>\n<|im_start|>assistant\n")


def test_reasoning_stays_only_after_the_last_user_message():
    thinking = {"role": "assistant", "content": "yes", "reasoning": "hm"}
    assert "<think>\nhm\n</think>\nyes" in render([USER, thinking, TOOL])
    assert "hm" not in render([USER, thinking, USER])


def test_text_parts_are_joined_and_the_last_message_can_be_continued():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "assistant", "content": parts}
    text = render([USER, message], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nab")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "robot", "content": ""}, "messages[0].role"),
        ("hello", "messages[0]"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_message_that_is_not_understood_is_named(message, field):
    with pytest.raises(InvalidField) as caught:
        render([message])
    assert caught.value.metadata["field"] == field
