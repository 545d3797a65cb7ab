"""The directory of a start goes with the last that uses it, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from apache_beam_vllm_dynamo import StartError, _private_directory
from apache_beam_vllm_dynamo._private_directory import PrivateDirectory, remove_stale
from tests.support.processes import (
    ROOT,
    WITHOUT_BEAM,
    ProcessTree,
    nothing_left_in_this_process,
    runs,
    wait_until,
)

OWNER = f"""{WITHOUT_BEAM}
from apache_beam_vllm_dynamo._private_directory import PrivateDirectory
from apache_beam_vllm_dynamo._process import ChildSpec, ManagedProcess
import os
directory = PrivateDirectory.make()
(directory.path / 'file').write_text('x')
children = [
    ManagedProcess(ChildSpec('c', ('sleep', '60'), dict(os.environ)))
    for _ in range(int(sys.argv[1]))
]
for child in children:
    child.start([directory.fd])
print(directory.path, flush=True)
sys.stdin.read()
"""


def test_it_is_removed_by_its_owner_and_may_be_removed_again() -> None:
    directory = PrivateDirectory.make()
    (directory.path / 'file').write_text('x')
    assert directory.path.stat().st_mode & 0o077 == 0
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_a_fork_of_its_owner_does_not_keep_it() -> None:
    directory = PrivateDirectory.make()
    fork = os.fork()
    if not fork:
        signal.pause()
        os._exit(0)
    try:
        directory._files.close()  # as when the owner is killed
        wait_until('it is gone', lambda: not directory.path.exists())
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        directory.remove()


@pytest.mark.parametrize('children', ['0', '3'])
def test_it_goes_with_a_killed_owner_and_its_children(children: str) -> None:
    with ProcessTree() as tree:
        with subprocess.Popen(
            [sys.executable, '-c', OWNER, children],
            cwd=ROOT,
            env={**os.environ, **tree.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner:
            assert owner.stdout is not None
            path = Path(owner.stdout.readline().strip())
            assert (path / 'file').exists()
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            wait_until('the directory is gone', lambda: not path.exists(), timeout_s=10)
        tree.wait_until_gone()


def test_it_stays_while_a_child_of_a_killed_owner_uses_it() -> None:
    directory = PrivateDirectory.make()
    user = os.dup(directory.fd)
    keeper = directory._keeper.pid
    directory._files.close()  # as when the owner is killed
    time.sleep(0.2)
    assert directory.path.exists()
    assert runs(keeper)
    os.close(user)
    wait_until('it is gone', lambda: not directory.path.exists())
    directory.remove()


def test_one_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, 'tempdir', '/missing')
    with nothing_left_in_this_process(), pytest.raises(StartError, match='/missing/vllm-dynamo-'):
        PrivateDirectory.make()


def test_one_that_nobody_uses_is_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(_private_directory, 'STALE_AFTER_S', -1.0)
    abandoned = tmp_path / f'{_private_directory.PREFIX}abandoned'
    abandoned.mkdir()
    other = tmp_path / 'of-somebody-else'
    other.mkdir()
    used = PrivateDirectory.make()
    try:
        assert not abandoned.exists()
        remove_stale(tmp_path)
        assert used.path.exists()
        assert other.exists()
    finally:
        used.remove()


def test_a_young_one_may_not_be_locked_yet_and_is_left_alone(tmp_path: Path) -> None:
    young = tmp_path / f'{_private_directory.PREFIX}young'
    young.mkdir()
    remove_stale(tmp_path)
    assert young.exists()


def test_a_temporary_directory_too_long_for_sockets_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ('x' * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(long))
    directory = PrivateDirectory.make()
    try:
        assert directory.path.parent == _private_directory.SHORT_DIRECTORY
    finally:
        directory.remove()
