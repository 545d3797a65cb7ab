"""What a config takes and refuses; each refusal names the field, the value and the mend."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from apache_beam_vllm_dynamo import _reserved
from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EnginesPerWorker,
)
from apache_beam_vllm_dynamo.errors import ConfigurationError

Spec = DynamoVLLMEngineSpec
TWO = (Spec(('0',)), Spec(('1',)))


def refusal(make: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        make(*args, **kwargs)
    return str(refused.value)


def test_a_config_without_arguments_is_one_engine_behind_the_kv_router_with_real_events() -> None:
    config = DynamoRuntimeConfig()
    assert config.listed_engines == (Spec(),)
    assert config.router_mode == 'kv'
    assert config.uses_kv_router
    assert config.kv_event_mode == 'zmq'
    assert config.engine_kind == 'gpu'
    assert config.discovery == 'etcd'
    assert config.migration_limit > 0


def test_round_robin_alone_switches_events_off() -> None:
    config = DynamoRuntimeConfig(router_mode='round-robin')
    assert config.kv_event_mode == 'disabled'
    assert not config.uses_kv_router


@pytest.mark.parametrize('field', [f.name for f in dataclasses.fields(DynamoRuntimeConfig)])
def test_a_config_is_frozen(field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(DynamoRuntimeConfig(), field, None)


@pytest.mark.parametrize('field', [f.name for f in dataclasses.fields(Spec)])
def test_a_spec_is_frozen(field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Spec(), field, None)


FULL = DynamoRuntimeConfig(
    engines=(
        Spec((0, 1), {'tensor_parallel_size': 2}, env={'HF_TOKEN': 'hf_secret'}),  # type: ignore[arg-type]  # ordinals as numbers are a convenience
        Spec(('GPU-8a2f', 'MIG-GPU-8a2f/1/0'), {'tp': 2}, simulation_kwargs={'speedup-ratio': 9}),
    ),
    router_mode='kv',
    kv_event_mode='approximate',
    frontend_kwargs={'tokenizer': 'fastokens'},
    router_prediction_secs=5,
    router_overlap_weight=1,
    router_temperature=0.5,
    discovery='file',
    etcd_path='/opt/etcd',
    migration_limit=0,
    start_timeout_secs=60,
    stop_timeout_secs=1.5,
    hang_timeout_secs=90,
)


@pytest.mark.parametrize(
    'config',
    [DynamoRuntimeConfig(), FULL, DynamoRuntimeConfig.for_devices(devices_per_engine=2)],
    ids=['default', 'full', 'counted on the worker'],
)
def test_a_config_crosses_processes_and_replaces_fields(config: DynamoRuntimeConfig) -> None:
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    changed = dataclasses.replace(config, migration_limit=7)
    assert changed.migration_limit == 7
    assert changed.engines == config.engines


def test_the_callers_mappings_and_lists_are_neither_changed_nor_kept() -> None:
    kwargs: dict[str, Any] = {'max_num_seqs': 8, 'a': {'b': [1]}}
    simulated: dict[str, Any] = {'speedup_ratio': 10, 'list': [1, 2]}
    frontend: dict[str, Any] = {'tokenizer': 'fastokens', 'c': {'d': 1}}
    env = {'A': '1'}
    devices = ['0']
    originals = copy.deepcopy((kwargs, simulated, frontend, env, devices))
    spec = Spec(devices, kwargs, simulation_kwargs=simulated, env=env)  # type: ignore[arg-type]  # a list does as well
    engines = [spec]
    config = DynamoRuntimeConfig(engines, frontend_kwargs=frontend)  # type: ignore[arg-type]  # a list does as well
    expected = copy.deepcopy(config)
    assert (kwargs, simulated, frontend, env, devices) == originals
    kwargs['a']['b'].append(2)
    kwargs['new'] = 1
    simulated['list'].append(3)
    frontend['c']['d'] = 2
    env['B'] = '2'
    devices.append('1')
    engines.append(Spec(('5',)))
    assert config == expected
    assert config.listed_engines == (spec,)


def test_repr_holds_no_value_of_env() -> None:
    for shown in (repr(FULL), repr(FULL.listed_engines[0]), str(FULL)):
        assert 'hf_secret' not in shown
        assert 'tensor-parallel-size' in shown


@pytest.mark.parametrize(
    ('given', 'devices'),
    [
        ((0, 1), ('0', '1')),
        (['0', 1], ('0', '1')),
        (range(2), ('0', '1')),
        ('0,1', ('0', '1')),
        (' 0 , 1 ', ('0', '1')),
        (('007',), ('7',)),
        (('GPU-8a2f01c4-0b1d-4f9e-9d3c-1f2e3d4c5b6a',),) * 2,
        (('MIG-8a2f01c4-0b1d-4f9e-9d3c-1f2e3d4c5b6a',),) * 2,
        (('MIG-GPU-8a2f01c4/1/0',),) * 2,
        ((), ()),
    ],
    ids=str,
)
def test_gpus_are_named_by_ordinal_uuid_or_mig_name(given: Any, devices: tuple[str, ...]) -> None:
    assert Spec(given).gpu_devices == devices


SPEC_REFUSALS: list[tuple[dict[str, Any], list[str]]] = [
    ({'gpu_devices': 0}, ['gpu_devices is 0', "('0', '1')"]),
    ({'gpu_devices': {'0'}}, ["gpu_devices is {'0'}", 'give a tuple']),
    ({'gpu_devices': ''}, ["gpu_devices holds ''", 'nvidia-smi -L']),
    ({'gpu_devices': ('a100',)}, ["gpu_devices holds 'a100'", 'ordinal (0), its UUID']),
    ({'gpu_devices': (-1,)}, ['gpu_devices holds -1', 'ordinal']),
    ({'gpu_devices': (True,)}, ['gpu_devices holds True', 'ordinal']),
    ({'gpu_devices': (1.0,)}, ['gpu_devices holds 1.0', 'ordinal']),
    ({'gpu_devices': ('GPU-',)}, ["gpu_devices holds 'GPU-'", 'UUID']),
    ({'gpu_devices': ('0', 0)}, ["gpu_devices names '0' twice", 'once']),
    ({'gpu_devices': ('MIG-a', 'MIG-a')}, ["gpu_devices names 'MIG-a' twice"]),
    *(
        ({'vllm_server_kwargs': {'gpu_memory_utilization': value}}, [repr(value), 'at most 1'])
        for value in (0, -0.5, 1.01, 90, '90%', 'nan', True)
    ),
    ({'cpu_cores': 3}, ['cpu_cores is 3', '(0, 1)']),
    ({'cpu_cores': '0,1'}, ["cpu_cores is '0,1'", '(0, 1)']),
    ({'cpu_cores': ('0',)}, ["cpu_cores is ('0',)", '(0, 1)']),
    ({'cpu_cores': (-1,)}, ['cpu_cores is (-1,)', '(0, 1)']),
    ({'cpu_cores': (True,)}, ['cpu_cores is (True,)', '(0, 1)']),
    ({'cpu_cores': (1, 1)}, ['cpu_cores is (1, 1)', 'each core once']),
    ({'vllm_server_kwargs': ['x']}, ["vllm_server_kwargs is ['x']", 'mapping']),
    ({'vllm_server_kwargs': {'a b': 1}}, ["vllm_server_kwargs has the key 'a b'", 'write it']),
    ({'vllm_server_kwargs': {'a': object}}, ["vllm_server_kwargs['a'] is <class", 'may be a str']),
    (
        {'vllm_server_kwargs': {'max-num-seqs': 'many'}},
        ["vllm_server_kwargs['max-num-seqs'] is 'many'", 'whole number, 1 or more'],
    ),
    ({'vllm_server_kwargs': {'max-num-seqs': 0}}, ["['max-num-seqs'] is 0", '1 or more']),
    ({'vllm_server_kwargs': {'tp': 1.5}}, ["['tensor-parallel-size'] is 1.5", '1 or more']),
    ({'vllm_server_kwargs': {'dp': True}}, ["['data-parallel-size'] is True", '1 or more']),
    ({'simulation_kwargs': 'x'}, ["simulation_kwargs is 'x'", 'mapping']),
    ({'env': [('A', '1')]}, ['env is a list', 'mapping of variable names']),
    ({'env': {'A=B': '1'}}, ["env has the key 'A=B'", "like 'HF_HOME'"]),
    ({'env': {'': '1'}}, ["env has the key ''", "like 'HF_HOME'"]),
    ({'env': {1: '1'}}, ['env has the key 1', "like 'HF_HOME'"]),
    ({'env': {'A': 1}}, ["env['A'] is a int", 'are strings']),
    ({'env': {'A': 'x\x00'}}, ["env['A'] is a str", 'plain string']),
    ({'env': {'CUDA_VISIBLE_DEVICES': '0'}}, ['env sets CUDA_VISIBLE_DEVICES', 'gpu_devices']),
    ({'env': {'VLLM_CPU_OMP_THREADS_BIND': '0'}}, ['VLLM_CPU_OMP_THREADS_BIND', 'cpu_cores']),
    ({'env': {'PYTHONHASHSEED': '1'}}, ['env sets PYTHONHASHSEED', 'KV routing']),
    ({'env': {'ETCD_ENDPOINTS': 'x'}}, ['env sets ETCD_ENDPOINTS', "worker's environment"]),
    ({'env': {'VLLM_PORT': '1'}}, ['env sets VLLM_PORT', 'for each start']),
    ({'env': {'VLLM_NIXL_SIDE_CHANNEL_PORT': '1'}}, ['VLLM_NIXL_SIDE_CHANNEL_PORT', 'each start']),
    ({'env': {'DYN_SYSTEM_PORT': '1'}}, ['env sets DYN_SYSTEM_PORT', 'leave it out']),
    ({'env': {'DYN_NAMESPACE': 'x'}}, ['env sets DYN_NAMESPACE', 'leave it out']),
    ({'env': {'DYN_ROUTER_MODE': 'x'}}, ['env sets DYN_ROUTER_MODE', 'leave it out']),
    ({'env': {'DYN_VLLM_DISAGGREGATION_MODE': 'x'}}, ['DISAGGREGATION_MODE', 'leave it out']),
]


@pytest.mark.parametrize(
    ('fields', 'says'), SPEC_REFUSALS, ids=[repr(fields)[:60] for fields, _ in SPEC_REFUSALS]
)
def test_a_spec_refuses_what_cannot_work(fields: dict[str, Any], says: list[str]) -> None:
    text = refusal(Spec, **fields)
    for part in says:
        assert part in text


def test_an_environment_error_shows_no_value() -> None:
    assert 'hf_secret' not in refusal(Spec, env={'HF_TOKEN': b'hf_secret'})
    assert 'hf_secret' not in refusal(Spec, env={'PYTHONHASHSEED': 'hf_secret'})


CONFIG_REFUSALS: list[tuple[dict[str, Any], list[str]]] = [
    ({'engines': ()}, ['engines is empty', 'at least one']),
    ({'engines': 2}, ['engines is 2', 'for_devices(num_engines=...)']),
    ({'engines': ('0',)}, ["engines holds '0'", 'DynamoVLLMEngineSpec']),
    ({'engines': (Spec(('0',)), Spec())}, ['engine 2 of 2 has no gpu_devices', 'for_devices']),
    ({'engines': (Spec(), Spec())}, ['engine 1 of 2 has no gpu_devices', 'Name the devices']),
    (
        {'engines': (Spec(('0',)), Spec((0,)))},  # type: ignore[arg-type]  # the same GPU, spelled otherwise
        ["GPU '0' is given to engine 1 and to engine 2", 'belongs to one engine'],
    ),
    (
        {'engines': (Spec(('0', '1')),)},
        ['engine 1 has 2 gpu_devices (0, 1)', 'tensor-parallel-size', 'is 1', 'make them equal'],
    ),
    (
        {'engines': (Spec(('0', '1', '2'), {'tp': 2, 'pp': 2}),)},
        ['engine 1 has 3 gpu_devices (0, 1, 2)', 'is 4', 'make them equal'],
    ),
    (
        {'engines': (Spec(('0',)), Spec(('1',), {'tensor-parallel-size': '2'}))},
        ['engine 2 has 1 gpu_devices (1)', 'is 2'],
    ),
    (
        {
            'engines': (
                Spec(('0',), {'block-size': 16}),
                Spec(('1',)),
                Spec(('2',), {'block-size': 32}),
            )
        },
        ["'block-size' of engine 3 is 32", 'that of engine 1 is 16', 'Make them equal'],
    ),
    (
        {'engines': (Spec(('0',), {'max_model_len': '1k'}), Spec(('1',), {'max-model-len': 2000}))},
        ["'max-model-len' of engine 2 is 2000", "that of engine 1 is '1k'"],
    ),
    (
        {'engines': EnginesPerWorker(devices_per_engine=2)},
        ['devices_per_engine is 2', 'is 1', 'make them equal'],
    ),
    (
        {'engines': EnginesPerWorker(spec=Spec(vllm_server_kwargs={'dp': 2}))},
        ['devices_per_engine is 1', 'is 2', 'make them equal'],
    ),
    (
        {'engines': (Spec(cpu_cores=(0,)), Spec()), 'engine_kind': 'cpu'},
        ['engine 2 has no cpu_cores', 'every engine, or of none'],
    ),
    (
        {'engines': (Spec(cpu_cores=(0, 1)), Spec(cpu_cores=(1,))), 'engine_kind': 'cpu'},
        ['CPU core 1 is given to engine 1 and to engine 2', 'belongs to one'],
    ),
    (
        {'engines': (Spec((), {'tp': 2}, cpu_cores=(0,)),), 'engine_kind': 'cpu'},
        ['engine 1 has 1 cpu_cores (0,)', 'is 2', 'a core for each rank'],
    ),
    ({'engine_kind': 'tpu'}, ["engine_kind is 'tpu'", "'gpu', 'cpu', 'simulated'"]),
    ({'router_mode': 'KV'}, ["router_mode is 'KV'", "'kv', 'round-robin'"]),
    ({'router_mode': None}, ['router_mode is None', "'kv', 'round-robin'"]),
    ({'router_mode': ['kv']}, ["router_mode is ['kv']", "'kv', 'round-robin'"]),
    ({'kv_event_mode': 'nats'}, ["kv_event_mode is 'nats'", "'zmq', 'approximate', 'disabled'"]),
    (
        {'router_mode': 'round-robin', 'kv_event_mode': 'zmq'},
        ["kv_event_mode is 'zmq'", "'round-robin'", "kv_event_mode='disabled'"],
    ),
    (
        {'router_mode': 'round-robin', 'kv_event_mode': 'approximate'},
        ["kv_event_mode is 'approximate'", "use router_mode='kv'"],
    ),
    ({'discovery': 'mem'}, ["discovery is 'mem'", "'etcd', 'file'"]),
    ({'etcd_path': ''}, ["etcd_path is ''", 'leave it out']),
    ({'etcd_path': 3}, ['etcd_path is 3', 'name the program']),
    ({'migration_limit': -1}, ['migration_limit is -1', '0 or more']),
    ({'migration_limit': 2**32}, ['migration_limit is 4294967296', 'below 4294967296']),
    ({'stop_timeout_secs': 1e9}, ['stop_timeout_secs is 1000000000.0', '604800 (a week) at most']),
    ({'migration_limit': True}, ['migration_limit is True', 'whole number']),
    ({'migration_limit': 1.0}, ['migration_limit is 1.0', 'whole number']),
    ({'frontend_kwargs': ['x']}, ["frontend_kwargs is ['x']", 'mapping']),
    *(
        ({field: value}, [f'{field} is {value!r}', 'seconds above 0'])
        for field in (
            'router_prediction_secs',
            'start_timeout_secs',
            'stop_timeout_secs',
            'hang_timeout_secs',
        )
        for value in (0, -1.5, math.inf, math.nan, '60', True, None)
    ),
    *(
        ({field: value}, [f'{field} is {value!r}', 'a number, 0 or more'])
        for field in ('router_overlap_weight', 'router_temperature')
        for value in (-0.5, math.inf, math.nan, '1', True, None)
    ),
]


@pytest.mark.parametrize(
    ('fields', 'says'), CONFIG_REFUSALS, ids=[repr(fields)[:70] for fields, _ in CONFIG_REFUSALS]
)
def test_a_config_refuses_what_cannot_work(fields: dict[str, Any], says: list[str]) -> None:
    text = refusal(DynamoRuntimeConfig, **fields)
    for part in says:
        assert part in text


@pytest.mark.parametrize('flag', sorted(_reserved.FRONTEND_FLAGS))
def test_a_frontend_flag_of_the_runtime_is_refused_by_name(flag: str) -> None:
    for spelling in (flag, f'--{flag}', flag.replace('-', '_'), f'no-{flag}'):
        text = refusal(DynamoRuntimeConfig, frontend_kwargs={spelling: 'x'})
        assert text.startswith(f"frontend_kwargs sets '{spelling.lstrip('-').replace('_', '-')}'")
        assert _reserved.FRONTEND_FLAGS[flag] in text


@pytest.mark.parametrize('flag', sorted(_reserved.ENGINE_FLAGS))
def test_an_engine_flag_of_the_runtime_is_refused_by_name(flag: str) -> None:
    spec = Spec(vllm_server_kwargs={flag: 'x'})
    for engines in ((spec,), EnginesPerWorker(spec=spec)):
        text = refusal(DynamoRuntimeConfig, engines)
        assert f"vllm_server_kwargs sets '{flag}'" in text
        assert _reserved.ENGINE_FLAGS[flag] in text


@pytest.mark.parametrize('flag', sorted(_reserved.SIMULATION_FLAGS))
def test_a_simulation_flag_of_the_runtime_is_refused_by_name(flag: str) -> None:
    text = refusal(DynamoRuntimeConfig, (Spec(simulation_kwargs={flag: 'x'}),))
    assert f"simulation_kwargs sets '{flag}'" in text
    assert _reserved.SIMULATION_FLAGS[flag] in text


@pytest.mark.parametrize('field', ['vllm_server_kwargs', 'simulation_kwargs'])
@pytest.mark.parametrize(
    'flag',
    [
        'router-mode', 'router_mode', 'no-router-kv-events', 'router-temperature', 'load-aware',
        'kv-events', 'no-kv-events', 'track-active-blocks', 'active-decode-blocks-threshold',
    ],
)  # fmt: skip
def test_no_engine_takes_a_flag_of_the_router(field: str, flag: str) -> None:
    fields: dict[str, Any] = {field: {flag: None}}
    text = refusal(DynamoRuntimeConfig, (Spec(**fields),))
    assert field in text
    assert 'a flag of the router' in text
    assert 'frontend_kwargs' in text


@pytest.mark.parametrize('field', ['vllm_server_kwargs', 'simulation_kwargs'])
@pytest.mark.parametrize(
    'off',
    [{'enable-prefix-caching': False}, {'no-enable-prefix-caching': None}],
    ids=['False', 'negation'],
)
def test_the_kv_router_needs_the_prefix_cache(field: str, off: dict[str, Any]) -> None:
    fields: dict[str, Any] = {field: off}
    engines = (Spec(**fields),)
    assert field in refusal(DynamoRuntimeConfig, engines)
    assert "router_mode='round-robin'" in refusal(DynamoRuntimeConfig, engines)
    DynamoRuntimeConfig(engines, router_mode='round-robin')


def test_devices_are_those_of_the_engine_kind_alone() -> None:
    """One field is changed between a laptop and GPUs, and the rest stays as it is."""
    gpus = DynamoRuntimeConfig(
        (Spec(('0', '1'), {'tp': 2}, cpu_cores=(0, 1)), Spec(('2',), cpu_cores=(2,)))
    )
    for kind in ('cpu', 'simulated'):
        elsewhere = dataclasses.replace(gpus, engine_kind=kind)
        assert elsewhere.engines == gpus.engines
    DynamoRuntimeConfig((Spec(), Spec()), engine_kind='cpu')
    DynamoRuntimeConfig((Spec(), Spec()), engine_kind='simulated')


@pytest.mark.parametrize(
    ('kwargs', 'devices', 'sequences'),
    [
        ({}, 1, 256),
        ({'max-num-seqs': 32}, 1, 32),
        ({'max_num_seqs': '32', 'tensor_parallel_size': '2'}, 2, 32),
        ({'tp': 2, 'pp': 3}, 6, 256),
        ({'dp': 2, 'max-num-seqs': 8}, 2, 16),
    ],
    ids=str,
)
def test_a_spec_knows_how_many_devices_it_fills_and_sequences_it_runs(
    kwargs: dict[str, Any], devices: int, sequences: int
) -> None:
    spec = Spec(vllm_server_kwargs=kwargs)
    assert (spec.devices_needed, spec.max_num_seqs) == (devices, sequences)


def test_one_engine_may_stand_alone_or_in_a_list() -> None:
    assert DynamoRuntimeConfig(TWO[0]).engines == (TWO[0],)  # type: ignore[arg-type]  # a convenience
    assert DynamoRuntimeConfig(list(TWO)).engines == TWO  # type: ignore[arg-type]  # a list does as well


def test_the_etcd_program_may_be_named_by_a_path() -> None:
    path = Path('/opt/etcd')
    assert DynamoRuntimeConfig(etcd_path=path) == DynamoRuntimeConfig(etcd_path='/opt/etcd')


FOR_DEVICES: list[tuple[dict[str, Any], list[tuple[str, ...]]]] = [
    ({'num_engines': 1}, [('0',)]),
    ({'num_engines': 2}, [('0',), ('1',)]),
    ({'num_engines': 2, 'devices_per_engine': 2}, [('0', '1'), ('2', '3')]),
    ({'gpu_devices': [3, 1]}, [('3',), ('1',)]),
    ({'gpu_devices': '4,5'}, [('4',), ('5',)]),
    ({'gpu_devices': ['GPU-a', 'GPU-b'], 'devices_per_engine': 2}, [('GPU-a', 'GPU-b')]),
    ({'gpu_devices': ['MIG-a', 'MIG-b'], 'num_engines': 2}, [('MIG-a',), ('MIG-b',)]),
]


@pytest.mark.parametrize(
    ('arguments', 'devices'), FOR_DEVICES, ids=[repr(arguments) for arguments, _ in FOR_DEVICES]
)
def test_for_devices_gives_each_engine_the_next_devices(
    arguments: dict[str, Any], devices: list[tuple[str, ...]]
) -> None:
    config = DynamoRuntimeConfig.for_devices(**arguments)
    assert [spec.gpu_devices for spec in config.listed_engines] == devices
    per_engine = arguments.get('devices_per_engine', 1)
    parallel = {'tensor-parallel-size': per_engine} if per_engine > 1 else {}
    assert all(spec.vllm_server_kwargs == parallel for spec in config.listed_engines)


def test_for_devices_leaves_the_use_of_several_devices_to_the_caller() -> None:
    for kwargs in ({'pp': 2}, {'pipeline_parallel_size': 2}, {'dp': 2}, {'tp': 2}):
        config = DynamoRuntimeConfig.for_devices(
            num_engines=2, devices_per_engine=2, vllm_server_kwargs=kwargs
        )
        for spec in config.listed_engines:
            assert list(spec.vllm_server_kwargs.values()) == [2]


def test_for_devices_passes_the_common_settings_and_the_fields_of_the_config_on() -> None:
    config = DynamoRuntimeConfig.for_devices(
        num_engines=2,
        vllm_server_kwargs={'max-num-seqs': 8},
        simulation_kwargs={'speedup-ratio': 10},
        env={'A': '1'},
        engine_kind='simulated',
        router_mode='round-robin',
    )
    assert (config.engine_kind, config.router_mode) == ('simulated', 'round-robin')
    for spec in config.listed_engines:
        assert spec.vllm_server_kwargs == {'max-num-seqs': 8}
        assert spec.simulation_kwargs == {'speedup-ratio': 10}
        assert spec.env == {'A': '1'}


def test_for_devices_without_a_number_counts_on_the_worker() -> None:
    config = DynamoRuntimeConfig.for_devices(devices_per_engine=2, env={'A': '1'})
    assert config.engines == EnginesPerWorker(
        devices_per_engine=2,
        spec=Spec(vllm_server_kwargs={'tensor-parallel-size': 2}, env={'A': '1'}),
    )
    with pytest.raises(ConfigurationError, match='counted on the worker'):
        _ = config.listed_engines


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        ({'num_engines': 0}, 'num_engines is 0; it must be a whole number, 1 or more'),
        ({'num_engines': 0, 'gpu_devices': [0]}, 'num_engines is 0; it must be'),
        ({'num_engines': True}, 'num_engines is True; it must be'),
        ({'devices_per_engine': 0}, 'devices_per_engine is 0; it must be'),
        ({'devices_per_engine': '2'}, "devices_per_engine is '2'; it must be"),
        ({'gpu_devices': []}, '0 GPUs cannot be shared out evenly to engines of 1; give'),
        (
            {'gpu_devices': [0, 1, 2], 'devices_per_engine': 2},
            '3 GPUs cannot be shared out evenly to engines of 2; give a multiple',
        ),
        (
            {'gpu_devices': '0,1,2', 'num_engines': 2},
            'num_engines is 2, but the 3 gpu_devices make 3 engines of 1; give 2 devices',
        ),
        ({'gpu_devices': [0, 0]}, "gpu_devices names '0' twice"),
        ({'num_engines': 1, 'vllm_server_kwargs': {'tp': 2}}, 'engine 1 has 1 gpu_devices (0)'),
        (
            {'devices_per_engine': 2, 'vllm_server_kwargs': {'tp': 1}},
            'devices_per_engine is 2, but tensor-parallel-size',
        ),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_for_devices_refuses_what_does_not_divide(arguments: dict[str, Any], says: str) -> None:
    assert says in refusal(DynamoRuntimeConfig.for_devices, **arguments)


@pytest.mark.parametrize(
    ('fields', 'says'),
    [
        ({'devices_per_engine': 0}, 'devices_per_engine is 0'),
        ({'spec': {}}, 'spec is {}; give a DynamoVLLMEngineSpec'),
        ({'spec': Spec(('3',))}, "gpu_devices of spec is ('3',)"),
        ({'spec': Spec(cpu_cores=(3,))}, 'cpu_cores of spec is (3,)'),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_engines_per_worker_refuses_devices_of_its_own(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(EnginesPerWorker, **fields)
