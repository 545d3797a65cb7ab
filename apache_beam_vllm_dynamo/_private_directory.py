"""A directory for one start of a stack, which goes when the last that uses it has gone.

A process of its own (``_keeper.py``) makes it, and removes it when the owner of the stack has
ended, however that was, and all who hold its lock: the shims of the children, which are given
:attr:`PrivateDirectory.fd` to hold. What even that missed, for the keeper was killed too, is
found by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from apache_beam_vllm_dynamo._addresses import LONGEST_SOCKET_PATH_BYTES
from apache_beam_vllm_dynamo._child_io import keep_from_forks, pipe
from apache_beam_vllm_dynamo.errors import StartError

_LOGGER = logging.getLogger(__name__)

PREFIX = 'vllm-dynamo-'
SHORT_DIRECTORY = Path('/tmp')  # noqa: S108 - its name cannot be foretold, and it is new
# A directory is made a moment before it is locked; one as young as that is left alone.
STALE_AFTER_S = 60.0
KEEPER_BOUND_S = 5.0  # it needs milliseconds

_KEEPER = str(pathlib.Path(__file__).with_name('_keeper.py'))


class PrivateDirectory:
    """The directory of one start, of this user alone.

    Attributes:
      path: Where it is; short enough for Unix sockets.

    Raises:
      StartError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as files, contextlib.ExitStack() as theirs:
            control, _ = pipe(theirs, files)
            ready, said = pipe(files, theirs)
            self._keeper = subprocess.Popen(
                (sys.executable, '-I', '-S', _KEEPER, str(control.fileno()), path),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.PIPE,
                pass_fds=(control.fileno(),),
                start_new_session=True,  # no Ctrl-C of the owner's terminal reaches it
            )
            theirs.close()
            assert self._keeper.stderr is not None
            with self._keeper.stderr as stderr:
                if not os.read(ready.fileno(), 1):
                    text = stderr.read().decode(errors='replace').strip()
                    self._keeper.wait()
                    raise StartError(f'The directory {path} was not made: {text[-200:]}')
            self._lock = _SharedLock(path)
            files.callback(self._lock.close)
            self._files = files.pop_all()

    @classmethod
    def make(cls) -> Self:
        """Makes a new one, and removes those that dead owners have left.

        Raises:
          StartError: It cannot be made.
        """
        base = usual = Path(tempfile.gettempdir())
        name = f'{PREFIX}{secrets.token_hex(4)}'
        if len(os.fsencode(base / name / 'events-out')) > LONGEST_SOCKET_PATH_BYTES:
            base = SHORT_DIRECTORY
        for place in {base, usual}:
            remove_stale(place)
        return cls(base / name)

    @property
    def fd(self) -> int:
        """What everybody who uses it must hold, so that it stays until they have gone."""
        return self._lock.fd

    def remove(self) -> None:
        """Removes it with all that is in it; removing it twice is no error."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._files.close()
        try:
            self._keeper.wait(KEEPER_BOUND_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()


class _SharedLock:
    """A shared lock on a directory, which a fork of this process does not keep."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._open = True
        keep_from_forks(self)
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self.fd)


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
