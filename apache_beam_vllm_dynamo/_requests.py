"""Pure: an element and its arguments become one HTTP request, or an error as data.

The arguments are those that Beam users know: the keyword arguments of the ``openai``
client's ``create()``. Nothing here sends anything.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import pydantic

from apache_beam_vllm_dynamo.errors import ConfigurationError, ErrorKind, InferenceError
from apache_beam_vllm_dynamo.messages import ChatRequest, CompletionRequest, message_fields

# What OpenAI and vLLM document for completions. Dynamo has no default and would generate
# until the context is full.
DEFAULT_COMPLETION_MAX_TOKENS = 16
# Dynamo refuses more choices for one request.
DYNAMO_MAX_CHOICES = 128
_SHOWN_CHARS = 80  # of a wrong value
# Of these no error shows a value, for it may be a prompt or a key.
_NEVER_SHOWN = frozenset(
    {'arguments', 'extra_body', 'extra_headers', 'messages', 'prompt', 'suffix'}
)


class Endpoint(enum.StrEnum):
    """Which of the server's two request paths a handler uses."""

    COMPLETIONS = '/v1/completions'
    CHAT = '/v1/chat/completions'


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request, ready to be sent.

    Attributes:
      endpoint: Which kind of answer to expect.
      target: Path and query, to append to the server's base URL.
      body: The JSON body, encoded. It begins with the model and what the model reads, in the
        order in which it is read, so that those of prompts that begin alike begin alike.
      prompt_bytes: How long the part of the body is that ends with the prompt.
      headers: Headers beyond ``Content-Type``.
      timeout_s: Bound of one attempt in seconds; ``None`` for the client's own.
    """

    endpoint: Endpoint
    target: str
    body: bytes = dataclasses.field(repr=False)
    prompt_bytes: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    timeout_s: float | None = None


_OWNED = {
    'model': 'the handler names its own model; remove it',
    'prompt': 'the element is the prompt; remove it',
    'messages': 'the element holds the messages; remove it',
    'stream_options': 'answers are never streamed; remove it',
}
# Dynamo answers 200 as if these had been heeded, or 400 for every element.
_UNKNOWN_TO_DYNAMO = {
    'echo': 'Dynamo ignores it silently; prepend the prompt to the answer yourself',
    'suffix': 'Dynamo ignores it silently; put it into the prompt',
    'best_of': 'Dynamo ignores it silently; use n and choose among the answers',
    'prompt_logprobs': 'Dynamo ignores it silently; use the native server (use_dynamo=False)',
    'priority': 'Dynamo refuses it; remove it, or use the native server (use_dynamo=False)',
}
_HARMLESS = {'echo': (False,), 'suffix': ('',), 'best_of': (1,), 'priority': (0,)}
_HEADERS_OF_THE_CONNECTION = frozenset(
    {'connection', 'content-length', 'content-type', 'host', 'transfer-encoding'}
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Arguments:
    """Checked arguments, sorted by where they go."""

    fields: Mapping[str, Any]
    headers: Mapping[str, str]
    query: Mapping[str, Any]
    timeout_s: float | None

    def over(self, base: _Arguments) -> _Arguments:
        """These arguments on top of others, one by one."""
        return _Arguments(
            {**base.fields, **self.fields},
            {**base.headers, **self.headers},
            {**base.query, **self.query},
            base.timeout_s if self.timeout_s is None else self.timeout_s,
        )


def validate_inference_args(
    inference_args: Mapping[str, Any] | None, endpoint: Endpoint, *, under_dynamo: bool
) -> None:
    """Checks a transform's arguments before any job starts.

    Raises:
      ConfigurationError: An argument cannot work; the text names it, its value and the mend.
    """
    _check_together(
        _sort(inference_args, 'inference_args').fields, endpoint, under_dynamo=under_dynamo
    )


class RequestBuilder:
    """Builds the requests of one handler call.

    Args:
      model_name: The name that the server knows the model by.
      endpoint: Where the requests go.
      inference_args: Arguments for every element.
      under_dynamo: Whether Dynamo's frontend answers, not vLLM's own server.

    Raises:
      ConfigurationError: ``inference_args`` cannot work.
    """

    def __init__(
        self,
        model_name: str,
        endpoint: Endpoint,
        inference_args: Mapping[str, Any] | None = None,
        *,
        under_dynamo: bool = True,
    ) -> None:
        self._model_name = model_name
        self._endpoint = endpoint
        self._under_dynamo = under_dynamo
        defaults: dict[str, Any] = {}
        if endpoint is Endpoint.COMPLETIONS:
            defaults['max_tokens'] = DEFAULT_COMPLETION_MAX_TOKENS
        arguments = _sort(inference_args, 'inference_args').over(_Arguments(defaults, {}, {}, None))
        _check_together(arguments.fields, endpoint, under_dynamo=under_dynamo)
        self._arguments = arguments

    def build(self, element: object) -> PreparedRequest | InferenceError:
        """The request of one element, or why there cannot be one."""
        try:
            return self._build(element)
        except ConfigurationError as error:
            return InferenceError(ErrorKind.INVALID_REQUEST, None, str(error), attempts=0)
        except Exception as error:  # noqa: BLE001 - an element of the user's may raise anything
            message = f'The element cannot be read: its own code raised a {type(error).__name__}.'
            return InferenceError(ErrorKind.INVALID_REQUEST, None, message, attempts=0)

    def _build(self, element: object) -> PreparedRequest:
        arguments = self._arguments
        own: Mapping[str, Any] | None = None
        content: object = element
        if isinstance(element, CompletionRequest):
            content, own = element.prompt, element.arguments
        elif isinstance(element, ChatRequest):
            content, own = element.messages, element.arguments
        if isinstance(element, (ChatRequest, CompletionRequest)):
            self._check_request_class(element)
        if own:
            arguments = _sort(own, 'arguments').over(arguments)
            _check_together(arguments.fields, self._endpoint, under_dynamo=self._under_dynamo)
        body: dict[str, Any] = {'model': self._model_name}
        if self._endpoint is Endpoint.COMPLETIONS:
            body['prompt'] = _prompt(content, under_dynamo=self._under_dynamo)
        else:
            if 'tools' in arguments.fields:
                body['tools'] = arguments.fields['tools']
            body['messages'] = _messages(content)
        rest = {name: value for name, value in arguments.fields.items() if name not in body}
        target = str(self._endpoint.value)
        if arguments.query:
            target += '?' + urlencode(arguments.query, doseq=True)
        encoded = prompt = _encode(body)
        if rest:
            encoded = prompt[:-1] + b', ' + _encode(rest)[1:]
        return PreparedRequest(
            self._endpoint,
            target,
            encoded,
            len(prompt) - 1,
            arguments.headers,
            arguments.timeout_s,
        )

    def _check_request_class(self, element: CompletionRequest | ChatRequest) -> None:
        wanted = CompletionRequest if self._endpoint is Endpoint.COMPLETIONS else ChatRequest
        if not isinstance(element, wanted):
            raise ConfigurationError(
                f'The element is a {type(element).__name__}, but this handler takes a '
                f'{wanted.__name__}: use the other handler, or the other class.'
            )


def _prompt(content: object, *, under_dynamo: bool) -> object:
    if isinstance(content, str):
        if not content and under_dynamo:
            raise ConfigurationError('The prompt is empty: filter such elements out.')
        return content
    if hasattr(content, 'tolist'):  # an array of token ids, as tokenizers return them
        content = content.tolist()
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise ConfigurationError(
            f'The element is a {type(content).__name__}, not a prompt: it must be a string, a '
            'list of token ids or a CompletionRequest.'
        )
    if not content:
        raise ConfigurationError('The list of token ids is empty: filter such elements out.')
    if set(map(type, content)) != {int}:
        content = _whole_numbers(content)
    if min(content) < 0:
        raise ConfigurationError(f'A token id is {min(content)}: ids start at 0.')
    return content if isinstance(content, list) else list(content)


def _whole_numbers(items: Sequence[object]) -> list[int]:
    numbers: list[int] = []
    refused: set[str] = set()
    for item in items:
        try:  # NumPy's integers and a tensor's, too
            numbers.append(operator.index(item))  # type: ignore[arg-type]  # it is being found out
        except TypeError:
            refused.add(type(item).__name__)
        else:
            if isinstance(item, bool):
                refused.add('bool')
    if refused:
        raise ConfigurationError(
            f'A list of token ids holds {", ".join(sorted(refused))}: it must hold integers alone. '
            'One element is one prompt, so a list of strings must be several elements.'
        )
    return numbers


def _messages(content: object) -> list[Mapping[str, Any]]:
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes, bytearray)):
        raise ConfigurationError(
            f'The element is a {type(content).__name__}, not a conversation: it must be a list of '
            'messages or a ChatRequest. A single message goes into a list of one.'
        )
    if not content:
        raise ConfigurationError('The list of messages is empty: filter such elements out.')
    return [_message(message, index) for index, message in enumerate(content)]


def _message(message: object, index: int) -> Mapping[str, Any]:
    fields = message_fields(message)
    if fields is None:
        raise ConfigurationError(
            f'Message {index} is a {type(message).__name__}: it must be a dict or an '
            'OpenAIChatMessage.'
        )
    role = fields.get('role')
    if not isinstance(role, str) or not role:
        raise ConfigurationError(f"Message {index} has no role: it must be e.g. 'user'.")
    return fields


def _sort(arguments: Mapping[str, Any] | None, where: str) -> _Arguments:
    if arguments is None:
        return _Arguments({}, {}, {}, None)
    _require_mapping(arguments, where, where)
    fields = dict(arguments)
    headers = fields.pop('extra_headers', None) or {}
    query = fields.pop('extra_query', None) or {}
    extra_body = fields.pop('extra_body', None) or {}
    timeout_s = _timeout(fields.pop('timeout'), where) if 'timeout' in fields else None
    for name, value in (('headers', headers), ('query', query), ('body', extra_body)):
        _require_mapping(value, f'{where}[{"extra_" + name!r}]', 'extra_' + name)
    _check_headers(headers, f"{where}['extra_headers']")
    for part, path in ((fields, where), (extra_body, f"{where}['extra_body']")):
        for name, mend in _OWNED.items():
            if name in part:
                raise ConfigurationError(f'{path}[{name!r}] is {_shown(part[name], name)}: {mend}.')
        if part.get('stream'):
            raise ConfigurationError(
                f"{path}['stream'] is {_shown(part['stream'])}: an element has one answer; remove "
                'it.'
            )
        problem = find_not_json(part, path)
        if problem:
            raise ConfigurationError(problem)
    problem = find_not_json(query, f"{where}['extra_query']")
    if problem:
        raise ConfigurationError(problem)
    fields.update(extra_body)
    fields.pop('stream', None)
    return _Arguments(fields, headers, query, timeout_s)


def _require_mapping(value: object, path: str, name: str = '') -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f'{path} is {_shown(value, name)}: it must be a dict.')
    for key in value:
        if not isinstance(key, str):
            raise ConfigurationError(f'{path} has the key {_shown(key)}: keys must be strings.')


def _check_headers(headers: Mapping[str, Any], path: str) -> None:
    # A value may be a key, so no text shows one.
    for name, value in headers.items():
        if name.lower() in _HEADERS_OF_THE_CONNECTION:
            raise ConfigurationError(f'{path}[{name!r}] is set by the client itself: remove it.')
        if not isinstance(value, str) or not (name + value).isprintable():
            raise ConfigurationError(
                f'{path}[{name!r}] must be a string without line breaks, not a '
                f'{type(value).__name__}.'
            )


def _timeout(value: object, where: str) -> float:
    # The openai client also takes an object with one bound for each phase, of which `read`
    # is the wait for the answer; None means no bound to it.
    seconds = getattr(value, 'read', value)
    if seconds is None:
        return math.inf
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0:
        return float(seconds)
    raise ConfigurationError(
        f"{where}['timeout'] is {_shown(value)}: it must be a number of seconds above 0."
    )


def _check_together(fields: Mapping[str, Any], endpoint: Endpoint, *, under_dynamo: bool) -> None:
    """Checks that need all arguments of a request at once."""
    if not under_dynamo:
        return
    for name, mend in _UNKNOWN_TO_DYNAMO.items():
        value = fields.get(name)
        if value is not None and not any(value == harmless for harmless in _HARMLESS.get(name, ())):
            raise ConfigurationError(f'{name!r} is {_shown(value, name)}: {mend}.')
    choices = fields.get('n')
    if isinstance(choices, int) and choices > 1:
        if fields.get('temperature') == 0:
            raise ConfigurationError(
                f"'n' is {choices} with 'temperature' 0: all answers would be equal, and Dynamo "
                'refuses it. Raise the temperature, or ask for one.'
            )
        if choices > DYNAMO_MAX_CHOICES:
            raise ConfigurationError(f"'n' is {choices}: Dynamo takes up to {DYNAMO_MAX_CHOICES}.")
    max_tokens = fields.get('max_tokens')
    if isinstance(max_tokens, (int, float)) and max_tokens < 1:
        raise ConfigurationError(f"'max_tokens' is {max_tokens}: it must be at least 1.")
    if endpoint is Endpoint.COMPLETIONS and fields.get('response_format') is not None:
        raise ConfigurationError(
            "'response_format' is for chat alone under Dynamo: pass extra_body={'guided_json': "
            'SCHEMA}, or use the chat handler.'
        )


def find_not_json(value: object, path: str) -> str:
    """Says where a value cannot be written as JSON, and why; empty if it can."""
    if value is None or isinstance(value, (bool, int)):
        return ''
    if isinstance(value, float):
        if math.isfinite(value):
            return ''
        return f'{path} is {value}: JSON has no such number.'
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f'{path} holds half of a surrogate pair, which is not text: replace it.'
        return ''
    try:
        return _find_in_container(value, path)
    except RecursionError:
        return f'{path[:_SHOWN_CHARS]} is nested too deeply, or contains itself.'


def _find_in_container(value: object, path: str) -> str:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                return f'{path} has a key of the type {type(key).__name__}: keys must be strings.'
            problem = find_not_json(key, f'a key of {path}') or find_not_json(
                item, f'{path}[{key!r}]'
            )
            if problem:
                return problem
        return ''
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            problem = find_not_json(item, f'{path}[{index}]')
            if problem:
                return problem
        return ''
    if isinstance(value, pydantic.BaseModel):
        return ''
    return (
        f'{path} is a {type(value).__name__}, which is not JSON: pass strings, numbers, booleans, '
        'lists and dicts.'
    )


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, default=_plain)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        # The slow search is only for the text; the values themselves stay out of it.
        key = next((key for key in ('prompt', 'messages') if key in body), None)
        problem = find_not_json(body[key], f'the {key}') if key else ''
        problem = problem or f'The request is not JSON: {error}'
        raise ConfigurationError(problem) from error


def _plain(value: object) -> object:
    """Lets other classes than dict and list be written, those of the ``openai`` client too."""
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode='json', by_alias=True, exclude_unset=True)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    raise TypeError(f'{type(value).__name__} is not JSON')


def _shown(value: object, name: str = '') -> str:
    if name in _NEVER_SHOWN or isinstance(value, (list, tuple)):
        return f'a {type(value).__name__}'
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + '...'
