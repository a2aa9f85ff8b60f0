"""The assistant's reply, put together from an answer or from the chunks of a stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Usage:
    """Token counts as an engine states them; 0 where it does not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Usage | None":
        """Read `usage` of an answer or a chunk."""
        usage = answer.get("usage")
        if not isinstance(usage, Mapping):
            return None
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else 0
        return cls(
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            _count(cached),
        )


@dataclass(slots=True)
class _Call:
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    """What choice 0 said, and what the engine said beside it."""

    finish_reason: str = ""
    usage: Usage | None = None
    # The engine reported an error inside the stream.
    error: Mapping[str, Any] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    # Only where they were asked for.
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _calls: dict[int, _Call] = field(default_factory=dict)
    _function: _Call | None = None

    @property
    def text(self) -> str:
        """The content, or the completion's text."""
        return "".join(self._texts)

    def message(self) -> dict[str, Any]:
        """Return it as the client will send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self._calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": "".join(call.arguments)}}
                for _, call in sorted(self._calls.items())
            ]
        if self._function is not None:
            message["function_call"] = {
                "name": self._function.name,
                "arguments": "".join(self._function.arguments),
            }
        return message

    def add(self, answer: Any) -> None:
        """Take in a chunk of a stream, or a whole answer. Never raises."""
        if not isinstance(answer, Mapping):
            return
        if answer.get("error"):
            error = answer["error"]
            self.error = error if isinstance(error, Mapping) else {"message": str(error)}
        self.usage = Usage.of(answer) or self.usage
        params = answer.get("kv_transfer_params")
        if isinstance(params, Mapping):
            self.kv_transfer_params = params
        self._prompt(answer)
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, Mapping) and (choice.get("index") or 0) == 0:
                self._choice(choice)

    def _prompt(self, holder: Mapping[str, Any]) -> None:
        ids = holder.get("prompt_token_ids")
        if isinstance(ids, list):
            self.prompt_token_ids = ids

    def _choice(self, choice: Mapping[str, Any]) -> None:
        self._prompt(choice)
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self.token_ids += ids
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = choice["finish_reason"]
        text = choice.get("text")
        if isinstance(text, str):
            self._texts.append(text)
        said = choice.get("delta") or choice.get("message")
        if not isinstance(said, Mapping):
            return
        content = said.get("content")
        if isinstance(content, str):
            self._texts.append(content)
        calls = said.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                index = call.get("index")
                place = index if isinstance(index, int) else number
                _extend(self._calls.setdefault(place, _Call()), call.get("function"))
        if isinstance(said.get("function_call"), Mapping):
            self._function = self._function or _Call()
            _extend(self._function, said["function_call"])


def _extend(call: _Call, function: Any) -> None:
    if not isinstance(function, Mapping):
        return
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(name, str) and not call.name:
        call.name = name
    if isinstance(arguments, str):
        call.arguments.append(arguments)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
