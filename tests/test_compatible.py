"""Beam's own arguments for Dynamo, which work here as they do there."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from apache_beam.ml.inference import vllm_inference as beams

from apache_beam_vllm_dynamo._addresses import allocate
from apache_beam_vllm_dynamo._commands import Stack, engine_command, frontend_command
from apache_beam_vllm_dynamo._compatible import compatible_config
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import ConfigurationError


def flags_of(argv: tuple[str, ...]) -> dict[str, str | None]:
    """The flags after ``python -m module``, with their values."""
    flags: dict[str, str | None] = {}
    for argument in argv[3:]:
        if argument.startswith('--'):
            name, equals, value = argument.partition('=')
            flags[name] = value if equals else None
        else:
            flags[list(flags)[-1]] = argument
    return flags


def commands_of(
    config: DynamoRuntimeConfig,
) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The flags of the frontend and of the engine."""
    stack = Stack(
        config=config,
        model_name='m',
        addresses=allocate(Path('/tmp/x'), 1, ports=lambda n: list(range(20_000, 20_000 + n))),
        namespace='beam-0',
        python='python',
        base_env={},
    )
    return flags_of(frontend_command(stack).argv), flags_of(engine_command(stack, 0).argv)


def test_the_bare_mode_is_one_engine_in_turn_without_events() -> None:
    config = compatible_config({}, {})
    assert len(config.listed_engines) == 1
    assert config.listed_engines[0].gpu_devices == ()
    assert (config.router_mode, config.kv_event_mode) == ('round-robin', 'disabled')
    assert (config.discovery, config.engine_kind) == ('etcd', 'gpu')


def test_the_bare_mode_gives_every_flag_that_beam_gives() -> None:
    """Beam's own defaults are read from Beam, so that a new release of it is noticed."""
    frontend, engine = commands_of(compatible_config({}, {}))
    for flag, value in beams._DYNAMO_FRONTEND_DEFAULT_KWARGS.items():
        assert frontend[f'--{flag}'] == value
    for flag, value in beams._DYNAMO_ENGINE_DEFAULT_KWARGS.items():
        assert engine[f'--{flag}'] == value


@pytest.mark.parametrize(
    ('given', 'router', 'events', 'flags', 'absent'),
    [
        (
            {'router-mode': 'kv'},
            'kv',
            'approximate',
            {'--router-mode': 'kv', '--no-router-kv-events': None},
            ['--router-kv-events'],
        ),
        (
            {'router_mode': 'kv', 'router_kv_events': None},
            'kv',
            'zmq',
            {'--router-mode': 'kv', '--router-predicted-ttl-secs': '60.0'},
            ['--no-router-kv-events', '--router-kv-events'],
        ),
        (
            {'router-mode': 'kv', 'kv-events': None},
            'kv',
            'zmq',
            {'--router-mode': 'kv'},
            ['--no-router-kv-events', '--kv-events'],
        ),
        (
            {'router-mode': 'kv', 'router-kv-events': False},
            'kv',
            'approximate',
            {'--no-router-kv-events': None},
            [],
        ),
        (
            {'router-mode': 'kv', 'no-kv-events': None, 'router-ttl-secs': '5'},
            'kv',
            'approximate',
            {'--no-router-kv-events': None, '--router-ttl-secs': '5'},
            ['--no-kv-events'],
        ),
        (
            {'router-mode': 'least-loaded'},
            'round-robin',
            'disabled',
            {'--router-mode': 'least-loaded', '--no-router-kv-events': None},
            [],
        ),
        (
            {'router-mode': 'round-robin', 'no-router-kv-events': None},
            'round-robin',
            'disabled',
            {'--router-mode': 'round-robin', '--no-router-kv-events': None},
            [],
        ),
        (
            {'enable-anthropic-api': None, 'migration-limit': '0', 'http-host': '0.0.0.0'},
            'round-robin',
            'disabled',
            {'--enable-anthropic-api': None, '--migration-limit': '0', '--http-host': '0.0.0.0'},
            [],
        ),
    ],
    ids=[
        'kv', 'kv and events', 'kv and events by the other name', 'kv and events False',
        'kv and no events by the other name', 'least-loaded', 'round-robin', 'other flags',
    ],
)  # fmt: skip
def test_flags_of_the_frontend_are_honoured(
    given: dict[str, Any],
    router: str,
    events: str,
    flags: dict[str, str | None],
    absent: list[str],
) -> None:
    config = compatible_config({}, given)
    assert (config.router_mode, config.kv_event_mode) == (router, events)
    frontend, engine = commands_of(config)
    assert flags.items() <= frontend.items()
    assert not frontend.keys() & set(absent)
    assert not [flag for flag in engine if 'router' in flag]


