"""Pure: from a config and addresses to the command line and environment of each child.

Nothing is looked up here and nothing is started; the same input gives the same output.
The flags and variables of etcd, Dynamo and vLLM that the runtime relies on are named in
this module and nowhere else.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from apache_beam_vllm_dynamo._addresses import LOOPBACK, Addresses
from apache_beam_vllm_dynamo._arguments import ServerArgument, given, render
from apache_beam_vllm_dynamo._reserved import OWNED_VARIABLE_PREFIXES
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig, DynamoVLLMEngineSpec

EVENT_BROKER_SCRIPT = Path(__file__).with_name('_event_broker.py')

# How long the frontend waits until an engine has acknowledged a request. The default of 5 s a burst
# on a busy machine exceeds. A request that meets the end of its connection can miss it, and is
# sent on to another engine only after this time.
TCP_REQUEST_TIMEOUT_SECS = 10
TCP_CONNECT_TIMEOUT_SECS = 2  # on loopback, where a connection takes microseconds

# While an engine loads its model it logs each health probe as a failure; minutes of them would
# push what matters out of the end of its log.
ENGINE_LOG_FILTER = 'info,tower_http=off'
# Until the engines are there the frontend logs each probe as an error too; and at its default level
# a line for every request.
FRONTEND_LOG_FILTER = 'warn,dynamo_llm::http::service::service_v2=off'

# Requests that the frontend has under way on one connection to an engine before it uses another.
# An engine acknowledges each by four bytes on a socket with Nagle's algorithm on: the second of
# two waits until the frontend's kernel confirms the first, which it delays by 40 ms, and the
# frontend holds the answers back for it. With one at a time nothing waits.
TCP_REQUESTS_PER_CONNECTION = 1
# When an engine dies, each of its connections is a chance for a request to miss that end: with up
# to 100, Dynamo's default, 7 of 100 deaths left one waiting for the timeout, with 4 and 8 none.
# An acknowledgement takes a fraction of a millisecond, so these few carry thousands of requests
# a second.
TCP_CONNECTIONS = 8

# What a KV block that waits to be computed counts in the KV router, beside 1 for one that is held:
# computing it takes longer than any other block costs, and is what an engine with a prefix saves.
PREFILL_LOAD_SCALE = 2

# How long an engine may be silent with a request under way before the request moves to another.
# A hung engine is found by its health and killed sooner, which moves its requests too; this is for
# one that leaves single requests unanswered. A long prompt in a queue is silent for long.
STREAM_TIMEOUT_SECS = 300

# How long an engine may bring forth nothing before it is asked for one token, and how long the
# answer may take. Its health endpoint says whether it came; without this canary, which the
# engine's process sends to that of the model, it says only that the former lives. A canary also
# comes before an engine's health endpoint says for the first time that it serves.
CANARY_WAIT_SECS = 3
CANARY_TIMEOUT_SECS = 10

# How long a dead engine stays listed. Requests find out sooner; the router's picture does not.
# etcd is given up and restarted within seconds, so the engines' leases outlast that too.
LEASE_SECS = 5

# Nobody looks for the frontend, and its end fails all requests. Each of its ten watches makes its
# connection to a restarted etcd anew, one after the other with growing pauses, and its lease waits
# among them for some ten seconds.
FRONTEND_LEASE_SECS = 30

# Block hashes must agree between the processes of one runtime, or no prefix ever matches.
HASH_SEED = '0'

# vLLM makes sockets of a slash and 36 letters in its temporary directory; sun_path holds 107.
LONGEST_TEMPORARY_DIRECTORY_BYTES = 70

# Other variables of the worker that would make children meet on one port or one device, or that
# would have vLLM's own server ask for a key, which nobody here has.
_NOT_INHERITED = frozenset({
    'ETCD_ENDPOINTS', 'DYN_CONNECTOR', 'DYN_FORWARDPASS_METRIC_PORT', 'VLLM_PORT',
    'VLLM_NIXL_SIDE_CHANNEL_PORT', 'VLLM_NIXL_SIDE_CHANNEL_HOST', 'VLLM_DP_MASTER_PORT',
    'MASTER_ADDR', 'MASTER_PORT', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'VLLM_API_KEY',
})  # fmt: skip

# The flags of vLLM that the simulated engine has too, by the same name and meaning.
SIMULATED_VLLM_FLAGS = frozenset({
    'block-size', 'data-parallel-size', 'enable-chunked-prefill', 'enable-prefix-caching',
    'gpu-memory-utilization', 'kv-cache-dtype', 'max-model-len', 'max-num-batched-tokens',
    'max-num-seqs', 'num-gpu-blocks-override',
})  # fmt: skip

# vLLM's own block on a GPU; the simulated engine's default of 64 would hide shorter prefixes.
SIMULATED_BLOCK_SIZE_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Command:
    """How one child is started.

    Attributes:
      argv: The command line.
      env: The whole environment; kept out of ``repr``, since it may hold tokens.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Stack:
    """What one runtime runs, with everything that a worker had to look up filled in.

    Attributes:
      config: The config, its engines listed.
      model_name: The model, as ``dynamo.vllm`` takes it and as requests name it.
      addresses: What the children listen on.
      namespace: The Dynamo namespace, of this runtime alone.
      python: The interpreter that has Dynamo and vLLM.
      base_env: The worker's environment.
      external_etcd: The endpoints of an etcd that is not this runtime's, or ``None``.
      chat_template: A chat template file of this machine, or ``None``.
    """

    config: DynamoRuntimeConfig
    model_name: str
    addresses: Addresses
    namespace: str
    python: str
    base_env: Mapping[str, str] = dataclasses.field(repr=False)
    external_etcd: str | None = None
    chat_template: Path | None = None

    @property
    def starts_etcd(self) -> bool:
        """Whether an etcd is among the children."""
        return self.config.discovery == 'etcd' and self.external_etcd is None


