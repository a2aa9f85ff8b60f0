"""What a conversation's answer must be: the engines' model, run alone and without reuse."""

from collections.abc import Sequence
from typing import Any

from kvplane.engine import template, tokenizer
from kvplane.engine.model import ToyModel

BLOCK = 16
_BLOCKS = 512


class Oracle:
    """Computes every token from the first one on; nothing is kept between two calls."""

    def __init__(self, model: str) -> None:
        self._model = ToyModel(f"{model}@1", _BLOCKS, BLOCK)
        self._blocks = list(range(_BLOCKS))

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` tokens that follow a prompt."""
        self._model.compute(self._blocks, 0, prompt)
        made: list[int] = []
        while True:
            length = len(prompt) + len(made)
            made.append(self._model.next_token(self._blocks, length))
            if len(made) == count:
                return made
            self._model.compute(self._blocks, length, made[-1:])

    def answer(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens of the answer to a request."""
        return self.tokens(prompt_of(body), body["max_tokens"])


def prompt_of(body: dict[str, Any]) -> list[int]:
    """Return a request's prompt as the engines see it."""
    if "messages" in body:
        return tokenizer.encode(template.render(body["messages"]))
    return list(body["prompt"])


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of an answer."""
    return tokenizer.decode(tokens)
