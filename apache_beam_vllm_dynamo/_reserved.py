"""Flags and variables that the runtime sets itself, each with the way to say it instead.

A user's flag that met one of ours would win or lose by the order of a command line, and
some of them break routing without a word (a router flag on an engine replaces the
frontend's whole router configuration), so they are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from apache_beam_vllm_dynamo._arguments import ServerArgument
from apache_beam_vllm_dynamo.errors import ConfigurationError

_CHOSEN = 'the runtime chooses it for each start'
_PLANES = 'the runtime keeps every connection inside the worker'

FRONTEND_FLAGS: Mapping[str, str] = {
    'router-mode': 'use the field router_mode',
    'router-kv-events': 'use the field kv_event_mode',
    'kv-events': 'use the field kv_event_mode',
    'load-aware': "use router_mode='kv' with kv_event_mode='disabled'",
    'router-predicted-ttl-secs': 'use the field router_prediction_secs',
    'router-ttl-secs': 'use the field router_prediction_secs',
    'router-kv-overlap-score-credit': 'use the field router_overlap_weight',
    'router-temperature': 'use the field router_temperature',
    'migration-limit': 'use the field migration_limit',
    'discovery-backend': 'use the field discovery',
    'http-host': 'the runtime listens on loopback only',
    'http-port': _CHOSEN,
    'request-plane': _PLANES,
    'response-plane': _PLANES,
    'event-plane': _PLANES,
    'namespace': _CHOSEN,
    'namespace-prefix': _CHOSEN,
    'model-name': "it is the handler's model_name",
    'model-path': "it is the handler's model_name",
    'metrics-prefix': 'the runtime reads the metrics by their names',
    'router-min-initial-workers': 'the runtime itself waits for every engine',
    'interactive': 'a worker has no terminal',
    'tls-cert-path': 'the frontend serves this worker alone, over loopback',
    'tls-key-path': 'the frontend serves this worker alone, over loopback',
    'kserve-grpc-server': 'requests go over HTTP',
}

ENGINE_FLAGS: Mapping[str, str] = {
    'model': "it is the handler's model_name",
    'model-path': "it is the handler's model_name",
    'model-name': "it is the handler's model_name",
    'served-model-name': "it is the handler's model_name",
    'kv-events-config': 'use the field kv_event_mode',
    'custom-jinja-template': "use the chat handler's chat_template_path",
    'chat-template': "use the chat handler's chat_template_path",
    'discovery-backend': 'use the field discovery',
    'request-plane': _PLANES,
    'response-plane': _PLANES,
    'event-plane': _PLANES,
    'namespace': _CHOSEN,
    'endpoint': _CHOSEN,
    'port': 'engines are reached through the frontend',
    'host': 'engines are reached through the frontend',
    'disaggregation-mode': 'every engine does both prefill and decode',
    'is-prefill-worker': 'every engine does both prefill and decode',
    'is-decode-worker': 'every engine does both prefill and decode',
    'headless': 'an engine of this runtime serves requests',
}

# Of vLLM's own server, each of which would leave the runtime asking at the wrong door.
NATIVE_FLAGS: Mapping[str, str] = {
    'model': "it is the handler's model_name",
    'port': _CHOSEN,
    'uds': 'the server is reached over loopback',
    'api-key': 'the server serves this worker alone, over loopback',
    'ssl-keyfile': 'the server serves this worker alone, over loopback',
    'ssl-certfile': 'the server serves this worker alone, over loopback',
    'root-path': 'the server is reached without a path',
}

SIMULATION_FLAGS: Mapping[str, str] = {
    **ENGINE_FLAGS,
    'num-workers': 'each engine is a process of its own; list more engines',
    'zmq-kv-events-ports': 'use the field kv_event_mode',
    'zmq-replay-ports': 'use the field kv_event_mode',
    'bootstrap-ports': 'every engine does both prefill and decode',
}

# The router's flags as they are named without the prefix "router-".
_ROUTER_FLAGS_WITHOUT_PREFIX = frozenset({
    'kv-events', 'load-aware', 'track-active-blocks', 'track-output-blocks', 'assume-kv-reuse',
    'active-decode-blocks-threshold', 'active-prefill-tokens-threshold',
    'active-prefill-tokens-threshold-frac',
})  # fmt: skip

ENGINE_VARIABLES: Mapping[str, str] = {
    'CUDA_VISIBLE_DEVICES': 'use the field gpu_devices',
    'NVIDIA_VISIBLE_DEVICES': 'use the field gpu_devices',
    'VLLM_CPU_OMP_THREADS_BIND': 'use the field cpu_cores',
    'PYTHONHASHSEED': 'the runtime pins it under KV routing',
    'ETCD_ENDPOINTS': "set it in the worker's environment to use an external etcd",
    'VLLM_PORT': _CHOSEN,
    'VLLM_HOST_IP': _PLANES,
    'VLLM_NIXL_SIDE_CHANNEL_HOST': _PLANES,
    'VLLM_NIXL_SIDE_CHANNEL_PORT': _CHOSEN,
    'DYN_FORWARDPASS_METRIC_PORT': 'several engines would meet on it',
}

# Settings of Dynamo's runtime: addresses, ports, planes, names, the part that an engine
# plays, and the router's own. Each flag that is reserved above has its variable here.
OWNED_VARIABLE_PREFIXES = (
    'DYN_SYSTEM_', 'DYN_NAMESPACE', 'DYN_ROUTER_', 'DYN_ACTIVE_', 'DYN_DISCOVERY_', 'DYN_FILE_KV',
    'DYN_EVENT_PLANE', 'DYN_REQUEST_PLANE', 'DYN_RESPONSE_PLANE', 'DYN_ZMQ_', 'DYN_TCP_RPC_',
    'DYN_TCP_RESPONSE_', 'DYN_HTTP_HOST', 'DYN_HTTP_PORT', 'DYN_MODEL_', 'DYN_ENDPOINT',
    'DYN_MIGRATION_LIMIT', 'DYN_TLS_', 'DYN_TCP_TLS_', 'DYN_METRICS_PREFIX', 'DYN_INTERACTIVE',
    'DYN_KSERVE_GRPC_SERVER', 'DYN_GRPC_METRICS_PORT', 'DYN_KV_STATE_ENDPOINT',
    'DYN_CUSTOM_JINJA_TEMPLATE', 'DYN_VLLM_DISAGGREGATION_MODE', 'DYN_VLLM_HEADLESS',
    'DYN_SERVE_INDEXER', 'DYN_USE_REMOTE_INDEXER', 'DYN_ENFORCE_DISAGG', 'DYN_BENCHMARK_',
)  # fmt: skip


def check_frontend_kwargs(arguments: Mapping[str, ServerArgument]) -> None:
    """Refuses flags of the frontend that are fields of the config or the runtime's own.

    Raises:
      ConfigurationError: Names the flag and what to use instead.
    """
    _refuse('frontend_kwargs', arguments, FRONTEND_FLAGS)


def check_engine_kwargs(arguments: Mapping[str, ServerArgument], router_mode: str) -> None:
    """Refuses flags of an engine that are fields, the runtime's own, or the router's.

    Raises:
      ConfigurationError: Names the flag and what to use instead.
    """
    _refuse('vllm_server_kwargs', arguments, ENGINE_FLAGS)
    _refuse_router_flags('vllm_server_kwargs', arguments)
    _refuse_no_cache('vllm_server_kwargs', arguments, router_mode)


def check_native_kwargs(arguments: Mapping[str, ServerArgument], model_name: str) -> None:
    """Refuses flags of the native server without which it cannot be reached.

    Raises:
      ConfigurationError: Names the flag and what to do instead.
    """
    _refuse('vllm_server_kwargs', arguments, NATIVE_FLAGS)
    names = arguments.get('served-model-name', model_name)
    if model_name not in (names if isinstance(names, (list, tuple)) else (names,)):
        raise ConfigurationError(
            f"vllm_server_kwargs sets 'served-model-name' to {names!r}, but requests ask for the "
            f"handler's model_name, {model_name!r}; leave it out, or add that name to it."
        )


def check_simulation_kwargs(arguments: Mapping[str, ServerArgument], router_mode: str) -> None:
    """Refuses flags of a simulated engine that the runtime sets, or that are the router's.

    Raises:
      ConfigurationError: Names the flag and what to use instead.
    """
    _refuse('simulation_kwargs', arguments, SIMULATION_FLAGS)
    _refuse_router_flags('simulation_kwargs', arguments)
    _refuse_no_cache('simulation_kwargs', arguments, router_mode)


def check_engine_variable(name: str) -> None:
    """Refuses an environment variable of an engine that the runtime sets itself.

    Raises:
      ConfigurationError: Names the variable and what to use instead.
    """
    if name in ENGINE_VARIABLES:
        raise ConfigurationError(f'env sets {name}: {ENGINE_VARIABLES[name]}.')
    if name.startswith(OWNED_VARIABLE_PREFIXES):
        raise ConfigurationError(
            f'env sets {name}, which the runtime sets for each process; leave it out.'
        )


def _refuse(
    field: str, arguments: Mapping[str, ServerArgument], reserved: Mapping[str, str]
) -> None:
    for flag in arguments:
        reason = reserved.get(flag) or reserved.get(flag.removeprefix('no-'))
        if reason:
            raise ConfigurationError(f'{field} sets {flag!r}: {reason}.')


def _refuse_no_cache(field: str, arguments: Mapping[str, ServerArgument], router_mode: str) -> None:
    off = arguments.get('enable-prefix-caching') is False or 'no-enable-prefix-caching' in arguments
    if router_mode == 'kv' and off:
        raise ConfigurationError(
            f"{field} switches prefix caching off, but router_mode='kv' sends prompts to the "
            "engine that has cached their prefix; use router_mode='round-robin', or leave the "
            'flag out.'
        )


def _refuse_router_flags(field: str, arguments: Mapping[str, ServerArgument]) -> None:
    for flag in arguments:
        positive = flag.removeprefix('no-')
        if positive.startswith('router-') or positive in _ROUTER_FLAGS_WITHOUT_PREFIX:
            raise ConfigurationError(
                f'{field} sets {flag!r}, a flag of the router: on an engine it would replace the '
                "router's whole configuration. Use frontend_kwargs, or the field of the config."
            )