def etcd_command(program: str, stack: Stack) -> Command:
    """An etcd for this runtime alone, on loopback."""
    addresses = stack.addresses
    peer = f'http://{LOOPBACK}:{addresses.etcd_peer_port}'
    name = stack.namespace
    argv = (
        program,
        '--name', name,
        '--data-dir', os.fspath(addresses.etcd_directory),
        '--listen-client-urls', addresses.etcd_endpoint,
        '--advertise-client-urls', addresses.etcd_endpoint,
        '--listen-peer-urls', peer,
        '--initial-advertise-peer-urls', peer,
        '--initial-cluster', f'{name}={peer}',
        '--log-level', 'warn',
        # Its data is of no use after this start, and a slow disk must cost no engine its lease.
        '--unsafe-no-fsync',
        # It has nobody to vote with, and by default lets one to two seconds pass before it notices.
        '--heartbeat-interval', '20',
        '--election-timeout', '200',
    )  # fmt: skip
    # etcd reads any of its flags from ETCD_… too.
    return Command(argv, _without(stack.base_env, prefixes=('ETCD_',)))


def event_broker_command(stack: Stack) -> Command:
    """The broker that keeps Dynamo's event plane off the network."""
    addresses = stack.addresses
    # -P: the package's directory must not come first on the program's module path.
    argv = (
        stack.python, '-P', os.fspath(EVENT_BROKER_SCRIPT),
        addresses.broker_in, addresses.broker_out,
    )  # fmt: skip
    return Command(argv, dict(stack.base_env))


def frontend_command(stack: Stack) -> Command:
    """The HTTP server with the router."""
    config = stack.config
    arguments: dict[str, ServerArgument] = {
        'http-host': LOOPBACK,
        'http-port': stack.addresses.frontend_port,
        **_planes(config),
        'router-mode': config.router_mode,
        **_router_arguments(config),
        'migration-limit': config.migration_limit,
    }
    argv = (
        stack.python, '-m', 'dynamo.frontend', *render(_merged(arguments, config.frontend_kwargs))
    )  # fmt: skip
    env = _dynamo_environment(stack)
    env.setdefault('DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS', str(STREAM_TIMEOUT_SECS))
    env.setdefault('DYN_LOG', FRONTEND_LOG_FILTER)
    if 'ETCD_LEASE_TTL' in env and 'ETCD_LEASE_TTL' not in stack.base_env:
        env['ETCD_LEASE_TTL'] = str(FRONTEND_LEASE_SECS)
    return Command(argv, env)


def engine_command(stack: Stack, index: int) -> Command:
    """Engine ``index``, counted from 0, on its devices."""
    spec = stack.config.listed_engines[index]
    simulated = stack.config.engine_kind == 'simulated'
    argv = _simulated_argv(stack, spec) if simulated else _vllm_argv(stack, spec, index)
    return Command(argv, _engine_environment(stack, spec, index))


