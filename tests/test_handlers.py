"""The handlers apart from Dynamo: their arguments, and the native server behind them.

The native server is a fake with vLLM's command line; the real one is in tests/cpu.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest
from apache_beam.ml.inference import vllm_inference as upstream
from openai.types.chat import ChatCompletion

from apache_beam_vllm_dynamo import (
    ConfigurationError,
    DynamoRuntimeConfig,
    InferenceFailedError,
    OpenAIChatMessage,
    StartError,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
)
from apache_beam_vllm_dynamo._commands import native_server_command
from tests.support.processes import ROOT, runs, wait_until
from tests.support.stacks import FAKE_MODULES

pytestmark = pytest.mark.usefixtures('nothing_left')

HANDLERS = (VLLMCompletionsModelHandler, VLLMChatModelHandler)


def native(**arguments: Any) -> VLLMCompletionsModelHandler:
    return VLLMCompletionsModelHandler('m', env_vars={'PYTHONPATH': FAKE_MODULES}, **arguments)


@pytest.mark.parametrize('ours', HANDLERS)
def test_every_argument_of_beams_handler_is_taken_in_its_place(ours: type[Any]) -> None:
    theirs = getattr(upstream, ours.__name__)
    expected = inspect.signature(theirs).parameters
    found = inspect.signature(ours).parameters
    for name, parameter in expected.items():
        assert found[name].kind is parameter.kind
        assert found[name].default == parameter.default
    positional = [n for n, p in expected.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(found)[: len(positional)] == positional


@pytest.mark.parametrize('handler', HANDLERS)
@pytest.mark.parametrize(
    ('arguments', 'mend'),
    [
        pytest.param(
            {'dynamo_runtime_config': DynamoRuntimeConfig()}, 'pass use_dynamo=True', id='config'
        ),
        pytest.param({'dynamo_frontend_kwargs': {}}, 'pass use_dynamo=True', id='frontend'),
        pytest.param(
            {
                'use_dynamo': True,
                'dynamo_frontend_kwargs': {},
                'dynamo_runtime_config': DynamoRuntimeConfig(),
            },
            'exclude each other',
            id='both',
        ),
        pytest.param(
            {
                'use_dynamo': True,
                'vllm_server_kwargs': {'max-num-seqs': 1},
                'dynamo_runtime_config': DynamoRuntimeConfig(),
            },
            "config's engines",
            id='flags beside a config',
        ),
        pytest.param(
            {'use_dynamo': True, 'dynamo_runtime_config': {'engines': 2}}, 'for_devices', id='dict'
        ),
        pytest.param({'vllm_server_kwargs': ['--x']}, 'mapping', id='flags as a list'),
        pytest.param({'vllm_server_kwargs': {'max-num-seqs': object()}}, 'str, int', id='object'),
        pytest.param({'on_error': 'ignore'}, "'raise' or 'return'", id='on_error'),
        pytest.param({'max_in_flight': 0}, '1 or more', id='max_in_flight'),
        pytest.param({'max_retries': -1}, 'from 0', id='max_retries'),
        pytest.param({'request_timeout_secs': 0}, 'seconds', id='request_timeout_secs'),
        pytest.param({'model_copies': 2}, 'list more engines', id='model_copies'),
        pytest.param({'model_copies': True}, 'model_copies is True', id='model_copies as a flag'),
        pytest.param({'use_dynamo': 'false'}, 'True or False', id='use_dynamo'),
        pytest.param({'start_timeout_secs': -1}, 'seconds', id='start_timeout_secs'),
        pytest.param({'hang_timeout_secs': 0}, 'seconds', id='hang_timeout_secs'),
        pytest.param(
            {
                'use_dynamo': True,
                'start_timeout_secs': 9,
                'dynamo_runtime_config': DynamoRuntimeConfig(),
            },
            'set it in the config',
            id='start_timeout_secs beside a config',
        ),
        pytest.param({'env_vars': {'OMP_NUM_THREADS': 1}}, 'quote numbers', id='env_vars'),
        pytest.param({'env_vars': {'A=B': 'c'}}, "has the key 'A=B'", id='name of a variable'),
        pytest.param({'env_vars': {'A': '\0'}}, 'plain string', id='value of a variable'),
        pytest.param({'env_vars': {'A': '\ud800'}}, 'plain string', id='half a character'),
        pytest.param({'vllm_server_kwargs': {'port': 8000}}, 'chooses it', id='port'),
        pytest.param(
            {'vllm_server_kwargs': {'served-model-name': 'x'}}, 'add that name', id='served name'
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused_on_the_launcher(
    handler: type[Any], arguments: dict[str, Any], mend: str
) -> None:
    with pytest.raises(ConfigurationError, match=mend):
        handler('m', **arguments)


@pytest.mark.parametrize('handler', HANDLERS)
def test_a_misspelled_argument_is_no_argument(handler: type[Any]) -> None:
    with pytest.raises(TypeError, match='dynamo_engines'):
        handler('m', dynamo_engines=2)


@pytest.mark.parametrize('name', ['', '  ', None, 3])
def test_a_model_needs_a_name(name: Any) -> None:
    with pytest.raises(ConfigurationError, match='model_name'):
        VLLMCompletionsModelHandler(name)


@pytest.mark.parametrize(
    ('arguments', 'mend'),
    [
        ({'model': 'other'}, 'model'),
        ({'prompt': 'hi'}, 'prompt'),
        ({'stream': True}, 'stream'),
        ({'logit_bias': {1: object()}}, 'logit_bias'),
    ],
)
def test_inference_args_are_checked_when_the_pipeline_is_built(
    arguments: dict[str, Any], mend: str
) -> None:
    with pytest.raises(ConfigurationError, match=mend):
        VLLMCompletionsModelHandler('m').validate_inference_args(arguments)


def test_what_dynamo_ignores_in_silence_is_refused_only_under_dynamo() -> None:
    VLLMCompletionsModelHandler('m').validate_inference_args({'echo': True})
    with pytest.raises(ConfigurationError, match='ignores it silently'):
        VLLMCompletionsModelHandler('m', use_dynamo=True).validate_inference_args({'echo': True})


MANAGED = """
import sys
from apache_beam.utils.multi_process_shared import MultiProcessShared
from apache_beam_vllm_dynamo import VLLMCompletionsModelHandler
load = VLLMCompletionsModelHandler('m').load_model
MultiProcessShared(load, 'm', path=sys.argv[1], always_proxy=True, spawn_process=True).acquire()
"""


def test_beams_model_manager_is_refused_with_the_reason(tmp_path: pathlib.Path) -> None:
    """It is told by the process that it starts for each model.

    Whoever starts that one keeps its pipes for life, and so is no process of tests.
    """
    command = (sys.executable, '-c', MANAGED, str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    _, _, reason = done.stderr.rpartition('\nRuntimeError: ')
    assert 'use_model_manager=True) cannot work' in reason


def test_another_model_by_a_side_input_is_refused_with_the_reason() -> None:
    handler = native()
    for same in (None, '', 'm'):
        handler.update_model_path(same)
    with pytest.raises(ConfigurationError, match="updates the model 'm' to 'other'"):
        handler.update_model_path('other')


def test_the_status_of_the_native_server_names_its_gpus() -> None:
    handler = native(vllm_server_kwargs={'data-parallel-size': 2})
    handler._server_env['CUDA_VISIBLE_DEVICES'] = '4,5,6'
    assert handler.load_model().status()[0].devices == ('4', '5')


def test_the_native_server_gets_every_flag_and_answers() -> None:
    kwargs = {'max-num-seqs': 32, 'data_parallel_size': 2, 'enable-prefix-caching': False}
    handler = native(vllm_server_kwargs=kwargs)
    assert handler.batch_elements_kwargs()['min_batch_size'] == 64
    model = handler.load_model()
    assert model.window() == 64
    results = handler.run_inference(['one', 'two'], model, {'max_tokens': 1})
    assert [r.example for r in results] == ['one', 'two']
    assert {r.model_id for r in results} == {'m'}
    assert kwargs == {'max-num-seqs': 32, 'data_parallel_size': 2, 'enable-prefix-caching': False}


def test_a_chat_template_of_any_beam_path_reaches_the_server_and_nothing_is_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'work').mkdir()
    monkeypatch.chdir(tmp_path / 'work')
    template = tmp_path / 'template.jinja'
    template.write_text('{{ messages }}')
    record = tmp_path / 'arguments.json'
    env = {'PYTHONPATH': FAKE_MODULES, 'RECORD_ARGUMENTS': str(record)}
    kwargs: dict[str, Any] = {}
    handler = VLLMChatModelHandler('m', str(template), kwargs, env_vars=env)
    model = handler.load_model()
    seen = json.loads(record.read_text())
    assert seen['template_text'] == '{{ messages }}'
    assert seen['host'] == '127.0.0.1'
    [result] = handler.run_inference([[OpenAIChatMessage('user', 'hi')]], model)
    assert isinstance(result.inference, ChatCompletion)
    assert result.inference.choices[0].message.content
    model.close()
    assert not pathlib.Path(seen['chat_template']).exists()
    assert list((tmp_path / 'work').iterdir()) == []
    assert kwargs == {}


@pytest.mark.parametrize('path', ['', 5])
def test_a_template_needs_a_path(path: Any) -> None:
    with pytest.raises(ConfigurationError, match='chat_template_path'):
        VLLMChatModelHandler('m', path)


@pytest.mark.parametrize('content', [None, b'\xff\xfe'], ids=['missing', 'no text'])
def test_a_template_that_cannot_be_read_is_named(
    content: bytes | None, tmp_path: pathlib.Path
) -> None:
    template = tmp_path / 'template.jinja'
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(StartError, match='chat_template_path'):
        VLLMChatModelHandler('m', str(template)).load_model()


def test_the_servers_variables_do_not_become_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('ONLY_FOR_THE_SERVER', raising=False)
    handler = VLLMCompletionsModelHandler(
        'm', env_vars={'PYTHONPATH': FAKE_MODULES, 'ONLY_FOR_THE_SERVER': '1'}
    )
    handler.set_environment_vars()
    model = handler.load_model()
    pid = model.status()[0].pid
    assert b'ONLY_FOR_THE_SERVER=1' in pathlib.Path(f'/proc/{pid}/environ').read_bytes()
    assert 'ONLY_FOR_THE_SERVER' not in os.environ


def test_a_failed_prompt_neither_fails_its_neighbours_nor_checks_the_server() -> None:
    handler = native()
    model = handler.load_model()
    before = model.status()
    with pytest.raises(InferenceFailedError, match='1 of 3') as raised:
        handler.run_inference(['one', '[status=400] two', 'three'], model)
    assert [index for index, _ in raised.value.failures] == [1]
    assert model.status() == before
    results = native(on_error='return').run_inference(['one', '[status=400] two'], model)
    assert [getattr(r.inference, 'status', None) for r in results] == [None, 400]


def test_a_killed_server_comes_back_and_its_requests_are_sent_again() -> None:
    handler = native()
    model = handler.load_model()
    pid = model.status()[0].pid
    assert pid is not None
    results: list[Any] = []
    asking = threading.Thread(
        target=lambda: results.extend(handler.run_inference(['[sleep=1] slow'] * 8, model))
    )
    asking.start()
    os.kill(pid, 9)
    wait_until('the server is another process', lambda: model.status()[0].pid not in (None, pid))
    asking.join(30)
    assert len(results) == 8
    assert not runs(pid)
    assert model.status()[0].restarts == 1
    assert model.take_events() == {}  # the batch has counted it


def test_threads_that_find_the_server_dead_all_get_their_answers() -> None:
    handler = native()
    model = handler.load_model()
    os.kill(model.status()[0].pid or 0, 9)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(len(handler.run_inference(['x'], model))))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [1] * 12


def test_braces_in_a_users_argument_are_left_alone() -> None:
    command = native_server_command(
        'm',
        {'chat-template-content-format': '{{PORT}}'},
        port=1,
        python='python',
        base_env={},
        directory=pathlib.Path('/'),
    )
    assert '{{PORT}}' in command.argv


def test_an_error_keeps_nothing_of_the_servers_message_where_that_is_asked() -> None:
    told = {}
    for chars in (0, 200):
        handler = native(on_error='return', error_excerpt_chars=chars)
        model = handler.load_model()
        [result] = handler.run_inference(['[status=400] my secret'], model)
        told[chars] = str(result.inference)
        model.close()
    assert 'the server answered 400' in told[0]
    assert 'the server answered 400' not in told[200]
