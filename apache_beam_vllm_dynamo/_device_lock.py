"""One stack at a time on a device: a lock for each, held by whoever owns the processes.

A device's lock is an flock on a file of its own. The owner of a stack takes it and hands it to
the shims of the engines (``hold_fds``), so that it is held until the last process on the device
is gone, also after the owner was killed. The files stay: to remove one that somebody is about
to lock would give two the same device.

Within one process the predecessor cannot be waited for, because it may live as long as the
process does: a second load of the same stack closes the first, and one of another stack on the
same devices is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from apache_beam_vllm_dynamo._child_io import keep_from_forks
from apache_beam_vllm_dynamo.errors import DevicesBusyError, StartError

_LOGGER = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.2  # a predecessor takes seconds to end
SAY_INTERVAL_S = 30.0  # a wait of minutes must not look like a hang


class Holder(Protocol):
    """A stack that has devices to itself."""

    @property
    def identity(self) -> object:
        """Equal for two loads of the same stack."""

    def close(self, reason: str = 'closed') -> None:
        """Ends it; it has given its devices back when this returns."""


_registry_lock = threading.Lock()
_holders: dict[str, tuple[int, Holder]] = {}  # device: (process, who has it there)


class DeviceLocks:
    """The locks of some devices, for one start.

    Args:
      holder: For whom they are.
      devices: Which devices; none need no lock.
    """

    def __init__(self, holder: Holder, devices: Iterable[str]) -> None:
        self._holder = holder
        self._devices = tuple(sorted(set(devices)))
        self._files: list[io.FileIO] = []
        self._given_back = False
        self._lock = threading.Lock()

    @property
    def fds(self) -> tuple[int, ...]:
        """What the shims of the processes on the devices must hold."""
        with self._lock:
            return tuple(file.fileno() for file in self._files)

    def acquire(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Takes all of them; waits for predecessors in other processes.

        Args:
          timeout_s: How long to wait at most, in seconds.
          cancelled: Whether nobody wants them any more.

        Raises:
          DevicesBusyError: Somebody else has one of them.
          StartError: The wait was cancelled, or the locks cannot be made.
        """
        if not self._devices:
            return
        self._evict()
        deadline = time.monotonic() + timeout_s
        try:
            directory = lock_directory()
            for device in self._devices:
                self._take(device, directory / _file_name(device), deadline, timeout_s, cancelled)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives them back for good; what shims hold stays held. Twice is no error."""
        with self._lock:
            self._given_back = True
            files, self._files = self._files, []
        for file in files:
            file.close()
        with _registry_lock:
            for device in self._devices:
                if _holders.get(device, (0, None))[1] is self._holder:
                    del _holders[device]

    def _evict(self) -> None:
        """Makes this holder the only one of the process, or raises."""
        while True:
            with _registry_lock:
                others = self._others()
                if not others:
                    for device in self._devices:
                        _holders[device] = os.getpid(), self._holder
                    return
            for device, other in others:
                if other.identity != self._holder.identity:
                    raise DevicesBusyError(
                        f'GPU {device} is in use by another model server of this process. Give '
                        'each handler gpu_devices of its own.'
                    )
            for other in {id(other): other for _, other in others}.values():
                other.close('the same model is loaded again on its devices')
            with _registry_lock:
                for device, other in others:
                    if _holders.get(device, (0, None))[1] is other:
                        del _holders[device]

    def _others(self) -> list[tuple[str, Holder]]:
        found = []
        for device in self._devices:
            process, holder = _holders.get(device, (0, self._holder))
            # A fork has a copy of its parent's entries and none of its stacks.
            if process == os.getpid() and holder is not self._holder:
                found.append((device, holder))
        return found

    def _take(
        self,
        device: str,
        path: Path,
        deadline: float,
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> None:
        file = _open(path)
        with contextlib.ExitStack() as on_error:
            on_error.callback(file.close)
            say_at = time.monotonic()
            while not _try_lock(file):
                now = time.monotonic()
                who = _written(path)
                if cancelled() or self._given_back:
                    raise StartError(f'The start was given up while it waited for GPU {device}.')
                if now > deadline:
                    raise DevicesBusyError(
                        f'GPU {device} is still held by {who} after {timeout_s:.0f} s. End it, '
                        'or give this handler other gpu_devices.'
                    )
                if now >= say_at:
                    say_at = now + SAY_INTERVAL_S
                    _LOGGER.warning('GPU %s is held by %s; waiting for it to end.', device, who)
                time.sleep(LOOK_INTERVAL_S)
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
            with self._lock:
                if not self._given_back:
                    self._files.append(file)
                    on_error.pop_all()
        if self._given_back:
            raise StartError(f'The start was given up when it had GPU {device}.')


def lock_directory() -> Path:
    """The directory of this user's locks on this machine.

    Raises:
      StartError: There is something else by its name.
    """
    path = Path(tempfile.gettempdir()) / f'apache-beam-vllm-dynamo-{os.getuid()}'
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    state = path.lstat()
    # In a directory that everybody may write to, the name may have been taken by somebody else.
    if not path.is_dir() or path.is_symlink() or state.st_uid != os.getuid():
        raise StartError(f'{path} is not a directory of this user; remove it, or set TMPDIR.')
    return path


def devices_to_lock(
    named: Sequence[str], needed: int, visible: Sequence[str] | None, identity: object
) -> list[str]:
    """What an engine has to itself: the devices it names, else its place on the first visible.

    An engine that no device was named for shares them with others, as its
    gpu-memory-utilization says: Beam's own handlers do so, several models on one GPU. What it
    must not meet is an earlier start of its own.

    Args:
      named: The devices it is pinned to.
      needed: How many it fills.
      visible: The GPUs of this worker; ``None`` where they could not be counted.
      identity: See :attr:`Holder.identity`.
    """
    if named:
        return list(named)
    devices = visible if visible is not None else [str(i) for i in range(needed)]
    place = hashlib.sha256(repr(identity).encode()).hexdigest()[:12]
    return [f'{device} for {place}' for device in devices[:needed]]


def _file_name(device: str) -> str:
    return f'gpu-{re.sub("[^A-Za-z0-9-]", "_", device)}.lock'


def _open(path: Path) -> io.FileIO:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    file = io.FileIO(os.fspath(path), 'r+', opener=opener)
    keep_from_forks(file)
    return file


def _try_lock(file: io.FileIO) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _written(path: Path) -> str:
    """Who wrote a lock file: its owner's process id, which may have ended before its engines."""
    pid = path.read_text(encoding='ascii', errors='replace').strip()
    if not pid.isdigit():
        return 'another process'
    alive = Path('/proc', pid).exists()
    return f'process {pid}' if alive else f'what process {pid}, which has ended, left behind'
