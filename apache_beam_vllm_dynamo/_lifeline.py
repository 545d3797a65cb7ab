"""Runs one command that cannot outlive its owner; a plain script, standard library only.

Usage::

    python -I -S _lifeline.py CONTROL_FD STATUS_FD HOLD_FDS STOP_GRACE_S ORPHAN_GRACE_S \
        COMMAND...

The owner holds the only write end of the control pipe. The kernel closes it when the
owner ends, however it ends, and that end of file is the lifeline being cut.

* Control pipe, owner to shim: ``T`` stops (as SIGTERM does): TERM to the command's process
  group, at most ``STOP_GRACE_S`` seconds, then KILL. ``K`` kills at once. End of file stops
  with ``ORPHAN_GRACE_S`` instead, where that is shorter.
* Status pipe, shim to owner, one JSON object a line: ``started`` with ``pid``;
  ``not_started`` with ``errno`` and ``error``; ``ended`` with ``returncode`` (negative for a
  signal), which is written strictly after the last descendant is gone; before it ``lingers`` with
  ``pids``, once, where some have not gone seconds after their KILL.
* ``HOLD_FDS`` (comma separated, or ``-``) stay open until then, so that an flock on one of
  them is held as long as a process that it protects lives. The command gets none of them.

The shim is a subreaper: whatever a descendant does (a session of its own, a double fork),
it is handed to the shim when its parent ends. So when ``waitpid`` says that the shim has no
child, there is no descendant either, and a kill that only ever looks at direct children,
again and again, reaches every one without a chance of hitting a recycled process id.

When the command ends by itself, what it left behind is killed at once. When the shim is
killed, the kernel kills the command (PR_SET_PDEATHSIG, sound here because the shim has one
thread); the rest is for the owner to find.
"""

# Importing pathlib would cost milliseconds at every start; exec is the purpose.
# ruff: noqa: PTH123, PTH208, S606

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

STOP = ord('T')
KILL = ord('K')
ORPHANED = -1  # not a byte: end of file on the control pipe

# A killed process is usually gone within a millisecond and SIGCHLD wakes the shim; the pause
# only matters for one that hangs in the kernel, where looking more often helps nobody.
FIRST_KILL_PAUSE_S = 0.01
LONGEST_KILL_PAUSE_S = 0.5
# Before the owner stops waiting for the end: it is to know that this is no fault of the shim.
LINGERS_AFTER_S = 3.0

# Those of a terminal are handled by doing nothing, not ignored: exec resets a handler only.
HANDLED = {
    *(signal.SIGCHLD, signal.SIGTERM),
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
}

_libc = ctypes.CDLL(None, use_errno=True)


