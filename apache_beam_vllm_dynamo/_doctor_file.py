"""What is to run on this machine, as a file describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from apache_beam_vllm_dynamo._arguments import normalized
from apache_beam_vllm_dynamo._compatible import compatible_config
from apache_beam_vllm_dynamo._config_mapping import (
    handler_from_mapping,
    runtime_config_from_mapping,
)
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig

HANDLER_KEY = 'handler'
"""Which handler a file is about, ``'completions'`` or ``'chat'``; the one key that is no argument
of a handler."""

_ASKS: Mapping[str, Literal['prompts', 'chats']] = {'completions': 'prompts', 'chat': 'chats'}


class UnreadableFileError(ValueError):
    """A file that cannot be read, or that holds no mapping."""


def read_mapping(path: str) -> Mapping[str, Any]:
    """The mapping in a JSON or YAML file.

    Raises:
      UnreadableFileError: There is none.
    """
    try:
        text = Path(path).read_text(encoding='utf-8')
    except (OSError, ValueError) as error:
        raise UnreadableFileError(f'{path} cannot be read: {error}') from error
    try:
        mapping = json.loads(text) if path.endswith('.json') else _yaml(text)
    except ValueError as error:
        raise UnreadableFileError(f'{path} is neither JSON nor YAML: {error}') from error
    if not isinstance(mapping, Mapping):
        raise UnreadableFileError(
            f'{path} holds a {type(mapping).__name__}; it must hold the arguments of a handler by '
            'name, such as model_name and dynamo_runtime_config.'
        )
    return mapping


def subject_from_mapping(mapping: Mapping[str, Any]) -> Subject:
    """What the arguments of a handler, by name and nested as in Python, describe.

    Raises:
      ConfigurationError: They cannot work.
    """
    arguments = dict(mapping)
    template = arguments.get('chat_template_path')
    given = arguments.pop(HANDLER_KEY, None)
    kind: Any = given or ('completions' if template is None else 'chat')
    # Made for its checks.
    handler_from_mapping(kind, arguments)
    return Subject(
        given=True,
        model_name=arguments['model_name'],
        config=_config(arguments),
        native_kwargs=normalized('vllm_server_kwargs', arguments.get('vllm_server_kwargs') or {}),
        asks=None if given is None and template is None else _ASKS[kind],
        chat_template_path=template,
        env_vars=dict(arguments.get('env_vars') or {}),
    )


def _config(arguments: Mapping[str, Any]) -> DynamoRuntimeConfig | None:
    if not arguments.get('use_dynamo'):
        return None
    nested = arguments.get('dynamo_runtime_config')
    if nested is not None:
        return runtime_config_from_mapping(nested)
    return compatible_config(
        arguments.get('vllm_server_kwargs') or {}, arguments.get('dynamo_frontend_kwargs') or {}
    )


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
