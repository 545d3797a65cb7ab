"""The outcome of one request: an answer as an ``openai`` object, or an error as data."""

from __future__ import annotations

import dataclasses
import json
from typing import TypeAlias

import pydantic
from openai.types import Completion
from openai.types.chat import ChatCompletion

from apache_beam_vllm_dynamo._requests import Endpoint
from apache_beam_vllm_dynamo._retry import RetryReason
from apache_beam_vllm_dynamo.errors import InferenceError

Response: TypeAlias = Completion | ChatCompletion


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A request that was answered.

    Attributes:
      response: What the server answered; fields that ``openai`` does not know are kept.
      latency_s: Seconds from the sending of the attempt that was answered to its last byte.
      queue_s: Seconds that the request waited for its place in the window.
      attempts: How many times it was sent.
      retried: Why it was sent again, one reason for each time.
      completed_at_ms: When the answer was complete, in milliseconds since 1970.
    """

    response: Response
    latency_s: float
    queue_s: float
    attempts: int
    retried: tuple[RetryReason, ...]
    completed_at_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A request that has no answer; the fields are those of :class:`Answer`.

    Attributes:
      error: Why.
      latency_s: Seconds that the last attempt took; 0 if there was none.
      queue_s: Seconds that the request waited for its place in the window.
      attempts: How many times it was sent; 0 if it was never fit to be.
      retried: Why it was sent again, one reason for each time.
      completed_at_ms: When it was given up, in milliseconds since 1970.
    """

    error: InferenceError
    latency_s: float
    queue_s: float
    attempts: int
    retried: tuple[RetryReason, ...]
    completed_at_ms: int


Outcome: TypeAlias = Answer | Failure


class MalformedResponseError(Exception):
    """A body of a response with status 200 that holds no answer."""


def parse_response(endpoint: Endpoint, body: bytes) -> Response:
    """Reads the body of a response with status 200.

    The models' own validator reads a body in 4 microseconds, their ``construct()`` in 50 to
    80. It is strict where servers are not (vLLM ends with reasons that OpenAI does not list),
    so what it refuses is constructed, if it has the shape that users index into.

    Raises:
      MalformedResponseError: It is no JSON, or not the shape of an answer.
    """
    try:
        if endpoint is Endpoint.CHAT:
            response: Response = ChatCompletion.model_validate_json(body)
        else:
            response = Completion.model_validate_json(body)
    except pydantic.ValidationError:
        response = _construct(endpoint, body)
    if not response.choices:
        raise MalformedResponseError('the answer has no choices')
    return response


def _construct(endpoint: Endpoint, body: bytes) -> Response:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedResponseError(f'the answer of {len(body)} bytes is no JSON') from None
    choices = value.get('choices') if isinstance(value, dict) else None
    if not isinstance(choices, list):
        raise MalformedResponseError('the answer has no list of choices')
    for choice in choices:
        if not isinstance(choice, dict) or not _has_content(endpoint, choice):
            raise MalformedResponseError(
                'a choice of the answer has no text and no message, or an odd reason'
            )
    if not _is_usage(value.get('usage')):
        raise MalformedResponseError('the usage in the answer holds no counts of tokens')
    if endpoint is Endpoint.CHAT:
        return ChatCompletion.construct(None, **value)
    return Completion.construct(None, **value)


def _is_usage(usage: object) -> bool:
    # What may be missing, but not be something else, for it is counted.
    if usage is None:
        return True
    if not isinstance(usage, dict):
        return False
    details = usage.get('prompt_tokens_details')
    if details is None:
        details = {}
    counts = (usage.get('prompt_tokens'), usage.get('completion_tokens'))
    return isinstance(details, dict) and all(
        count is None or type(count) is int for count in (*counts, details.get('cached_tokens'))
    )


def _has_content(endpoint: Endpoint, choice: dict[str, object]) -> bool:
    if not isinstance(choice.get('finish_reason'), (str, type(None))):
        return False
    if endpoint is Endpoint.CHAT:
        return isinstance(choice.get('message'), dict)
    return isinstance(choice.get('text'), str)
