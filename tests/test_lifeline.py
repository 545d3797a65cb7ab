"""The shim by itself: its pipes, its signals, and its promise to outlive all descendants."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from apache_beam_vllm_dynamo import _lifeline
from tests.support.processes import (
    FAKES,
    PATIENCE_S,
    ProcessTree,
    children_of,
    nothing_left_in_this_process,
    runs,
    session_of,
    state_of,
    status_field,
    wait_until,
)

FAKE = (sys.executable, '-S', str(FAKES / 'child.py'))
STUBBORN = {'IGNORE_SIGTERM': '1'}
GRANDCHILD = {'SPAWN_GRANDCHILD_IN_OWN_SESSION': '1'}

# Six lines of processes; in each, a process starts its successor in a session of its own, and
# ends: whoever looks finds others than a moment ago. Their number cannot grow, even where
# nothing stops them, and they end by a time that all of them inherit.
RUNNERS = 6
RUNNING = f"""
import os, signal, time
end = time.monotonic() + 10
def run():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(0.02)
    os._exit(0)
for _ in range({RUNNERS}):
    if os.fork() == 0:
        run()
print('running', flush=True)
time.sleep(10)
"""


class Shim:
    """The shim as its owner sees it."""

    def __init__(
        self,
        tree: ProcessTree,
        command: Sequence[str] = FAKE,
        *,
        env: dict[str, str] | None = None,
        stop_grace_s: float = 60.0,
        orphan_grace_s: float = 0.3,
        early: bytes | None = None,
    ) -> None:
        read_end, self.control = os.pipe()
        if early is not None:
            self.ask(early) if early else self.cut()
        self.status, write_end = os.pipe()
        numbers = (str(read_end), str(write_end), '-', str(stop_grace_s), str(orphan_grace_s))
        self.process = subprocess.Popen(
            (sys.executable, '-I', '-S', _lifeline.__file__, *numbers, *command),
            env={**tree.env, **(env or {})},
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        os.close(read_end)
        os.close(write_end)
        self._lines = iter(os.fdopen(self.status, closefd=False))

    def event(self) -> dict[str, Any]:
        """The next event, or an empty one at the end of the pipe."""
        found: dict[str, Any] = json.loads(next(self._lines, '{}'))
        return found

    def report(self) -> dict[str, Any]:
        """What the fake child prints when it is ready."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self, request: bytes) -> None:
        os.write(self.control, request)

    def cut(self) -> None:
        """What the kernel does when the owner ends."""
        os.close(self.control)
        self.control = -1

    def close(self) -> None:
        for fd in (self.control, self.status):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    with nothing_left_in_this_process(), ProcessTree() as tree:
        yield tree


def test_it_reports_the_start_and_the_end(tree: ProcessTree) -> None:
    """The command leads a session of its own; its exit status arrives, then end of file."""
    with contextlib.closing(Shim(tree, env={'SIGTERM_EXIT_CODE': '5'})) as shim:
        started = shim.event()
        shim.report()
        assert started['event'] == 'started'
        assert session_of(started['pid']) == started['pid']
        shim.ask(b'T')
        assert shim.event() == {'event': 'ended', 'returncode': 5}
        assert shim.event() == {}
        assert shim.process.wait() == 0


@pytest.mark.parametrize(
    ('command', 'text'),
    [('/no/such/program', 'No such file or directory'), ('/etc/passwd', 'Permission denied')],
)
def test_it_reports_why_a_command_cannot_be_executed(
    tree: ProcessTree, command: str, text: str
) -> None:
    """One event, and the shim ends."""
    with contextlib.closing(Shim(tree, [command])) as shim:
        event = shim.event()
        assert (event['event'], event['error']) == ('not_started', text)
        assert event['errno'] in {2, 13}
        assert shim.event() == {}


