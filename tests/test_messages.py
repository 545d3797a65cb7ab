"""Elements: what users may put into the PCollection."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from apache_beam_vllm_dynamo.messages import ChatRequest, CompletionRequest, OpenAIChatMessage


def test_a_message_takes_role_and_content_by_position_as_beams_does() -> None:
    message = OpenAIChatMessage('user', 'hello')
    assert (message.role, message.content) == ('user', 'hello')
    assert message == OpenAIChatMessage(role='user', content='hello')
    assert hash(message) == hash(OpenAIChatMessage('user', 'hello'))


def test_a_message_leaves_out_what_is_not_set() -> None:
    assert OpenAIChatMessage('user', 'hello').to_dict() == {'role': 'user', 'content': 'hello'}


def test_a_message_with_tool_calls_keeps_its_null_content() -> None:
    calls = [{'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]
    message = OpenAIChatMessage('assistant', None, tool_calls=calls)
    assert message.to_dict() == {'role': 'assistant', 'content': None, 'tool_calls': calls}


def test_a_tool_message_names_the_call_that_it_answers() -> None:
    message = OpenAIChatMessage('tool', '42', name='f', tool_call_id='a')
    assert message.to_dict() == {
        'role': 'tool',
        'content': '42',
        'name': 'f',
        'tool_call_id': 'a',
    }


@pytest.mark.parametrize(
    'element',
    [
        OpenAIChatMessage('user', [{'type': 'text', 'text': 'hello'}]),
        CompletionRequest('hello', {'max_tokens': 3}),
        ChatRequest([OpenAIChatMessage('user', 'hello')], {'temperature': 0}),
    ],
)
def test_elements_survive_pickling(element: object) -> None:
    assert pickle.loads(pickle.dumps(element)) == element


@pytest.mark.parametrize('element', [CompletionRequest('a'), ChatRequest([])])
def test_a_request_cannot_be_changed_and_has_no_arguments_by_default(
    element: CompletionRequest | ChatRequest,
) -> None:
    assert element.arguments == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        element.arguments = {'n': 2}  # type: ignore[misc]  # what the test is about
