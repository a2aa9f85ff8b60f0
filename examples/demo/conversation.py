"""A five-turn conversation of an agent that reads one document after another.

The model's weights are random, so its answers are words without sense; the tool calls come
from this script. All that is sent is real text, and each answer is sent back as it came.
"""

from dataclasses import dataclass, field
from typing import Any

from demo import text

TURNS = len(text.NAMES)
ANSWER_TOKENS = 48
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_document",
            "description": "Return the text of one document about the search service.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": list(text.NAMES)}},
                "required": ["name"],
            },
        },
    }
]
SYSTEM = (
    "You help the person who carries the pager. Read what there is before you answer, name the "
    "document that each of your statements comes from, and say what you do not know."
)
QUESTION = (
    "The search service was slow last night. Read the runbook below first, then the other "
    "documents, and tell me what happened and what should be done about it.\n\n"
)


@dataclass
class Conversation:
    """The messages so far."""

    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION + text.read(text.NAMES[0])},
        ]
    )
    answers: int = 0

    def request(self, model: str) -> dict[str, Any]:
        """Return the body of the next chat completion."""
        return {
            "model": model,
            "messages": self.messages,
            "tools": TOOLS,
            # The tools are described to the model, but its answer is plain text.
            "tool_choice": "none",
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "return_token_ids": True,
        }

    def answer(self, content: str) -> None:
        """Add the model's answer, and the tool call and result that the next turn begins with."""
        self.answers += 1
        message: dict[str, Any] = {"role": "assistant", "content": content}
        self.messages.append(message)
        if self.answers < TURNS:
            name, call = text.NAMES[self.answers], f"call_{self.answers}"
            arguments = '{"name": "' + name + '"}'
            function = {"name": "read_document", "arguments": arguments}
            message["tool_calls"] = [{"id": call, "type": "function", "function": function}]
            result = {"role": "tool", "tool_call_id": call, "content": text.read(name)}
            self.messages.append(result)
