"""The command line and the environment of each child, exactly."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from apache_beam_vllm_dynamo import _reserved
from apache_beam_vllm_dynamo._addresses import allocate
from apache_beam_vllm_dynamo._commands import (
    EVENT_BROKER_SCRIPT,
    SIMULATED_VLLM_FLAGS,
    Command,
    Stack,
    engine_command,
    etcd_command,
    event_broker_command,
    frontend_command,
    native_server_command,
)
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig, DynamoVLLMEngineSpec
from apache_beam_vllm_dynamo.errors import ConfigurationError

Spec = DynamoVLLMEngineSpec
DIRECTORY = Path('/tmp/beam-x')
PLANES = ('--request-plane', 'tcp', '--event-plane', 'zmq')
ETCD = ('--discovery-backend', 'etcd', *PLANES)
NO_EVENTS = '{"enable_kv_cache_events": false}'

# What a child needs of the worker, and may be told there.
HARMLESS = {
    'PATH': '/bin',
    'HOME': '/root',
    'HF_TOKEN': 'hf_secret',
    'LD_LIBRARY_PATH': '/usr/lib',
    'VLLM_CPU_KVCACHE_SPACE': '1',
    'VLLM_ATTENTION_BACKEND': 'FLASH_ATTN',
    'DYN_HTTP_BODY_LIMIT_MB': '90',
    'DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS': '9',
}
# What would make children meet on one port, join another stack, or change the router.
NASTY = {
    'ETCD_NAME': 'other',
    'ETCD_DATA_DIR': '/var/lib/etcd',
    'ETCD_LISTEN_CLIENT_URLS': 'http://0.0.0.0:2379',
    'ETCD_AUTH_USERNAME': 'root',
    'ETCD_AUTH_PASSWORD': 'secret',
    'ETCD_AUTH_CA': '/ca.pem',
    'VLLM_API_KEY': 'secret',
    'DYN_SYSTEM_PORT': '9090',
    'DYN_SYSTEM_HOST': '0.0.0.0',
    'DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS': '["nothing"]',
    'DYN_NAMESPACE': 'other',
    'DYN_NAMESPACE_PREFIX': 'other',
    'DYN_ROUTER_MODE': 'random',
    'DYN_ROUTER_TEMPERATURE': '7',
    'DYN_ROUTER_MIN_INITIAL_WORKERS': '9',
    'DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD': '0.1',
    'DYN_DISCOVERY_BACKEND': 'kubernetes',
    'DYN_FILE_KV': '/var/lib/kv',
    'DYN_EVENT_PLANE': 'nats',
    'DYN_EVENT_PLANE_HOST': '0.0.0.0',
    'DYN_REQUEST_PLANE': 'nats',
    'DYN_RESPONSE_PLANE': 'quic',
    'DYN_ZMQ_BROKER_URL': 'xsub=tcp://elsewhere:1 , xpub=tcp://elsewhere:2',
    'DYN_TCP_RPC_HOST': '0.0.0.0',
    'DYN_TCP_RPC_PORT': '1',
    'DYN_TCP_RESPONSE_STREAM_HOST': '0.0.0.0',
    'DYN_TCP_TLS_CERT_PATH': '/cert.pem',
    'DYN_HTTP_HOST': '0.0.0.0',
    'DYN_HTTP_PORT': '8000',
    'DYN_MODEL_NAME': 'other',
    'DYN_ENDPOINT': 'dyn://a.b.c',
    'DYN_MIGRATION_LIMIT': '0',
    'DYN_TLS_CERT_PATH': '/cert.pem',
    'DYN_INTERACTIVE': '1',
    'DYN_KSERVE_GRPC_SERVER': '1',
    'DYN_CUSTOM_JINJA_TEMPLATE': '/other.jinja',
    'DYN_VLLM_DISAGGREGATION_MODE': 'prefill',
    'DYN_VLLM_HEADLESS': '1',
    'DYN_CONNECTOR': 'nixl',
    'DYN_FORWARDPASS_METRIC_PORT': '5',
    'VLLM_PORT': '6',
    'VLLM_NIXL_SIDE_CHANNEL_PORT': '5600',
    'VLLM_NIXL_SIDE_CHANNEL_HOST': '0.0.0.0',
    'VLLM_DP_MASTER_PORT': '7',
    'MASTER_ADDR': 'elsewhere',
    'MASTER_PORT': '8',
    'RANK': '3',
    'LOCAL_RANK': '3',
    'WORLD_SIZE': '4',
}
# Of the worker, but not for every child.
OVERRIDDEN = {
    'PYTHONHASHSEED': '1234',
    'CUDA_VISIBLE_DEVICES': '6,7',
    'VLLM_CPU_OMP_THREADS_BIND': 'all',
    'VLLM_HOST_IP': '10.0.0.5',
}

DYNAMO = {
    'DYN_NAMESPACE': 'beam-0',
    'DYN_SDK_DISABLE_ANSI_LOGGING': '1',
    'DYN_TCP_RPC_HOST': '127.0.0.1',
    'DYN_TCP_RESPONSE_STREAM_HOST': '127.0.0.1',
    'DYN_EVENT_PLANE_HOST': '127.0.0.1',
    'DYN_ZMQ_BROKER_URL': (
        'xsub=ipc:///tmp/beam-x/events-in , xpub=ipc:///tmp/beam-x/events-out'
    ),
    'DYN_TCP_REQUEST_TIMEOUT': '10',
    'DYN_TCP_CONNECT_TIMEOUT': '2',
    'DYN_TCP_CHANNEL_BUFFER': '1',
    'DYN_TCP_POOL_SIZE': '8',
    'PYTHONUNBUFFERED': '1',
    'TMPDIR': '/tmp/beam-x',
}  # fmt: skip
OWN_ETCD = {'ETCD_ENDPOINTS': 'http://127.0.0.1:20001', 'ETCD_LEASE_TTL': '5'}
FRONTEND = {
    'DYN_LOG': 'warn,dynamo_llm::http::service::service_v2=off',
    'DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS': '300',
}
HASH_SEED = {'PYTHONHASHSEED': '0'}
# A simulated engine is one process, whose health endpoint says all.
CANARY = {
    'DYN_HEALTH_CHECK_ENABLED': 'true',
    'DYN_CANARY_WAIT_TIME': '3',
    'DYN_HEALTH_CHECK_REQUEST_TIMEOUT': '10',
}


def engine_variables(index: int, *, simulated: bool = False) -> dict[str, str]:
    return ({} if simulated else CANARY) | {
        'DYN_LOG': 'info,tower_http=off',
        'DYN_SYSTEM_HOST': '127.0.0.1',
        'DYN_SYSTEM_PORT': str(20_003 + 2 * index),
        'VLLM_HOST_IP': '127.0.0.1',
        'VLLM_NIXL_SIDE_CHANNEL_HOST': '127.0.0.1',
        'VLLM_NIXL_SIDE_CHANNEL_PORT': str(20_004 + 2 * index),
    }


def stack_of(config: DynamoRuntimeConfig, **fields: Any) -> Stack:
    engines = len(config.listed_engines)
    return Stack(
        config=config,
        model_name='org/model',
        addresses=allocate(DIRECTORY, engines, ports=lambda n: list(range(20_000, 20_000 + n))),
        namespace='beam-0',
        python='/venv/bin/python',
        **({'base_env': {}} | fields),
    )


def two(router: str = 'kv', events: str | None = None, **fields: Any) -> DynamoRuntimeConfig:
    return DynamoRuntimeConfig.for_devices(
        num_engines=2, router_mode=router, kv_event_mode=events, **fields
    )


def children_of(stack: Stack) -> dict[str, Command]:
    engines = range(len(stack.config.listed_engines))
    return {
        'etcd': etcd_command('/bin/etcd', stack),
        'broker': event_broker_command(stack),
        'frontend': frontend_command(stack),
        **{f'engine {index}': engine_command(stack, index) for index in engines},
    }


MODES: dict[str, tuple[DynamoRuntimeConfig, tuple[str, ...]]] = {
    'kv, events of the engines': (
        two('kv', 'zmq'),
        (
            '--router-mode', 'kv', '--router-predicted-ttl-secs', '60.0',
            '--router-prefill-load-scale', '2', '--router-kv-overlap-score-credit', '2.0',
        ),
    ),
    'kv, prediction alone': (
        two(
            'kv', 'approximate', router_prediction_secs=5,
            router_overlap_weight=1, router_temperature=0.5,
        ),
        (
            '--router-mode', 'kv', '--no-router-kv-events', '--router-ttl-secs', '5',
            '--router-prefill-load-scale', '2', '--router-kv-overlap-score-credit', '1',
            '--router-temperature', '0.5',
        ),
    ),
    'kv, load alone': (
        two('kv', 'disabled'),
        (
            '--router-mode', 'kv', '--no-router-kv-events',
            '--router-kv-overlap-score-credit', '0',
        ),
    ),
    'round-robin': (
        two('round-robin'),
        ('--router-mode', 'round-robin', '--no-router-kv-events'),
    ),
}  # fmt: skip


@pytest.mark.parametrize('mode', MODES)
def test_the_frontend_of_each_mode(mode: str) -> None:
    config, router = MODES[mode]
    command = frontend_command(stack_of(config))
    assert command.argv == (
        '/venv/bin/python', '-m', 'dynamo.frontend',
        '--http-host', '127.0.0.1', '--http-port', '20000',
        *ETCD, *router, '--migration-limit', '3',
    )  # fmt: skip
    seed = HASH_SEED if config.uses_kv_router else {}
    assert command.env == DYNAMO | OWN_ETCD | seed | FRONTEND | {'ETCD_LEASE_TTL': '30'}


@pytest.mark.parametrize('index', [0, 1])
@pytest.mark.parametrize('mode', MODES)
def test_a_gpu_engine_of_each_mode(mode: str, index: int) -> None:
    config, _ = MODES[mode]
    command = engine_command(stack_of(config), index)
    prefix_caching = ('--enable-prefix-caching',) if config.uses_kv_router else ()
    events = (
        '{"publisher": "zmq", "topic": "kv-events", '
        f'"endpoint": "ipc:///tmp/beam-x/kv{index}inproc", "enable_kv_cache_events": true}}'
    )
    assert command.argv == (
        '/venv/bin/python', '-m', 'dynamo.vllm',
        '--model', 'org/model', '--served-model-name', 'org/model',
        *ETCD, *prefix_caching,
        '--kv-events-config', events if config.kv_event_mode == 'zmq' else NO_EVENTS,
    )  # fmt: skip
    seed = HASH_SEED if config.uses_kv_router else {}
    own = engine_variables(index) | {'CUDA_VISIBLE_DEVICES': str(index)}
    assert command.env == DYNAMO | OWN_ETCD | seed | own


def test_the_endpoint_of_events_tells_data_parallel_ranks_apart() -> None:
    """vLLM finds the word in it and appends the rank; any other Unix socket it refuses."""
    stack = stack_of(two('kv', 'zmq'))
    assert all('inproc' in engine.kv_events for engine in stack.addresses.engines)


@pytest.mark.parametrize(
    ('devices', 'visible'),
    [
        (('0', '1'), '0,1'),
        (('GPU-8a2f', 'GPU-9b3c'), 'GPU-8a2f,GPU-9b3c'),
        (('MIG-a', 'MIG-b'), 'MIG-a,MIG-b'),
    ],
    ids=['ordinals', 'UUIDs', 'MIG'],
)
def test_an_engine_sees_its_own_gpus_alone(devices: tuple[str, ...], visible: str) -> None:
    config = DynamoRuntimeConfig((Spec(devices, {'tp': 2}),))
    command = engine_command(stack_of(config, base_env=OVERRIDDEN), 0)
    assert command.env['CUDA_VISIBLE_DEVICES'] == visible
    assert command.argv[-2:] == ('--tensor-parallel-size', '2')


def test_a_single_engine_without_devices_keeps_those_of_the_worker() -> None:
    stack = stack_of(DynamoRuntimeConfig(), base_env={'CUDA_VISIBLE_DEVICES': '6,7'})
    assert engine_command(stack, 0).env['CUDA_VISIBLE_DEVICES'] == '6,7'
    assert 'CUDA_VISIBLE_DEVICES' not in engine_command(stack_of(DynamoRuntimeConfig()), 0).env


@pytest.mark.parametrize(
    ('kwargs', 'cores', 'bound'),
    [
        ({}, (0,), '0'),
        ({}, (2, 3), '2,3'),
        ({'tp': 2}, (0, 1), '0|1'),
        ({'tp': 2}, (0, 1, 2, 3, 4), '0,1|2,3,4'),
        ({'dp': 3}, (0, 1, 2), '0|1|2'),
    ],
    ids=str,
)
def test_a_cpu_engine_binds_each_rank_to_its_share_of_the_cores(
    kwargs: dict[str, Any], cores: tuple[int, ...], bound: str
) -> None:
    config = DynamoRuntimeConfig((Spec((), kwargs, cpu_cores=cores),), engine_kind='cpu')
    env = engine_command(stack_of(config), 0).env
    own = {'VLLM_CPU_OMP_THREADS_BIND': bound}
    assert env == DYNAMO | OWN_ETCD | HASH_SEED | engine_variables(0) | own


def test_a_cpu_engine_is_started_as_a_gpu_engine_is() -> None:
    cpu = stack_of(two(engine_kind='cpu'))
    assert engine_command(cpu, 1).argv == engine_command(stack_of(two()), 1).argv
    assert 'CUDA_VISIBLE_DEVICES' not in engine_command(cpu, 1).env


def test_a_simulated_engine_takes_the_flags_of_vllm_that_it_knows_and_its_own() -> None:
    config = two(
        engine_kind='simulated',
        vllm_server_kwargs={
            'max-num-seqs': 8, 'enforce-eager': None, 'dtype': 'float32',
            'enable-chunked-prefill': False, 'num_gpu_blocks_override': 64,
        },
        simulation_kwargs={'speedup-ratio': 10},
    )  # fmt: skip
    command = engine_command(stack_of(config), 1)
    assert command.argv == (
        '/venv/bin/python', '-m', 'dynamo.mocker',
        '--model-path', 'org/model', '--model-name', 'org/model', *ETCD,
        '--block-size', '16', '--max-num-seqs', '8', '--no-enable-chunked-prefill',
        '--num-gpu-blocks-override', '64', '--speedup-ratio', '10',
    )  # fmt: skip
    own = engine_variables(1, simulated=True) | {
        'DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS': '["generate"]'
    }
    assert command.env == DYNAMO | OWN_ETCD | HASH_SEED | own


def test_the_block_size_of_a_simulated_engine_may_be_chosen() -> None:
    choices: list[dict[str, Any]] = [
        {'vllm_server_kwargs': {'block-size': 64}},
        {'simulation_kwargs': {'block_size': 64}},
    ]
    for fields in choices:
        config = two(engine_kind='simulated', **fields)
        argv = engine_command(stack_of(config), 0).argv
        assert argv.count('--block-size') == 1
        assert argv[argv.index('--block-size') + 1] == '64'


def test_the_etcd_of_a_runtime_listens_on_loopback_and_is_its_own() -> None:
    command = etcd_command('/bin/etcd', stack_of(two()))
    client, peer = 'http://127.0.0.1:20001', 'http://127.0.0.1:20002'
    assert command.argv == (
        '/bin/etcd', '--name', 'beam-0', '--data-dir', '/tmp/beam-x/etcd',
        '--listen-client-urls', client, '--advertise-client-urls', client,
        '--listen-peer-urls', peer, '--initial-advertise-peer-urls', peer,
        '--initial-cluster', f'beam-0={peer}', '--log-level', 'warn', '--unsafe-no-fsync',
        '--heartbeat-interval', '20', '--election-timeout', '200',
    )  # fmt: skip
    assert command.env == {}


def test_the_event_broker_is_a_script_of_this_package_that_runs_alone() -> None:
    command = event_broker_command(stack_of(two(), base_env=HARMLESS))
    assert command.argv == (
        '/venv/bin/python', '-P', os.fspath(EVENT_BROKER_SCRIPT),
        'ipc:///tmp/beam-x/events-in', 'ipc:///tmp/beam-x/events-out',
    )  # fmt: skip
    assert EVENT_BROKER_SCRIPT.is_file()
    assert command.env == HARMLESS


def test_an_external_etcd_is_named_to_frontend_and_engines_with_its_credentials() -> None:
    credentials = {name: NASTY[name] for name in NASTY if name.startswith('ETCD_AUTH_')}
    endpoints = 'http://etcd-0:2379,http://etcd-1:2379'
    stack = stack_of(two(), external_etcd=endpoints, base_env=credentials)
    assert not stack.starts_etcd
    for command in (frontend_command(stack), engine_command(stack, 0)):
        assert command.env['ETCD_ENDPOINTS'] == endpoints
        assert command.env.items() >= credentials.items()
        assert '--discovery-backend' in command.argv


def test_discovery_by_files_names_no_etcd() -> None:
    stack = stack_of(two(discovery='file'), base_env=NASTY | {'ETCD_ENDPOINTS': 'http://x:1'})
    assert not stack.starts_etcd
    for command in (frontend_command(stack), engine_command(stack, 0)):
        assert command.env['DYN_FILE_KV'] == '/tmp/beam-x/discovery'
        assert not [name for name in command.env if name.startswith('ETCD_')]
        at = command.argv.index('--discovery-backend')
        assert command.argv[at + 1] == 'file'


def test_a_runtime_without_an_external_etcd_starts_its_own() -> None:
    assert stack_of(two()).starts_etcd


def test_the_lease_of_ones_own_etcd_may_be_set_on_the_worker() -> None:
    stack = stack_of(two(), base_env={'ETCD_LEASE_TTL': '3'})
    for command in (engine_command(stack, 0), frontend_command(stack)):
        assert command.env['ETCD_LEASE_TTL'] == '3'


def test_a_chat_template_is_a_file_of_each_engine() -> None:
    stack = stack_of(two(), chat_template=Path('/tmp/t.jinja'))
    for index in (0, 1):
        argv = engine_command(stack, index).argv
        assert argv[argv.index('--custom-jinja-template') + 1] == '/tmp/t.jinja'
    assert '/tmp/t.jinja' not in frontend_command(stack).argv
    assert '--custom-jinja-template' not in engine_command(stack_of(two()), 0).argv


def test_the_users_flags_come_last_and_once() -> None:
    config = two(
        vllm_server_kwargs={'enable_prefix_caching': True, 'max-model-len': 2048, 'dtype': 'auto'},
        frontend_kwargs={'tokenizer': 'fastokens', 'router-event-threads': 8},
    )
    stack = stack_of(config)
    engine = engine_command(stack, 0).argv
    assert engine.count('--enable-prefix-caching') == 1
    assert engine[-5:] == ('--enable-prefix-caching', '--max-model-len', '2048', '--dtype', 'auto')
    frontend = frontend_command(stack).argv
    assert frontend[-4:] == ('--tokenizer', 'fastokens', '--router-event-threads', '8')


@pytest.mark.parametrize('kind', ['gpu', 'cpu', 'simulated'])
@pytest.mark.parametrize('mode', MODES)
def test_no_flag_and_no_variable_of_the_router_is_ever_given_to_an_engine(
    mode: str, kind: str
) -> None:
    """It would go into the model card and replace the frontend's router configuration."""
    config, _ = MODES[mode]
    events = config.kv_event_mode
    stack = stack_of(two(config.router_mode, events, engine_kind=kind), base_env=NASTY)
    for index in (0, 1):
        command = engine_command(stack, index)
        assert not [argument for argument in command.argv if 'router' in argument]
        assert not [name for name in command.env if 'ROUTER' in name]


