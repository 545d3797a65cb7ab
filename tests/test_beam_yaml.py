"""Pipelines in Beam YAML: the handlers behind RunInference, and the transform LLMInference.

On simulated engines behind etcd, frontend and router, and where a test needs an answer that
means something, on a fake server.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
import yaml
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.typehints.schemas import named_fields_from_element_type
from apache_beam.yaml import main
from apache_beam.yaml.yaml_provider import parse_providers
from apache_beam.yaml.yaml_transform import YamlTransform, expand_jinja

from apache_beam_vllm_dynamo import (
    ConfigurationError,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
    beam_yaml,
)
from tests.fake_server import FakeServer
from tests.support.pipelines import collect, collected
from tests.support.processes import ROOT
from tests.support.stacks import MODEL
from tests.test_inference import OnServer

pytestmark = pytest.mark.usefixtures('nothing_left')

EXAMPLE = ROOT / 'examples' / 'chat.yaml'
OPTIONS = PipelineOptions(
    ['--runner=FnApiRunner', '--yaml_experimental_features=ML'], pickle_library='cloudpickle'
)
PROVIDERS: Any = yaml.safe_load("""
- type: python
  config: {}
  transforms:
    LLMInference: apache_beam_vllm_dynamo.beam_yaml.llm_inference
""")

CHAT: dict[str, Any] = {'type': 'VLLMChatModelHandler', 'config': {'model_name': 'm'}}
SIMULATED = {
    'model_name': MODEL,
    'use_dynamo': True,
    'dynamo_runtime_config': {
        'num_engines': 1,
        'engine_kind': 'simulated',
        'simulation_kwargs': {'speedup-ratio': 1000},
    },
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """What the handlers take for their server."""
    with FakeServer() as fake:
        for handler in (VLLMChatModelHandler, VLLMCompletionsModelHandler):
            monkeypatch.setattr(handler, 'load_model', lambda _: OnServer(fake, window=8))
        yield fake


def ask(
    elements: list[Any], kind: str = 'LLMInference', **config: Any
) -> tuple[list[dict[str, Any]], list[tuple[str, Any]]]:
    """What comes out of one transform, each row as a dict, and the fields that it declares."""
    transform = YamlTransform(
        json.dumps({'type': kind, 'config': config}), parse_providers('', PROVIDERS)
    )
    collected.clear()
    with beam.Pipeline(options=OPTIONS) as pipeline:
        rows = pipeline | beam.Create(elements)
        outputs = rows | transform
        if not isinstance(outputs, dict):
            outputs = {'good': outputs}
        for name, output in outputs.items():
            _ = (
                output
                | f'{name} as dicts' >> beam.Map(as_dict, name)
                | f'{name}' >> beam.Map(collect)
            )
    fields: list[tuple[str, Any]] = named_fields_from_element_type(outputs['good'].element_type)
    return list(collected), fields


def as_dict(row: Any, output: str) -> dict[str, Any]:
    return {'output': output, **row._asdict()}


def by_id(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {row['id']: row for row in rows}


def refusal(elements: list[Any], kind: str = 'LLMInference', **config: Any) -> str:
    with pytest.raises(ValueError, match=r'.') as refused:
        ask(elements, kind, **config)
    return str(refused.value)


def test_the_example_needs_no_more_than_its_first_lines_give() -> None:
    """What they leave out has a default."""
    lines = EXAMPLE.read_text().splitlines()
    command = ' '.join(line.strip('#\\ ') for line in lines[: lines.index('')])
    given = set(re.findall(r'--(model|input|output|engine_kind)=', command.partition('OUTPUT')[0]))
    assert given == {'model', 'input', 'output'}
    made = yaml.safe_load(expand_jinja(EXAMPLE.read_text(), dict.fromkeys(given, 'x'), []))
    [ask] = [step for step in made['pipeline']['transforms'] if step['name'] == 'Ask']
    handler = ask['config']['model_handler']['config']
    assert handler['model_name'] == 'x'
    assert handler['dynamo_runtime_config']['engine_kind'] == 'gpu'


ROWS = [beam.Row(id=i, prompt=f'prompt number {i}') for i in range(4)]


def test_the_example_answers_conversations_and_keeps_what_has_no_answer_apart(
    tmp_path: pathlib.Path,
) -> None:
    """By the program and with the flags of its first lines; no line of the input is lost."""
    conversation = {'id': 1, 'messages': [{'role': 'user', 'content': 'Hi'}], 'tags': ['a', None]}
    lines = ['{"id": 0, "prompt": "Hello"}', json.dumps(conversation), '{"id": 2, "prompt": 7}']
    lines += ['{"id": 3}', 'no JSON', '[4]']
    (tmp_path / 'in.jsonl').write_text('\n'.join(lines))
    main.run(
        [
            f'--yaml_pipeline_file={EXAMPLE}',
            '--jinja_variable_flags=model,input,output,engine_kind', f'--model={MODEL}',
            f'--input={tmp_path}/in.jsonl', f'--output={tmp_path}/out',
            '--engine_kind=simulated', '--runner=FnApiRunner',
        ]
    )  # fmt: skip
    [answers] = tmp_path.glob('out-?????-of-?????')
    answered = by_id([json.loads(line) for line in answers.read_text().splitlines()])
    assert answered.keys() == {0, 1}
    assert answered[1] == conversation | {'answer': answered[1]['answer']}
    for row in answered.values():
        assert row['answer'].keys() == set(beam_yaml.AnswerRow._fields)
        assert row['answer']['completion']
        assert row['answer']['error'] is None
    [errors] = tmp_path.glob('out-errors-?????-of-?????')
    failed = [json.loads(line) for line in errors.read_text().splitlines()]
    assert {row['line'] for row in failed if 'line' in row} == {'no JSON', '[4]'}
    unanswered = by_id([row for row in failed if 'line' not in row])
    assert unanswered.keys() == {2, 3}
    assert unanswered[2]['error'].startswith('invalid_request')
    assert unanswered[3]['error'] == "KeyError('prompt')"


def test_beams_run_inference_takes_a_chat_handler_with_a_typed_config() -> None:
    rows, fields = ask(
        ROWS,
        'RunInference',
        model_handler={'type': 'VLLMChatModelHandler', 'config': SIMULATED},
        inference_args={'max_tokens': 3},
    )
    assert by_id(rows).keys() == {0, 1, 2, 3}
    for row in rows:
        answer = row['inference']
        assert (answer.finish_reason, answer.completion_tokens) == ('length', 3)
        assert answer.error is None
    assert [name for name, _ in fields] == ['id', 'prompt', 'inference']
    assert dict(fields)['prompt'] is str


def test_beams_run_inference_takes_a_completions_handler_and_functions_round_it(
    server: FakeServer,
) -> None:
    config = {
        'model_name': 'm',
        'preprocess': {'callable': 'lambda row: [504, 2365, 11 + row.id]'},
        'postprocess': {'callable': 'lambda result: result.inference.choices[0].text'},
    }
    rows, _ = ask(
        ROWS,
        'RunInference',
        model_handler={'type': 'VLLMCompletionsModelHandler', 'config': config},
        inference_tag='text',
    )
    assert {row['id']: row['text'] for row in rows} == {
        i: f'[504, 2365, {11 + i}]' for i in range(4)
    }


def test_answers_are_rows_with_types_beside_what_the_rows_had(server: FakeServer) -> None:
    rows, fields = ask(ROWS, model_handler=CHAT, inference_tag='answer')
    expected = beam_yaml.AnswerRow('PROMPT NUMBER 2', 'stop', 5, 4, 2, None)
    assert by_id(rows)[2] == {
        'output': 'good', 'id': 2, 'prompt': 'prompt number 2', 'answer': expected,
    }  # fmt: skip
    assert 'completion=typing.Optional[str]' in str(dict(fields)['answer'])
    assert 'cached_tokens=typing.Optional[int]' in str(dict(fields)['answer'])
    assert server.bodies[0]['messages'][0]['role'] == 'user'


def test_a_row_without_an_answer_says_so_in_its_place(server: FakeServer) -> None:
    """As with ``RunInference``, where the handler returns errors."""
    rows = [beam.Row(id=0, prompt='good'), beam.Row(id=1, prompt='[status=400] bad')]
    config = {'model_name': 'm', 'on_error': 'return'}
    handler = {'type': 'VLLMCompletionsModelHandler', 'config': config}
    for kind in ('LLMInference', 'RunInference'):
        answers = by_id(ask(rows, kind, model_handler=handler)[0])
        assert answers[0]['inference'].completion == 'GOOD'
        assert answers[1]['inference'].completion is None
        assert answers[1]['inference'].error.startswith('invalid_request (HTTP 400, sent once)')


def test_what_has_no_answer_leaves_through_an_output_of_its_own(server: FakeServer) -> None:
    """Also where the functions before and after it fail, in Beam YAML's format for errors."""
    config = {
        'model_name': 'm',
        'preprocess': {'callable': 'lambda row: [{"role": "user", "content": row.prompt[0]}]'},
        'postprocess': {
            'callable': 'lambda result: int(result.inference.choices[0].message.content)'
        },
    }
    prompts = [['1'], ['[status=400] refused'], [], ['text']]
    rows, _ = ask(
        [beam.Row(id=i, prompt=prompt) for i, prompt in enumerate(prompts)],
        model_handler={'type': 'VLLMChatModelHandler', 'config': config},
        inference_tag='number',
        error_handling={'output': 'failed'},
    )
    [good] = [row for row in rows if row['output'] == 'good']
    assert (good['id'], good['number']) == (0, 1)
    failed = {row['element'].id: row for row in rows if row['output'] == 'failed'}
    assert failed.keys() == {1, 2, 3}
    assert failed[1]['msg'].startswith('invalid_request (HTTP 400, sent once)')
    assert failed[1]['stack'] == ''
    assert failed[2]['msg'].startswith('IndexError')
    assert failed[3]['msg'].startswith('ValueError')
    assert 'Traceback' in failed[3]['stack']
    assert failed[3]['element'].prompt == ['text']


