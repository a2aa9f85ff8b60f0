"""The demo's model: the same each time, and answers that survive being sent back."""

import json
import re
from pathlib import Path

import jinja2
import numpy as np
import pytest
from demo import build_model, text
from demo.conversation import TOOLS, TURNS, Conversation
from safetensors.numpy import load_file
from tokenizers import Tokenizer

SHAPE = build_model.Shape(400, 64, 96, 1, 2, 1, 32)
TEMPLATES = build_model.HERE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model.build("test", SHAPE, tmp_path_factory.mktemp("model") / "one")


def test_two_builds_are_equal_to_the_byte(folder: Path, tmp_path: Path) -> None:
    other = build_model.build("test", SHAPE, tmp_path / "two")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert all((folder / n).read_bytes() == (other / n).read_bytes() for n in names)


def test_a_whole_folder_is_not_built_again(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert build_model.build("test", SHAPE, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.16), ("demo", 24.3)])
def test_sizes(name: str, millions: float) -> None:
    shape = build_model.SHAPES[name]
    weights = build_model.make_weights(shape, shape.vocab, [1])
    assert sum(w.size for w in weights.values()) / 1e6 == pytest.approx(millions, rel=0.03)
    assert shape.head_dim >= 32


def test_only_whole_words_have_logits(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    logits = load_file(folder / "model.safetensors")["lm_head.weight"]
    words = [i for i in range(len(logits)) if np.any(logits[i])]
    assert len(words) > 30
    assert all(re.fullmatch(" [a-z]+", tokenizer.decode([i])) for i in words)


def test_an_answer_becomes_the_same_tokens_again(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = build_model.whole_words(tokenizer)
    answer = list(np.random.default_rng(1).choice(words, 60))
    before, after = "<|im_start|>assistant\n", "<|im_end|>\n"
    again = tokenizer.encode(before + tokenizer.decode(answer) + after).ids
    assert again == [*tokenizer.encode(before).ids, *answer, *tokenizer.encode(after).ids]


def render(name: str, messages: list[dict[str, object]], tools: object = None) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    template = environment.from_string((TEMPLATES / name).read_text())
    return template.render(messages=messages, tools=tools, add_generation_prompt=True)


def test_each_turns_text_only_appends() -> None:
    conversation, before = Conversation(), ""
    for turn in range(1, TURNS + 1):
        body = conversation.request("m")
        prompt = render("chat_template.jinja", body["messages"], body["tools"])
        assert prompt.startswith(before)
        answer = f" answer {turn}"
        conversation.answer(answer)
        before = prompt + answer
    assert prompt.count("<tool_call>read_document") == TURNS - 1
    assert all(text.read(name) in prompt for name in text.NAMES)
    assert TOOLS[0]["function"]["name"] in prompt


def test_the_other_template_drops_earlier_reasoning() -> None:
    asked = {"role": "user", "content": "Q"}
    thought = {"role": "assistant", "reasoning_content": "because", "content": " so"}
    result = {"role": "tool", "content": "R"}
    name = "chat_template_reasoning.jinja"
    assert "assistant\nbecause so" in render(name, [asked, thought, result])
    assert "assistant\n so" in render(name, [asked, thought, asked])
