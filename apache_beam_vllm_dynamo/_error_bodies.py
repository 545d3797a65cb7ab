"""Pure: what the bodies of error responses say, in the shapes that servers give them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorBody:
    """What a server said about a request that it did not answer.

    Attributes:
      message: Its words; empty if it had none.
      type: Its name for the kind of error.
      param: Which parameter vLLM complains about.
      details: What Dynamo adds as data.
    """

    message: str = ''
    type: str = ''
    param: str = ''
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parse_error(body: bytes) -> ErrorBody:
    """Reads Dynamo's flat error body, vLLM's nested one, FastAPI's, or plain text."""
    text = body.decode(errors='replace').strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ErrorBody(message=text)
    if isinstance(value, dict) and isinstance(value.get('error'), dict):
        value = value['error']
    if not isinstance(value, dict):
        return ErrorBody(message=text)
    message = value.get('message', value.get('detail', value.get('error', '')))
    details = value.get('details')
    return ErrorBody(
        message if isinstance(message, str) else json.dumps(message),
        str(value.get('type') or ''),
        str(value.get('param') or ''),
        details if isinstance(details, dict) else {},
    )


# vLLM's own server has the numbers in its sentence alone. Each pattern asks for the words
# around a number, so that no other number of the sentence can be taken for it.
_LIMIT = re.compile(r'(?:context length(?: is(?: only)?| of)?|model length of) \(?(\d+)')
_ACTUAL = tuple(
    re.compile(pattern)
    for pattern in (
        r'contains (?:at least )?(\d+) input tokens',
        r'(?:passed|has) (\d+) input tokens',
        r'prompt \(length (\d+)\)',
        r'\((\d+) in the (?:messages|prompt)',
    )
)


def too_long(said: ErrorBody) -> dict[str, object] | None:
    """The token counts of a refusal for length; ``None`` if it is none."""
    if said.details.get('type') == 'context_length':
        return {key: said.details[key] for key in ('limit', 'actual') if key in said.details}
    limit = _LIMIT.search(said.message)
    found = (pattern.search(said.message) for pattern in _ACTUAL)
    actual = next((match for match in found if match), None)
    if said.param not in ('input_tokens', 'input_text') and not (limit and actual):
        return None
    lengths: dict[str, object] = {}
    if limit:
        lengths['limit'] = int(limit[1])
    if actual:
        lengths['actual'] = int(actual[1])
    return lengths


def length_text(lengths: Mapping[str, object], message: str) -> str:
    """Says by how much a prompt is too long, or the message if that is not known."""
    if 'limit' in lengths and 'actual' in lengths:
        return (
            f'{lengths["actual"]} tokens in the prompt, but the model takes {lengths["limit"]}, '
            'with the answer'
        )
    return message


def excerpt(message: str, chars: int) -> str:
    """The beginning of a message, on one line; empty for ``chars`` of 0."""
    message = ' '.join(message.split())
    if len(message) <= chars:
        return message
    return message[:chars].rstrip() + '...' if chars else ''