def test_messages_may_be_rows_and_a_prompt_is_a_conversation_of_one_message() -> None:
    """YAML's own rows have every field of their like, null where it was not given."""
    messages = [
        beam.Row(role='assistant', content=None, tool_calls=[beam.Row(id='1', index=None)]),
        beam.Row(role='tool', content='4', tool_calls=None),
    ]
    assert beam_yaml.chat_element(beam.Row(id=1, messages=messages, prompt=None)) == [
        {'role': 'assistant', 'tool_calls': [{'id': '1'}]},
        {'role': 'tool', 'content': '4'},
    ]
    of_a_prompt = [{'role': 'user', 'content': 'Hi'}]
    assert beam_yaml.chat_element(beam.Row(prompt='Hi')) == of_a_prompt
    assert beam_yaml.chat_element(beam.Row(messages=math.nan, prompt='Hi')) == of_a_prompt
    assert beam_yaml.completion_element(beam.Row(id=1, prompt=[1, 2])) == [1, 2]
    with pytest.raises(ConfigurationError, match='the rows have the fields id, but not prompt'):
        beam_yaml.completion_element(beam.Row(id=1))


@pytest.mark.parametrize(
    ('config', 'text'),
    [
        (
            {'dynamo_runtime_config': {'engines': [{'gpu': 0}]}, 'use_dynamo': True},
            "dynamo_runtime_config.engines[0] has the key 'gpu' with the value 0",
        ),
        ({'modelname': 'm'}, "has the key 'modelname' with the value 'm', which does not exist"),
        ({'use_dynamo': 'yes'}, "use_dynamo is 'yes'; it must be True or False"),
    ],
)
@pytest.mark.parametrize('kind', ['LLMInference', 'RunInference'])
def test_a_wrong_config_is_said_where_the_pipeline_is_made(
    kind: str, config: dict[str, Any], text: str
) -> None:
    handler = {'type': 'VLLMChatModelHandler', 'config': {'model_name': 'm'} | config}
    assert text in refusal(ROWS, kind, model_handler=handler)


