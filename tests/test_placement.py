"""Which devices each engine gets, over workers that are made up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apache_beam_vllm_dynamo import _placement
from apache_beam_vllm_dynamo._placement import Topology, look_up_topology, place
from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EnginesPerWorker,
)
from apache_beam_vllm_dynamo.errors import ConfigurationError, StartError

Spec = DynamoVLLMEngineSpec
for_devices = DynamoRuntimeConfig.for_devices
UUIDS = ('GPU-aaaa1111', 'GPU-bbbb2222')


def worker(gpus: int | tuple[str, ...] | None, cores: int = 4) -> Topology:
    names = tuple(map(str, range(gpus))) if isinstance(gpus, int) else gpus
    return Topology(names, tuple(range(cores)))


def gpus_of(config: DynamoRuntimeConfig) -> list[tuple[str, ...]]:
    return [spec.gpu_devices for spec in config.listed_engines]


def cores_of(config: DynamoRuntimeConfig) -> list[tuple[int, ...]]:
    return [spec.cpu_cores for spec in config.listed_engines]


@pytest.mark.parametrize(
    ('gpus', 'per_engine', 'devices'),
    [
        (1, 1, [('0',)]),
        (3, 1, [('0',), ('1',), ('2',)]),
        (3, 2, [('0', '1')]),
        (8, 1, [(str(n),) for n in range(8)]),
        (8, 4, [('0', '1', '2', '3'), ('4', '5', '6', '7')]),
        (8, 8, [tuple(map(str, range(8)))]),
        (('3', '5'), 1, [('3',), ('5',)]),
        (UUIDS, 1, [UUIDS[:1], UUIDS[1:]]),
        (UUIDS, 2, [UUIDS]),
        (('MIG-a', 'MIG-b', 'MIG-c'), 1, [('MIG-a',), ('MIG-b',), ('MIG-c',)]),
    ],
    ids=str,
)
def test_engines_per_worker_become_as_many_as_the_gpus_allow(
    gpus: int | tuple[str, ...], per_engine: int, devices: list[tuple[str, ...]]
) -> None:
    config = place(for_devices(devices_per_engine=per_engine, env={'A': '1'}), worker(gpus))
    assert gpus_of(config) == devices
    assert all(spec.env == {'A': '1'} for spec in config.listed_engines)


def test_gpus_that_stay_idle_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        place(for_devices(devices_per_engine=2), worker(3))
    assert 'GPUs 2 stay idle: 3 GPUs do not divide into engines of 2' in caplog.text
    caplog.clear()
    place(for_devices(devices_per_engine=2), worker(8))
    assert not caplog.text


@pytest.mark.parametrize(
    ('config', 'topology', 'says'),
    [
        (for_devices(), worker(0), 'No GPU was found on this worker'),
        (for_devices(), worker(0), "engine_kind='cpu' or 'simulated'"),
        (for_devices(), worker(None), 'could not be counted'),
        (for_devices(), worker(None), 'for_devices(num_engines=...)'),
        (
            for_devices(devices_per_engine=2),
            worker(1),
            'devices_per_engine is 2, but this worker has 1 GPUs (0); use a machine with more',
        ),
        (
            for_devices(num_engines=2),
            worker(1),
            'The engines need GPU 1, but this worker has 1 (0). Use a machine with more GPUs',
        ),
        (for_devices(num_engines=1), worker(0), 'need GPU 0, but this worker has 0 (none)'),
        (for_devices(gpu_devices=[0, 7]), worker(3), 'need GPU 7, but this worker has 3 (0, 1, 2)'),
        (for_devices(gpu_devices=['GPU-c']), worker(UUIDS), 'need GPU GPU-c, but this worker'),
        (for_devices(gpu_devices=['GPU-c']), worker(0), 'need GPU GPU-c, but this worker has 0'),
        (
            for_devices(num_engines=3, engine_kind='cpu'),
            worker(0, cores=2),
            '3 CPU engines need a core each, but this worker has 2; use fewer engines',
        ),
        (
            for_devices(devices_per_engine=3, engine_kind='cpu'),
            worker(0, cores=2),
            'devices_per_engine is 3, but this worker has 2 CPU cores; use a machine with more',
        ),
        (
            DynamoRuntimeConfig((Spec(cpu_cores=(1, 7)),), engine_kind='cpu'),
            worker(0, cores=2),
            'cpu_cores names [7], but this worker may run on cores [0, 1]; name those',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_a_worker_with_too_few_devices_is_told_with_the_mend(
    config: DynamoRuntimeConfig, topology: Topology, says: str
) -> None:
    with pytest.raises(StartError) as refused:
        place(config, topology)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ('asked', 'visible', 'devices'),
    [
        ([0, 1], ('0', '1', '2'), [('0',), ('1',)]),
        ([0, 1], ('2', '3'), [('2',), ('3',)]),
        ([1], ('1', '2'), [('2',)]),
        ([1, 0], ('4', '5'), [('5',), ('4',)]),
        ([0, 1], UUIDS, [UUIDS[:1], UUIDS[1:]]),
        ([0], ('MIG-a',), [('MIG-a',)]),
        (['GPU-bbbb'], UUIDS, [('GPU-bbbb',)]),
        (['GPU-bbbb2222'], ('0', '1'), [('GPU-bbbb2222',)]),
        (['MIG-a'], UUIDS, [('MIG-a',)]),
        ([5, 9], None, [('5',), ('9',)]),
    ],
    ids=[
        'all visible', 'hidden: counted among the visible', 'hidden: never by name',
        'in the asked order',
        'ordinals of UUIDs', 'ordinal of a MIG device', 'beginning of a UUID',
        'UUID where ordinals are listed', 'MIG name where GPUs are listed', 'not counted',
    ],
)  # fmt: skip
def test_a_gpu_hidden_from_the_worker_is_never_taken(
    asked: list[Any], visible: tuple[str, ...] | None, devices: list[tuple[str, ...]]
) -> None:
    """Else an engine would meet other jobs on a GPU that is theirs."""
    assert gpus_of(place(for_devices(gpu_devices=asked), worker(visible))) == devices


def test_one_gpu_asked_for_by_two_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="GPU 'GPU-aaaa1111' is given to engine 1 and"):
        place(for_devices(gpu_devices=[0, UUIDS[0]]), worker(UUIDS))


def test_a_single_engine_without_devices_keeps_the_choice() -> None:
    for gpus in (None, 0, 1, 8):
        config = DynamoRuntimeConfig()
        assert place(config, worker(gpus)) == config


@pytest.mark.parametrize(
    ('engines', 'cores', 'shares'),
    [
        (1, 4, [(0, 1, 2, 3)]),
        (2, 4, [(0, 1), (2, 3)]),
        (2, 5, [(0, 1), (2, 3)]),
        (2, 2, [(0,), (1,)]),
    ],
)
def test_cores_are_shared_out_evenly(
    engines: int, cores: int, shares: list[tuple[int, ...]]
) -> None:
    config = for_devices(num_engines=engines, engine_kind='cpu')
    assert cores_of(place(config, worker(0, cores))) == shares


def test_cores_that_are_named_are_kept() -> None:
    config = DynamoRuntimeConfig((Spec(cpu_cores=(3,)), Spec(cpu_cores=(0, 1))), engine_kind='cpu')
    assert place(config, worker(0)) == config


def test_engines_per_worker_on_cores_get_so_many_each() -> None:
    config = for_devices(devices_per_engine=2, engine_kind='cpu')
    assert cores_of(place(config, worker(0, cores=5))) == [(0, 1), (2, 3)]


def test_cpu_and_simulated_engines_need_no_gpu() -> None:
    for kind in ('cpu', 'simulated'):
        config = for_devices(num_engines=2, engine_kind=kind)
        assert len(place(config, worker(0)).listed_engines) == 2


@pytest.mark.parametrize(('gpus', 'engines'), [(0, 1), (None, 1), (1, 1), (3, 3), (8, 8)], ids=str)
def test_simulated_engines_per_worker_follow_the_gpus_and_are_one_without(
    gpus: int | None, engines: int
) -> None:
    assert len(place(for_devices(engine_kind='simulated'), worker(gpus)).listed_engines) == engines


@pytest.mark.parametrize(
    'config',
    [for_devices(), for_devices(num_engines=2), for_devices(num_engines=2, engine_kind='cpu')],
    ids=['counted', 'listed', 'cpu'],
)
def test_placing_twice_changes_nothing_more(config: DynamoRuntimeConfig) -> None:
    before = (config.engines, worker(2))
    placed = place(config, worker(2))
    assert place(placed, worker(2)) == placed
    assert (config.engines, worker(2)) == before


@pytest.mark.parametrize(
    ('visible', 'gpus'),
    [
        ('', ()),
        ('-1', ()),
        ('NoDevFiles', ()),
        ('0', ('0',)),
        ('2, 3', ('2', '3')),
        ('0,-1,1', ('0',)),
        ('GPU-aaaa1111,MIG-GPU-b/1/0', ('GPU-aaaa1111', 'MIG-GPU-b/1/0')),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str, gpus: tuple[str, ...]) -> None:
    topology = look_up_topology({'CUDA_VISIBLE_DEVICES': visible})
    assert topology.gpus == gpus
    assert topology.cores == tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program of that name, with that shell text, alone on PATH."""

    def install(script: str) -> None:
        program = tmp_path / 'nvidia-smi'
        program.write_text(f'#!/bin/sh\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv('PATH', os.fspath(tmp_path))

    return install


@pytest.mark.parametrize(
    ('script', 'gpus'),
    [
        ('printf "0\\n1\\n"', ('0', '1')),
        ('printf ""', ()),
        ('echo "no driver" >&2; exit 9', None),
    ],
    ids=['two', 'none', 'failing'],
)
def test_gpus_are_counted_by_nvidia_smi_where_nothing_names_them(
    nvidia_smi: Callable[[str], None], script: str, gpus: tuple[str, ...] | None
) -> None:
    nvidia_smi(script)
    assert look_up_topology({}).gpus == gpus


def test_the_tool_is_looked_for_on_the_path_of_the_given_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / 'nvidia-smi'
    program.write_text('#!/bin/sh\nprintf "0\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', '/nowhere')
    assert look_up_topology({'PATH': os.fspath(tmp_path)}).gpus == ('0',)


@pytest.mark.parametrize(
    ('device', 'gpus'),
    [('nvidia0', None), ('nvidia3', None), ('nvidiactl', ())],
    ids=['first', 'another', 'none'],
)
def test_a_driver_without_its_tool_leaves_the_gpus_uncounted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    gpus: tuple[str, ...] | None,
) -> None:
    (tmp_path / device).touch()
    monkeypatch.setattr(_placement, '_DEVICE_FILES', tmp_path)
    monkeypatch.setenv('PATH', os.fspath(tmp_path))
    assert look_up_topology({}).gpus == gpus


def test_engines_per_worker_is_what_for_devices_leaves_to_count() -> None:
    assert isinstance(for_devices().engines, EnginesPerWorker)