@pytest.mark.parametrize('mode', MODES)
def test_the_hash_seed_is_pinned_under_the_kv_router_only(mode: str) -> None:
    config, _ = MODES[mode]
    for base, otherwise in (({}, None), ({'PYTHONHASHSEED': '1234'}, '1234')):
        stack = stack_of(config, base_env=base)
        for name, command in children_of(stack).items():
            pinned = config.uses_kv_router and name not in ('etcd', 'broker')
            assert command.env.get('PYTHONHASHSEED') == ('0' if pinned else otherwise), name


@pytest.mark.parametrize('kind', ['gpu', 'cpu', 'simulated'])
@pytest.mark.parametrize('router', ['kv', 'round-robin'])
def test_what_the_worker_inherited_changes_no_childs_addresses_or_part(
    router: str, kind: str
) -> None:
    config = two(router, engine_kind=kind)
    clean = children_of(stack_of(config, base_env=HARMLESS))
    nasty = children_of(stack_of(config, base_env=HARMLESS | NASTY))
    for name in ('frontend', 'engine 0', 'engine 1'):
        assert nasty[name] == clean[name], name
        assert clean[name].env.items() >= HARMLESS.items()
    assert not [name for name in nasty['etcd'].env if name.startswith('ETCD_')]


def test_a_native_server_meets_no_port_of_another_process() -> None:
    command = native_server_command(
        'org/model',
        {},
        port=20_000,
        python='python',
        base_env=HARMLESS | NASTY | OVERRIDDEN,
        directory=DIRECTORY,
    )
    assert command.env.items() >= (HARMLESS | OVERRIDDEN).items()
    for name in (
        'VLLM_PORT',
        'VLLM_DP_MASTER_PORT',
        'MASTER_PORT',
        'RANK',
        'WORLD_SIZE',
        'VLLM_API_KEY',
    ):
        assert name not in command.env


