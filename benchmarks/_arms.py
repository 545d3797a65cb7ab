"""The arms that are compared: the same engines on the same hardware, served in different ways."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from apache_beam_vllm_dynamo import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.config import EngineKind
from benchmarks._arm_pipeline import TimedHandler

Engine = Literal['vllm', 'cpu', 'simulated']
ENGINE_KINDS: Mapping[Engine, EngineKind] = {'vllm': 'gpu', 'cpu': 'cpu', 'simulated': 'simulated'}

BLOCK_TOKENS: Mapping[Engine, int] = {'vllm': 16, 'cpu': 128, 'simulated': 16}
"""How many tokens a KV block of an engine holds; shorter common beginnings are not reused."""

STAND_IN = (
    'The simulated engine has no server of its own, so native-dp is stood in for here by one '
    'simulated engine with --data-parallel-size {engines} behind a round-robin frontend. It says '
    "nothing about the speed of vLLM's own server."
)
# The CPU build of vLLM gives wrong text in bfloat16 without compilation.
CPU_FLAGS: Mapping[str, str | bool] = {'dtype': 'float32', 'enforce-eager': True}
# The cache of each engine, in GiB, unless the number of its blocks is given.
CPU_ENV = {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1'}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of serving.

    Attributes:
      name: Its name on the command line and in reports.
      meaning: What it is, for reports.
      native: Whether it is vLLM's own server, data parallel.
      config: Fields of ``DynamoRuntimeConfig`` that differ from their defaults.
      handler: Arguments of the handler that differ from their defaults.
    """

    name: str
    meaning: str
    native: bool = False
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    handler: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_AS_IT_CAME: Mapping[str, Any] = {'order_by_prefix': False}
_ORDERED: Mapping[str, Any] = {'order_by_prefix': True}

# The fewest moving parts first: of arms that are equally fast, the first is to be chosen. So that
# arms differ by their servers alone, those that do not say otherwise send prompts as they came.
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm('native-dp', "vLLM's own server, data parallel", native=True, handler=_AS_IT_CAME),
        Arm(
            'native-dp-ordered',
            'the same, prompts that begin alike sent one after the other',
            native=True,
            handler=_ORDERED,
        ),
        Arm(
            'dynamo-rr',
            'engines behind Dynamo, in turn, without KV events',
            config={'router_mode': 'round-robin'},
            handler=_AS_IT_CAME,
        ),
        Arm(
            'dynamo-rr-ordered',
            'the same, prompts that begin alike sent one after the other',
            config={'router_mode': 'round-robin'},
            handler=_ORDERED,
        ),
        Arm(
            'dynamo-approx',
            'engines behind the KV router, which predicts what they hold',
            config={'kv_event_mode': 'approximate'},
            handler=_AS_IT_CAME,
        ),
        Arm(
            'dynamo-kv',
            "engines behind the KV router, with the engines' own events",
            handler=_AS_IT_CAME,
        ),
        Arm(
            'dynamo-kv-ordered',
            'the same, prompts that begin alike sent one after the other (the defaults of this '
            'package)',
            handler=_ORDERED,
        ),
    )
}
USUAL_ARMS = ('native-dp', 'dynamo-rr', 'dynamo-kv')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is equal in all arms of a comparison.

    Attributes:
      engine: What runs as an engine.
      model: A hub name, or a directory that the workers can read.
      model_revision: Of the hub's model.
      num_gpus: How many engines there are, each with a GPU (or cores) of its own.
      max_tokens: Of each answer.
      batch_size: Elements of a batch; ``None`` for the transform that makes none.
      gpu_memory_utilization: The share of a GPU's memory that an engine takes; ``None`` for
        vLLM's default, as below.
      max_num_seqs: How many prompts an engine works on at once.
      max_model_len: The longest prompt and answer together, in tokens.
      kv_cache_tokens: How many tokens the KV cache of one engine holds, in place of what fits
        into the memory.
      temperature: 0 for the likeliest answer.
      seed: Of the sampling.
      simulation_speedup: How much faster than a GPU the simulated engine counts.
    """

    engine: Engine
    model: str
    model_revision: str | None = None
    num_gpus: int
    max_tokens: int
    batch_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    simulation_speedup: float = 1.0

    def inference_args(self, arm: Arm) -> dict[str, Any]:
        """What is asked for with each prompt."""
        arguments: dict[str, Any] = {
            'max_tokens': self.max_tokens,
            'temperature': self.temperature,
            'seed': self.seed,
        }
        if uses_dynamo(arm, self.engine):
            arguments['extra_body'] = {'nvext': {'extra_fields': ['worker_id', 'timing']}}
        return arguments

    def engine_flags(self) -> dict[str, Any]:
        """The flags of every engine, in every arm."""
        flags = {
            'revision': self.model_revision,
            'gpu-memory-utilization': self.gpu_memory_utilization,
            'max-num-seqs': self.max_num_seqs,
            'max-model-len': self.max_model_len,
            # Also where it is the default, so that no arm depends on one.
            'enable-prefix-caching': True,
        }
        if self.kv_cache_tokens is not None:
            blocks = self.kv_cache_tokens // BLOCK_TOKENS[self.engine]
            flags['num-gpu-blocks-override'] = max(1, blocks)
        if self.engine == 'cpu':
            flags |= CPU_FLAGS
        return {flag: value for flag, value in flags.items() if value is not None}

    def environment(self) -> dict[str, str]:
        """The environment variables of every engine, in every arm."""
        if self.engine != 'cpu':
            return {}
        return dict(CPU_ENV)


def uses_dynamo(arm: Arm, engine: Engine) -> bool:
    """Whether Dynamo's frontend answers, which the stand-in for the native server needs too."""
    return not arm.native or engine == 'simulated'


