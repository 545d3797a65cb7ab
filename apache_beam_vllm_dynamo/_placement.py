"""Which devices of a worker each engine gets.

The choice is pure, over a :class:`Topology` that is looked up once on the worker.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EnginesPerWorker,
    engines_on_devices,
)
from apache_beam_vllm_dynamo.errors import StartError

_LOGGER = logging.getLogger(__name__)

_FIRST_GPU = Path('/dev/nvidia0')
NVIDIA_SMI_TIMEOUT_S = 30  # a driver that is still loading answers after some seconds


@dataclasses.dataclass(frozen=True)
class Topology:
    """What a worker has to give out.

    Attributes:
      gpus: The GPUs by the names that ``CUDA_VISIBLE_DEVICES`` takes, in order; ``None``
        where they could not be counted.
      cores: The CPU cores that this process may run on.
    """

    gpus: tuple[str, ...] | None
    cores: tuple[int, ...]


def look_up_topology(env: Mapping[str, str]) -> Topology:
    """Counts the devices of this worker; a GPU hidden by ``CUDA_VISIBLE_DEVICES`` is not there."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    visible = env.get('CUDA_VISIBLE_DEVICES')
    if visible is not None:
        return Topology(tuple(name.strip() for name in visible.split(',') if name.strip()), cores)
    return Topology(_gpus_by_nvidia_smi(), cores)


def place(config: DynamoRuntimeConfig, topology: Topology) -> DynamoRuntimeConfig:
    """Lists every engine with the devices that it gets on this worker.

    Raises:
      StartError: The worker has fewer devices than the config needs.
    """
    if isinstance(config.engines, EnginesPerWorker):
        config = dataclasses.replace(config, engines=_count_out(config, config.engines, topology))
    if config.engine_kind == 'gpu':
        _check_gpus_exist(config.listed_engines, topology)
    if config.engine_kind == 'cpu':
        engines = _share_cores(config.listed_engines, topology.cores)
        config = dataclasses.replace(config, engines=engines)
    return config


def _count_out(
    config: DynamoRuntimeConfig, per_worker: EnginesPerWorker, topology: Topology
) -> tuple[DynamoVLLMEngineSpec, ...]:
    if config.engine_kind == 'cpu':
        engines = len(topology.cores) // per_worker.devices_per_engine
        if not engines:
            raise StartError(
                f'devices_per_engine is {per_worker.devices_per_engine}, but this worker has '
                f'{len(topology.cores)} CPU cores; use a machine with more, or give each engine '
                'fewer.'
            )
        return (per_worker.spec,) * engines
    if config.engine_kind == 'simulated' and not topology.gpus:
        return (per_worker.spec,)
    if not topology.gpus:
        raise StartError(
            'No GPU was found on this worker, so it can run no engine. Attach GPUs (on Dataflow: '
            "worker_accelerator), install their driver, or use engine_kind='cpu' or 'simulated'."
        )
    usable = len(topology.gpus) // per_worker.devices_per_engine * per_worker.devices_per_engine
    if not usable:
        raise StartError(
            f'devices_per_engine is {per_worker.devices_per_engine}, but this worker has '
            f'{len(topology.gpus)} GPUs ({", ".join(topology.gpus)}); use a machine with more, or '
            'give each engine fewer.'
        )
    if usable < len(topology.gpus):
        _LOGGER.warning(
            'GPUs %s stay idle: %d GPUs do not divide into engines of %d.',
            ', '.join(topology.gpus[usable:]),
            len(topology.gpus),
            per_worker.devices_per_engine,
        )
    return engines_on_devices(
        per_worker.spec, topology.gpus[:usable], per_worker.devices_per_engine
    )


def _check_gpus_exist(engines: Sequence[DynamoVLLMEngineSpec], topology: Topology) -> None:
    if topology.gpus is None:
        return
    asked = [device for spec in engines for device in spec.gpu_devices]
    # An ordinal may count GPUs that the worker lists by UUID, so only ordinals are compared.
    ordinals = [int(device) for device in asked if device.isdigit()]
    beyond = [n for n in ordinals if n >= len(topology.gpus) and str(n) not in topology.gpus]
    if beyond:
        raise StartError(
            f'The engines need GPU {", ".join(map(str, beyond))}, but this worker has '
            f'{len(topology.gpus)} ({", ".join(topology.gpus) or "none"}). Use a machine with '
            f'{max(ordinals) + 1} GPUs, or fewer engines; to develop without GPUs, use '
            "engine_kind='cpu' or 'simulated'."
        )


def _share_cores(
    engines: Sequence[DynamoVLLMEngineSpec], cores: Sequence[int]
) -> tuple[DynamoVLLMEngineSpec, ...]:
    if any(spec.cpu_cores for spec in engines):
        missing = {core for spec in engines for core in spec.cpu_cores} - set(cores)
        if missing:
            raise StartError(
                f'cpu_cores names {sorted(missing)}, but this worker may run on cores '
                f'{list(cores)}; name those, or leave cpu_cores out.'
            )
        return tuple(engines)
    if len(engines) > len(cores):
        raise StartError(
            f'{len(engines)} CPU engines need a core each, but this worker has {len(cores)}; use '
            'fewer engines or a larger machine.'
        )
    share = len(cores) // len(engines)
    return tuple(
        dataclasses.replace(spec, cpu_cores=tuple(cores[i * share : (i + 1) * share]))
        for i, spec in enumerate(engines)
    )


def _gpus_by_nvidia_smi() -> tuple[str, ...] | None:
    program = shutil.which('nvidia-smi')
    if program is None:
        # Some containers have the driver without its tool; then CUDA itself has to say no.
        return None if _FIRST_GPU.exists() else ()
    try:
        listed = subprocess.run(
            (program, '--query-gpu=index', '--format=csv,noheader'),
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _LOGGER.warning('The GPUs could not be counted: %s', error)
        return None
    return tuple(line.strip() for line in listed.stdout.splitlines() if line.strip())