@pytest.mark.parametrize(
    ('arguments', 'template', 'rest'),
    [
        ({}, None, ()),
        (
            {'data-parallel-size': 2, 'enforce-eager': None},
            None,
            ('--data-parallel-size', '2', '--enforce-eager'),
        ),
        ({'dtype': 'auto'}, Path('/t.jinja'), ('--chat-template', '/t.jinja', '--dtype', 'auto')),
        ({'chat-template': '/own.jinja'}, Path('/t.jinja'), ('--chat-template', '/own.jinja')),
    ],
    ids=['bare', 'flags', 'template', "the user's own template"],
)
def test_the_native_server_listens_on_loopback(
    arguments: dict[str, Any], template: Path | None, rest: tuple[str, ...]
) -> None:
    command = native_server_command(
        'org/model',
        arguments,
        port=20_000,
        python='python',
        base_env={},
        directory=DIRECTORY,
        chat_template=template,
    )
    assert command.argv == (
        'python', '-m', 'vllm.entrypoints.openai.api_server',
        '--model', 'org/model', '--host', '127.0.0.1', '--port', '20000', *rest,
    )  # fmt: skip
    assert command.env == {'TMPDIR': '/tmp/beam-x'}


def test_an_engines_own_variables_reach_it_alone() -> None:
    engines = (Spec(('0',), env={'HF_TOKEN': 'a', 'NEW': '1'}), Spec(('1',)))
    stack = stack_of(DynamoRuntimeConfig(engines), base_env=HARMLESS)
    children = children_of(stack)
    assert children['engine 0'].env['HF_TOKEN'] == 'a'
    assert children['engine 0'].env['NEW'] == '1'
    for name in ('engine 1', 'frontend', 'broker', 'etcd'):
        assert children[name].env['HF_TOKEN'] == 'hf_secret'
        assert 'NEW' not in children[name].env


