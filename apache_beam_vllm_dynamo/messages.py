"""What one element of the PCollection may be.

For completions: a string, a list of token ids, or a :class:`CompletionRequest`. For chat: a
list of messages, or a :class:`ChatRequest`. The two request classes carry arguments of
their own, so that one PCollection may mix output lengths, JSON schemas or temperatures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

ContentPart: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OpenAIChatMessage:
    """One message of a conversation.

    Attributes:
      role: Who speaks: ``'system'``, ``'user'``, ``'assistant'`` or ``'tool'``.
      content: The text, or a list of parts as the OpenAI schema has them (text, images), or
        ``None`` for an assistant message that only calls tools.
      name: A name that tells speakers of one role apart.
      tool_calls: The tool calls that an assistant message made.
      tool_call_id: Which of those calls a ``'tool'`` message answers.
    """

    role: str
    content: str | Sequence[ContentPart] | None
    name: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    tool_call_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The message as the server expects it; what is not set is left out."""
        message: dict[str, Any] = {'role': self.role, 'content': self.content}
        for name in ('name', 'tool_calls', 'tool_call_id'):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


ChatMessage: TypeAlias = OpenAIChatMessage | Mapping[str, Any]


def message_fields(message: object) -> Mapping[str, Any] | None:
    """What a message says, whoever made it; ``None`` of what is no message.

    It may be a dict, one of ours, an answer's of the ``openai`` client, sent back to continue a
    conversation, or Beam's own class.
    """
    if isinstance(message, Mapping):
        return message
    if callable(to_dict := getattr(message, 'to_dict', None)):
        fields: Mapping[str, Any] = to_dict()
        return fields
    if hasattr(message, 'role') and hasattr(message, 'content'):
        return {'role': message.role, 'content': message.content}
    return None


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A prompt with arguments of its own.

    Attributes:
      prompt: The text, or the token ids.
      arguments: Keyword arguments of the ``openai`` client's ``completions.create()``, e.g.
        ``{'max_tokens': 200, 'extra_body': {'guided_json': {...}}}``. They win over the
        transform's ``inference_args``, one by one.
    """

    prompt: str | Sequence[int]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A conversation with arguments of its own.

    Attributes:
      messages: The conversation, oldest message first.
      arguments: Keyword arguments of the ``openai`` client's ``chat.completions.create()``,
        e.g. ``{'temperature': 0, 'response_format': {...}}``. They win over the transform's
        ``inference_args``, one by one.
    """

    messages: Sequence[ChatMessage]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


CompletionElement: TypeAlias = str | Sequence[int] | CompletionRequest
ChatElement: TypeAlias = Sequence[ChatMessage] | ChatRequest


def size_bytes(element: object) -> int:
    """How large an element is: its text in UTF-8, eight bytes for a number, keys not counted."""
    if isinstance(element, str):
        return len(element) if element.isascii() else len(element.encode('utf-8', 'replace'))
    if isinstance(element, (int, float)):
        return 8
    if isinstance(element, CompletionRequest):
        return size_bytes(element.prompt)
    if isinstance(element, ChatRequest):
        return size_bytes(element.messages)
    if isinstance(element, OpenAIChatMessage):
        return size_bytes(element.content) + size_bytes(element.tool_calls)
    if isinstance(element, Mapping):
        return sum(size_bytes(value) for value in element.values())
    if isinstance(element, Sequence):
        return sum(size_bytes(value) for value in element)
    return 0