@pytest.mark.parametrize('early', [b'', b'T', b'K'], ids=['cut', 'stop', 'kill'])
def test_it_does_not_start_what_is_not_wanted_any_more(tree: ProcessTree, early: bytes) -> None:
    """The owner ended, or changed its mind, while the interpreter of the shim came up."""
    with contextlib.closing(Shim(tree, ['/no/such/program'], early=early)) as shim:
        event = shim.event()
        assert (event['event'], event['errno']) == ('not_started', None)
        assert shim.event() == {}


@pytest.mark.parametrize('way', ['cut', 'terminate', 'kill'])
def test_whatever_moment_it_ends_at_nothing_is_left(tree: ProcessTree, way: str) -> None:
    """Before its signals are armed, while it forks, while it reports: every few milliseconds."""
    for delay_ms in range(0, 40, 2):
        with contextlib.closing(Shim(tree, ['/bin/sleep', '100'])) as shim:
            time.sleep(delay_ms / 1000)  # the moment is the point, not something to wait for
            getattr(shim if way == 'cut' else shim.process, way)()
            shim.process.wait(PATIENCE_S)
        tree.wait_until_gone()


def test_an_owner_that_is_gone_is_not_waited_for(tree: ProcessTree) -> None:
    """End of file gives the short grace, with nobody there to read the status."""
    with contextlib.closing(Shim(tree, env={**STUBBORN, **GRANDCHILD})) as shim:
        shim.event()
        shim.report()
        os.close(shim.status)
        begin = time.monotonic()
        shim.cut()
        shim.process.wait(PATIENCE_S)
        assert 0.3 <= time.monotonic() - begin < 10
        assert not tree.pids()


@pytest.mark.parametrize('first', ['signal', 'request'])
def test_the_end_of_the_owner_shortens_a_stop_that_is_under_way(
    tree: ProcessTree, first: str
) -> None:
    """A grace of a minute becomes the short one, and a second request never lengthens it."""
    with contextlib.closing(Shim(tree, env=STUBBORN)) as shim:
        shim.event()
        shim.report()
        if first == 'signal':
            shim.process.terminate()
        else:
            shim.ask(b'T')
        shim.cut()
        shim.process.terminate()
        assert shim.event() == {'event': 'ended', 'returncode': -9}


def test_sigterm_stops_and_signals_of_a_terminal_do_not(tree: ProcessTree) -> None:
    """Ctrl-C is for the owner, which decides what becomes of its children."""
    with contextlib.closing(Shim(tree)) as shim:
        pid = shim.event()['pid']
        shim.report()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
            shim.process.send_signal(number)
        caught = int(status_field(shim.process.pid, 'SigCgt'), 16)
        wait_until('no signal is pending', lambda: _pending(shim.process.pid) == 0)
        assert caught >> (signal.SIGINT - 1) & 1
        assert runs(pid)
        assert shim.process.poll() is None
        shim.process.terminate()
        assert shim.event() == {'event': 'ended', 'returncode': -15}


def test_a_kill_cuts_a_grace_short(tree: ProcessTree) -> None:
    """K after T ends it at once."""
    with contextlib.closing(Shim(tree, env={**STUBBORN, **GRANDCHILD})) as shim:
        shim.event()
        shim.report()
        shim.ask(b'T')
        shim.ask(b'K')
        assert shim.event() == {'event': 'ended', 'returncode': -9}
        assert tree.pids() <= {shim.process.pid}


