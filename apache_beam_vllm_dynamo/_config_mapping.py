"""Pure: plain nested mappings, as YAML and JSON files hold them, to configs and handlers.

The keys are the names of the Python arguments, nested as they are in Python. Engines are given
in one of these ways::

    engines:                       # one by one
      - gpu_devices: [0]
        vllm_server_kwargs: {max-num-seqs: 32}
      - gpu_devices: [1]

    engines:                       # as many as the worker has GPUs for
      devices_per_engine: 2
      spec: {vllm_server_kwargs: {tensor-parallel-size: 2}}

    num_engines: 2                 # the arguments of DynamoRuntimeConfig.for_devices()
    devices_per_engine: 1
    vllm_server_kwargs: {max-num-seqs: 32}

A key that means nothing is an error: a misspelled setting would otherwise be its default,
without a word.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from apache_beam_vllm_dynamo import _checks
from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EnginesPerWorker,
)
from apache_beam_vllm_dynamo.errors import ConfigurationError
from apache_beam_vllm_dynamo.handlers import VLLMChatModelHandler, VLLMCompletionsModelHandler

HandlerKind = Literal['completions', 'chat']
"""Which of the two handlers."""

_CONFIG = 'dynamo_runtime_config'
_MAPPING_EXAMPLE = 'such as {num_engines: 2, router_mode: kv}'

# Functions, and what has no effect without one: no file can hold them.
_NEED_PYTHON = frozenset(
    {'element_size_fn', 'max_batch_weight', 'batch_length_fn', 'batch_bucket_boundaries'}
)
# What the handlers take as further keywords.
_OPTIONS = ('env_vars', 'large_model', 'model_copies')


def runtime_config_from_mapping(mapping: Mapping[str, Any]) -> DynamoRuntimeConfig:
    """The config that a mapping describes.

    Raises:
      ConfigurationError: A key is unknown, or the config cannot work.
    """
    for_devices = _keywords_of(DynamoRuntimeConfig.for_devices)
    fields = _fields_of(DynamoRuntimeConfig)
    given = _checked(_CONFIG, mapping, (*fields, *for_devices), _MAPPING_EXAMPLE)
    by_devices = [name for name in for_devices if name in given]
    if 'engines' not in given:
        return (
            DynamoRuntimeConfig.for_devices(**given) if by_devices else DynamoRuntimeConfig(**given)
        )
    if by_devices:
        raise ConfigurationError(
            f'{_CONFIG} has engines and {", ".join(by_devices)}, which say the same thing in two '
            'ways; list the engines with all that each needs, or leave engines out.'
        )
    return DynamoRuntimeConfig(
        **given | {'engines': _engines(f'{_CONFIG}.engines', given['engines'])}
    )


def handler_from_mapping(
    kind: HandlerKind, mapping: Mapping[str, Any]
) -> VLLMCompletionsModelHandler | VLLMChatModelHandler:
    """The handler that a mapping of its arguments describes.

    Args:
      kind: Which handler.
      mapping: Its arguments by name, ``dynamo_runtime_config`` being a mapping too. All but
        those that are or need a Python function.

    Raises:
      ConfigurationError: A key is unknown, or the arguments cannot work.
    """
    _checks.check_choice('kind', kind, get_args(HandlerKind))
    handler = VLLMChatModelHandler if kind == 'chat' else VLLMCompletionsModelHandler
    parameters = inspect.signature(handler).parameters
    known = [name for name in (*parameters, *_OPTIONS) if name not in _NEED_PYTHON | {'kwargs'}]
    given = _checked(f'the {kind} handler', mapping, known, 'of its arguments by name')
    if 'model_name' not in given:
        raise ConfigurationError(
            f"the {kind} handler has no model_name; give a hub name such as 'Qwen/Qwen3-0.6B', or "
            'a directory.'
        )
    for name in ('min_batch_size', 'max_batch_size'):
        if given.get(name) is not None:
            _checks.check_count(name, given[name])
    if given.get('max_batch_duration_secs') is not None:
        _checks.check_seconds('max_batch_duration_secs', given['max_batch_duration_secs'])
    if given.get(_CONFIG) is not None:
        given[_CONFIG] = runtime_config_from_mapping(given[_CONFIG])
    return handler(**given)


def _engines(where: str, engines: object) -> tuple[DynamoVLLMEngineSpec, ...] | EnginesPerWorker:
    if isinstance(engines, Mapping):
        given = _checked(where, engines, _fields_of(EnginesPerWorker), '')
        if 'spec' in given:
            given['spec'] = _engine(f'{where}.spec', given['spec'])
        return EnginesPerWorker(**given)
    if not isinstance(engines, (list, tuple)):
        raise ConfigurationError(
            f'{where} is {_shown(engines)}; give a list with a mapping for each engine, or '
            '{devices_per_engine: 1} for as many as the worker has GPUs for.'
        )
    return tuple(_engine(f'{where}[{index}]', engine) for index, engine in enumerate(engines))


def _engine(where: str, mapping: object) -> DynamoVLLMEngineSpec:
    given = _checked(where, mapping, _fields_of(DynamoVLLMEngineSpec), 'such as {gpu_devices: [0]}')
    try:
        return DynamoVLLMEngineSpec(**given)
    except ConfigurationError as error:
        raise ConfigurationError(f'{where}: {error}') from error


def _checked(where: str, mapping: object, known: Iterable[str], example: str) -> dict[str, Any]:
    """A copy of ``mapping``, whose keys are all among the known ones."""
    if not isinstance(mapping, Mapping):
        raise ConfigurationError(
            f'{where} is {_shown(mapping)}; it must be a mapping {example}'.rstrip() + '.'
        )
    names = sorted(set(known))
    for key, value in mapping.items():
        if key not in names:
            raise ConfigurationError(
                f'{where} has the key {key!r} with the value {_shown(value)}, which '
                f'{_hint(key, names)}. The keys are {", ".join(names)}.'
            )
    return dict(mapping)


def _hint(key: object, names: list[str]) -> str:
    if key in _NEED_PYTHON:
        return 'is a Python function or needs one; leave it out, or write the pipeline in Python'
    close = difflib.get_close_matches(str(key), names, n=1)
    return f'does not exist (is {close[0]!r} meant?)' if close else 'does not exist'


def _fields_of(config: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(config))


def _keywords_of(function: Any) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


class _Repr(reprlib.Repr):
    """Short, and without what a mapping holds: it may be an environment with tokens."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:  # noqa: ARG002 - reprlib's
        return '{' + ', '.join(f'{key!r}: …' for key in x) + '}'


def _shown(value: object) -> str:
    return _Repr().repr(value)
