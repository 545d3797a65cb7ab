"""What the doctor, and each start, make of a model on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from apache_beam_vllm_dynamo import DynamoRuntimeConfig, StartError
from apache_beam_vllm_dynamo._doctor_file import subject_from_mapping
from apache_beam_vllm_dynamo._doctor_model import (
    check_model,
    check_template,
    check_weights,
    hub_cache,
    look_up_model,
    read_directory,
)
from apache_beam_vllm_dynamo._doctor_report import Check
from apache_beam_vllm_dynamo._doctor_trial import try_start, write_model
from apache_beam_vllm_dynamo._preflight import preflight
from tests.support.stacks import MODEL, simulated

GPUS = {'num_engines': 1}
SIMULATED = {'num_engines': 1, 'engine_kind': 'simulated'}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that simulated engines can serve."""
    directory = tmp_path / 'model'
    directory.mkdir()
    write_model(directory)
    return directory


def drop_template(model: Path) -> None:
    path = model / 'tokenizer_config.json'
    settings = json.loads(path.read_text())
    del settings['chat_template']
    path.write_text(json.dumps(settings))


def checks(model_name: object, config: dict[str, Any] | None, **arguments: Any) -> list[Check]:
    """The two checks of a model."""
    mapping: dict[str, Any] = {'model_name': str(model_name), **arguments}
    if config is not None:
        mapping |= {'use_dynamo': True, 'dynamo_runtime_config': config}
    subject = subject_from_mapping(mapping)
    files = look_up_model(str(model_name), {})
    return [check_model(subject, files, {}), check_template(subject, files)]


def test_a_whole_directory_is_all_right(model: Path) -> None:
    (model / 'model.safetensors').write_bytes(b'0' * (1 << 20))
    for config in (GPUS, SIMULATED, None):
        assert [check.result for check in checks(model, config)] == ['ok', 'ok']
    assert read_directory(model).weights_bytes == 1 << 20


def test_only_simulated_engines_and_other_load_formats_do_without_weights(model: Path) -> None:
    """Before a start they are not looked for: vLLM says at once what it misses."""

    def missing(config: dict[str, Any]) -> Check | None:
        mapping = {'model_name': str(model), 'use_dynamo': True, 'dynamo_runtime_config': config}
        return check_weights(subject_from_mapping(mapping), read_directory(model))

    check = missing(GPUS)
    assert check is not None
    assert check.result == 'failed'
    assert missing(SIMULATED) is None
    assert missing({**GPUS, 'vllm_server_kwargs': {'load-format': 'dummy'}}) is None
    preflight(str(model), DynamoRuntimeConfig(), chat_template=None, env={})
    (model / 'model.safetensors').write_bytes(b'0')
    assert missing(GPUS) is None


@pytest.mark.parametrize(
    ('damage', 'said'),
    [
        (shutil.rmtree, 'no directory'),
        (lambda d: (d / 'config.json').unlink(), 'config.json cannot be read'),
        (lambda d: (d / 'config.json').write_text('{'), 'config.json is no JSON'),
        (lambda d: (d / 'config.json').write_text('{}'), 'names no model_type'),
        (lambda d: (d / 'tokenizer.json').unlink(), 'no tokenizer'),
    ],
)
def test_a_directory_that_cannot_be_served_says_why(model: Path, damage: Any, said: str) -> None:
    damage(model)
    check = checks(model, SIMULATED)[0]
    assert check.result == 'failed'
    assert said in check.found
    with pytest.raises(StartError, match=said):
        preflight(str(model), simulated(), chat_template=None, env={})


def test_dynamo_serves_no_model_without_a_chat_template(model: Path) -> None:
    """Not even for prompts: such a start gets its engines healthy, and never ready."""
    drop_template(model)
    check = checks(model, SIMULATED)[1]
    assert check.result == 'failed'
    assert 'chat_template.jinja' in check.mend
    assert checks(model, None)[1].result == 'warning'
    with pytest.raises(StartError, match=r'chat template: .* has none'):
        preflight(str(model), simulated(), chat_template=None, env={})
    on_gpus = DynamoRuntimeConfig()
    preflight(str(model), on_gpus, chat_template='{{ messages }}', env={})
    (model / 'chat_template.jinja').write_text('{{ messages }}')
    assert checks(model, SIMULATED)[1].result == 'ok'
    preflight(str(model), simulated(), chat_template=None, env={})