def test_the_command_starts_with_a_clean_slate_of_signals(tree: ProcessTree) -> None:
    """What the owner's thread blocks or ignores would otherwise be inherited."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        shim = Shim(tree, ['/bin/sleep', '100'])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGHUP, ignored)
    with contextlib.closing(shim):
        pid = shim.event()['pid']
        # The C library keeps two signals to itself; GNU make, which may run this, ignores them.
        ours = sum(1 << (number - 1) for number in signal.valid_signals())
        assert int(status_field(pid, 'SigBlk'), 16) & ours == 0
        assert int(status_field(pid, 'SigIgn'), 16) & ours == 0
        shim.ask(b'T')
        assert shim.event() == {'event': 'ended', 'returncode': -15}


def test_a_killed_shim_takes_the_command_with_it(tree: ProcessTree) -> None:
    """The kernel sees to that, whatever the command thinks of SIGTERM."""
    with contextlib.closing(Shim(tree, env=STUBBORN)) as shim:
        pid = shim.event()['pid']
        shim.report()
        shim.process.kill()
        wait_until('the command is gone', lambda: state_of(pid) in (None, 'Z'))
        assert shim.event() == {}


def test_adopted_descendants_leave_no_zombies_while_the_command_runs(tree: ProcessTree) -> None:
    """An orphan that ends is collected at once, not when all is over."""
    with contextlib.closing(Shim(tree, env=GRANDCHILD)) as shim:
        pid = shim.event()['pid']
        grandchild = shim.report()['grandchild']
        assert children_of(shim.process.pid) == {pid, grandchild}
        os.kill(grandchild, signal.SIGKILL)
        wait_until('it is collected', lambda: state_of(grandchild) is None)
        assert children_of(shim.process.pid) == {pid}
        shim.ask(b'K')
        assert shim.event()['event'] == 'ended'


@pytest.mark.parametrize('way', ['kill', 'cut', 'leader'])
def test_processes_that_are_others_at_every_look_are_all_found(tree: ProcessTree, way: str) -> None:
    """Each in a session of its own and deaf to SIGTERM: after the report none is left."""
    with contextlib.closing(Shim(tree, [sys.executable, '-S', '-c', RUNNING])) as shim:
        pid = shim.event()['pid']
        before = wait_until('all run', lambda: _at_least(RUNNERS, tree.pids() - {pid}))
        wait_until('they are others', lambda: len(tree.pids() & before) <= 1)
        if way == 'kill':
            shim.ask(b'K')
        elif way == 'cut':
            shim.cut()
        else:
            os.kill(pid, signal.SIGKILL)
        assert shim.event()['event'] == 'ended'
        assert tree.pids() <= {shim.process.pid}


def test_the_environment_arrives_byte_for_byte(tree: ProcessTree) -> None:
    """Not changed by the interpreter of the shim, which may set a locale for itself."""
    given = {**tree.env, 'NOT_UTF8': os.fsdecode(b'\xff\xfe'), 'EQUALS': 'a=b=c', 'EMPTY': ''}
    with contextlib.closing(Shim(tree, ['/usr/bin/env', '-0'], env=given)) as shim:
        assert shim.process.stdout is not None
        printed = shim.process.stdout.read().split(b'\0')
        assert sorted(printed[:-1]) == sorted(os.fsencode(f'{k}={v}') for k, v in given.items())


def test_many_start_and_die_at_the_same_time(tree: ProcessTree) -> None:
    """Instant exits race with the report of the start; every one is seen to its end."""
    events: list[list[dict[str, Any]]] = []

    def life() -> None:
        for _ in range(10):
            with contextlib.closing(Shim(tree, ['/bin/true'])) as shim:
                events.append([shim.event(), shim.event(), shim.event()])

    threads = [threading.Thread(target=life) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events) == 40
    for first, second, third in events:
        assert first['event'] == 'started'
        assert second == {'event': 'ended', 'returncode': 0}
        assert third == {}


def test_the_shim_needs_nothing_but_the_standard_library() -> None:
    """It must start in milliseconds, from any interpreter, without the package."""
    code = (
        'import runpy, sys; before = set(sys.modules); '
        f'runpy.run_path({_lifeline.__file__!r}); '
        'print(*sorted({m.partition(".")[0] for m in set(sys.modules) - before}))'
    )
    argv = (sys.executable, '-I', '-S', '-c', code)
    loaded = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    assert set(loaded) <= sys.stdlib_module_names
    assert not {'subprocess', 'threading', 'asyncio', 'logging'} & set(loaded)
    assert len(pathlib.Path(_lifeline.__file__).read_text().splitlines()) < 300


def _pending(pid: int) -> int:
    return int(status_field(pid, 'SigPnd'), 16) | int(status_field(pid, 'ShdPnd'), 16)


def _at_least(number: int, pids: set[int]) -> set[int]:
    return pids if len(pids) > number else set()