def test_flags_of_the_engine_override_the_runtimes_own() -> None:
    own = '{"enable_kv_cache_events": true, "publisher": "null"}'
    _, engine = commands_of(
        compatible_config(
            {'kv-events-config': own, 'max-num-seqs': '8', 'enforce-eager': None, 'tp': '1'}, {}
        )
    )
    assert engine['--kv-events-config'] == own
    assert engine['--max-num-seqs'] == '8'
    assert engine['--enforce-eager'] is None
    assert engine['--tensor-parallel-size'] == '1'
    _, engine = commands_of(
        compatible_config({'no-enable-prefix-caching': None}, {'router-mode': 'kv'})
    )
    assert '--enable-prefix-caching' not in engine


def test_file_discovery_is_taken_where_both_sides_name_it() -> None:
    config = compatible_config({'discovery-backend': 'file'}, {'discovery_backend': 'file'})
    assert config.discovery == 'file'
    for flags in commands_of(config):
        assert flags['--discovery-backend'] == 'file'


@pytest.mark.parametrize(
    ('engine', 'frontend', 'says'),
    [
        ({}, {'discovery-backend': 'file'}, "'file' in dynamo_frontend_kwargs and 'etcd' in vllm"),
        ({'discovery-backend': 'file'}, {}, "'etcd' in dynamo_frontend_kwargs and 'file' in vllm"),
        ({'discovery-backend': 'mem'}, {'discovery-backend': 'mem'}, "only with 'etcd' or 'file'"),
        ({'discovery-backend': ['etcd']}, {}, "discovery-backend is 'etcd' in"),
        ({}, {'discovery-backend': None}, 'discovery-backend is None in dynamo_frontend_kwargs'),
        ({}, {'router-mode': None}, "['router-mode'] is None; name a mode"),
        ({}, {'router-mode': 3}, "['router-mode'] is 3; name a mode"),
        ({}, {'http-port': '8000'}, "dynamo_frontend_kwargs sets 'http-port'"),
        ({}, {'http-host': '10.0.0.5'}, "['http-host'] is '10.0.0.5', but requests are sent over"),
        ({}, {'namespace': 'x'}, "dynamo_frontend_kwargs sets 'namespace'"),
        ({'model': 'x'}, {}, "vllm_server_kwargs sets 'model', which the runtime chooses itself"),
        ({'endpoint': 'x'}, {}, "vllm_server_kwargs sets 'endpoint'"),
        ({'a b': 'x'}, {}, "vllm_server_kwargs has the key 'a b'"),
        ({}, {'a b': 'x'}, "dynamo_frontend_kwargs has the key 'a b'"),
        ({'max-num-seqs': 'x'}, {}, "vllm_server_kwargs['max-num-seqs'] is 'x'"),
    ],
    ids=repr,
)
def test_what_could_not_have_worked_in_beam_either_is_refused_at_once(
    engine: dict[str, Any], frontend: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        compatible_config(engine, frontend)
    assert says in str(refused.value)


def test_the_callers_mappings_are_not_changed() -> None:
    engine: dict[str, Any] = {'discovery-backend': 'file', 'a': {'b': 1}}
    frontend: dict[str, Any] = {'discovery-backend': 'file', 'router-mode': 'kv', 'kv-events': None}
    before = copy.deepcopy((engine, frontend))
    compatible_config(engine, frontend)
    assert (engine, frontend) == before


def test_it_crosses_processes_and_keeps_its_freedom_when_it_is_placed() -> None:
    config = compatible_config({'kv-events-config': {}}, {'router-mode': 'random'})
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, engines=config.engines) == config