def stand_in(arm: Arm, settings: Settings) -> str | None:
    """What must be said of an arm that is not what its name says; ``None`` for all others."""
    if arm.native and settings.engine == 'simulated':
        return STAND_IN.format(engines=settings.num_gpus)
    return None


def make_handler(arm: Arm, settings: Settings) -> TimedHandler:
    """The handler of an arm; nothing differs between two arms but what their table says.

    Raises:
      ConfigurationError: The settings cannot work.
    """
    arguments: dict[str, Any] = {'on_error': 'return', **arm.handler}
    if settings.batch_size is not None:
        arguments |= {
            'min_batch_size': settings.batch_size,
            'max_batch_size': settings.batch_size,
        }
    if not uses_dynamo(arm, settings.engine):
        return TimedHandler(
            settings.model, _native_flags(settings), env_vars=_native_env(settings), **arguments
        )
    return TimedHandler(
        settings.model,
        use_dynamo=True,
        dynamo_runtime_config=_config(arm, settings),
        **arguments,
    )


def _config(arm: Arm, settings: Settings) -> DynamoRuntimeConfig:
    flags, engines, fields = settings.engine_flags(), settings.num_gpus, dict(arm.config)
    if arm.native:  # stood in for
        flags['data-parallel-size'], engines = engines, 1
        fields['router_mode'] = 'round-robin'
    simulation = {}
    if settings.engine == 'simulated':
        simulation['speedup-ratio'] = settings.simulation_speedup
    return DynamoRuntimeConfig.for_devices(
        num_engines=engines,
        engine_kind=ENGINE_KINDS[settings.engine],
        vllm_server_kwargs=flags,
        simulation_kwargs=simulation,
        env=settings.environment(),
        **fields,
    )


def _native_flags(settings: Settings) -> dict[str, Any]:
    return settings.engine_flags() | {
        'data-parallel-size': settings.num_gpus,
        # Without it the server does not say how much of a prompt it had in its cache.
        'enable-prompt-tokens-details': True,
    }


def _native_env(settings: Settings) -> dict[str, str]:
    env = settings.environment()
    if settings.engine == 'cpu':
        # Each rank gets as many cores as an engine behind Dynamo gets.
        cores = sorted(os.sched_getaffinity(0))
        ranks = settings.num_gpus
        shares = [
            cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
            for rank in range(ranks)
        ]
        env['VLLM_CPU_OMP_THREADS_BIND'] = '|'.join(','.join(map(str, own)) for own in shares)
    return env