def native_server_command(
    model_name: str,
    arguments: Mapping[str, ServerArgument],
    *,
    port: int,
    python: str,
    base_env: Mapping[str, str],
    directory: Path,
    chat_template: Path | None = None,
) -> Command:
    """vLLM's own OpenAI-compatible server, without Dynamo, on loopback."""
    ours: dict[str, ServerArgument] = {
        'model': model_name,
        'host': LOOPBACK,
        'port': port,
    }
    if chat_template is not None:
        ours['chat-template'] = os.fspath(chat_template)
    argv = (
        python, '-m', 'vllm.entrypoints.openai.api_server', *render(_merged(ours, arguments))
    )  # fmt: skip
    env = _without(base_env, names=_NOT_INHERITED)
    return Command(argv, env | _temporary_directory(directory))


def _vllm_argv(stack: Stack, spec: DynamoVLLMEngineSpec, index: int) -> tuple[str, ...]:
    config = stack.config
    arguments: dict[str, ServerArgument] = {
        'model': stack.model_name,
        'served-model-name': stack.model_name,
        **_planes(config),
    }
    if config.uses_kv_router:
        arguments['enable-prefix-caching'] = None
    arguments['kv-events-config'] = _kv_events_config(stack, index)
    if stack.chat_template is not None:
        arguments['custom-jinja-template'] = os.fspath(stack.chat_template)
    return (
        stack.python, '-m', 'dynamo.vllm', *render(_merged(arguments, spec.vllm_server_kwargs))
    )  # fmt: skip


def _simulated_argv(stack: Stack, spec: DynamoVLLMEngineSpec) -> tuple[str, ...]:
    arguments: dict[str, ServerArgument] = {
        'model-path': stack.model_name,
        'model-name': stack.model_name,
        **_planes(stack.config),
        'block-size': SIMULATED_BLOCK_SIZE_TOKENS,
    }
    known = {
        flag: value
        for flag, value in spec.vllm_server_kwargs.items()
        if flag.removeprefix('no-') in SIMULATED_VLLM_FLAGS
    }
    arguments = _merged(_merged(arguments, known), spec.simulation_kwargs)
    return (stack.python, '-m', 'dynamo.mocker', *render(arguments))


def _kv_events_config(stack: Stack, index: int) -> str:
    if stack.config.kv_event_mode != 'zmq':
        return json.dumps({'enable_kv_cache_events': False})
    # An ipc endpoint, because vLLM binds it; it would only connect to one on loopback TCP,
    # and then nobody listens.
    return json.dumps(
        {
            'publisher': 'zmq',
            'topic': 'kv-events',
            'endpoint': stack.addresses.engines[index].kv_events,
            'enable_kv_cache_events': True,
        }
    )


def _planes(config: DynamoRuntimeConfig) -> dict[str, ServerArgument]:
    return {
        'discovery-backend': config.discovery,
        'request-plane': 'tcp',
        'event-plane': 'zmq',
    }


def _router_arguments(config: DynamoRuntimeConfig) -> dict[str, ServerArgument]:
    if not config.uses_kv_router:
        return {'router-kv-events': False}
    arguments: dict[str, ServerArgument]
    if config.kv_event_mode == 'zmq':
        arguments = {'router-predicted-ttl-secs': config.router_prediction_secs}
    elif config.kv_event_mode == 'approximate':
        arguments = {'router-kv-events': False, 'router-ttl-secs': config.router_prediction_secs}
    else:
        arguments = {'router-kv-events': False}
    known = config.kv_event_mode != 'disabled'
    if known:
        arguments['router-prefill-load-scale'] = PREFILL_LOAD_SCALE
    arguments['router-kv-overlap-score-credit'] = config.router_overlap_weight if known else 0
    if config.router_temperature:
        arguments['router-temperature'] = config.router_temperature
    return arguments


