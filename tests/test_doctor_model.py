"""What the doctor, and each start, make of a model on this machine."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from apache_beam_vllm_dynamo import (
    ChildExitedError,
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    StartError,
)
from apache_beam_vllm_dynamo._config_mapping import HandlerKind, handler_from_mapping
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
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._doctor_trial import try_start, write_model
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime
from apache_beam_vllm_dynamo._preflight import (
    UNUSED_TEMPLATE,
    preflight,
    template_for_prompts,
)
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


def described(model_name: object, config: dict[str, Any] | None, **arguments: Any) -> Subject:
    """A model behind Dynamo, or without a config on vLLM's own server."""
    mapping: dict[str, Any] = {'model_name': str(model_name), **arguments}
    if config is not None:
        mapping |= {'use_dynamo': True, 'dynamo_runtime_config': config}
    return subject_from_mapping(mapping)


def checks(model_name: object, config: dict[str, Any] | None, **arguments: Any) -> list[Check]:
    """The two checks of a model."""
    subject = described(model_name, config, **arguments)
    files = look_up_model(subject, {})
    return [check_model(subject, files, {}), check_template(subject, files)]


def start(subject: Subject, env: Mapping[str, str] | None = None, template: str = '') -> None:
    """What is looked at before a start, of chats where there is no template."""
    subject = dataclasses.replace(subject, asks='chats')
    preflight(subject, Path(tempfile.gettempdir()), chat_template=template or None, env=env or {})


def test_a_whole_directory_is_all_right(model: Path) -> None:
    (model / 'model.safetensors').write_bytes(b'0' * (1 << 20))
    for config in (GPUS, SIMULATED, None):
        assert [check.result for check in checks(model, config)] == ['ok', 'ok']
    assert read_directory(model).weights_bytes == 1 << 20


def test_only_simulated_engines_and_other_load_formats_do_without_weights(model: Path) -> None:
    """Before a start they are not looked for: vLLM says at once what it misses."""

    def missing(config: dict[str, Any]) -> Check | None:
        return check_weights(described(model, config), read_directory(model))

    check = missing(GPUS)
    assert check is not None
    assert check.result == 'failed'
    assert missing(SIMULATED) is None
    assert missing({**GPUS, 'vllm_server_kwargs': {'load-format': 'dummy'}}) is None
    start(described(model, GPUS))
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
    with pytest.raises(StartError, match=f'^model: .*{said}.* Give a directory with '):
        start(described(model, SIMULATED))


def test_dynamo_serves_no_model_without_a_chat_template(model: Path) -> None:
    """Simulated engines not even for prompts: they get healthy, and the start never ready."""
    drop_template(model)
    check = checks(model, SIMULATED)[1]
    assert check.result == 'failed'
    assert 'chat_template.jinja' in check.mend
    for config in (SIMULATED, GPUS):
        with pytest.raises(StartError, match=r'chat template: .* has none'):
            start(described(model, config))
    start(described(model, None))
    start(described(model, GPUS), template='{{ messages }}')
    (model / 'chat_template.jinja').write_text('{{ messages }}')
    assert checks(model, SIMULATED)[1].result == 'ok'
    start(described(model, SIMULATED))


@pytest.mark.parametrize(
    ('handler', 'on_gpus', 'native'),
    [
        ({'handler': 'chat'}, 'failed', 'warning'),
        ({'handler': 'completions'}, 'ok', 'ok'),
        ({}, 'warning', 'warning'),
    ],
)
def test_prompts_need_no_chat_template(
    handler: dict[str, str], on_gpus: str, native: str, model: Path
) -> None:
    drop_template(model)
    assert checks(model, GPUS, **handler)[1].result == on_gpus
    assert checks(model, None, **handler)[1].result == native
    assert checks(model, SIMULATED, **handler)[1].result == 'failed'


