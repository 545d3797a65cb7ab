"""What nobody guards any more is found by its environment, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from apache_beam_vllm_dynamo import _marker
from apache_beam_vllm_dynamo._marker import (
    MARKER,
    is_stopped,
    kill_marked,
    kill_orphans,
    new_token,
)
from tests.support.processes import (
    ROOT,
    ProcessTree,
    nothing_left_in_this_process,
    state_of,
    wait_until,
)


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    with nothing_left_in_this_process(), ProcessTree() as tree:
        yield tree


def sleeper(tree: ProcessTree, token: str | None) -> subprocess.Popen[bytes]:
    env = {**tree.env, **({MARKER: token} if token is not None else {})}
    return subprocess.Popen(('/bin/sleep', '100'), env=env, start_new_session=True)


def token_of_a_process_that_is_gone() -> str:
    code = 'from apache_beam_vllm_dynamo._marker import new_token; print(new_token())'
    argv = (sys.executable, '-c', code)
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    return subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout.strip()


def end(*processes: subprocess.Popen[bytes]) -> list[int]:
    """How each ended, those that live by being terminated now."""
    for process in processes:
        process.terminate()
    return [process.wait() for process in processes]


def test_tokens_differ() -> None:
    """Two children of one owner are two."""
    assert new_token() != new_token()


def test_exactly_the_marked_processes_are_killed(tree: ProcessTree) -> None:
    """Neither the children with another token nor those with none."""
    token = new_token()
    marked = [sleeper(tree, token) for _ in range(3)]
    others = [sleeper(tree, new_token()), sleeper(tree, token[:-1]), sleeper(tree, None)]
    assert kill_marked(token) == ()
    assert end(*marked) == [-signal.SIGKILL] * 3
    assert end(*others) == [-signal.SIGTERM] * 3


def test_what_is_said_to_be_gone_has_given_its_memory_back(tree: ProcessTree) -> None:
    """Its environment is gone a tenth of a second before that, and cannot tell."""
    token = new_token()
    code = "memory = b'x' * (400 << 20); print(flush=True); input()"
    process = subprocess.Popen(
        (sys.executable, '-S', '-c', code),
        env={**tree.env, MARKER: token}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert kill_marked(token) == ()
        assert state_of(process.pid) == 'Z'


def test_orphans_are_those_whose_owner_is_gone(tree: ProcessTree) -> None:
    """A living owner's children, and marks of an unknown form, are left alone."""
    orphan = sleeper(tree, token_of_a_process_that_is_gone())
    recycled = sleeper(tree, f'{os.getpid()}.1.abc')
    others = [sleeper(tree, new_token()), sleeper(tree, 'of another kind'), sleeper(tree, None)]
    assert kill_orphans() == ()
    assert end(orphan, recycled) == [-signal.SIGKILL] * 2
    assert end(*others) == [-signal.SIGTERM] * 3


def test_orphans_are_left_to_their_shim_while_it_can_end_them(
    tree: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = token_of_a_process_that_is_gone()
    shim, orphan = sleeper(tree, token), sleeper(tree, token)
    monkeypatch.setattr(_marker, '_is_shim', lambda pid: pid == str(shim.pid))
    assert kill_orphans() == ()
    assert (shim.poll(), orphan.poll()) == (None, None)
    shim.send_signal(signal.SIGSTOP)
    wait_until('it is stopped', lambda: is_stopped(shim.pid), 10)
    assert kill_orphans() == ()
    assert end(shim, orphan) == [-signal.SIGKILL] * 2


def test_orphans_of_other_containers_are_left_alone(
    tree: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another PID namespace the owner's process id means nothing."""
    foreign = sleeper(tree, token_of_a_process_that_is_gone())
    name = _marker._pid_namespace
    monkeypatch.setattr(
        _marker, '_pid_namespace', lambda pid: 'pid:[1]' if pid == str(foreign.pid) else name(pid)
    )
    assert kill_orphans() == ()
    assert end(foreign) == [-signal.SIGTERM]


def test_a_process_that_a_signal_has_stopped_is_told_from_one_that_runs(tree: ProcessTree) -> None:
    process = sleeper(tree, None)
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    wait_until('it is stopped', lambda: is_stopped(process.pid), 10)
    process.send_signal(signal.SIGCONT)
    wait_until('it runs', lambda: not is_stopped(process.pid), 10)
    end(process)
    assert not is_stopped(process.pid)


def test_what_cannot_be_killed_is_named_in_time(
    tree: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that meets a process stuck in the kernel does not wait for ever."""
    token = new_token()
    process = sleeper(tree, token)
    monkeypatch.setattr(os, 'kill', lambda *_: None)
    assert kill_marked(token, timeout_s=0.2) == (process.pid,)
    monkeypatch.undo()
    assert state_of(process.pid) is not None
    assert end(process) == [-signal.SIGTERM]