def _dynamo_environment(stack: Stack) -> dict[str, str]:
    env = _without(stack.base_env, names=_NOT_INHERITED, prefixes=OWNED_VARIABLE_PREFIXES)
    addresses = stack.addresses
    if stack.external_etcd is None:
        # Credentials and certificates in it are those of another etcd.
        lease = env.get('ETCD_LEASE_TTL')
        env = _without(env, prefixes=('ETCD_',))
        if stack.config.discovery == 'etcd':
            env['ETCD_LEASE_TTL'] = lease or str(LEASE_SECS)
    env.setdefault('DYN_TCP_REQUEST_TIMEOUT', str(TCP_REQUEST_TIMEOUT_SECS))
    env.setdefault('DYN_TCP_CONNECT_TIMEOUT', str(TCP_CONNECT_TIMEOUT_SECS))
    env.setdefault('DYN_TCP_CHANNEL_BUFFER', str(TCP_REQUESTS_PER_CONNECTION))
    env.setdefault('DYN_TCP_POOL_SIZE', str(TCP_CONNECTIONS))
    env |= {
        'DYN_NAMESPACE': stack.namespace,
        'DYN_SDK_DISABLE_ANSI_LOGGING': '1',
        'DYN_TCP_RPC_HOST': LOOPBACK,
        'DYN_TCP_RESPONSE_STREAM_HOST': LOOPBACK,
        'DYN_EVENT_PLANE_HOST': LOOPBACK,
        'DYN_ZMQ_BROKER_URL': f'xsub={addresses.broker_in} , xpub={addresses.broker_out}',
        'PYTHONUNBUFFERED': '1',
    }
    env |= _temporary_directory(addresses.directory)
    if stack.config.uses_kv_router:
        env['PYTHONHASHSEED'] = HASH_SEED
    if stack.config.discovery == 'file':
        env['DYN_FILE_KV'] = os.fspath(addresses.discovery_directory)
    else:
        env['ETCD_ENDPOINTS'] = stack.external_etcd or addresses.etcd_endpoint
    return env


def _temporary_directory(directory: Path) -> dict[str, str]:
    # Each Dynamo process leaves a file behind, and a killed vLLM its sockets; so they go when
    # the directory goes.
    if len(os.fsencode(directory)) > LONGEST_TEMPORARY_DIRECTORY_BYTES:
        return {}
    return {'TMPDIR': os.fspath(directory)}


def _engine_environment(stack: Stack, spec: DynamoVLLMEngineSpec, index: int) -> dict[str, str]:
    own = stack.addresses.engines[index]
    env = _dynamo_environment(stack) | {
        'DYN_SYSTEM_HOST': LOOPBACK,
        'DYN_SYSTEM_PORT': str(own.system_port),
        'VLLM_HOST_IP': LOOPBACK,
        'VLLM_NIXL_SIDE_CHANNEL_HOST': LOOPBACK,
        'VLLM_NIXL_SIDE_CHANNEL_PORT': str(own.side_channel_port),
    }
    env.setdefault('DYN_LOG', ENGINE_LOG_FILTER)
    kind = stack.config.engine_kind
    if kind == 'gpu' and spec.gpu_devices:
        env['CUDA_VISIBLE_DEVICES'] = ','.join(spec.gpu_devices)
    elif kind == 'cpu' and spec.cpu_cores:
        env['VLLM_CPU_OMP_THREADS_BIND'] = _cores_by_rank(spec)
    elif kind == 'simulated':
        # Without it the simulated engine's health endpoint never turns healthy.
        env['DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS'] = json.dumps(['generate'])
    if kind != 'simulated':  # all of which is one process
        env.setdefault('DYN_HEALTH_CHECK_ENABLED', 'true')
        env.setdefault('DYN_CANARY_WAIT_TIME', str(CANARY_WAIT_SECS))
        env.setdefault('DYN_HEALTH_CHECK_REQUEST_TIMEOUT', str(CANARY_TIMEOUT_SECS))
    return env | dict(spec.env)


def _cores_by_rank(spec: DynamoVLLMEngineSpec) -> str:
    # vLLM wants a list for each of its ranks.
    ranks, cores = spec.devices_needed, spec.cpu_cores
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    lists = (cores[start:end] for start, end in itertools.pairwise(bounds))
    return '|'.join(','.join(map(str, own)) for own in lists)


def _merged(
    ours: Mapping[str, ServerArgument], theirs: Mapping[str, ServerArgument]
) -> dict[str, ServerArgument]:
    """Both, ``theirs`` winning also where it holds the negation of one of ``ours``."""
    kept = {flag: value for flag, value in ours.items() if given(theirs, (flag,)) is None}
    return kept | dict(theirs)


def _without(
    env: Mapping[str, str],
    *,
    names: frozenset[str] = frozenset(),
    prefixes: tuple[str, ...] = (),
) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name not in names and not name.startswith(prefixes or ('\x00',))
    }