def test_engines_of_a_model_without_a_template_get_one_for_prompts(
    model: Path, tmp_path: Path
) -> None:
    """Dynamo wants one of every model; where it has its own, chats can share the servers."""
    on_gpus, alike = DynamoRuntimeConfig(), simulated()
    assert template_for_prompts(str(model), on_gpus, {}) is None
    drop_template(model)
    assert template_for_prompts(str(model), on_gpus, {}) == UNUSED_TEMPLATE
    assert template_for_prompts(str(model), alike, {}) is None
    assert template_for_prompts('org/name', on_gpus, {'HF_HOME': str(tmp_path)}) is None
    (model / 'tokenizer_config.json').unlink()
    assert template_for_prompts(str(model), on_gpus, {}) is None


def test_prompts_and_chats_of_a_model_with_a_template_find_the_same_servers(model: Path) -> None:
    with_dynamo = {
        'model_name': str(model),
        'use_dynamo': True,
        'dynamo_runtime_config': {'num_engines': 1, 'engine_kind': 'cpu'},
    }
    kinds: tuple[HandlerKind, ...] = ('completions', 'chat')

    def identities() -> set[str]:
        handlers = [handler_from_mapping(kind, with_dynamo) for kind in kinds]
        return {handler._runtime().identity for handler in handlers}

    assert len(identities()) == 1
    drop_template(model)
    assert len(identities()) == 2


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
    offline = {**env, 'HF_HUB_OFFLINE': '1'}
    subject = described('org/name', GPUS)

    def found(env: Mapping[str, str]) -> str:
        return str(check_model(subject, look_up_model(subject, env), env).result)

    assert found(env) == 'warning'
    start(subject, env)
    assert found(offline) == 'failed'
    with pytest.raises(StartError, match=r'^model: org/name is no directory .* Unset HF_HUB_OFF'):
        start(subject, offline)
    repository = hub_cache(env) / 'models--org--name'
    snapshot = repository / 'snapshots' / 'abc'
    snapshot.mkdir(parents=True)
    (repository / 'refs').mkdir()
    (repository / 'refs' / 'main').write_text('abc')
    # Of a download that was given up only a part is there: the servers go on with it.
    assert found(env) == 'warning'
    start(subject, env)
    with pytest.raises(StartError, match=r'config\.json cannot be read'):
        start(subject, offline)
    write_model(snapshot)
    drop_template(snapshot)
    files = look_up_model(subject, env)
    assert (check_weights(subject, files), check_template(subject, files).result) == (
        None,
        'warning',
    )
    start(subject, env)
    with pytest.raises(StartError, match='has none, and Dynamo serves no model without one'):
        start(subject, offline)
    (snapshot / 'chat_template.jinja').write_text('{{ messages }}')
    assert found(offline) == 'ok'
    start(subject, offline)


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


@pytest.mark.parametrize(
    ('flags', 'variables'),
    [
        ({'revision': 'v2'}, {}),
        ({'tokenizer': 'org/other'}, {}),
        ({'config-format': 'mistral'}, {}),
        ({}, {'VLLM_USE_MODELSCOPE': 'True'}),
        ({}, {'VLLM_MODEL_REDIRECT_PATH': '/models.json'}),
    ],
)
def test_a_model_that_is_read_in_another_way_is_left_to_vllm(
    flags: dict[str, str], variables: dict[str, str], tmp_path: Path
) -> None:
    """What the directory or the cache holds says nothing then, and no start is refused for it."""
    offline = {'HF_HOME': str(tmp_path), 'HF_HUB_OFFLINE': '1', **variables}
    for name in ('org/name', str(tmp_path)):
        for config in ({**GPUS, 'vllm_server_kwargs': flags}, None):
            arguments = {} if config else {'vllm_server_kwargs': flags}
            subject = described(name, config, **arguments)
            check = check_model(subject, look_up_model(subject, offline), offline)
            assert check.found.endswith(
                f'read as {next(iter(flags | variables))} says; not looked at'
            )
            start(subject, offline)


def test_an_engine_with_a_cache_of_its_own_is_left_to_it(tmp_path: Path) -> None:
    engine = {'env': {'HF_HOME': str(tmp_path)}}
    start(described('org/name', {'engines': [engine]}), {'HF_HUB_OFFLINE': '1'})