class Shim:
    """One command, its descendants, and the two pipes to the owner."""

    def __init__(
        self, control_fd: int, status_fd: int, stop_grace_s: float, orphan_grace_s: float
    ) -> None:
        self._status_fd = status_fd
        self._stop_grace_s = stop_grace_s
        self._orphan_grace_s = min(orphan_grace_s, stop_grace_s)
        self._wake_fd = _arm_signals()
        self._poller = select.poll()
        self._poller.register(control_fd, select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)
        self._leader = 0
        self._returncode: int | None = None
        self._kill_at: float | None = None  # time.monotonic()

    def run(self, command: list[str]) -> None:
        """Starts the command and returns when it and all of its descendants are gone."""
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        if self._requests(timeout_s=0.0):
            self._report(event='not_started', errno=None, error='asked to stop before the start')
            return
        try:
            self._leader = _spawn(command)
        except OSError as error:
            self._report(event='not_started', errno=error.errno, error=error.strerror)
            return
        self._report(event='started', pid=self._leader)
        self._watch()
        self._kill_all()
        self._report(event='ended', returncode=self._returncode)

    def _watch(self) -> None:
        """Returns when the command has ended or it is time to kill it."""
        while self._returncode is None:
            left_s = None if self._kill_at is None else self._kill_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            requests = self._requests(left_s)
            self._reap()
            if KILL in requests:
                return
            if ORPHANED in requests:
                self._terminate(self._orphan_grace_s)
            elif STOP in requests:
                self._terminate(self._stop_grace_s)

    def _terminate(self, grace_s: float) -> None:
        """Sends TERM once; asked again, it can only bring the end of the grace nearer."""
        if self._returncode is not None:
            return  # reaped: its process id may belong to somebody else by now
        kill_at = time.monotonic() + grace_s
        if self._kill_at is not None:
            self._kill_at = min(self._kill_at, kill_at)
            return
        self._kill_at = kill_at
        with contextlib.suppress(OSError):  # not ours to signal: KILL follows
            os.killpg(self._leader, signal.SIGTERM)
            os.killpg(self._leader, signal.SIGCONT)  # a stopped process waits with its SIGTERM

    def _kill_all(self) -> None:
        pause_s = FIRST_KILL_PAUSE_S
        lingers_at = time.monotonic() + LINGERS_AFTER_S
        while not self._reap():
            left = []
            for pid in _children():
                left.append(pid)
                with contextlib.suppress(OSError):  # not ours to kill: left to its own end
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > lingers_at:
                self._report(event='lingers', pids=left)
                lingers_at = math.inf
            self._requests(pause_s)
            pause_s = min(2 * pause_s, LONGEST_KILL_PAUSE_S)

    def _reap(self) -> bool:
        """Collects all children that have ended; true when the shim has no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._leader:
                self._returncode = os.waitstatus_to_exitcode(status)

    def _requests(self, timeout_s: float | None) -> set[int]:
        """Waits for a signal or the owner, and returns what was asked for meanwhile."""
        found: set[int] = set()
        # Rounded up: a poll that returns a fraction too early would spin until the deadline.
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        for fd, _ in self._poller.poll(timeout_ms):
            data = os.read(fd, 4096)
            if fd == self._wake_fd:
                found.update({STOP} if signal.SIGTERM in data else ())
            elif data:
                found.update(data)
            else:
                self._poller.unregister(fd)
                found.add(ORPHANED)
        return found

    def _report(self, **event: object) -> None:
        with contextlib.suppress(OSError):  # the owner is gone
            os.write(self._status_fd, json.dumps(event).encode() + b'\n')


def _arm_signals() -> int:
    """Makes signals readable from a descriptor, so that no wait can miss one."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in HANDLED:
        signal.signal(number, lambda *_: None)
    # The thread of the owner that started the shim may have had signals blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return read_end


def _spawn(command: list[str]) -> int:
    """Starts the command as the leader of a new session; returns once its exec succeeded.

    Raises:
      OSError: The fork or the exec failed.
    """
    read_end, write_end = os.pipe()  # not inheritable: a successful exec closes it
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, shim, write_end)
    os.close(write_end)
    with open(read_end, 'rb') as failure:
        number = failure.read()
    if number:
        os.waitpid(pid, 0)
        raise OSError(int(number), os.strerror(int(number)))
    return pid


def _become(command: list[str], shim: int, failure_fd: int) -> NoReturn:
    """Turns the forked child into the command, or reports why not and exits."""
    try:
        signal.set_wakeup_fd(-1)  # it is the shim's pipe too
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == shim:  # otherwise the shim ended before the line above
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(command[0], command, _environment())
    except OSError as error:
        os.write(failure_fd, str(error.errno).encode())
    finally:
        os._exit(127)


def _environment() -> dict[bytes, bytes]:
    """The environment as it was given: the interpreter may have added to its own copy."""
    with open('/proc/self/environ', 'rb') as file:
        entries = (entry.partition(b'=') for entry in file.read().split(b'\0'))
    return {name: value for name, equals, value in entries if equals}


def _children() -> Iterator[int]:
    """The direct children of this process, adopted ones included, each as soon as it is found."""
    # Not /proc/self/task/*/children: kernels may be built without that file.
    own = os.getpid()
    for name in os.listdir('/proc'):
        if name.isdigit():
            try:
                with open(f'/proc/{name}/stat', 'rb') as file:
                    # The second field, in parentheses, may itself hold blanks and parentheses.
                    parent = int(file.read().rpartition(b')')[2].split()[1])
            except OSError:
                continue
            if parent == own:
                yield int(name)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
        raise OSError(ctypes.get_errno(), f'prctl({option}) failed')


def main(arguments: list[str]) -> None:
    control_fd, status_fd = int(arguments[0]), int(arguments[1])
    hold_fds = [] if arguments[2] == '-' else [int(fd) for fd in arguments[2].split(',')]
    for fd in (control_fd, status_fd, *hold_fds):
        os.set_inheritable(fd, False)
    Shim(control_fd, status_fd, float(arguments[3]), float(arguments[4])).run(arguments[5:])


if __name__ == '__main__':
    main(sys.argv[1:])
