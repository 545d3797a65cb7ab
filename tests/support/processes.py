"""Watching real process trees from a test: polling, finding, and never leaving one behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from apache_beam_vllm_dynamo._process import ChildSpec, ManagedProcess

T = TypeVar('T')

FAKES = pathlib.Path(__file__).parents[1] / 'fakes'
ROOT = FAKES.parents[1]

# For a program that needs a module of the package, and not Beam, whose import takes seconds.
WITHOUT_BEAM = """
import sys, types
package = sys.modules['apache_beam_vllm_dynamo'] = types.ModuleType('apache_beam_vllm_dynamo')
package.__path__ = ['apache_beam_vllm_dynamo']
"""

PTRACE_SEIZE = 0x4206  # linux/ptrace.h

# For what takes milliseconds on an idle machine: only a failing test waits that long.
PATIENCE_S = 20.0


def wait_until(what: str, probe: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Polls until `probe` returns something true, and returns that."""
    deadline = time.monotonic() + timeout_s
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f'not within {timeout_s:.1f} s: {what}; last seen: {found!r}')
        time.sleep(0.01)
    return found


def state_of(pid: int) -> str | None:
    """The state of a process, e.g. ``'S'``, ``'T'`` or ``'Z'``; ``None`` if there is none."""
    stat = _stat(pid)
    return stat[0] if stat else None


def runs(pid: int | None) -> bool:
    """Whether a process is there, and neither ended nor stopped."""
    return pid is not None and state_of(pid) not in (None, 'Z', 'X', 'T', 't')


def parent_of(pid: int) -> int | None:
    stat = _stat(pid)
    return int(stat[1]) if stat else None


def session_of(pid: int) -> int | None:
    stat = _stat(pid)
    return int(stat[3]) if stat else None


def status_field(pid: int, name: str) -> str:
    """One field of /proc/PID/status, e.g. ``SigIgn``."""
    for line in pathlib.Path(f'/proc/{pid}/status').read_text().splitlines():
        if line.startswith(f'{name}:'):
            return line.partition(':')[2].strip()
    raise KeyError(name)


def children_of(pid: int) -> set[int]:
    pids = (int(path.name) for path in pathlib.Path('/proc').glob('[0-9]*'))
    return {other for other in pids if parent_of(other) == pid}


def fds_of(pid: int | str = 'self') -> dict[int, str]:
    """Descriptor to what it leads to, e.g. ``'pipe:[123]'``."""
    found = {}
    for path in pathlib.Path(f'/proc/{pid}/fd').iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the directory
            found[int(path.name)] = str(path.readlink())
    return found


class ProcessTree:
    """All processes that were started with one token in their environment.

    At the end of the ``with`` block none may be left; those that are left get killed first.
    """

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)

    @property
    def env(self) -> dict[str, str]:
        """What a process, or one above it, must have in its environment to belong here."""
        return {'TEST_PROCESS_TREE': self._token}

    def pids(self) -> set[int]:
        """Those that live; a zombie has no environment any more."""
        entry = f'TEST_PROCESS_TREE={self._token}\0'.encode()
        found = set()
        for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
            with contextlib.suppress(OSError):
                if entry in path.read_bytes():
                    found.add(int(path.parent.name))
        return found

    def wait_until_gone(self, timeout_s: float = PATIENCE_S) -> None:
        wait_until('no process of the tree is left', lambda: not self.pids(), timeout_s)

    def spec(
        self,
        *arguments: str,
        script: str = 'child.py',
        stop_grace_s: float = 5.0,
        env: Mapping[str, str] | None = None,
    ) -> ChildSpec:
        """A fake of tests/fakes, with its knobs in `env`."""
        argv = (sys.executable, '-S', str(FAKES / script), *arguments)
        return ChildSpec('fake', argv, {**self.env, **(env or {})}, None, stop_grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        left = self.pids()
        deadline = time.monotonic() + PATIENCE_S
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if error is None and left:
            raise AssertionError(f'processes were left behind: {left}')


def report_of(child: ManagedProcess) -> dict[str, Any]:
    """What the fake child says of itself, once it is ready."""
    lines = wait_until('the fake child is ready', lambda: child.log_tail(1))
    report: dict[str, Any] = json.loads(lines[0])
    return report


@contextlib.contextmanager
def not_to_be_collected(pid: int) -> Iterator[None]:
    """A process that stays, when it is killed, until the end of the block.

    As one does that hangs in a driver. This one is traced, so that its parent cannot collect it
    before the tracer, a thread, has ended.
    """
    attached, over = threading.Event(), threading.Event()
    found: list[int] = []

    def trace() -> None:
        found.append(ctypes.CDLL(None).ptrace(PTRACE_SEIZE, pid, None, None))
        attached.set()
        over.wait()

    thread = threading.Thread(target=trace)
    thread.start()
    attached.wait()
    assert found == [0]
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def nothing_left_in_this_process() -> Iterator[None]:
    """No descriptor, thread or zombie of the block outlives it."""
    fds, threads = fds_of(), set(threading.enumerate())
    children = children_of(os.getpid())
    yield
    # What was there before, of an earlier test's library, may go in between.
    assert fds_of().items() <= fds.items()
    assert set(threading.enumerate()) <= threads
    assert children_of(os.getpid()) <= children


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(')')[2].split()


def ends_under(lock: contextlib.AbstractContextManager[object], does: Callable[[], object]) -> bool:
    """Whether ``does`` returns on a thread that holds ``lock``, as a garbage collection may."""

    def collect() -> None:
        with lock:
            does()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()
