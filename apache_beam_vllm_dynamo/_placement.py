"""Which devices of a worker each engine gets.

The choice is pure, over a :class:`Topology` that is looked up once on the worker.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EngineKind,
    EnginesPerWorker,
    engines_on_devices,
)
from apache_beam_vllm_dynamo.errors import StartError

_LOGGER = logging.getLogger(__name__)

_GPU_NAME = re.compile(r'\d+|(GPU|MIG)-\S+')
_DEVICE_FILES = Path('/dev')  # nvidia0 and so on; a container is given those of its own GPUs
_GPU_COLUMNS = ('index', 'uuid', 'name')
NVIDIA_SMI_TIMEOUT_S = 30  # a driver that is still loading answers after some seconds


@dataclasses.dataclass(frozen=True)
class Topology:
    """What a worker has to give out.

    Attributes:
      gpus: The GPUs by the names that ``CUDA_VISIBLE_DEVICES`` takes, in order; ``None``
        where they could not be counted.
      cores: The CPU cores that this process may run on.
      uuids: The UUID of each GPU of the machine, by its ordinal, as far as that is known.
    """

    gpus: tuple[str, ...] | None
    cores: tuple[int, ...]
    uuids: Mapping[str, str] = dataclasses.field(default_factory=dict)


def look_up_topology(env: Mapping[str, str]) -> Topology:
    """Counts the devices of this worker; a GPU hidden by ``CUDA_VISIBLE_DEVICES`` is not there."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    visible = env.get('CUDA_VISIBLE_DEVICES')
    if visible is not None:
        names = _visible_names(visible)
        listed = _list_gpus(env.get('PATH')) if names else None
        return Topology(names, cores, _uuids(listed or [], env))
    listed = _list_gpus(env.get('PATH'))
    if listed is None:
        return Topology(None, cores)
    return Topology(tuple(gpu[0] for gpu in listed), cores, _uuids(listed, env))


def place(config: DynamoRuntimeConfig, topology: Topology) -> DynamoRuntimeConfig:
    """Lists every engine with the devices that it gets on this worker.

    Raises:
      StartError: The worker has fewer devices than the config needs.
    """
    if isinstance(config.engines, EnginesPerWorker):
        engines = _count_out(config, config.engines, topology)
    elif config.engine_kind == 'gpu' and topology.gpus is not None:
        engines = _as_visible(config.listed_engines, topology.gpus)
    else:
        engines = config.listed_engines
    if config.engine_kind == 'cpu':
        engines = _share_cores(engines, topology.cores)
    own = tuple(_with_own_devices(spec, config.engine_kind) for spec in engines)
    return dataclasses.replace(config, engines=own)


def _with_own_devices(spec: DynamoVLLMEngineSpec, kind: EngineKind) -> DynamoVLLMEngineSpec:
    """Without the devices that an engine of another kind would use."""
    return dataclasses.replace(
        spec,
        gpu_devices=spec.gpu_devices if kind == 'gpu' else (),
        cpu_cores=spec.cpu_cores if kind == 'cpu' else (),
    )


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
    if topology.gpus is None:
        raise StartError(
            'The GPUs of this worker could not be counted (nvidia-smi is missing or failed, as its '
            'log says). Put nvidia-smi on PATH, set CUDA_VISIBLE_DEVICES, or say how many engines '
            'there are: DynamoRuntimeConfig.for_devices(num_engines=...).'
        )
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


def _visible_names(visible: str) -> tuple[str, ...]:
    names = (name.strip() for name in visible.split(','))
    # CUDA reads the list up to the first name that is no device, such as -1 or NoDevFiles.
    return tuple(itertools.takewhile(_GPU_NAME.fullmatch, names))


def _as_visible(
    engines: Sequence[DynamoVLLMEngineSpec], gpus: Sequence[str]
) -> tuple[DynamoVLLMEngineSpec, ...]:
    """Names each engine's GPUs as the worker does; an ordinal counts those that it may use."""
    asked = [device for spec in engines for device in spec.gpu_devices]
    beyond = [device for device in asked if device.isdigit() and int(device) >= len(gpus)]
    hidden = [device for device in asked if not device.isdigit() and _is_hidden(device, gpus)]
    if beyond or hidden:
        raise StartError(
            f'The engines need GPU {", ".join(beyond + hidden)}, but this worker has '
            f'{len(gpus)} ({", ".join(gpus) or "none"}). Use a machine with more GPUs, fewer '
            "engines or those names; to develop without GPUs, use engine_kind='cpu' or 'simulated'."
        )
    return tuple(
        dataclasses.replace(
            spec,
            gpu_devices=tuple(gpus[int(d)] if d.isdigit() else d for d in spec.gpu_devices),
        )
        for spec in engines
    )


def _is_hidden(device: str, gpus: Sequence[str]) -> bool:
    # Only names of one kind can be compared; CUDA takes the beginning of one for the whole.
    kind = device[: len('GPU-')]
    return all(gpu.startswith(kind) and not gpu.startswith(device) for gpu in gpus)


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


def _uuids(listed: Sequence[Sequence[str]], env: Mapping[str, str]) -> dict[str, str]:
    """Ordinal to UUID, where CUDA counts the GPUs as nvidia-smi does."""
    whole = [gpu for gpu in listed if len(gpu) == len(_GPU_COLUMNS)]
    models = {model for _, _, model in whole}
    # CUDA counts the fastest first unless told otherwise.
    if len(models) > 1 and env.get('CUDA_DEVICE_ORDER') != 'PCI_BUS_ID':
        return {}
    return {ordinal: uuid for ordinal, uuid, _ in whole}


def _list_gpus(search_path: str | None) -> list[list[str]] | None:
    """The columns of each GPU of the machine; ``None`` where they cannot be listed."""
    program = shutil.which('nvidia-smi', path=search_path)
    if program is None:
        # Some containers have the driver without its tool; then CUDA itself has to say no.
        return None if any(_DEVICE_FILES.glob('nvidia[0-9]*')) else []
    try:
        listed = subprocess.run(
            (program, f'--query-gpu={",".join(_GPU_COLUMNS)}', '--format=csv,noheader'),
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _LOGGER.warning('nvidia-smi does not list the GPUs: %s', error)
        return None
    lines = filter(None, map(str.strip, listed.stdout.splitlines()))
    return [[column.strip() for column in line.split(',')] for line in lines]