@pytest.mark.parametrize(
    ('config', 'text'),
    [
        ({'model_handler': {'type': 'Vertex', 'config': {}}}, "handler is 'Vertex'; LLMInference"),
        ({'model_handler': {'type': 'VLLMChatModelHandler'}}, 'must have a type and a config'),
        ({'model_handler': {**CHAT, 'name': 'x'}}, 'and nothing else'),
        ({'model_handler': {**CHAT, 'config': 'm'}}, "config of model_handler is 'm'"),
        ({'model_handler': CHAT, 'inference_tag': 'id'}, 'choose another for the answer'),
        ({'model_handler': CHAT, 'inference_args': {'stream': True}}, "'stream'"),
        (
            {'model_handler': CHAT, 'error_handling': {'output': 'e', 'threshold': 1}},
            'it takes the name of an output',
        ),
        (
            {
                'model_handler': {**CHAT, 'config': {'model_name': 'm', 'on_error': 'raise'}},
                'error_handling': {'output': 'failed'},
            },
            "on_error is 'raise', but with error_handling no row fails another",
        ),
    ],
)
def test_a_transform_that_cannot_work_is_said_where_the_pipeline_is_made(
    config: dict[str, Any], text: str
) -> None:
    assert text in refusal(ROWS, **config)


def test_rows_need_a_field_to_ask_about() -> None:
    rows = [beam.Row(id=1, text='x')]
    text = refusal(rows, model_handler=CHAT)
    assert 'the rows have the fields id, text, but not messages or prompt' in text
    handler = {'type': 'VLLMCompletionsModelHandler', 'config': {'model_name': 'm'}}
    assert 'but not prompt, which' in refusal(rows, model_handler=handler)
