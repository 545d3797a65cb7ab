"""The GPUs of this machine, and whether what is to run fits them."""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from apache_beam_vllm_dynamo._doctor_report import Check, failed_by, gib
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._placement import NVIDIA_SMI_TIMEOUT_S, Topology, place
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig, DynamoVLLMEngineSpec
from apache_beam_vllm_dynamo.errors import ConfigurationError, StartError

_COLUMNS = (
    'index', 'uuid', 'name', 'driver_version', 'memory.total', 'memory.free', 'compute_cap',
)  # fmt: skip

# The oldest driver that runs programs of a CUDA release, by NVIDIA's table.
_DRIVER_FOR_CUDA = {12: (525, 60), 13: (580, 65)}

# vLLM 0.31's own share of a GPU's memory.
DEFAULT_MEMORY_SHARE = 0.92
# The first compute capability with bfloat16: Ampere's.
_BFLOAT16_CAPABILITY = (8, 0)

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi describes it.

    Attributes:
      index: Its place among all of the machine.
      uuid: Its name for good.
      name: Its model.
      driver: The version of its driver.
      total_mib: Its memory, in MiB.
      free_mib: What of it nobody uses, in MiB.
      capability: Its compute capability; ``None`` where that is not said.
    """

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: int
    free_mib: int
    capability: tuple[int, int] | None


def look_up_gpus(search_path: str | None) -> tuple[Gpu, ...]:
    """Asks nvidia-smi; none where it is missing or does not answer."""
    program = shutil.which('nvidia-smi', path=search_path)
    if program is None:
        return ()
    argv = (program, f'--query-gpu={",".join(_COLUMNS)}', '--format=csv,noheader,nounits')
    try:
        listed = subprocess.run(
            argv, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(listed.stdout)


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """The GPUs in a list of nvidia-smi's; a line that does not describe one is passed over."""
    found = []
    for row in csv.reader(listed.splitlines(), skipinitialspace=True):
        if len(row) == len(_COLUMNS) and row[4].isdigit() and row[5].isdigit():
            index, uuid, name, driver, total, free, capability = row
            parts = re.fullmatch(r'(\d+)\.(\d+)', capability)
            found.append(
                Gpu(
                    index,
                    uuid,
                    name,
                    driver,
                    int(total),
                    int(free),
                    (int(parts[1]), int(parts[2])) if parts else None,
                )
            )
    return tuple(found)


def check_gpus(gpus: Sequence[Gpu], topology: Topology, subject: Subject) -> Check:
    """Which there are."""
    name = 'GPUs'
    if topology.gpus is None:
        return Check.warning(
            name,
            'there are some, but nvidia-smi does not list them',
            'Put nvidia-smi on PATH; on Dataflow it is in /usr/local/nvidia/bin',
        )
    visible = [gpu for gpu in gpus if is_visible(gpu, topology.gpus)]
    if not topology.gpus:
        if subject.given and not subject.needs_gpus:
            return Check.ok(name, f'none, and {subject.server} engines need none')
        hidden = f'; CUDA_VISIBLE_DEVICES hides {len(gpus)}' if gpus else ''
        return Check.warning(
            name,
            f'none{hidden}',
            "Attach some and install their driver, or use engine_kind='simulated' or 'cpu'",
        )
    if not visible:  # MIG names, which are not listed one by one
        return Check.ok(name, ', '.join(topology.gpus))
    return Check.ok(name, '; '.join(map(_describe, visible)))


def check_driver(gpus: Sequence[Gpu], cuda: int | None) -> Check:
    """Whether the driver runs what was built for a CUDA release."""
    name = 'driver'
    found = ', '.join(sorted({gpu.driver for gpu in gpus}))
    needed = _DRIVER_FOR_CUDA.get(cuda or 0)
    if needed is None:
        return Check.ok(name, found)
    numbers = '.'.join(map(str, needed))
    for gpu in gpus:
        version = tuple(int(part) for part in gpu.driver.split('.')[:2] if part.isdigit())
        if version < needed:
            return Check.failed(
                name,
                f'{gpu.driver}, but CUDA {cuda} needs {numbers} or newer',
                'Install a newer one; on Dataflow: install-nvidia-driver:5xx in worker_accelerator',
            )
    return Check.ok(name, f'{found}, new enough for CUDA {cuda}')


