"""Configs and handlers out of plain mappings, and what is said of mappings that are none."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from apache_beam_vllm_dynamo import (
    ConfigurationError,
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EnginesPerWorker,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
)
from apache_beam_vllm_dynamo._checks import LONGEST_SECS
from apache_beam_vllm_dynamo._config_mapping import (
    handler_from_mapping,
    runtime_config_from_mapping,
)

Spec = DynamoVLLMEngineSpec


def from_yaml(text: str) -> DynamoRuntimeConfig:
    return runtime_config_from_mapping(yaml.safe_load(text))


def refusal(mapping: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        runtime_config_from_mapping(mapping)
    return str(refused.value)


def handler_refusal(mapping: Any, kind: Any = 'chat') -> str:
    with pytest.raises(ConfigurationError) as refused:
        handler_from_mapping(kind, mapping)
    return str(refused.value)


def test_engines_may_be_listed_one_by_one() -> None:
    config = from_yaml("""
        engines:
          - gpu_devices: [0, GPU-8a2f]
            vllm_server_kwargs: {tensor_parallel_size: 2, max-num-seqs: 32, enforce-eager: null}
            env: {HF_HUB_OFFLINE: '1'}
          - gpu_devices: ['1']
        router_mode: kv
        kv_event_mode: approximate
        start_timeout_secs: 60
    """)
    assert config == DynamoRuntimeConfig(
        engines=(
            Spec(
                ('0', 'GPU-8a2f'),
                {'tensor-parallel-size': 2, 'max-num-seqs': 32, 'enforce-eager': None},
                env={'HF_HUB_OFFLINE': '1'},
            ),
            Spec(('1',)),
        ),
        kv_event_mode='approximate',
        start_timeout_secs=60,
    )


def test_engines_may_be_counted_on_the_worker() -> None:
    config = from_yaml("""
        engines:
          devices_per_engine: 2
          spec: {vllm_server_kwargs: {tensor-parallel-size: 2}}
    """)
    assert config == DynamoRuntimeConfig(
        engines=EnginesPerWorker(
            devices_per_engine=2, spec=Spec(vllm_server_kwargs={'tensor-parallel-size': 2})
        )
    )
    assert from_yaml('engines: {devices_per_engine: 1}').engines == EnginesPerWorker()


def test_equal_engines_are_given_as_to_for_devices() -> None:
    config = from_yaml("""
        num_engines: 2
        devices_per_engine: 2
        gpu_devices: [3, 2, 1, 0]
        vllm_server_kwargs: {max-num-seqs: 8}
        simulation_kwargs: {speedup-ratio: 10}
        engine_kind: simulated
        router_mode: round-robin
    """)
    assert config == DynamoRuntimeConfig.for_devices(
        num_engines=2,
        devices_per_engine=2,
        gpu_devices=[3, 2, 1, 0],
        vllm_server_kwargs={'max-num-seqs': 8},
        simulation_kwargs={'speedup-ratio': 10},
        engine_kind='simulated',
        router_mode='round-robin',
    )


def test_what_is_not_given_is_as_in_python() -> None:
    assert runtime_config_from_mapping({}) == DynamoRuntimeConfig()
    assert from_yaml('devices_per_engine: 1') == DynamoRuntimeConfig.for_devices()


@pytest.mark.parametrize(
    ('mapping', 'text'),
    [
        (
            {'router': 'kv'},
            (
                "dynamo_runtime_config has the key 'router' with the value 'kv', which does not "
                "exist (is 'router_mode' meant?). The keys are "
            ),
        ),
        (
            {'engines': [{}, {'gpu_device': [0]}]},
            (
                "dynamo_runtime_config.engines[1] has the key 'gpu_device' with the value [0], "
                "which does not exist (is 'gpu_devices' meant?). The keys are cpu_cores, env, "
                'gpu_devices, simulation_kwargs, vllm_server_kwargs.'
            ),
        ),
        (
            {'engines': {'spec': {}, 'devices': 2}},
            (
                "dynamo_runtime_config.engines has the key 'devices' with the value 2, which does "
                'not exist. The keys are devices_per_engine, spec.'
            ),
        ),
        (
            {'engines': {'spec': {'cpu': [0]}}},
            "dynamo_runtime_config.engines.spec has the key 'cpu' with the value [0]",
        ),
        ({3: 4}, 'has the key 3 with the value 4, which does not exist. The keys are '),
        (
            {'engines': [{'gpu_devices': ['x']}]},
            "dynamo_runtime_config.engines[0]: gpu_devices holds 'x'",
        ),
        (
            {'engines': [{}], 'num_engines': 2, 'env': {}},
            'dynamo_runtime_config has engines and num_engines, env, which say the same thing',
        ),
        ({'engines': 2}, 'dynamo_runtime_config.engines is 2; give a list'),
        ({'engines': [2]}, 'dynamo_runtime_config.engines[0] is 2; it must be a mapping such as'),
        ({'engines': []}, 'at least one engine'),
        ({'num_engines': '2'}, "num_engines is '2'"),
        ({'router_mode': 'KV'}, "router_mode is 'KV'; it must be one of 'kv', 'round-robin'"),
        ([], 'dynamo_runtime_config is []; it must be a mapping such as {num_engines: 2'),
        (None, 'dynamo_runtime_config is None; it must be a mapping'),
    ],
)
def test_what_cannot_work_is_named_with_its_place_its_value_and_the_mend(
    mapping: Any, text: str
) -> None:
    assert text in refusal(mapping)


def test_an_unknown_key_shows_no_value_of_a_mapping() -> None:
    """The key may be a misspelled ``env``, whose values may be tokens."""
    secret = {'HF_TOKEN': 'hf_secret'}
    for mapping in ({'envs': secret}, {'engines': [{'envs': [secret]}]}, [secret]):
        assert 'secret' not in refusal(mapping)
    assert "'envs' with the value {'HF_TOKEN': …}, which" in refusal({'envs': secret})


def test_a_mapping_is_left_as_it_was() -> None:
    mapping = {'engines': [{'gpu_devices': [0], 'vllm_server_kwargs': {'tp': 1}}]}
    before = json.dumps(mapping)
    runtime_config_from_mapping(mapping)
    assert json.dumps(mapping) == before


def test_a_handler_takes_its_arguments_by_name() -> None:
    handler = handler_from_mapping(
        'chat',
        {
            'model_name': 'm',
            'chat_template_path': 'gs://bucket/template.jinja',
            'use_dynamo': True,
            'dynamo_runtime_config': {'num_engines': 2},
            'max_batch_size': 8,
            'max_batch_duration_secs': 0.5,
            'on_error': 'return',
            'max_in_flight': 4,
            'env_vars': {'HF_HUB_OFFLINE': '1'},
        },
    )
    assert isinstance(handler, VLLMChatModelHandler)
    assert repr(handler) == "VLLMChatModelHandler('m', Dynamo, 2 engines, kv)"
    assert handler.on_error == 'return'
    sizes = handler.batch_elements_kwargs()
    assert (sizes['max_batch_size'], sizes['max_batch_duration_secs']) == (8, 0.5)


def test_a_handler_without_dynamo_is_the_native_server() -> None:
    handler = handler_from_mapping(
        'completions',
        {'model_name': 'm', 'vllm_server_kwargs': {'tp': 2}, 'dynamo_runtime_config': None},
    )
    assert isinstance(handler, VLLMCompletionsModelHandler)
    assert repr(handler) == "VLLMCompletionsModelHandler('m', native vLLM)"


@pytest.mark.parametrize(
    ('mapping', 'text'),
    [
        ({}, 'the chat handler has no model_name'),
        ({'model_name': None}, 'model_name is None'),
        (
            {'model_name': 'm', 'dynamo_config': {'num_engines': 2}},
            (
                "the chat handler has the key 'dynamo_config' with the value {'num_engines': …}, "
                "which does not exist (is 'dynamo_runtime_config' meant?). The keys are chat_"
            ),
        ),
        ({'model_name': 'm', 'batch_length_fn': 'len'}, 'is a Python function or needs one'),
        ({'model_name': 'm', 'max_batch_weight': 9}, 'is a Python function or needs one'),
        ({'model_name': 'm', 'min_batch_size': 'x'}, "min_batch_size is 'x'"),
        ({'model_name': 'm', 'max_batch_duration_secs': True}, 'number of seconds'),
        (
            {'model_name': 'm', 'dynamo_runtime_config': {'num_engines': 2}},
            'dynamo_runtime_config is given, but use_dynamo is false; pass use_dynamo=True',
        ),
        (
            {'model_name': 'm', 'use_dynamo': True, 'dynamo_runtime_config': {'engine': 2}},
            "dynamo_runtime_config has the key 'engine' with the value 2",
        ),
        ('m', "the chat handler is 'm'; it must be a mapping of its arguments by name."),
    ],
)
def test_a_handler_says_what_is_wrong_with_its_arguments(mapping: Any, text: str) -> None:
    assert text in handler_refusal(mapping)


def test_only_chat_has_a_template_and_there_are_two_kinds() -> None:
    mapping = {'model_name': 'm', 'chat_template_path': 'x'}
    assert 'the completions handler has the key' in handler_refusal(mapping, 'completions')
    assert "kind is 'embed'; it must be one of 'completions', 'chat'" in handler_refusal(
        {}, 'embed'
    )


names = st.sampled_from(['max-num-seqs', 'enforce-eager', 'dtype', 'hf-overrides'])
values = st.one_of(
    st.none(), st.booleans(), st.text('abc', min_size=1), st.just({'a': [1, None]}), st.just([1])
)
arguments = st.dictionaries(names.filter(lambda name: name != 'max-num-seqs'), values)
environments = st.dictionaries(st.sampled_from(['HF_TOKEN', 'A_B']), st.text('xyz'))
configs = st.builds(
    DynamoRuntimeConfig,
    engines=st.one_of(
        st.lists(
            st.builds(
                Spec,
                cpu_cores=st.just(()),
                vllm_server_kwargs=arguments,
                env=environments,
            ),
            min_size=1,
            max_size=3,
        ),
        st.builds(
            EnginesPerWorker,
            devices_per_engine=st.integers(1, 8),
            spec=st.builds(Spec, vllm_server_kwargs=arguments, env=environments),
        ),
    ),
    engine_kind=st.sampled_from(['cpu', 'simulated']),
    router_mode=st.sampled_from(['kv', 'round-robin']),
    discovery=st.sampled_from(['etcd', 'file']),
    start_timeout_secs=st.floats(1, LONGEST_SECS),
    migration_limit=st.integers(0, 9),
    etcd_path=st.sampled_from([None, '/usr/bin/etcd']),
)


@given(configs)
def test_every_config_survives_the_way_through_json(config: DynamoRuntimeConfig) -> None:
    mapping = json.loads(json.dumps(dataclasses.asdict(config)))
    assert runtime_config_from_mapping(mapping) == config


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats()
    | st.sampled_from(['', 'kv', 'zmq', 'simulated', '1', 'return', '-x']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Spec)]), inner)
    ),
    max_leaves=8,
)
config_keys = [f.name for f in dataclasses.fields(DynamoRuntimeConfig)]
config_keys += ['num_engines', 'devices_per_engine', 'gpu_devices', 'vllm_server_kwargs', 'env']
wrong_configs = st.dictionaries(st.sampled_from(config_keys), plain, max_size=4)
handler_keys = [*inspect.signature(VLLMCompletionsModelHandler).parameters, 'env_vars']
handler_keys.remove('dynamo_runtime_config')


@settings(max_examples=300)
@given(wrong_configs)
def test_nothing_but_a_configuration_error_comes_of_a_wrong_config(mapping: Any) -> None:
    with contextlib.suppress(ConfigurationError):
        runtime_config_from_mapping(mapping)


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(handler_keys), plain, max_size=4),
    st.none() | wrong_configs,
    st.sampled_from(['completions', 'chat']),
)
def test_nothing_but_a_configuration_error_comes_of_wrong_arguments(
    mapping: Any, config: Any, kind: Any
) -> None:
    base = {'model_name': 'm', 'use_dynamo': True, 'dynamo_runtime_config': config}
    with contextlib.suppress(ConfigurationError):
        handler_from_mapping(kind, base | mapping)