def test_vllm_reads_more_than_dynamo(model: Path) -> None:
    """Its own server takes a directory in Mistral's format, one without a tokenizer, and a file."""
    (model / 'tokenizer.json').unlink()
    start(described(model, None))
    (model / 'config.json').rename(model / 'params.json')
    start(described(model, None))
    with pytest.raises(StartError, match='cannot be read'):
        start(described(model, GPUS))
    (model / 'params.json').unlink()
    with pytest.raises(StartError, match='cannot be read'):
        start(described(model, None))
    weights = model / 'model.gguf'
    weights.write_bytes(b'GGUF')
    for config in (None, GPUS):
        start(described(weights, config))


@pytest.mark.parametrize('family', ['deepseek_v4', 'kimi_k3'])
def test_families_whose_prompts_dynamo_writes_itself_need_no_template(
    family: str, model: Path
) -> None:
    drop_template(model)
    config = json.loads((model / 'config.json').read_text())
    (model / 'config.json').write_text(json.dumps({**config, 'model_type': family}))
    start(described(model, GPUS))


def test_a_disk_without_room_for_etcd_is_found_before_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage('/')._replace(free=1 << 20)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: full)
    with pytest.raises(StartError, match=r'^disk: 0\.0 GiB free at .*\. Make room'):
        start(described(model, SIMULATED))
    start(described(model, SIMULATED), {'ETCD_ENDPOINTS': 'http://127.0.0.1:2379'})
    start(described(model, {**SIMULATED, 'discovery': 'file'}))
    start(described(model, None))


def test_what_is_looked_at_takes_no_time_and_imports_nothing_heavy() -> None:
    """Before each start, beside a model load of minutes; measured 0.3 ms."""
    subject, before = described(MODEL, SIMULATED), set(sys.modules)
    began = time.perf_counter()
    start(subject)
    assert time.perf_counter() - began < 0.2
    assert not sys.modules.keys() - before


@pytest.mark.parametrize('config', [SIMULATED, None])
def test_a_runtime_looks_before_it_starts_anything(
    config: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Behind Dynamo, and for vLLM's own server: a model that is not there needs no load."""
    handler = handler_from_mapping(
        'completions',
        {'model_name': str(tmp_path / 'missing')}
        | ({'use_dynamo': True, 'dynamo_runtime_config': config} if config else {}),
    )
    with pytest.raises(StartError, match=r'^model: .*missing: it is no directory'):
        handler.load_model()


@pytest.mark.usefixtures('nothing_left')
def test_a_start_ends_when_the_frontend_says_that_it_will_never_serve(model: Path) -> None:
    """Of a model for which Dynamo makes no prompts; the engine is healthy, and nothing exits."""
    drop_template(model)
    (model / 'tokenizer_config.json').unlink()
    (model / 'chat_template.jinja').write_text('{{ messages }}')
    runtime = _DynamoLocalRuntime(str(model), simulated(start_timeout_secs=150.0))
    with pytest.raises(
        ChildExitedError, match=r'^frontend ended: it would never serve\. Dynamo serves no model w'
    ):
        runtime.start()


@pytest.mark.usefixtures('nothing_left')
def test_a_start_ends_when_the_frontend_leaves_out_an_engine_for_good(model: Path) -> None:
    """One unlike the first; the frontend says so once, and both are healthy."""
    speed = {'speedup-ratio': 10}
    engines = (
        DynamoVLLMEngineSpec(simulation_kwargs=speed),
        DynamoVLLMEngineSpec(vllm_server_kwargs={'block-size': 32}, simulation_kwargs=speed),
    )
    runtime = _DynamoLocalRuntime(
        str(model),
        DynamoRuntimeConfig(engines, engine_kind='simulated', start_timeout_secs=150.0),
    )
    with pytest.raises(
        ChildExitedError, match=r'^frontend ended: it would never serve\. The front'
    ):
        runtime.start()


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
