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
        if not isinstance(usage, dict):
            return None
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
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
        if not isinstance(answer, dict):
            return
        choices = answer.get("choices")
        if isinstance(choices, list):
            for choice in choices:
                if isinstance(choice, dict) and not choice.get("index"):
                    self._choice(choice)
        if "usage" in answer:
            self.usage = Usage.of(answer) or self.usage
        if answer.get("error"):
            error = answer["error"]
            self.error = error if isinstance(error, dict) else {"message": str(error)}
        params = answer.get("kv_transfer_params")
        if isinstance(params, dict):
            self.kv_transfer_params = params
        if "prompt_token_ids" in answer:
            self._prompt(answer)

    def _prompt(self, holder: Mapping[str, Any]) -> None:
        ids = holder.get("prompt_token_ids")
        if isinstance(ids, list):
            self.prompt_token_ids = ids

    def _choice(self, choice: dict[str, Any]) -> None:
        reason = choice.get("finish_reason")
        if reason is not None and isinstance(reason, str):
            self.finish_reason = reason
        said = choice.get("delta") or choice.get("message")
        if isinstance(said, dict):
            content = said.get("content")
            if isinstance(content, str):
                self._texts.append(content)
            if said.get("tool_calls"):
                self._tool_calls(said["tool_calls"])
            if isinstance(said.get("function_call"), dict):
                self._function = self._function or _Call()
                _extend(self._function, said["function_call"])
        if isinstance(choice.get("text"), str):
            self._texts.append(choice["text"])
        if "prompt_token_ids" in choice:
            self._prompt(choice)
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self.token_ids += ids

    def _tool_calls(self, calls: Any) -> None:
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                index = call.get("index")
                place = index if isinstance(index, int) else number
                _extend(self._calls.setdefault(place, _Call()), call.get("function"))


def _extend(call: _Call, function: Any) -> None:
    if not isinstance(function, dict):
        return
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(name, str) and not call.name:
        call.name = name
    if isinstance(arguments, str):
        call.arguments.append(arguments)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
