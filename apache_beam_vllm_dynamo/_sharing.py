"""One runtime for all who load the same model with the same settings, in whichever process.

Beam loads a model once for each step of a pipeline, again after a time-out or for a side
input, and in whichever of its processes comes first; and it never says that it has loaded the
same before. So what runs is found by its identity: who gets the lock of an identity starts the
runtime and lets the others in by a door, those of this process directly. It ends when the last
of them has left. When the process that runs it ends, the others find the lock free, once the
last of its servers is gone, and the first of them starts it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Protocol

from apache_beam_vllm_dynamo._door import Caller, Door, LineLostError
from apache_beam_vllm_dynamo._lock_files import LockFile, lock_directory, owner_of, read_note
from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._runtime import Events, Runtime, Serving
from apache_beam_vllm_dynamo.errors import DevicesBusyError, RuntimeFailedError, StartError

_LOGGER = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # the step from a lock that is given back to the next start
SAY_INTERVAL_S = 30.0  # a wait of minutes must not look like a hang
# What ends is gone within a minute, unless its processes hang in the driver.
UNREACHABLE_BOUND_S = 180.0
# A start takes minutes; one who waits for it in another process hears that often that it goes on.
STARTING_ANSWER_S = 10.0
STARTING = 'starting'


class Access(Serving, Protocol):
    """A place among those who use a runtime.

    What asks raises ``LineLostError`` when the process that runs it is gone.
    """

    def take_events(self) -> dict[str, int]:
        """See ``Events``."""

    def leave(self) -> None:
        """Gives the place up; the last one ends the runtime."""


class Place:
    """A place that outlives the process in which the runtime runs.

    Args:
      make: Makes a runtime that is not started.

    Raises:
      StartError: It did not come up.
    """

    def __init__(self, make: Callable[[], Runtime]) -> None:
        self._make = make
        self._lock = threading.RLock()  # re-entrant: a garbage collection may leave
        self._looking = threading.Lock()
        self._failure: Exception | None = None  # of the last start after the first
        self._left = threading.Event()
        self._process = os.getpid()
        runtime = make()
        # For good: what libraries write into the environment later must not part the users.
        self.identity = runtime.identity
        self._access = access = _find(runtime, self.identity)
        self.window = access.window
        self.kv_caches = access.kv_caches

    def endpoint(self) -> str:
        """Where requests go, without a path; where nobody runs it any more, starts it again.

        Raises:
          RuntimeFailedError: It was given up, or this place was.
          StartError: It did not come up again.
        """
        while True:
            access = self._access
            if self._left.is_set():
                raise RuntimeFailedError('The server was closed.')
            try:
                return access.endpoint()
            except LineLostError as error:
                _LOGGER.warning('The process that ran the servers does not answer: %s', error)
                self._find_again(access)
            except RuntimeFailedError:
                # It stays given up, but others may have started it anew.
                if not self._join_again(access):
                    raise

    def statuses(self) -> tuple[ChildStatus, ...]:
        """What is known of each process; nothing while nobody runs it."""
        access = self._access
        try:
            return access.statuses()
        except LineLostError:
            self._join_again(access)
            return ()

    def take_events(self) -> dict[str, int]:
        """What happened since anybody asked last, by the name of a metric, each once."""
        access = self._access
        try:
            return access.take_events()
        except LineLostError:
            self._join_again(access)
            return {}

    def leave(self) -> None:
        """Gives the place up; twice is no error."""
        if os.getpid() != self._process:
            return  # at the exit of a fork, which has none, and locks that may be held for ever
        with self._lock:
            if self._left.is_set():
                return
            self._left.set()
            access = self._access
        access.leave()

    def _find_again(self, lost: Access) -> None:
        failure = self._failure
        with self._looking:
            if self._access is not lost or self._left.is_set():
                return  # another thread has found it
            if self._failure is not None and self._failure is not failure:
                raise self._failure  # another thread has tried it while this one waited
            lost.leave()
            try:
                access = _find(self._make(), self.identity)
            except Exception as error:
                self._failure = error
                raise
            self._move(access)

    def _join_again(self, lost: Access) -> bool:
        """Joins who runs it now, if anybody does, and starts nothing; whether there is another.

        Who ran it may have been silent for a moment only, and would end it without this place.
        """
        if not self._looking.acquire(blocking=False):
            return False  # another thread looks for it, which may take as long as a start
        try:
            if self._access is lost and not self._left.is_set():
                access = _join(self.identity)
                if access is not None:
                    lost.leave()
                    self._move(access)
            return self._access is not lost
        finally:
            self._looking.release()

    def _move(self, access: Access) -> None:
        with self._lock:
            if not self._left.is_set():
                self._access = access
                self._process = os.getpid()  # a fork may have found it for itself
                return
        access.leave()  # closed meanwhile


_hosts_lock = threading.RLock()  # re-entrant: a garbage collection may leave
_hosts: dict[str, _Host] = {}  # of this process, by identity


def _find(runtime: Runtime, identity: str) -> Access:
    """Finds who runs it, or starts it.

    Args:
      runtime: One that is not started.
      identity: By which it is found.

    Raises:
      DevicesBusyError: Somebody runs it, and cannot be reached.
      StartError: It did not come up.
    """
    path = _lock_path(identity)
    waiting = _Waiting(runtime.description, path)
    while True:
        with _hosts_lock:
            host = _hosts.get(identity)
            joined = host is not None and host.admit()
            begun = None if joined else _begin(runtime, identity, path)
        if begun is not None:
            begun.start()
            return _Resident(begun)
        if host is not None and joined:
            if host.await_start():
                return _Resident(host)
            waiting.begin()
        elif (guest := _visit(path, waiting)) is not None:
            return guest
        waiting.look()
        time.sleep(LOOK_INTERVAL_S)


def _join(identity: str) -> Access | None:
    """A place with who runs it and serves; ``None`` where nobody does."""
    with _hosts_lock:
        host = _hosts.get(identity)
        joined = host is not None and host.admit()
    if host is None or not joined:
        with contextlib.suppress(StartError):
            return _visit(_lock_path(identity))
        return None
    with contextlib.suppress(StartError):
        if host.has_started(0):
            return _Resident(host)
    host.leave()
    return None


def _lock_path(identity: str) -> Path:
    return lock_directory() / f'server-{identity}.lock'


class _Waiting:
    """A wait for one who has the lock: who lets nobody in, because it ends, or is starting."""

    def __init__(self, description: str, path: Path) -> None:
        self._description = description
        self._path = path
        self._say_at = time.monotonic() + SAY_INTERVAL_S
        self.begin()

    def begin(self) -> None:
        """Notes that who has the lock was heard of just now."""
        self._began = time.monotonic()

    def hear_of_start(self) -> None:
        """Speaks of a start that goes on now and then; it has a bound of its own."""
        self.begin()
        if self._began > self._say_at:
            self._say_at = self._began + SAY_INTERVAL_S
            _LOGGER.info(
                '%s is being started by %s; waiting for it to serve.',
                self._description,
                owner_of(self._path)[0],
            )

    def look(self) -> None:
        """Speaks of the wait now and then, and gives it up in the end."""
        now = time.monotonic()
        if now - self._began > UNREACHABLE_BOUND_S:
            raise DevicesBusyError(
                f'{self._description} is run by {owner_of(self._path)[0]}, which lets nobody in '
                f'and has not ended for {UNREACHABLE_BOUND_S:.0f} s. End it; and if it serves, '
                "have the machine's SDK processes share their network, by which they find it."
            )
        if now > self._say_at:
            self._say_at = now + SAY_INTERVAL_S
            _LOGGER.warning(
                '%s is run by %s; waiting for it to end.',
                self._description,
                owner_of(self._path)[0],
            )


def _begin(runtime: Runtime, identity: str, path: Path) -> _Host | None:
    """Makes this process the one that runs it, if none does."""
    lock = LockFile(path)
    if not lock.try_lock():
        lock.close()
        return None
    try:
        host = _hosts[identity] = _Host(runtime, identity, lock)
    except BaseException:
        lock.close()
        raise
    return host


def _visit(path: Path, waiting: _Waiting | None = None) -> Access | None:
    """A place with the process that runs it; ``None`` if it does not let anybody in.

    Args:
      path: Its lock.
      waiting: The wait that a start is part of; without one, a start is not waited for.

    Raises:
      StartError: It did not come up.
    """
    note = read_note(path)
    address = note.get('address')
    if not isinstance(address, str):
        return None
    try:
        caller = Caller(address)
    except LineLostError:
        return None
    _LOGGER.info('Sharing %s of process %s.', note.get('what'), note.get('pid'))
    try:
        while (size := caller.ask('join')) == STARTING and waiting is not None:
            waiting.hear_of_start()
    except LineLostError:
        size = None
    except BaseException:
        caller.close()
        raise
    if size is None or size == STARTING:
        caller.close()
        return None
    return _Remote(caller, *size)


class _Host:
    """A runtime that this process runs, and who uses it; made with a place for its maker."""

    def __init__(self, runtime: Runtime, identity: str, lock: LockFile) -> None:
        self.runtime = runtime
        self._identity = identity
        self.events = Events(runtime)
        self._lock = lock
        self._process = os.getpid()
        self._users = 1
        self._open = True
        self._started: Future[None] = Future()
        self._door = Door(lambda: _Visitor(self), 'vllm-dynamo share')
        try:
            lock.write(what=runtime.description, address=self._door.address)
        except BaseException:
            self._door.close()
            raise
        self._exiting = threading.Event()
        # Before the start, which takes minutes in which the process may exit.
        self._at_exit = weakref.finalize(
            self, _close_at_exit, self._exiting, self._door, runtime, self._process
        )

    def start(self) -> None:
        """Starts the runtime, for all who wait for it.

        Raises:
          StartError: It did not come up.
        """
        try:
            self.runtime.start((self._lock.fd,))
        except BaseException as error:
            with _hosts_lock:
                self._retire()
                self._lock.close()  # whatever had started is gone again
            self._started.set_exception(error)
            self.leave()
            raise
        self._started.set_result(None)

    def admit(self) -> bool:
        """Takes a place, if there are any to be had."""
        if not self._is_here():
            return False
        with _hosts_lock:
            if self.runtime.failure is not None:
                self._retire()
                self._lock.close()  # its processes are gone; who still has it only asks why
            admitted = self._open and not self.runtime.ending
            self._users += admitted
            return admitted

    def check_process(self) -> None:
        """Raises LineLostError in a fork of the process that runs it."""
        if not self._is_here():
            raise LineLostError('this process is a fork of the one that started them')

    def await_start(self) -> bool:
        """Waits, with a place, for the start; whether it was not given up.

        Raises:
          StartError: It did not come up.
        """
        try:
            started = bool(self.has_started())
        except BaseException:
            self.leave()
            raise
        if not started:
            self.leave()
        return started

    def has_started(self, timeout_s: float | None = None) -> bool | None:
        """Waits for the start at most so long; ``None`` if it goes on, ``False`` if given up.

        Raises:
          StartError: It did not come up.
        """
        if not wait([self._started], timeout_s).done:
            return None
        error = self._started.exception()
        # An error of its own is that of all others; that it was called off is not.
        if isinstance(error, Exception) and not self._exiting.is_set():
            raise error
        return error is None

    def leave(self) -> None:
        """Gives a place up; the last one ends the runtime."""
        if not self._is_here():
            return
        with _hosts_lock:
            self._users -= 1
            if self._users:
                return
            self._retire()
        self._at_exit.detach()
        self._door.close()
        self.runtime.close('nobody uses it any more')
        self._lock.close()

    def _is_here(self) -> bool:
        # A fork has a copy of it, and none of its servers.
        return self._process == os.getpid()

    def _retire(self) -> None:
        """Lets nobody else in; called with the lock."""
        self._open = False
        if _hosts.get(self._identity) is self:
            del _hosts[self._identity]


def _close_at_exit(exiting: threading.Event, door: Door, runtime: Runtime, process: int) -> None:
    if os.getpid() == process:
        exiting.set()
        door.close()  # first, so that the others look for a new one, and see no failure
        runtime.close('its process exits')


class _Resident:
    """A place in the process that runs it."""

    def __init__(self, host: _Host) -> None:
        self._host = host
        self.window = host.runtime.window
        self.kv_caches = host.runtime.kv_caches

    def endpoint(self) -> str:
        self._host.check_process()
        return self._host.runtime.endpoint()

    def statuses(self) -> tuple[ChildStatus, ...]:
        self._host.check_process()
        return self._host.runtime.statuses()

    def take_events(self) -> dict[str, int]:
        self._host.check_process()
        return self._host.events.take()

    def leave(self) -> None:
        self._host.leave()


class _Remote:
    """A place in another process than the one that runs it."""

    def __init__(self, caller: Caller, window: int, kv_caches: int) -> None:
        self._caller = caller
        self.window = window
        self.kv_caches = kv_caches

    def endpoint(self) -> str:
        endpoint: str = self._caller.ask('endpoint')
        return endpoint

    def statuses(self) -> tuple[ChildStatus, ...]:
        statuses: tuple[ChildStatus, ...] = self._caller.ask('statuses')
        return statuses

    def take_events(self) -> dict[str, int]:
        events: dict[str, int] = self._caller.ask('take_events')
        return events

    def leave(self) -> None:
        self._caller.close()


class _Visitor:
    """What a ``_Remote`` asks, in the process that runs it."""

    def __init__(self, host: _Host) -> None:
        self._host = host
        self._place: _Resident | None = None

    def answer(self, question: str) -> object:
        if question == 'join':
            return self._join()
        place = self._place
        if place is None:
            raise RuntimeFailedError('The server was closed.')
        if question == 'endpoint':
            return place.endpoint()
        return place.statuses() if question == 'statuses' else place.take_events()

    def leave(self) -> None:
        if self._place is not None:
            self._place.leave()

    def _join(self) -> tuple[int, int] | str | None:
        if self._place is None:
            if not self._host.admit():
                return None
            # Left with the line: the last one closes the door, by which the answer has to go.
            self._place = _Resident(self._host)
        started = self._host.has_started(STARTING_ANSWER_S)
        if started is None:
            return STARTING
        return (self._place.window, self._place.kv_caches) if started else None
