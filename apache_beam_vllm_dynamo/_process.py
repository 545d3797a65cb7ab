"""Child processes that leave nothing behind.

:class:`ManagedProcess` starts one command behind the shim of ``_lifeline.py``, reads what
it prints, says how it ended, and stops it together with every process that it started.
Whatever happens to the owner (this process), the child is gone soon after:

* The owner ends, by ``SIGKILL`` too: TERM, :data:`ORPHAN_GRACE_S`, KILL for all of it.
* The thread that started the child ends: nothing happens.
* The owner forks: the fork does not keep the child alive, and cannot use the object.
* The object is dropped without a stop: as if the owner had ended.
* The shim is killed: the kernel kills the command, and the owner finds the rest by a
  marker in their environment.

Only a process that the kernel does not end, one that hangs in a driver, is there longer; its
shim then waits for it, and with it keeps what it was given to hold.

Nothing here knows what the child is for.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from apache_beam_vllm_dynamo._child_io import LineAssembler, pipe
from apache_beam_vllm_dynamo._marker import (
    MARKER,
    READABLE_ENVIRON,
    SWEEP_BOUND_S,
    exists,
    kill_marked,
    new_token,
    start_ticks,
)
from apache_beam_vllm_dynamo.errors import MissingDependencyError, StartError, format_log_tail

START_BOUND_S = 60.0  # the shim's interpreter needs 20 ms; a starved machine a thousand times that
ORPHAN_GRACE_S = 3.0  # with the kill it keeps "all gone within 10 s of the owner's death"
KILL_BOUND_S = 5.0  # processes with much GPU memory need a second or two to be torn down
TAIL_LINES = 200  # a chain of Python tracebacks is 50 to 150 lines
READ_BYTES = 65536  # what a pipe holds

# What exec answers for a command that is not there or is not a program.
NOT_EXECUTABLE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.ELOOP)

_LIFELINE = str(pathlib.Path(__file__).with_name('_lifeline.py'))

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ChildSpec:
    """What to run.

    Attributes:
      label: What messages and logs call it, e.g. ``"engine 1 of 2"``.
      argv: The command and its arguments; the command is looked up on the ``PATH`` in `env`.
      env: The child's whole environment. Never printed: it may hold tokens.
      cwd: Its working directory, or ``None`` for the owner's.
      stop_grace_s: How long a stop waits between TERM and KILL, in seconds.
    """

    label: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(repr=False)
    cwd: str | None = None
    stop_grace_s: float = 10.0


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """How a child ended.

    Attributes:
      returncode: Its exit status, or minus the number of the signal that killed it.
      lost_lifeline: Its shim was killed, and the child therefore as well.
    """

    returncode: int
    lost_lifeline: bool = False

    def __str__(self) -> str:
        if self.lost_lifeline:
            return 'lost its lifeline (the process that guards it was killed)'
        if self.returncode >= 0:
            return f'exit status {self.returncode}'
        try:
            return f'killed by {signal.Signals(-self.returncode).name}'
        except ValueError:
            return f'killed by signal {-self.returncode}'


class ManagedProcess:
    """One child, from its start to its end; a restart makes a new object.

    All methods may be called from any thread of the process that made the object. Time
    budgets: :meth:`stop` takes at most ``stop_grace_s + KILL_BOUND_S`` seconds, :meth:`kill`
    at most ``KILL_BOUND_S``, :meth:`start` at most ``START_BOUND_S``; only where the shim
    itself does not answer ``2 * SWEEP_BOUND_S`` come on top.

    Args:
      spec: What to run.
      on_line: Called with each line of output, on the reader's thread: it must be quick, and
        it keeps alive what it refers to.
    """

    def __init__(self, spec: ChildSpec, on_line: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        self._on_line = on_line
        self._owner = os.getpid()
        self._start_lock = threading.Lock()
        self._may_start = True
        self._run: _Run | None = None

    def start(self, hold_fds: Sequence[int] = ()) -> None:
        """Starts the command and returns once it is running.

        Args:
          hold_fds: Descriptors that the shim keeps open until the last descendant is gone,
            e.g. with an flock on them. The command does not get them. An flock outlives
            the caller's own copies, which it may close as soon as this returns; only where
            the shim is killed, it ends before the rest is swept.

        Raises:
          MissingDependencyError: The command cannot be executed.
          StartError: It was not started for another reason, e.g. a stop in the meantime.
          RuntimeError: It was started or stopped before.
        """
        self._check_owner()
        with self._start_lock:
            if not self._may_start:
                raise RuntimeError(f'{self.spec.label} was started or stopped before')
            self._may_start = False
            run = self._run = _Run(self.spec, self._on_line, hold_fds)
            # At the exit of the interpreter others, who know the order, may still want to stop it.
            weakref.finalize(self, run.cut).atexit = False
        if not run.settled.wait(START_BOUND_S):
            run.abandon(f'not running {START_BOUND_S:.0f} s after its start')
            run.ended.wait(2 * SWEEP_BOUND_S)
            run.join()
            raise StartError(f'{self.spec.label}: not running after {START_BOUND_S:.0f} s')
        if run.start_error is not None:
            run.join()
            raise run.start_error

    @property
    def pid(self) -> int | None:
        """The process id of the command (not the shim's); ``None`` before it runs."""
        return self._run.pid if self._run is not None else None

    def poll(self) -> ExitStatus | None:
        """How it ended, once it and all of its descendants are gone; else ``None``."""
        return self._run.exit if self._run is not None else None

    def left(self) -> tuple[int, ...]:
        """The process ids of those that are still there, of what is to have ended.

        Only for after a stop, a kill or an end; empty when nothing is left.
        """
        return self._run.left() if self._run is not None else ()

    def wait(self, timeout_s: float | None = None) -> ExitStatus | None:
        """Waits at most `timeout_s` seconds for what :meth:`poll` says, and returns it."""
        self._check_owner()
        if self._run is not None and self._run.ended.wait(timeout_s):
            self._run.join()
        return self.poll()

    def log_tail(self, n: int = 50) -> tuple[str, ...]:
        """The last `n` lines of output, oldest first, an unfinished one included."""
        return self._run.tail(n) if self._run is not None else ()

    def stop(self, reason: str) -> bool:
        """TERM to its process group, ``stop_grace_s``, KILL to every descendant.

        The grace ends when the command itself has ended. Stopping it again, or after its
        end, does nothing; before its start, it prevents the start.

        Returns:
          Whether no descendant is left; false only for one that even KILL did not end in
          time, which is logged as an error and named by :meth:`left`.
        """
        return stop_all((self,), reason)

    def kill(self, reason: str) -> bool:
        """KILL to every descendant at once; otherwise like :meth:`stop`."""
        return _end((self,), b'K', reason)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(f'{self.spec.label} belongs to process {self._owner}')

    def _running(self) -> _Run | None:
        self._check_owner()
        with self._start_lock:
            self._may_start = False
            return self._run


def stop_all(processes: Iterable[ManagedProcess], reason: str) -> bool:
    """Stops several at the same time, within the budget of the slowest one.

    Returns:
      Whether no descendant of any of them is left.
    """
    return _end(tuple(processes), b'T', reason)


def _end(processes: Sequence[ManagedProcess], command: bytes, reason: str) -> bool:
    runs = [run for it in processes if (run := it._running()) is not None]  # noqa: SLF001  same room
    for run in runs:
        run.ask(command, reason)
    grace_s = max((run.spec.stop_grace_s for run in runs), default=0.0) if command == b'T' else 0.0
    deadline = time.monotonic() + grace_s + KILL_BOUND_S
    # The reader's own thread (a stop from `on_line`) cannot wait for itself.
    waiting = [run for run in runs if run.reader is not threading.current_thread()]
    late = [run for run in waiting if not run.ended.wait(max(0.0, deadline - time.monotonic()))]
    # A shim that says why it waits has killed all that it can; without it nobody would hold on
    # to what the processes use until they are gone.
    late = [run for run in late if not run.lingers]
    for run in late:
        run.abandon(f'still there {grace_s + KILL_BOUND_S:.0f} s after the request to end')
    deadline = time.monotonic() + 2 * SWEEP_BOUND_S
    for run in late:
        run.ended.wait(max(0.0, deadline - time.monotonic()))
    for run in waiting:
        run.join()
    return all(run.ended.is_set() and not run.survivors for run in runs)


class _Run:
    """One started shim. Its reader thread refers to this and never to the ManagedProcess."""

    def __init__(
        self, spec: ChildSpec, on_line: Callable[[str], None] | None, hold_fds: Sequence[int]
    ) -> None:
        self.spec = spec
        self._owner = os.getpid()
        self.settled = threading.Event()  # started, or failed to
        self.ended = threading.Event()  # set last: nothing changes after it
        self.start_error: StartError | None = None
        self.pid: int | None = None
        self._leader: dict[int, int | None] = {}  # with its start, for it may be gone long since
        self.exit: ExitStatus | None = None
        self.survivors: tuple[int, ...] = ()  # the shim and its sweep
        self.lingers: tuple[int, ...] = ()  # what the shim waits for
        self._returncode: int | None = None
        self._on_line = on_line
        self._lines = LineAssembler()
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._tail_lock = threading.Lock()
        self._token = new_token()
        # Nothing may be written to a descriptor that was closed, and reused, in between.
        # Re-entrant: a garbage collection inside this lock may call `cut`.
        self._control_lock = threading.RLock()
        self.reader = threading.Thread(target=self._read, name=f'{spec.label} reader', daemon=True)
        self._files = contextlib.ExitStack()
        try:
            self._shim = self._start_shim(hold_fds)
            self.reader.start()
        except OSError as error:
            self._files.close()
            raise StartError(f'{spec.label}: {error}') from error
        except BaseException:
            self._files.close()
            raise

    def _start_shim(self, hold_fds: Sequence[int]) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as theirs:
            control, self._control = pipe(theirs, self._files)
            self._status, status = pipe(self._files, theirs)
            self._output, output = pipe(self._files, theirs)
            fds = (control.fileno(), status.fileno())
            hold = ','.join(map(str, hold_fds)) or '-'
            arguments = (hold, self.spec.stop_grace_s, ORPHAN_GRACE_S)
            shim = (_LIFELINE, *map(str, (*fds, *arguments)))
            return subprocess.Popen(
                (sys.executable, '-I', '-S', *shim, *self.spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.spec.cwd,
                env={**READABLE_ENVIRON, **self.spec.env, MARKER: self._token},
                pass_fds=(*fds, *hold_fds),
                start_new_session=True,  # no Ctrl-C of the owner's terminal reaches it
            )

    def ask(self, request: bytes, reason: str) -> None:
        """Asks the shim to stop (T) or kill (K); does nothing when all has ended."""
        with self._control_lock:
            if self._control.closed:
                return
            with contextlib.suppress(OSError):  # the shim has just ended
                self._control.write(request)
        stopping = request == b'T'
        level = logging.INFO if stopping else logging.DEBUG  # who has it killed says why
        what = 'stopping' if stopping else 'killing'
        _log.log(level, '%s: %s: %s', self.spec.label, what, reason)

    def cut(self) -> None:
        """Cuts the lifeline; the shim then acts as on the owner's death."""
        if os.getpid() != self._owner:
            return  # at the exit of a fork, in which the lock may be held for ever
        with self._control_lock:
            self._control.close()

    def abandon(self, problem: str) -> None:
        """Kills a shim that does not do its work; the reader then kills the rest."""
        _log.error('%s: %s: killing its guard', self.spec.label, problem)
        self._shim.kill()

    def left(self) -> tuple[int, ...]:
        """The process ids of those that are still there."""
        if self.ended.is_set():
            return tuple(pid for pid in self.survivors if exists(pid))
        return self.lingers or (self.pid or self._shim.pid,)

    def join(self) -> None:
        """Waits for the reader's thread, which ends right after the run."""
        if self.ended.is_set() and self.reader is not threading.current_thread():
            self.reader.join()

    def tail(self, n: int) -> tuple[str, ...]:
        with self._tail_lock:
            lines = [*self._tail, *filter(None, (self._lines.pending,))]
        return tuple(lines[-n:]) if n > 0 else ()

    def _read(self) -> None:
        try:
            self._read_pipes()
        except Exception:  # noqa: BLE001  the child must not go on unguarded
            _log.exception('%s: its reader failed', self.spec.label)
        finally:
            self._shim.kill()  # it has ended, unless the reader failed
            self._shim.wait()
            if self._returncode is None and self.start_error is None:
                self.survivors = kill_marked(self._token, known=self._leader)
            self._finish()

    def _read_pipes(self) -> None:
        """Reads until the shim has closed its end of the status pipe, which is when it ends."""
        events = b''
        poller = select.poll()
        for file in (self._status, self._output):
            poller.register(file, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                data = os.read(fd, READ_BYTES)
                if fd == self._status.fileno():
                    if not data:
                        return
                    *complete, events = (events + data).split(b'\n')
                    for line in complete:
                        self._handle(json.loads(line))
                elif data:
                    self._add(self._lines.feed(data))
                else:
                    poller.unregister(fd)

    def _handle(self, event: dict[str, Any]) -> None:
        if event['event'] == 'started':
            self.pid = event['pid']
            self._leader = {event['pid']: start_ticks(event['pid'])}
            self.settled.set()
        elif event['event'] == 'ended':
            self._returncode = event['returncode']
        elif event['event'] == 'lingers':
            self.lingers = tuple(event['pids'])
            _log.error('%s: still there after KILL: %s', self.spec.label, self.lingers)
        elif event['errno'] in NOT_EXECUTABLE:
            self.start_error = MissingDependencyError(
                f'{self.spec.label}: cannot run {self.spec.argv[0]!r}: {event["error"]}. '
                'Install it, or give a PATH that leads to it.'
            )
        else:
            self.start_error = StartError(f'{self.spec.label} was not started: {event["error"]}')

    def _finish(self) -> None:
        """Takes the rest of the output, closes everything and publishes the end."""
        os.set_blocking(self._output.fileno(), False)  # a survivor may hold the other end
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output.fileno(), READ_BYTES):
                self._add(self._lines.feed(data))
        self._add(self._lines.flush())
        with self._control_lock:
            self._files.close()
        if self.pid is not None:
            lost = self._returncode is None
            code = -signal.SIGKILL if self._returncode is None else self._returncode
            self.exit = ExitStatus(code, lost_lifeline=lost)
            _log.debug('%s ended: %s', self.spec.label, self.exit)  # who needs it says so
            if self.survivors:
                _log.error('%s: still there after KILL: %s', self.spec.label, self.survivors)
        elif self.start_error is None:
            self.start_error = StartError(
                f'{self.spec.label}: its guard ended before the start'
                + format_log_tail(self.tail(50))
            )
        self.settled.set()
        self.ended.set()

    def _add(self, lines: Iterable[str]) -> None:
        for line in lines:
            with self._tail_lock:
                self._tail.append(line)
            _log.debug('%s | %s', self.spec.label, line)
            if self._on_line is not None:
                try:
                    self._on_line(line)
                except Exception:  # noqa: BLE001  whatever it raises, the pipe must not fill up
                    _log.exception('%s: on_line failed', self.spec.label)