def check_placement(
    subject: Subject, topology: Topology
) -> tuple[Check, DynamoRuntimeConfig | None]:
    """Whether the machine has the devices that the config asks for.

    Returns:
      The check, and the config with its devices; ``None`` where they are not known.
    """
    name = 'devices'
    if subject.config is None:
        return Check.ok(name, "vLLM's own server finds its own"), None
    try:
        placed = place(subject.config, topology)
    except (StartError, ConfigurationError) as error:
        return failed_by(name, error), None
    engines = placed.listed_engines
    number = f'{len(engines)} engines' if len(engines) > 1 else '1 engine'
    kind = placed.engine_kind
    if kind == 'simulated':
        return Check.ok(name, f'{number}, simulated'), placed
    noun = 'GPU' if kind == 'gpu' else 'CPU cores'
    shares = [', '.join(_devices(spec, kind)) or 'any' for spec in engines]
    return Check.ok(name, f'{number}, on {noun} {" | ".join(shares)}'), placed


def check_memory(
    gpus: Sequence[Gpu],
    engines: Sequence[DynamoVLLMEngineSpec],
    weights_bytes: int | None,
) -> Check:
    """Whether each GPU has the memory free that vLLM wants from its start on.

    Args:
      gpus: Those that there are.
      engines: The engines with the devices they got.
      weights_bytes: The size of the model's weights, or ``None`` where it is not known.
    """
    name = 'GPU memory'
    for index, spec in enumerate(engines, 1):
        share = _share(spec.vllm_server_kwargs)
        mine = [gpu for gpu in gpus if is_visible(gpu, spec.gpu_devices)]
        if not spec.gpu_devices:
            mine = list(gpus[: spec.devices_needed])
        for gpu in mine:
            wanted_mib = share * gpu.total_mib
            if gpu.free_mib < wanted_mib:
                return Check.failed(
                    name,
                    f'engine {index} takes {share:.0%} of GPU {gpu.index}, {_gib(wanted_mib)}, '
                    f'but {_gib(gpu.free_mib)} of {_gib(gpu.total_mib)} are free',
                    'End what else uses it (nvidia-smi shows it), or lower gpu-memory-utilization',
                )
            part_mib = (weights_bytes or 0) / spec.devices_needed / _MIB
            if part_mib > wanted_mib:
                return Check.failed(
                    name,
                    f"the model's weights take {_gib(part_mib)} of each of engine {index}'s GPUs, "
                    f'but it may use {_gib(wanted_mib)} of GPU {gpu.index}',
                    'Give the engine more GPUs (tensor-parallel-size), or take a smaller model',
                )
    return Check.ok(name, 'enough is free for every engine')


def check_dtype(gpus: Sequence[Gpu], engines: Sequence[DynamoVLLMEngineSpec]) -> Check | None:
    """Whether the GPUs compute in the type that is asked for; ``None`` where none is.

    Left to itself, vLLM takes float16 where there is no bfloat16.
    """
    named = {str(spec.vllm_server_kwargs.get('dtype', 'auto')) for spec in engines} - {'auto'}
    if not named:
        return None
    name = 'dtype'
    for gpu in gpus:
        capability = gpu.capability or _BFLOAT16_CAPABILITY
        if 'bfloat16' in named and capability < _BFLOAT16_CAPABILITY:
            return Check.failed(
                name, f'GPU {gpu.index}, {gpu.name}, has no bfloat16', "Set {'dtype': 'half'}"
            )
    return Check.ok(name, ', '.join(sorted(named)))


def is_visible(gpu: Gpu, names: Sequence[str]) -> bool:
    """Whether one of the names, as ``CUDA_VISIBLE_DEVICES`` has them, is of this GPU."""
    return any(
        name == gpu.index or (name.startswith('GPU-') and gpu.uuid.startswith(name))
        for name in names
    )


def _devices(spec: DynamoVLLMEngineSpec, kind: str) -> Sequence[str]:
    return spec.gpu_devices if kind == 'gpu' else tuple(map(str, spec.cpu_cores))


def _share(kwargs: Mapping[str, object]) -> float:
    given = kwargs.get('gpu-memory-utilization')
    try:
        return float(given) if isinstance(given, (str, int, float)) else DEFAULT_MEMORY_SHARE
    except ValueError:  # vLLM says so itself
        return DEFAULT_MEMORY_SHARE


def _describe(gpu: Gpu) -> str:
    return f'{gpu.index}: {gpu.name}, {_gib(gpu.free_mib)} of {_gib(gpu.total_mib)} free'


def _gib(mib: float) -> str:
    return gib(mib * _MIB)
