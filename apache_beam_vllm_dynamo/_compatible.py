"""Beam's own arguments for Dynamo, as a config.

Beam 2.77's handlers take ``use_dynamo=True`` with ``dynamo_frontend_kwargs`` and no typed
config: one engine, round-robin, no KV events, and any flag may be overridden. That mode has
to go on working as it is, so its flags are not held against the list of reserved ones
beyond the few that could not have worked there either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from apache_beam_vllm_dynamo._arguments import ServerArgument, normalized
from apache_beam_vllm_dynamo.config import (
    Discovery,
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    KVEventMode,
    RouterMode,
)
from apache_beam_vllm_dynamo.errors import ConfigurationError

_NEVER_FRONTEND = frozenset({'http-port', 'namespace', 'namespace-prefix'})
_NEVER_ENGINE = frozenset({'model', 'served-model-name', 'namespace', 'endpoint'})

# What reaches the loopback interface, on which requests are sent.
_HTTP_HOSTS = ('127.0.0.1', 'localhost', '0.0.0.0', '::')  # noqa: S104 - the user's own choice


@dataclasses.dataclass(frozen=True)
class CompatibleConfig(DynamoRuntimeConfig):
    """A config whose flags may override the runtime's own."""

    def _check_reserved(self) -> None:
        for spec in self.listed_engines:
            _refuse('vllm_server_kwargs', spec.vllm_server_kwargs, _NEVER_ENGINE)
        _refuse('dynamo_frontend_kwargs', self.frontend_kwargs, _NEVER_FRONTEND)


def compatible_config(
    vllm_server_kwargs: Mapping[str, ServerArgument],
    dynamo_frontend_kwargs: Mapping[str, ServerArgument],
) -> DynamoRuntimeConfig:
    """The config that stands for ``use_dynamo=True`` without a typed one.

    Raises:
      ConfigurationError: A flag cannot be rendered or cannot work.
    """
    frontend = normalized('dynamo_frontend_kwargs', dynamo_frontend_kwargs)
    engine = normalized('vllm_server_kwargs', vllm_server_kwargs)
    router_mode: RouterMode = 'round-robin'
    _check_values(frontend)
    if frontend.get('router-mode') == 'kv':
        router_mode = 'kv'
        del frontend['router-mode']
    wants_events = False
    for flag in ('router-kv-events', 'kv-events'):
        wants_events |= frontend.pop(flag, False) is not False
        frontend.pop(f'no-{flag}', None)
    return CompatibleConfig(
        engines=(DynamoVLLMEngineSpec(vllm_server_kwargs=engine),),
        router_mode=router_mode,
        kv_event_mode=_kv_event_mode(router_mode, wants_events=wants_events),
        frontend_kwargs=frontend,
        discovery=_discovery(frontend, engine),
    )


def _check_values(frontend: Mapping[str, ServerArgument]) -> None:
    mode = frontend.get('router-mode', 'round-robin')
    if not isinstance(mode, str):
        raise ConfigurationError(
            f"dynamo_frontend_kwargs['router-mode'] is {mode!r}; name a mode of the router, such "
            "as 'kv', 'round-robin' or 'least-loaded'."
        )
    host = frontend.get('http-host', _HTTP_HOSTS[0])
    if host not in _HTTP_HOSTS:
        raise ConfigurationError(
            f"dynamo_frontend_kwargs['http-host'] is {host!r}, but requests are sent over "
            'loopback; leave it out to listen there only.'
        )


def _kv_event_mode(router_mode: RouterMode, *, wants_events: bool) -> KVEventMode:
    if router_mode != 'kv':
        return 'disabled'
    return 'zmq' if wants_events else 'approximate'


def _discovery(frontend: dict[str, ServerArgument], engine: dict[str, ServerArgument]) -> Discovery:
    ours, theirs = (kwargs.pop('discovery-backend', 'etcd') for kwargs in (frontend, engine))
    if ours == theirs == 'file':
        return 'file'
    if ours == theirs == 'etcd':
        return 'etcd'
    raise ConfigurationError(
        f'discovery-backend is {ours!r} in dynamo_frontend_kwargs and {theirs!r} in '
        "vllm_server_kwargs; frontend and engine find each other only with 'etcd' or 'file' in "
        'both.'
    )


def _refuse(field: str, arguments: Mapping[str, ServerArgument], never: frozenset[str]) -> None:
    for flag in arguments:
        if flag in never:
            raise ConfigurationError(
                f'{field} sets {flag!r}, which the runtime chooses itself; leave it out.'
            )
