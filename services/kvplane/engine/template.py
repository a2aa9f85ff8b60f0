"""The chat template: ChatML with tools, tool calls, and reasoning dropped from the past."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvplane.kernel.errors import InvalidField

ROLES = ("system", "developer", "user", "assistant", "tool")


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the prompt text of a conversation.

    As many templates do, it keeps an assistant's reasoning only after the last user
    message. InvalidField names the message that is not understood.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidField("continue_final_message", "cannot go with add_generation_prompt")
    parts: list[str] = []
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(f"<|im_start|>tools\n{listed}<|im_end|>\n")
    roles = [_role(i, message) for i, message in enumerate(messages)]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    for i, (role, message) in enumerate(zip(roles, messages, strict=True)):
        parts.append(f"<|im_start|>{role}\n{_body(i, role, message, i > last_user)}")
        if not (continue_final_message and i == len(messages) - 1):
            parts.append("<|im_end|>\n")
    if add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _role(index: int, message: Any) -> str:
    if not isinstance(message, Mapping):
        raise InvalidField(f"messages[{index}]", "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidField(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")
    return str(role)


def _body(index: int, role: str, message: Mapping[str, Any], keep_reasoning: bool) -> str:
    content = _text(f"messages[{index}].content", message.get("content"))
    if role != "assistant":
        return content
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if keep_reasoning and isinstance(reasoning, str):
        content = f"<think>\n{reasoning}\n</think>\n{content}"
    calls = message.get("tool_calls") or ()
    return content + "".join(
        _call(f"messages[{index}].tool_calls[{j}]", call) for j, call in enumerate(calls)
    )


def _text(field: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise InvalidField(field, "must be text or a list of text parts")


def _call(field: str, call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidField(field, "must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # As vLLM does: the template sees an object, so spacing is the template's own.
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise InvalidField(f"{field}.function.arguments", "must be JSON") from error
    body = {"name": function["name"], "arguments": arguments}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>\n"
