"""One stack at a time on a device: waiting for those that end, refusing beside those that stay."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from apache_beam_vllm_dynamo import (
    DevicesBusyError,
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    StartError,
    _device_lock,
)
from apache_beam_vllm_dynamo._device_lock import Claim, DeviceLocks, gpu_claims
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime
from apache_beam_vllm_dynamo._lock_files import lock_directory
from apache_beam_vllm_dynamo._placement import Topology
from tests.support.processes import ROOT, WITHOUT_BEAM, ends_under, fds_of, wait_until
from tests.support.stacks import MODEL, nothing_left_on_this_machine, simulated

HOLDS = f"""{WITHOUT_BEAM}
from apache_beam_vllm_dynamo._device_lock import Claim, DeviceLocks
class Holder:
    description, ending = 'that model', False
locks = DeviceLocks(Holder(), [Claim('gpu-' + name, name) for name in sys.argv[1:]])
locks.acquire(5)
print('held', flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left_on_this_machine():
        yield
    assert [fd for fd, path in fds_of().items() if path.startswith(str(lock_directory()))] == []


def claim(device: str, *, shared: bool = False) -> Claim:
    return Claim(f'gpu-{device}', f'GPU {device}', shared)


class Holder:
    """A stack that has devices, as far as the locks can tell."""

    ending = False

    def __init__(self, *devices: str, shared: bool = False, description: str = 'a model') -> None:
        self.description = description
        names = devices or ('0',)
        self.locks = DeviceLocks(self, [claim(name, shared=shared) for name in names])


@contextlib.contextmanager
def holding(*devices: str, shared: bool = False, description: str = 'a model') -> Iterator[Holder]:
    holder = Holder(*devices, shared=shared, description=description)
    holder.locks.acquire(0)
    yield holder
    holder.locks.release()


@contextlib.contextmanager
def another_process(*devices: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the locks of those devices until it ends."""
    with subprocess.Popen(
        (sys.executable, '-c', HOLDS, *devices),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == 'held\n'
            yield process
        finally:
            process.kill()


def test_a_stack_may_end_by_a_garbage_collection_at_any_moment() -> None:
    locks = DeviceLocks(Holder(), [claim('0')])
    locks.acquire(5)
    assert ends_under(_device_lock._here_lock, locks.release)


def test_a_start_waits_for_another_process_and_says_for_whom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    holder = Holder()
    with another_process('0', '1') as other, ThreadPoolExecutor() as threads:
        start: Future[None] = threads.submit(holder.locks.acquire, 30)
        wait_until('it says that it waits', lambda: 'waits' in caplog.text)
        assert f'GPU 0 is held by process {other.pid} (that model); a model waits' in caplog.text
        assert not start.done()
        other.kill()
        start.result(timeout=10)
    holder.locks.release()


def test_the_wait_has_an_end_that_names_both_and_the_mend() -> None:
    with another_process('0') as other, pytest.raises(DevicesBusyError) as raised:
        Holder().locks.acquire(0.3)
    said = str(raised.value)
    assert f'GPU 0 is still held by process {other.pid} (that model) after 0 s' in said
    assert 'a model needs it' in said
    assert 'gpu_devices' in said


def test_an_owner_that_lives_is_not_waited_for_as_long_as_a_start_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_device_lock, 'LIVE_OWNER_PATIENCE_S', 0.2)
    with another_process('0'), pytest.raises(DevicesBusyError):
        Holder().locks.acquire(1800)


def test_other_devices_are_not_waited_for() -> None:
    with another_process('0', '1'), holding('2', 'GPU-1a'):
        pass


def test_a_failed_start_gives_back_what_it_had_taken() -> None:
    with another_process('1'), pytest.raises(DevicesBusyError):
        Holder('0', '1').locks.acquire(0)
    with another_process('0'):
        pass


def test_a_wait_that_nobody_wants_any_more_ends() -> None:
    with another_process('0'), pytest.raises(StartError, match='given up'):
        Holder().locks.acquire(60, lambda: True)


def test_another_stack_in_the_same_process_is_refused_at_once() -> None:
    with holding('0', description='this model'):
        began = time.monotonic()
        with pytest.raises(DevicesBusyError) as raised:
            Holder('0', description='that model').locks.acquire(60)
        assert time.monotonic() - began < 5
    said = str(raised.value)
    assert 'GPU 0 is in use by this model of this process, and that model needs it' in said
    assert 'gpu_devices' in said


def test_one_that_is_ending_in_the_same_process_is_waited_for() -> None:
    with ThreadPoolExecutor() as threads, holding('0') as first:
        first.ending = True
        second = Holder()
        start = threads.submit(second.locks.acquire, 20)
        with contextlib.suppress(TimeoutError):
            start.result(timeout=0.5)
        assert not start.done()
        first.locks.release()
        start.result(timeout=10)
    second.locks.release()


def test_those_that_can_share_a_gpu_do_but_not_with_one_that_has_it_to_itself() -> None:
    with holding('0', shared=True), holding('0', shared=True), pytest.raises(DevicesBusyError):
        Holder('0').locks.acquire(0)
    with holding('0'), pytest.raises(DevicesBusyError):
        Holder('0', shared=True).locks.acquire(0)


def test_a_fork_holds_no_lock() -> None:
    read_end, write_end = os.pipe()
    with holding('0'):
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
    try:
        with another_process('0'):
            pass
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(pid, 0)


def test_the_locks_are_in_a_directory_of_this_user_alone(tmp_path: Path) -> None:
    directory = lock_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rename(tmp_path / 'away')
    try:
        directory.symlink_to(tmp_path)
        with pytest.raises(StartError, match='not a directory of this user'):
            lock_directory()
        directory.unlink()
    finally:
        (tmp_path / 'away').rename(directory)


UUIDS = {'0': 'GPU-5d5ba0d6-d33d', '1': 'GPU-77aa0000-1111'}


@pytest.mark.parametrize(
    ('named', 'needed', 'visible', 'locks', 'shared'),
    [
        (('1',), 1, ('0', '1'), ['gpu-GPU-77aa0000-1111'], False),
        (('GPU-77aa0000-1111',), 1, ('0', '1'), ['gpu-GPU-77aa0000-1111'], False),
        (('GPU-77',), 1, ('GPU-77', 'GPU-5d'), ['gpu-GPU-77aa0000-1111'], False),
        ((), 1, ('1',), ['gpu-GPU-77aa0000-1111'], True),
        ((), 2, ('1', '0', '2'), ['gpu-GPU-77aa0000-1111', 'gpu-GPU-5d5ba0d6-d33d'], True),
        ((), 2, None, ['gpu-GPU-5d5ba0d6-d33d', 'gpu-GPU-77aa0000-1111'], True),
        (('MIG-9/1',), 1, ('MIG-9/1',), ['gpu-MIG-9_1'], False),
    ],
    ids=['ordinal', 'UUID', 'beginning', 'remapped', 'two', 'uncounted', 'MIG'],
)
def test_one_gpu_is_one_lock_whatever_it_is_called(
    named: tuple[str, ...],
    needed: int,
    visible: tuple[str, ...] | None,
    locks: list[str],
    shared: bool,  # noqa: FBT001
) -> None:
    claims = gpu_claims(named, needed, visible, UUIDS)
    assert [claim.lock for claim in claims] == locks
    assert {claim.shared for claim in claims} == {shared}


def test_two_engines_cannot_have_one_gpu_under_two_names() -> None:
    config = DynamoRuntimeConfig(
        (DynamoVLLMEngineSpec(('0',)), DynamoVLLMEngineSpec(('GPU-5d5ba0d6-d33d',)))
    )
    with pytest.raises(StartError, match='GPU 0 and GPU GPU-5d5ba0d6-d33d are one'):
        _DynamoLocalRuntime(MODEL, config, topology=Topology(None, (0,), UUIDS))


def test_cores_that_a_user_names_are_the_engines_own_and_others_are_not() -> None:
    def locks(config: DynamoRuntimeConfig) -> list[str]:
        runtime = _DynamoLocalRuntime(MODEL, config, topology=Topology((), (0, 1)))
        return [claim.lock for claim in runtime._locks._claims]

    named = DynamoRuntimeConfig((DynamoVLLMEngineSpec(cpu_cores=(1,)),), engine_kind='cpu')
    assert locks(named) == ['core-1']
    assert locks(DynamoRuntimeConfig.for_devices(num_engines=1, engine_kind='cpu')) == []


def test_simulated_engines_lock_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), another_process('0', '1'):
        runtime = _DynamoLocalRuntime(MODEL, simulated(2))
        runtime._locks.acquire(0)
        assert runtime._locks.fds == ()
    assert 'waits' not in caplog.text
