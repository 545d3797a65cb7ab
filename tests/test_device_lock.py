"""One stack at a time on a GPU: waiting for others, evicting one's own predecessor."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from apache_beam_vllm_dynamo import (
    DevicesBusyError,
    DynamoRuntimeConfig,
    StartError,
    VLLMCompletionsModelHandler,
)
from apache_beam_vllm_dynamo._device_lock import DeviceLocks, devices_to_lock, lock_directory
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime
from tests.support.processes import ROOT, fds_of, runs, wait_until
from tests.support.stacks import FAKE_MODULES, MODEL, nothing_left_on_this_machine, simulated

HOLDS = """
import sys
from apache_beam_vllm_dynamo._device_lock import DeviceLocks
class Holder:
    identity = 'it'
locks = DeviceLocks(Holder(), sys.argv[1:])
locks.acquire(5)
print('held', flush=True)
sys.stdin.readline()
"""
LOADS = """
import os, signal
from apache_beam_vllm_dynamo import VLLMCompletionsModelHandler
signal.alarm(100)
env = {'PYTHONPATH': os.environ['FAKES'], 'CUDA_VISIBLE_DEVICES': '0'}
model = VLLMCompletionsModelHandler('m', env_vars=env).load_model()
print(model.status()[0].pid, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    descriptors = fds_of()
    with nothing_left_on_this_machine():
        yield
    assert [fd for fd, path in fds_of().items() if path.startswith(str(lock_directory()))] == []
    assert len(fds_of()) <= len(descriptors) + 8  # the loop's own, made once a process


class Holder:
    """A stack that has devices, as far as the locks can tell."""

    def __init__(self, identity: str = 'it', devices: tuple[str, ...] = ('0',)) -> None:
        self.identity = identity
        self.locks = DeviceLocks(self, devices)
        self.closed = ''

    def close(self, reason: str = 'closed') -> None:
        self.closed = reason
        self.locks.release()


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


def native(model: str = 'm') -> VLLMCompletionsModelHandler:
    """The native server, a fake, on a worker with one GPU."""
    env = {'PYTHONPATH': FAKE_MODULES, 'CUDA_VISIBLE_DEVICES': '0'}
    return VLLMCompletionsModelHandler(model, env_vars=env)


def test_a_start_waits_for_another_process_and_says_for_whom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    holder = Holder()
    with another_process('0', '1') as other, ThreadPoolExecutor() as threads:
        start: Future[None] = threads.submit(holder.locks.acquire, 30)
        wait_until('it says that it waits', lambda: 'waiting' in caplog.text)
        assert f'GPU 0 is held by process {other.pid}' in caplog.text
        assert not start.done()
        other.kill()
        start.result(timeout=10)
    holder.close()


def test_the_wait_has_an_end_that_names_the_holder() -> None:
    with (
        another_process('0') as other,
        pytest.raises(DevicesBusyError, match=rf'GPU 0 is still held by process {other.pid} '),
    ):
        Holder().locks.acquire(0.3)


def test_other_devices_are_not_waited_for() -> None:
    holder = Holder(devices=('2', 'GPU-1a/b'))
    with another_process('0', '1'):
        holder.locks.acquire(0)
        holder.close()


def test_a_failed_start_gives_back_what_it_had_taken() -> None:
    with another_process('1'), pytest.raises(DevicesBusyError):
        Holder(devices=('0', '1')).locks.acquire(0)
    with another_process('0'):
        pass


def test_a_wait_that_nobody_wants_any_more_ends() -> None:
    with another_process('0'), pytest.raises(StartError, match='given up'):
        Holder().locks.acquire(60, lambda: True)


def test_the_same_stack_in_the_same_process_makes_room() -> None:
    first, second = Holder(devices=('0', '1')), Holder(devices=('1', '2'))
    first.locks.acquire(0)
    second.locks.acquire(0)
    assert 'loaded again' in first.closed
    first.locks.release()  # as its own end does once more
    third = Holder(devices=('1',))
    third.locks.acquire(0)
    assert second.closed
    third.close()


def test_another_stack_in_the_same_process_is_refused_at_once() -> None:
    first = Holder('this')
    first.locks.acquire(0)
    began = time.monotonic()
    with pytest.raises(DevicesBusyError, match=r'GPU 0 is in use by another.*gpu_devices'):
        Holder('that').locks.acquire(60)
    assert time.monotonic() - began < 5
    assert not first.closed
    first.close()


def test_a_fork_holds_no_lock() -> None:
    holder = Holder()
    holder.locks.acquire(0)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        holder.close()
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


@pytest.mark.parametrize(
    ('named', 'needed', 'visible', 'expected'),
    [
        (('4', '5'), 2, ('4', '5', '6'), ['4', '5']),
        ((), 2, ('4', '5', '6'), ['4 for', '5 for']),
        ((), 2, None, ['0 for', '1 for']),
    ],
)
def test_an_engine_without_names_has_a_place_of_its_own_on_the_first_gpus(
    named: tuple[str, ...], needed: int, visible: tuple[str, ...] | None, expected: list[str]
) -> None:
    locked = devices_to_lock(named, needed, visible, 'me')
    assert [device.rpartition(' ')[0] or device for device in locked] == expected
    other = devices_to_lock(named, needed, visible, 'somebody else')
    assert (set(locked) & set(other) == set()) == (not named)


def test_a_second_load_of_a_handler_replaces_the_first() -> None:
    handler = native()
    first = handler.load_model()
    pid = first.status()[0].pid
    second = handler.load_model()
    assert not runs(pid)
    assert [status.state for status in first.status()] == ['stopped']
    assert len(handler.run_inference(['x'], second)) == 1


def test_another_model_may_share_a_gpu_that_neither_names() -> None:
    first, second = native().load_model(), native('other').load_model()
    assert runs(first.status()[0].pid)
    assert runs(second.status()[0].pid)


def test_the_successor_of_a_killed_process_waits_for_its_engine() -> None:
    env = {**os.environ, 'FAKES': FAKE_MODULES}
    with subprocess.Popen(
        (sys.executable, '-c', LOADS), stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        engine = int(owner.stdout.readline())
        os.kill(engine, signal.SIGSTOP)  # it does not end at TERM, but by the shim's KILL
        owner.kill()
        owner.wait()
    model = native().load_model()
    assert not runs(engine)
    assert runs(model.status()[0].pid)


def test_a_load_that_was_abandoned_in_its_start_makes_room() -> None:
    env = {**os.environ, 'PYTHONPATH': FAKE_MODULES, 'CUDA_VISIBLE_DEVICES': '0,1'}

    def runtime(start_timeout_secs: float) -> _DynamoLocalRuntime:
        config = DynamoRuntimeConfig.for_devices(
            num_engines=2, discovery='file', start_timeout_secs=start_timeout_secs
        )
        return _DynamoLocalRuntime(MODEL, config, env=env)

    first, second = runtime(60), runtime(60)
    with ThreadPoolExecutor() as threads:
        abandoned = threads.submit(first.start)
        wait_until('its engines run', lambda: len(first.statuses()) == 4)
        waiting = threads.submit(second.start)
        with pytest.raises(StartError, match='given up'):
            abandoned.result(timeout=30)
        wait_until('the engines of the second run', lambda: len(second.statuses()) == 4)
        second.close()
        with pytest.raises(StartError, match='given up'):
            waiting.result(timeout=30)


def test_simulated_engines_lock_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), another_process('0', '1'):
        runtime = _DynamoLocalRuntime(MODEL, simulated(2))
        assert runtime._locks.fds == ()
        runtime._locks.acquire(0)
    assert 'waiting' not in caplog.text


def test_two_starts_at_once_in_one_process_leave_one() -> None:
    holders = [Holder() for _ in range(4)]
    barrier = threading.Barrier(len(holders))

    def acquire(holder: Holder) -> None:
        barrier.wait()
        holder.locks.acquire(20)

    with ThreadPoolExecutor() as threads:
        for start in [threads.submit(acquire, holder) for holder in holders]:
            with contextlib.suppress(StartError):
                start.result(timeout=30)
    assert sum(bool(holder.closed) for holder in holders) == 3
    for holder in holders:
        holder.close()