def test_a_template_of_the_users_must_be_readable(model: Path, tmp_path: Path) -> None:
    (model / 'model.safetensors').write_bytes(b'0')
    template = tmp_path / 'template.jinja'
    missing = checks(model, GPUS, chat_template_path=str(template))[1]
    assert missing.result == 'failed'
    template.write_text('no template at all')
    assert checks(model, GPUS, chat_template_path=str(template))[1].result == 'warning'
    template.write_text('{{ messages }}')
    assert checks(model, GPUS, chat_template_path=str(template))[1].result == 'ok'
    remote = checks(model, GPUS, chat_template_path='gs://bucket/template.jinja')[1]
    assert remote.result == 'ok'


def test_a_model_of_the_hub_is_looked_for_in_the_cache(tmp_path: Path) -> None:
    """Nothing is fetched; that it is not there is a warning, or a failure where no one may."""
    env = {'HF_HOME': str(tmp_path)}
    subject = subject_from_mapping({'model_name': 'org/name'})
    files = look_up_model('org/name', env)
    assert check_model(subject, files, env).result == 'warning'
    offline = check_model(subject, files, {**env, 'HF_HUB_OFFLINE': '1'})
    assert offline.result == 'failed'
    repository = hub_cache(env) / 'models--org--name'
    snapshot = repository / 'snapshots' / 'abc'
    snapshot.mkdir(parents=True)
    (repository / 'refs').mkdir()
    (repository / 'refs' / 'main').write_text('abc')
    write_model(snapshot)
    (snapshot / 'model.safetensors').write_bytes(b'0')
    assert check_model(subject, look_up_model('org/name', env), env).result == 'ok'


@pytest.mark.parametrize(
    ('env', 'cache'),
    [
        ({'HOME': '/h'}, '/h/.cache/huggingface/hub'),
        ({'HOME': '/h', 'XDG_CACHE_HOME': '/x'}, '/x/huggingface/hub'),
        ({'XDG_CACHE_HOME': '/x', 'HF_HOME': '/f'}, '/f/hub'),
        ({'HF_HOME': '/f', 'HF_HUB_CACHE': '/c'}, '/c'),
    ],
)
def test_the_cache_is_where_hugging_face_has_it(env: dict[str, str], cache: str) -> None:
    assert hub_cache(env) == Path(cache)


def test_an_address_is_left_to_vllm() -> None:
    assert [check.result for check in checks('gs://bucket/model', GPUS)] == ['ok', 'ok']


def test_the_model_of_the_other_tests_passes_before_a_start() -> None:
    preflight(MODEL, simulated(), chat_template=None, env={})


@pytest.mark.usefixtures('nothing_left')
def test_a_trial_start_that_fails_says_what_the_log_says(tmp_path: Path) -> None:
    """An etcd that ends at once: its last words are below the table, its status in the line."""
    program = tmp_path / 'etcd'
    program.write_text('#!/bin/sh\necho "etcd: no luck today"\nexit 3\n')
    program.chmod(0o755)
    subject = subject_from_mapping(
        {
            'model_name': MODEL,
            'use_dynamo': True,
            'dynamo_runtime_config': {**SIMULATED, 'etcd_path': str(program)},
        }
    )
    check = try_start(subject, {'PATH': '/usr/bin:/bin'})
    assert check.result == 'failed'
    assert check.found.startswith('etcd ended: exit status 3')
    assert any('no luck today' in line for line in check.details)


def test_there_is_no_trial_of_the_native_server() -> None:
    assert try_start(subject_from_mapping({'model_name': 'm'}), {}).result == 'warning'