@pytest.mark.parametrize('kind', ['gpu', 'cpu', 'simulated'])
def test_a_variable_that_the_runtime_sets_for_each_engine_cannot_be_set_for_all(kind: str) -> None:
    """Else two engines could be sent to one port by one innocent setting."""
    config = two(engine_kind=kind)
    first, second = (engine_command(stack_of(config), index).env for index in (0, 1))
    differing = {name for name in first if first[name] != second[name]}
    assert 'DYN_SYSTEM_PORT' in differing
    for name in differing | {'ETCD_ENDPOINTS', *HASH_SEED}:
        with pytest.raises(ConfigurationError, match=f'env sets {name}'):
            Spec(env={name: 'x'})


@pytest.mark.parametrize('mode', MODES)
def test_nothing_is_looked_up_and_the_process_environment_is_left_alone(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same input gives the same output, whatever this process has in its environment."""
    config, _ = MODES[mode]
    base = dict(HARMLESS)
    first = children_of(stack_of(config, base_env=base))
    for name, value in (NASTY | OVERRIDDEN).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert children_of(stack_of(config, base_env=base)) == first
    assert dict(os.environ) == before
    assert base == HARMLESS
    for command in first.values():
        assert command.env is not base


@pytest.mark.parametrize(('length', 'own'), [(70, True), (71, False)])
def test_temporary_files_of_dynamo_go_with_the_directory_unless_sockets_would_not_fit(
    length: int, *, own: bool
) -> None:
    directory = Path('/tmp/'.ljust(length, 'd'))
    stack = dataclasses.replace(
        stack_of(two(), base_env={'TMPDIR': '/var/tmp'}), addresses=allocate(directory, 2)
    )
    expected = os.fspath(directory) if own else '/var/tmp'
    for command in (frontend_command(stack), engine_command(stack, 1)):
        assert command.env['TMPDIR'] == expected


def test_no_child_shares_its_environment_with_another() -> None:
    environments = [command.env for command in children_of(stack_of(two())).values()]
    assert len({id(env) for env in environments}) == len(environments)


def test_repr_holds_no_environment() -> None:
    stack = stack_of(two(), base_env=HARMLESS)
    assert 'hf_secret' not in repr(stack)
    assert 'hf_secret' not in repr(engine_command(stack, 0))


def test_everything_listens_on_loopback_or_on_unix_sockets() -> None:
    for name, command in children_of(stack_of(two(), base_env=HARMLESS | NASTY)).items():
        # etcd and the broker look at no variable of Dynamo.
        env = {} if name in ('etcd', 'broker') else dict(command.env)
        text = ' '.join(command.argv) + json.dumps(env)
        assert '0.0.0.0' not in text, name
        assert not re.search(r'(tcp|http)://(?!127\.0\.0\.1[:/])', text), name


class HelpTexts:
    """What the installed programs say of their flags."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def text(self, module: str) -> str:
        if module not in self._texts:
            done = subprocess.run(
                [sys.executable, '-m', module, '--help'],
                capture_output=True,
                text=True,
                check=True,
                timeout=120,
                env=dict(os.environ) | {'COLUMNS': '100'},
            )
            self._texts[module] = done.stdout
        return self._texts[module]

    def flags(self, module: str) -> set[str]:
        return set(re.findall(r'(?<![\w-])--[a-z0-9][a-z0-9-]*', self._options(module)))

    def variables(self, module: str) -> Mapping[str, str]:
        """The variable that stands for each flag that has one."""
        found = {}
        for option in re.split(r'\n(?=  --?\w)', self._options(module)):
            variable = re.search(r'env var:\s+(\w+)', option)
            if variable:
                for flag in re.findall(r'--([a-z0-9-]+)', option.partition('\n')[0]):
                    found[flag] = variable[1]
        return found

    def _options(self, module: str) -> str:
        """The list of options, without the summary before it, whose lines may break a flag."""
        return self.text(module).partition('\noptions:\n')[2]


@pytest.fixture(scope='module')
def helps() -> HelpTexts:
    return HelpTexts()


def flags_in(argv: tuple[str, ...]) -> set[str]:
    return {argument.partition('=')[0] for argument in argv if argument.startswith('--')}


@pytest.mark.parametrize('mode', MODES)
def test_the_installed_programs_know_every_flag_that_is_used(helps: HelpTexts, mode: str) -> None:
    config, _ = MODES[mode]
    stack = stack_of(two(config.router_mode, config.kv_event_mode, engine_kind='simulated'))
    frontend = flags_in(frontend_command(stack).argv)
    engine = flags_in(engine_command(stack, 0).argv)
    assert len(frontend) > 5 < len(engine)
    assert frontend <= helps.flags('dynamo.frontend')
    assert engine <= helps.flags('dynamo.mocker')


def test_the_simulated_engine_knows_every_flag_of_vllm_that_is_passed_on_to_it(
    helps: HelpTexts,
) -> None:
    known = helps.flags('dynamo.mocker')
    assert {f'--{flag}' for flag in SIMULATED_VLLM_FLAGS} <= known


def test_every_flag_that_the_frontend_is_refused_exists(helps: HelpTexts) -> None:
    """A name that no longer exists there would refuse nothing."""
    known = helps.flags('dynamo.frontend')
    assert {f'--{flag}' for flag in _reserved.FRONTEND_FLAGS} <= known


@pytest.mark.parametrize('module', ['dynamo.frontend', 'dynamo.mocker'])
def test_no_variable_stands_in_for_a_flag_that_is_refused_or_set(
    helps: HelpTexts, module: str
) -> None:
    """Else the worker's environment could do what the config is not allowed to."""
    variables = helps.variables(module)
    reserved = _reserved.FRONTEND_FLAGS if 'frontend' in module else _reserved.SIMULATION_FLAGS
    by_router = {flag for flag in variables if flag.startswith('router-')}
    assert len(by_router) > 10
    held = {variables[flag] for flag in by_router | (reserved.keys() & variables.keys())}
    stack = stack_of(two(engine_kind='simulated'), base_env=dict.fromkeys(held, 'nasty'))
    for command in (frontend_command(stack), engine_command(stack, 0)):
        assert 'nasty' not in command.env.values()
