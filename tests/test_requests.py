"""Elements and arguments become HTTP requests, or errors that name the mend."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage

from apache_beam_vllm_dynamo._requests import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    Endpoint,
    PreparedRequest,
    RequestBuilder,
    validate_inference_args,
)
from apache_beam_vllm_dynamo.errors import ConfigurationError, ErrorKind, InferenceError
from apache_beam_vllm_dynamo.messages import ChatRequest, CompletionRequest, OpenAIChatMessage

COMPLETIONS, CHAT = Endpoint.COMPLETIONS, Endpoint.CHAT
ITSELF: list[object] = []
ITSELF.append(ITSELF)


def build(
    element: object,
    arguments: dict[str, Any] | None = None,
    endpoint: Endpoint = COMPLETIONS,
    *,
    under_dynamo: bool = True,
) -> PreparedRequest:
    built = RequestBuilder('model', endpoint, arguments, under_dynamo=under_dynamo).build(element)
    assert isinstance(built, PreparedRequest), built
    return built


def body_of(request: PreparedRequest) -> dict[str, Any]:
    body = json.loads(request.body)
    assert isinstance(body, dict)
    return body


def refusal(element: object, endpoint: Endpoint = COMPLETIONS) -> InferenceError:
    error = RequestBuilder('model', endpoint).build(element)
    assert isinstance(error, InferenceError), error
    assert (error.kind, error.status, error.attempts) == (ErrorKind.INVALID_REQUEST, None, 0)
    return error


# What an element may be.


def test_a_string_is_sent_with_the_documented_default_of_16_tokens() -> None:
    request = build('hello')
    assert request.target == '/v1/completions'
    assert body_of(request) == {'model': 'model', 'prompt': 'hello', 'max_tokens': 16}
    assert DEFAULT_COMPLETION_MAX_TOKENS == 16


def test_chat_has_no_default_of_its_own() -> None:
    request = build([OpenAIChatMessage('user', 'hello')], endpoint=CHAT)
    assert request.target == '/v1/chat/completions'
    assert body_of(request) == {
        'model': 'model',
        'messages': [{'role': 'user', 'content': 'hello'}],
    }


@pytest.mark.parametrize('ids', [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), [1, *np.array([2, 3])]])
def test_token_ids_may_come_as_any_sequence_of_integers(ids: object) -> None:
    assert body_of(build(ids))['prompt'] == [1, 2, 3]


def test_text_beyond_ascii_is_sent_as_it_is() -> None:
    request = build('größer als 🦙')
    assert '🦙'.encode() in request.body
    assert body_of(request)['prompt'] == 'größer als 🦙'


def test_messages_may_be_dicts_ours_beams_or_an_earlier_answers() -> None:
    @dataclasses.dataclass(frozen=True)
    class BeamsMessage:
        role: str
        content: str

    parts = [{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,AA=='}}]
    messages = [
        {'role': 'system', 'content': 'be short'},
        OpenAIChatMessage('user', parts),
        ChatCompletionMessage(role='assistant', content='yes'),
        BeamsMessage('user', 'why'),
    ]
    assert body_of(build(messages, endpoint=CHAT))['messages'] == [
        {'role': 'system', 'content': 'be short'},
        {'role': 'user', 'content': parts},
        {'role': 'assistant', 'content': 'yes'},
        {'role': 'user', 'content': 'why'},
    ]


def test_the_calls_of_an_earlier_answer_are_sent_back_as_they_came() -> None:
    call = {'id': '1', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
    answer = ChatCompletionMessage.model_validate(
        {'role': 'assistant', 'content': None, 'tool_calls': [call]}
    )
    calls: Any = answer.tool_calls
    again = OpenAIChatMessage('assistant', None, tool_calls=calls)
    plain = {'role': 'assistant', 'content': None, 'tool_calls': calls}
    assert (
        body_of(build([again, plain, answer], endpoint=CHAT))['messages']
        == [{'role': 'assistant', 'content': None, 'tool_calls': [call]}] * 3
    )


# Arguments.


def test_the_arguments_of_an_element_win_one_by_one() -> None:
    element = CompletionRequest('hello', {'max_tokens': 3, 'extra_body': {'guided_json': {}}})
    body = body_of(build(element, {'max_tokens': 100, 'temperature': 0.5}))
    assert body == {
        'model': 'model',
        'prompt': 'hello',
        'max_tokens': 3,
        'temperature': 0.5,
        'guided_json': {},
    }


def test_the_arguments_of_a_chat_request_win_too() -> None:
    element = ChatRequest([OpenAIChatMessage('user', 'a')], {'response_format': {'type': 'text'}})
    assert body_of(build(element, {'temperature': 0}, CHAT))['response_format'] == {'type': 'text'}


def test_one_element_leaves_nothing_for_the_next() -> None:
    builder = RequestBuilder('model', COMPLETIONS, {'seed': 1})
    builder.build(CompletionRequest('a', {'max_tokens': 3, 'extra_headers': {'X-A': '1'}}))
    request = builder.build('b')
    assert isinstance(request, PreparedRequest)
    assert body_of(request) == {'model': 'model', 'prompt': 'b', 'max_tokens': 16, 'seed': 1}
    assert request.headers == {}


def test_extra_body_wins_over_the_named_argument_as_in_the_openai_client() -> None:
    body = body_of(build('a', {'max_tokens': 1, 'extra_body': {'max_tokens': 2, 'top_k': 3}}))
    assert (body['max_tokens'], body['top_k']) == (2, 3)


def test_an_explicit_none_asks_for_no_limit() -> None:
    assert body_of(build('a', {'max_tokens': None}))['max_tokens'] is None


def test_stream_false_is_not_sent() -> None:
    assert 'stream' not in body_of(build('a', {'stream': False}))


def test_extra_headers_and_extra_query_go_where_they_belong() -> None:
    request = build(
        'a', {'extra_headers': {'X-Who': 'me'}, 'extra_query': {'q': 'a b', 'n': [1, 2]}}
    )
    assert request.headers == {'X-Who': 'me'}
    assert request.target == '/v1/completions?q=a+b&n=1&n=2'
    assert body_of(request) == {'model': 'model', 'prompt': 'a', 'max_tokens': 16}


def test_timeout_is_the_bound_of_one_attempt() -> None:
    assert build('a').timeout_s is None
    assert build('a', {'timeout': 3}).timeout_s == 3
    assert build(CompletionRequest('a', {'timeout': 5}), {'timeout': 3}).timeout_s == 5
    assert build('a', {'timeout': None}).timeout_s == math.inf


def test_the_openai_clients_timeout_object_counts_by_its_wait_for_the_answer() -> None:
    class Timeout:
        connect = 1.0
        read = 7.0

    assert build('a', {'timeout': Timeout()}).timeout_s == 7


def test_the_repr_of_a_request_shows_neither_prompt_nor_key() -> None:
    request = build('SECRET', {'extra_headers': {'Authorization': 'Bearer KEY'}})
    assert 'SECRET' not in repr(request)
    assert 'KEY' not in repr(request)


GOOD: list[dict[str, Any] | None] = [
    None,
    {},
    {'max_tokens': 5, 'temperature': 0.0, 'stop': ['a', 'b'], 'seed': None},
    {'logit_bias': {50256: -100}},
    {'echo': False, 'best_of': 1, 'suffix': None, 'stream': False},
    {'n': 2, 'temperature': 0.7},
    {'extra_body': {'guided_choice': ('a', 'b')}},
]


@pytest.mark.parametrize('arguments', GOOD)
def test_arguments_that_work_are_let_through(arguments: dict[str, Any] | None) -> None:
    validate_inference_args(arguments, COMPLETIONS, under_dynamo=True)


BAD: list[tuple[Any, str]] = [
    ({'model': 'other'}, r"inference_args\['model'\] is 'other'.*remove it"),
    ({'prompt': 'a'}, r"\['prompt'\]"),
    ({'messages': []}, r"\['messages'\]"),
    ({'stream': True}, r"\['stream'\] is True.*one answer"),
    ({'stream_options': {}}, r"\['stream_options'\]"),
    ({'extra_body': {'stream': True}}, r"inference_args\['extra_body'\]\['stream'\] is True"),
    ({'extra_body': {'model': 'x'}}, r"\['extra_body'\]\['model'\]"),
    ({'extra_body': [1]}, r"\['extra_body'\] is a list: it must be a dict"),
    ({'temperature': math.nan}, r"\['temperature'\] is nan: JSON has no such number"),
    ({'stop': {'a'}}, r"\['stop'\] is a set, which is not JSON"),
    ({'extra_body': {'a': [0, {'b': b'x'}]}}, r"\['extra_body'\]\['a'\]\[1\]\['b'\] is a bytes"),
    ({'logit_bias': {1.5: 2}}, r"\['logit_bias'\] has a key of the type float"),
    ({'user': '\ud800'}, r"\['user'\] holds half of a surrogate pair"),
    ({'stop': ITSELF}, r'nested too deeply, or contains itself'),
    ({'timeout': 0}, r"\['timeout'\] is 0: it must be a number of seconds above 0"),
    ({'timeout': 'soon'}, r"\['timeout'\] is 'soon'"),
    ({'extra_headers': {'X-A': 1}}, r"\['extra_headers'\]\['X-A'\] must be a string"),
    ({'extra_headers': {'X-A': 'a\r\nb'}}, r"\['X-A'\] must be a string without line breaks"),
    ({'extra_headers': {'Content-Length': '1'}}, r"\['Content-Length'\] is set by the client"),
    ({'extra_query': {'a': {1, 2}}}, r"\['extra_query'\]\['a'\] is a set"),
    ({1: 2}, r'inference_args has the key 1: keys must be strings'),
    ('max_tokens=3', r"inference_args is 'max_tokens=3': it must be a dict"),
]


@pytest.mark.parametrize(('arguments', 'text'), BAD)
@pytest.mark.parametrize('under_dynamo', [True, False])
def test_arguments_that_cannot_work_are_refused_by_name(
    arguments: Any, text: str, *, under_dynamo: bool
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        validate_inference_args(arguments, CHAT, under_dynamo=under_dynamo)


IGNORED_BY_DYNAMO: list[tuple[dict[str, Any], str]] = [
    ({'echo': True}, "'echo' is True: Dynamo ignores it silently"),
    ({'suffix': 'end'}, "'suffix' is a str: Dynamo ignores it silently"),
    ({'best_of': 3}, "'best_of' is 3: Dynamo ignores it silently"),
    ({'extra_body': {'prompt_logprobs': 0}}, "'prompt_logprobs' is 0: Dynamo ignores it"),
    ({'extra_body': {'priority': 1}}, "'priority' is 1: Dynamo refuses it"),
    ({'n': 2, 'temperature': 0}, "'n' is 2 with 'temperature' 0"),
    ({'n': 129}, "'n' is 129: Dynamo takes up to 128"),
    ({'max_tokens': 0}, "'max_tokens' is 0: it must be at least 1"),
    ({'response_format': {'type': 'json_object'}}, "'response_format' is for chat alone"),
]


@pytest.mark.parametrize(('arguments', 'text'), IGNORED_BY_DYNAMO)
def test_what_dynamo_ignores_or_refuses_is_refused_under_dynamo_alone(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        validate_inference_args(arguments, COMPLETIONS, under_dynamo=True)
    validate_inference_args(arguments, COMPLETIONS, under_dynamo=False)


def test_response_format_is_fine_for_chat_under_dynamo() -> None:
    arguments = {'response_format': {'type': 'json_object'}}
    validate_inference_args(arguments, CHAT, under_dynamo=True)


@pytest.mark.parametrize(
    'headers', [{'Authorization': 'KEY\n'}, [('Authorization', 'KEY')], 'Authorization: KEY']
)
def test_a_key_in_a_header_is_never_in_the_error(headers: object) -> None:
    with pytest.raises(ConfigurationError, match='extra_headers') as caught:
        validate_inference_args({'extra_headers': headers}, CHAT, under_dynamo=True)
    assert 'KEY' not in str(caught.value)


# Elements that no server could answer.

BAD_PROMPTS: list[tuple[object, str]] = [
    (None, 'a NoneType, not a prompt'),
    (7, 'a int, not a prompt'),
    (b'bytes', 'a bytes, not a prompt'),
    ({'prompt': 'a'}, 'a dict, not a prompt'),
    ('', 'empty'),
    ([], 'empty'),
    (['a', 'b'], 'holds str'),
    ([1, True], 'holds bool'),
    ([1, 2.0], 'holds float'),
    ([np.int64(1), np.float32(2), np.bool_(1)], 'holds bool, float32'),
    ([1, -1], 'A token id is -1'),
    ('\ud800', 'the prompt holds half of a surrogate pair'),
    (ChatRequest([{'role': 'user', 'content': 'a'}]), 'takes a CompletionRequest'),
    (CompletionRequest('a', {'model': 'x'}), "arguments['model'] is 'x'"),
    (CompletionRequest('a', {'temperature': math.inf}), "arguments['temperature'] is inf"),
    (CompletionRequest('a', {'echo': True}), "'echo' is True"),
    (CompletionRequest('a', 3), 'arguments is a int'),  # type: ignore[arg-type]  # what it is about
]


@pytest.mark.parametrize(('element', 'text'), BAD_PROMPTS)
def test_a_prompt_that_cannot_be_sent_is_an_error_of_that_element(
    element: object, text: str
) -> None:
    assert text in refusal(element).message


BAD_CONVERSATIONS: list[tuple[object, str]] = [
    ('hello', 'a str, not a conversation'),
    (OpenAIChatMessage('user', 'a'), 'a list of one'),
    ({'role': 'user', 'content': 'a'}, 'a dict, not a conversation'),
    ([], 'empty'),
    (['hello'], 'Message 0 is a str'),
    ([{'role': 'user', 'content': 'a'}, {'content': 'b'}], 'Message 1 has no role'),
    ([{'role': 'user', 'content': {1, 2}}], "the messages[0]['content'] is a set"),
    ([{'role': 'user', 'content': math.nan}], "the messages[0]['content'] is nan"),
    ([{'role': 'user', 'content': 'a\udfff'}], 'half of a surrogate pair'),
    ([{'role': 'user', 'content': ITSELF}], 'nested too deeply, or contains itself'),
    (CompletionRequest('a'), 'takes a ChatRequest'),
]


@pytest.mark.parametrize(('element', 'text'), BAD_CONVERSATIONS)
def test_a_conversation_that_cannot_be_sent_is_an_error_of_that_element(
    element: object, text: str
) -> None:
    assert text in refusal(element, CHAT).message


def test_an_element_that_asks_for_two_equal_answers_is_refused_across_both_arguments() -> None:
    built = RequestBuilder('model', COMPLETIONS, {'temperature': 0}).build(
        CompletionRequest('a', {'n': 2})
    )
    assert isinstance(built, InferenceError)
    assert "'n' is 2 with 'temperature' 0" in built.message


def test_the_native_server_decides_itself_about_an_empty_prompt() -> None:
    """Many tokenizers begin every prompt with a token of their own, so it is not empty there."""
    assert body_of(build('', under_dynamo=False))['prompt'] == ''


@pytest.mark.parametrize('name', ['prompt', 'messages', 'suffix', 'extra_body'])
def test_the_error_of_an_argument_does_not_show_what_may_be_a_prompt(name: str) -> None:
    assert 'SECRET' not in refusal(CompletionRequest('a', {name: 'SECRET'})).message
    by_mistake: Any = 'SECRET'
    assert 'SECRET' not in refusal(CompletionRequest('a', by_mistake)).message


def test_the_error_of_a_bad_element_does_not_show_its_prompt() -> None:
    assert 'SECRET' not in refusal('SECRET\ud800').message
    assert (
        'SECRET' not in refusal([{'role': 'user', 'content': ['SECRET', math.nan]}], CHAT).message
    )


class _Broken:
    def to_dict(self) -> dict[str, str]:
        raise KeyError('secret')


def test_an_element_whose_own_code_fails_is_an_error_of_its_own() -> None:
    error = RequestBuilder('m', Endpoint.CHAT).build([_Broken()])
    assert isinstance(error, InferenceError)
    assert error.kind is ErrorKind.INVALID_REQUEST
    assert 'KeyError' in error.message
    assert 'secret' not in error.message


def test_a_body_begins_with_what_the_model_reads_in_its_order() -> None:
    """Requests are put in order by their bodies, and compared up to the end of the prompt."""
    arguments = {'temperature': 0, 'tools': [{'type': 'function'}]}
    chat = RequestBuilder('m', Endpoint.CHAT, arguments)
    request = chat.build([{'role': 'user', 'content': 'hi'}])
    assert isinstance(request, PreparedRequest)
    assert list(json.loads(request.body)) == ['model', 'tools', 'messages', 'temperature']
    assert request.body[: request.prompt_bytes].endswith(b'"content": "hi"}]')
    plain = RequestBuilder('m', Endpoint.CHAT).build([{'role': 'user', 'content': 'hi'}])
    assert isinstance(plain, PreparedRequest)
    assert plain.body[plain.prompt_bytes :] == b'}'
