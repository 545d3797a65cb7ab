"""A directory for one start of a stack, which goes when the last that uses it has gone.

Everybody who uses it holds a shared lock on it: the process that owns the stack, and the
shim of each child (``_lifeline.py``). Who can turn its lock into an exclusive one is the last
and removes the directory, so that it goes also when the owner is killed. What even that
missed, for a shim was killed too, is found by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Self

from apache_beam_vllm_dynamo._addresses import LONGEST_SOCKET_PATH_BYTES
from apache_beam_vllm_dynamo._child_io import keep_from_forks

_LOGGER = logging.getLogger(__name__)

PREFIX = 'vllm-dynamo-'
SHORT_DIRECTORY = Path('/tmp')  # noqa: S108 - mkdtemp makes a directory of this user alone
# A directory is made a moment before it is locked; one as young as that is left alone.
STALE_AFTER_S = 60.0


class PrivateDirectory:
    """The directory of one start, of this user alone.

    Attributes:
      path: Where it is; short enough for Unix sockets.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _SharedLock(path)

    @classmethod
    def make(cls) -> Self:
        """Makes a new one, and removes those that dead owners have left."""
        base = Path(tempfile.gettempdir())
        remove_stale(base)
        longest = base / f'{PREFIX}xxxxxxxx' / 'events-out'
        if len(os.fsencode(longest)) > LONGEST_SOCKET_PATH_BYTES:
            base = SHORT_DIRECTORY
        return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=base)))

    def remove(self) -> None:
        """Removes it with all that is in it; removing it twice is no error."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class _SharedLock:
    """A shared lock on a directory, which a fork of this process does not keep."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        keep_from_forks(self)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def remove_stale(base: Path) -> None:
    """Removes the directories in ``base`` that nobody uses any more."""
    for path in base.glob(f'{PREFIX}*'):
        # It may belong to another user, or go in this very moment.
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    if time.time() - path.stat().st_mtime < STALE_AFTER_S:
        return
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        _LOGGER.info('Removed %s, which an earlier start had left.', path)
    finally:
        os.close(lock)
